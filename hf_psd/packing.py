"""Device state as one int64 tensor per kind: what crosses between devices, or into a captured graph, by one copy."""

from __future__ import annotations

import torch

from .reviews import Review
from .runner import Rows
from .state import View


def pack_view(view: View) -> torch.Tensor:
    """A view as one int64 tensor, [R, W + 6], or [R, 2 W + 6] with the bits of log-probabilities."""
    numbers = [view.padding, view.length, view.limit, view.round, view.request, view.done.long()]
    parts = [view.tokens, torch.stack(numbers, 1)]
    if view.log_prob is not None:
        parts.append(_bits(view.log_prob))
    return torch.cat(parts, 1)


def unpack_view(rows: Rows, packed: torch.Tensor, width: int) -> View:
    """The inverse of `pack_view` for W = `width`; shares the tensor's memory."""
    padding, length, limit, rounds, request, done = packed[:, width : width + 6].unbind(1)
    log_prob = _floats(packed[:, width + 6 :]) if packed.shape[1] > width + 6 else None
    return View(rows, packed[:, :width], padding, length, limit, rounds, request, done.bool(), log_prob)


def pack_review(review: Review) -> torch.Tensor:
    """A review as [R, 2] int64."""
    return torch.stack([_bits(review.gain), review.tokens], 1)


def unpack_review(packed: torch.Tensor) -> Review:
    """The inverse of `pack_review`."""
    return Review(_floats(packed[:, 0]), packed[:, 1])


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.float().view(torch.int32).long()


def _floats(bits: torch.Tensor) -> torch.Tensor:
    return bits.int().view(torch.float32)
