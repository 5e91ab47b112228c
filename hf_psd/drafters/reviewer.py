"""Scores committed tokens with the logits that a drafter model computes while it catches up on them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..phases import Request
from ..reviews import Review
from ..runner import upload
from ..state import Limits, View
from ..verify.agreement import acceptance_chance
from ..verify.sampler import Sampler

_LONGEST = 64
"""A review looks at no more than so many of the newest tokens."""


class Reviewer:
    """Keeps how far each request has been reviewed by one drafter, on the device and, as a bound, on the host.

    Args:
        limits: sizes of the call.
        sampler: the drafter's.
        vocab_size: width of the target's logits.
        device: the drafter's.
    """

    def __init__(self, limits: Limits, sampler: Sampler, vocab_size: int, device: torch.device):
        self.limits, self.sampler, self.vocab_size = limits, sampler, vocab_size
        slots = limits.slots
        self._reviewed, self._row, self._tokens = (
            torch.zeros(slots, dtype=torch.long, device=device) for _ in range(3)
        )
        self._gain = torch.zeros(slots, device=device)
        self._surely: dict[int, int] = {}
        self._log_prob: torch.Tensor | None = None

    def begin(self, view: View, requests: Sequence[Request], log_prob: torch.Tensor | None) -> None:
        """Starts a turn; `log_prob` [R, W] belongs to the tokens of `view` (None where the law needs none)."""
        slots, device = view.rows.slots, view.length.device
        start = [-1 if request.index in self._surely else request.length - len(request.tokens) for request in requests]
        fresh = upload(start, device)
        self._reviewed.index_copy_(0, slots, torch.where(fresh >= 0, fresh, self._reviewed.index_select(0, slots)))
        self._row.index_copy_(0, slots, torch.arange(len(requests), device=device))
        self._gain.index_fill_(0, slots, 0.0)
        self._tokens.index_fill_(0, slots, 0)
        self._log_prob = log_prob
        for request in requests:
            self._surely.setdefault(request.index, request.length - len(request.tokens))

    def unscored(self, request: Request, drafted_last: bool) -> int:
        """Upper bound of the request's tokens to review; what drafted last has reviewed all before that draft."""
        bound = min(request.most - self._surely.get(request.index, request.most), _LONGEST)
        return min(bound, self.limits.gamma + 1) if drafted_last else bound

    def done(self, requests: Sequence[Request]) -> None:
        """All that is committed has been reviewed."""
        for request in requests:
            self._surely[request.index] = request.length

    def score(self, view: View, logits: torch.Tensor, meant: torch.Tensor) -> None:
        """Reviews tokens not reviewed before.

        Args:
            view: R requests, of those of the turn.
            logits: [R, N, V'] that predict the last N committed tokens.
            meant: [R] bool, rows whose logits mean anything.
        """
        slots, count = view.rows.slots, logits.shape[1]
        step = torch.arange(count, device=logits.device)
        first = view.length - count
        begin = torch.maximum(self._reviewed.index_select(0, slots), first)
        place = ((begin - first)[:, None] + step).clamp(max=count - 1)
        logits = logits.gather(1, place[..., None].expand(-1, -1, logits.shape[2]))
        judged = (begin[:, None] + step < view.length[:, None]) & meant[:, None]
        columns = (view.padding + begin)[:, None] + step
        ids = view.tokens.gather(1, columns.clamp(max=view.tokens.shape[1] - 1))
        log_prob = None
        if self._log_prob is not None:
            log_prob = self._log_prob.index_select(0, self._row.index_select(0, slots))
            log_prob = log_prob.gather(1, columns.clamp(max=log_prob.shape[1] - 1))
        chance = acceptance_chance(self.sampler, logits, ids, view, begin, log_prob, self.vocab_size)
        self._gain.index_add_(0, slots, torch.where(judged, chance, 0.0).sum(1))
        self._tokens.index_add_(0, slots, judged.sum(1))
        reviewed = torch.where(meant, view.length, self._reviewed.index_select(0, slots))
        self._reviewed.index_copy_(0, slots, reviewed)

    def result(self, view: View) -> Review:
        """The turn's review of the requests that it began with."""
        slots = view.rows.slots
        self._log_prob = None
        return Review(self._gain.index_select(0, slots), self._tokens.index_select(0, slots))
