"""transformers' own caches at the two ends of a call: read before its first step, filled after its last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .cache import KVAddress
from .runner import ModelRunner, Rows, upload

CACHE_NAMES = ("cache", "past_key_values")
_READABLE = (DynamicLayer, DynamicSlidingWindowLayer)


def cache_of(arguments: dict[str, Any]) -> Any:
    """The cache among arguments of `generate` or of a decoding method, under its newer or its older name."""
    return next((arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None), None)


def check_cache(cache: Any) -> None:
    """Raises a `ValueError` for a cache of an earlier turn that cannot be read row by row."""
    layers = getattr(cache, "layers", ())
    strange = sorted({type(layer).__name__ for layer in layers if type(layer) not in _READABLE})
    if not isinstance(cache, DynamicCache) or strange or getattr(cache, "offloading", False):
        what = type(cache).__name__ + (f" with {', '.join(strange)}" if strange else "")
        raise ValueError(
            f"psd: the cache passed in must be a plain DynamicCache, as `generate` returns it, got {what}; "
            "leave it out and pass the whole text as input_ids."
        )


def covered(cache: DynamicCache, prompts: torch.Tensor) -> int:
    """Columns of `prompts` [B, P] that a checked cache holds; a `ValueError` if it cannot be of their beginning."""
    columns = cache.get_seq_length()
    layers: list[Any] = cache.layers
    batches = {layer.keys.shape[0] for layer in layers if layer.is_initialized}
    if batches - {prompts.shape[0]}:
        raise ValueError(
            f"psd: the cache passed in holds {batches.pop()} rows, but the call has {prompts.shape[0]}; "
            "they must be the same rows in the same order."
        )
    if columns >= prompts.shape[1]:
        raise ValueError(
            f"psd: the cache passed in covers {columns} columns, but input_ids has only {prompts.shape[1]}; "
            "pass the whole text, earlier turns included, as input_ids."
        )
    return columns


def load(cache: DynamicCache, runner: ModelRunner, rows: Rows, padding: torch.Tensor) -> int:
    """Copies a checked cache into the runner's rows; returns the columns it held.

    Args:
        cache: keys and values of left-padded columns, [B, heads, columns, head_dim] per layer; sliding layers hold the
            newest columns alone, which are all that later tokens look at.
        runner: the target.
        rows: its B requests.
        padding: [B] int64, left-padding columns.
    """
    columns = cache.get_seq_length()
    pairs: Iterable[tuple[Any, Any]] = zip(cache.layers, runner.cache.layers)
    for given, own in pairs:
        if not given.is_initialized or columns == 0:
            continue
        if not own.is_initialized:
            own.lazy_initialization(given.keys, given.values)
        at = torch.arange(columns - given.keys.shape[2], columns, device=padding.device) - padding[:, None]
        at = torch.where(at >= 0, at, runner.cache.capacity)
        own.write(KVAddress(rows.slots, at, columns, rows.span).on(own.keys.device), given.keys, given.values)
    return columns


def fill(
    cache: DynamicCache, runner: ModelRunner, padding: Sequence[int], lengths: Sequence[int], sequences: torch.Tensor
) -> None:
    """Appends what the call has computed to `cache`, which then covers all columns of `sequences` but the last.

    Plain `generate` feeds a row's padding after its end too; that is done here for all rows at once. Columns of left
    padding hold zeros.

    Args:
        cache: empty, or what `load` has read.
        runner: the target, whose slots 0 .. B - 1 hold the rows.
        padding: left-padding columns per row.
        lengths: columns per row up to the end of its text, left padding included.
        sequences: [B, W] int64, the call's result.
    """
    device, width = runner.device, sequences.shape[1] - 1
    rows, first, ids = Rows(range(len(padding)), device), upload(padding, device), sequences.to(device)
    columns = torch.arange(width, device=device)
    oldest = min(lengths) - 1
    if oldest < width:
        unfed = columns[oldest:] >= upload(lengths, device)[:, None] - 1
        runner.feed(rows, ids[:, oldest:width], torch.where(unfed, columns[oldest:] - first[:, None], -1), width)
    known = cache.get_seq_length()
    positions = columns[known:] - first[:, None]
    layers: list[Any] = runner.cache.layers
    for number, own in enumerate(layers):
        if own.is_initialized:
            at = KVAddress(rows.slots, positions, width, rows.span).on(own.keys.device)
            index = at.positions[:, None, :, None]
            keys, values = (
                states.gather(2, index.clamp(min=0).expand(-1, states.shape[1], -1, states.shape[3])).masked_fill(
                    index < 0, 0
                )
                for states in own.read(at)
            )
            cache.update(keys, values, number)
