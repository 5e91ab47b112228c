"""`generate_batch`: a list of prompts through the queue, a dict of results back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..config import PSDConfig
from ..hooks import StepHook
from .manager import ContinuousBatchingManager
from .results import Result
from .settings import prompt_of


def generate_batch(
    model: PreTrainedModel,
    inputs: Sequence[Any],
    assistant_models: Sequence[Any] | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    psd: PSDConfig | Mapping[str, Any] | bool = True,
    psd_hooks: Sequence[StepHook] = (),
    max_batch_size: int | None = None,
    block_size: int | None = None,
    kv_memory: int | None = None,
    prefill_chunk: int | None = None,
    requests: Sequence[Mapping[str, Any]] | None = None,
    record_timestamps: bool = False,
    return_logprobs: bool = False,
    progress_bar: bool = False,
    **kwargs: Any,
) -> dict[str, Result]:
    """Decodes many prompts of mixed lengths speculatively; a seat that becomes free is given to the next at once.

    The counterpart of transformers' `generate_batch`, with drafters. Each text is what `generate` gives for its prompt
    alone. An error of one request (its processors, criteria, scores) ends that request and no other.

    Args:
        model: a decoder-only causal LM.
        inputs: prompts, each [P] ids without padding.
        assistant_models: as for `generate`.
        generation_config: for all requests.
        psd, psd_hooks, max_batch_size, block_size, kv_memory, prefill_chunk, return_logprobs: as for
            `ContinuousBatchingManager`.
        requests: one mapping per prompt with arguments of `ContinuousBatchingManager.add_request` for it alone.
        record_timestamps: note when each token came.
        progress_bar: show one (tqdm), in requests.
        **kwargs: arguments of `generate` for all requests.

    Returns:
        "req_0", "req_1", ... -> `Result`, in the order of the prompts. `hf_psd.last_stats()` has the statistics.

    Raises:
        ValueError, TypeError: for what cannot be honoured, before any forward of the given models.
    """
    if isinstance(inputs, torch.Tensor) and inputs.dim() > 1:
        raise ValueError("psd: inputs must be a list of prompts without padding, not a padded tensor.")
    if isinstance(inputs, (str, torch.Tensor)) or not isinstance(inputs, Sequence):
        raise TypeError(f"psd: inputs must be a list of prompts, each one of token ids, got {type(inputs).__name__}.")
    prompts = [prompt_of(prompt, f"inputs[{number}]") for number, prompt in enumerate(inputs)]
    if requests is not None and len(requests) != len(inputs):
        raise ValueError(f"psd: requests must have one mapping per prompt: {len(inputs)}, got {len(requests)}.")
    chunk: dict[str, Any] = {} if prefill_chunk is None else {"prefill_chunk": prefill_chunk}
    manager = ContinuousBatchingManager(
        model, assistant_models, generation_config, psd, psd_hooks, max_batch_size=max_batch_size,
        block_size=block_size, kv_memory=kv_memory, return_logprobs=return_logprobs, **chunk, **kwargs,
    )  # fmt: skip
    for number, prompt in enumerate(prompts):
        own = {} if requests is None else dict(requests[number])
        manager.add_request(prompt, record_timestamps=record_timestamps, **own)
    if not prompts:
        return {}
    with _bar(len(inputs), progress_bar) as bar:
        return {result.request_id: result for result in manager.run_to_end(bar.update if bar else None)}


def _bar(total: int, wanted: bool) -> Any:
    if not wanted:
        return nullcontext()
    from tqdm.auto import tqdm  # comes with transformers

    return tqdm(total=total, unit="request", desc=f"Solving {total} requests")
