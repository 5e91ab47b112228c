"""The torch specification of ragged attention and of the KV write that goes with it.

A cache is [N, B, heads, head_dim]: N blocks of B tokens. Token p of row r is in block `blocks[r, p // B]` at `p % B`.
With `blocks` of shape [R] every row owns one block of B tokens: a slot.
"""

from __future__ import annotations

import torch
from torch import Tensor


def kv_write(
    key_cache: Tensor, value_cache: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, positions: Tensor
) -> None:
    """Stores a step's keys and values [R, T, Hkv, D] at `positions` int64 [R, T], in place.

    A negative position, one beyond the row's blocks, or a negative block writes nothing.
    """
    size = key_cache.shape[1]
    block = _locate(_table(blocks), positions, size).flatten()
    kept = block >= 0
    # A token that is not kept repeats what one kept token writes; if there is none, block 0 is written with itself.
    source = torch.where(kept, torch.arange(kept.shape[0], device=kept.device), kept.long().argmax())
    some = kept.any()
    index = torch.where(some, block[source], 0), torch.where(some, positions.flatten()[source] % size, 0)
    for cache, states in ((key_cache, keys), (value_cache, values)):
        update = torch.where(some, states.flatten(0, 1)[source].to(cache.dtype), cache[0, 0])
        cache.index_put_(index, update)


def ragged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    blocks: Tensor,
    positions: Tensor,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kv_length: int | None = None,
) -> Tensor:
    """Causal attention of T queries a row over that row's own cache: [R, T, H, D] in the query's dtype.

    Args:
        query: [R, T, H, D]; query head h reads KV head h // (H / Hkv).
        key_cache, value_cache: [N, B, Hkv, D].
        blocks: int [R] (slots) or [R, M] (block table).
        positions: int64 [R, T]; the query at position p sees keys 0..p. A query whose position is negative, or not
            under `kv_length`, is padding and yields zeros.
        scaling: factor of the scores, default D ** -0.5.
        sliding_window: a query sees at most this many keys, itself included.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: [H], a logit per head that takes part in the softmax and carries no value.
        kv_length: host-known bound of how many leading positions are read, default all of them.
    """
    rows, _, heads, head_dim = query.shape
    table = _table(blocks)
    size = key_cache.shape[1]
    capacity = table.shape[1] * size
    limit = capacity if kv_length is None else min(kv_length, capacity)
    key_positions = torch.arange(limit, device=query.device)
    block = _locate(table, key_positions.expand(rows, -1), size)
    group = heads // key_cache.shape[2]
    keys, values = (
        cache[block.clamp(min=0), key_positions % size].float().repeat_interleave(group, 2)
        for cache in (key_cache, value_cache)
    )
    scores = torch.einsum("rthd,rnhd->rhtn", query.float(), keys) * (head_dim**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    reach = torch.where(positions < limit, positions, -1)[:, :, None]
    seen = key_positions <= reach
    if sliding_window is not None:
        seen = seen & (key_positions > reach - sliding_window)
    seen = seen[:, None]
    scores = scores.masked_fill(~seen, float("-inf"))
    peak = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    extra = torch.zeros_like(peak)
    if sinks is not None:
        sink = sinks.float().view(1, -1, 1, 1)
        peak = torch.maximum(peak, sink)
        extra = (sink - peak).exp()
    weights = (scores - peak).exp()
    weights = weights / (weights.sum(-1, keepdim=True) + extra).clamp(min=torch.finfo(torch.float32).tiny)
    # Keys that nobody wrote may hold anything: a weight of 0 must not meet a NaN.
    values = torch.where(seen.any(2)[:, 0, :, None, None], values, 0.0)
    return torch.einsum("rhtn,rnhd->rthd", weights, values).to(query.dtype)


def _table(blocks: Tensor) -> Tensor:
    return blocks[:, None] if blocks.dim() == 1 else blocks


def _locate(table: Tensor, positions: Tensor, size: int) -> Tensor:
    """Block number [R, T] of each position, -1 where there is none."""
    inside = (positions >= 0) & (positions < table.shape[1] * size)
    block = table.long().gather(1, torch.where(inside, positions, 0) // size)
    return torch.where(inside, block, -1)
