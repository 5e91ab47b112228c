"""Samples drawn through a queue, beside requests of other settings."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..queue import ContinuousBatchingManager

_OTHERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7, "max_new_tokens": 7},
    {"temperature": 1.5, "top_k": 3, "max_new_tokens": 2},
    {"do_sample": False, "max_new_tokens": 5},
)
"""Settings of every fourth request."""

_PREEMPTED = 20
"""One in so many loses its seat after each step."""


def sample_queue(
    model: PreTrainedModel,
    prompt: Sequence[int],
    n: int,
    *,
    tokens: int,
    psd: Mapping[str, Any],
    assistant_models: Sequence[Any],
    **kwargs: Any,
) -> Tensor:
    """Draws `n` samples of the next `tokens` tokens as requests of one queue, every fourth of which is another.

    After each step some seated requests, by a fair lot, lose their seat and their drafts and are read in again later.

    Args:
        psd: settings, those that size the queue included.
        **kwargs: further arguments of `ContinuousBatchingManager`.

    Returns:
        [n, tokens] int64, with the padding id after the end of a text.
    """
    queue = ContinuousBatchingManager(model, assistant_models, psd=psd, max_new_tokens=tokens, **kwargs)
    wanted: list[str] = []
    while len(wanted) < n:
        other = queue.total % 4 == 3
        own = _OTHERS[queue.total // 4 % len(_OTHERS)] if other else {}
        name = queue.add_request(prompt, **own)
        if not other:
            wanted.append(name)
    lots = random.Random(queue.seed)
    while queue.step():
        with queue._worker.work() as engine:
            engine.absorb_before(engine.step + 1)
            seated = list(engine.tickets.values())
            for ticket in lots.sample(seated, len(seated) // _PREEMPTED):
                engine.preempt(ticket)
    queue.stop()
    texts = {result.request_id: result.generated_tokens for result in queue}
    pad = kwargs.get("pad_token_id", 0)
    return torch.tensor([texts[name] + [pad] * (tokens - len(texts[name])) for name in wanted])
