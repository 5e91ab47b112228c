"""Scores committed tokens with the logits that a drafter model computes while it catches up on them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from ..phases import Request
from ..reviews import Review
from ..runner import Rows, upload
from ..state import View
from ..verify.agreement import acceptance_chance
from ..verify.sampler import Sampler
from .base import Session

_LONGEST = 64
"""A review looks at no more than so many of the newest tokens."""


class Reviewer:
    """Keeps how far each request has been reviewed by one drafter, on the device and, as a bound, on the host.

    What is on the device lies in buffers kept between calls, so `score` and `take` can be captured in CUDA graphs.

    Args:
        session: the call.
        name: tells the drafter from the others of its device.
        sampler: the drafter's.
        device: the drafter's.
    """

    def __init__(self, session: Session, name: Hashable, sampler: Sampler, device: torch.device):
        self.session, self.sampler, self.device = session, sampler, device
        self._name = ("reviewer", name, device)
        self._buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._surely: dict[int, int] = {}

    def begin(self, requests: Sequence[Request]) -> None:
        """Requests take part in a turn; those that have not before are reviewed from their first new token on."""
        if self._buffers is None:
            self._buffers = self._obtain()
        fresh = [request for request in requests if request.index not in self._surely]
        if not fresh:
            return
        start = [request.length - len(request.tokens) for request in fresh]
        slots = upload([request.slot for request in fresh], self.device)
        self._buffers[0].index_copy_(0, slots, upload(start, self.device))
        self._surely.update(zip((request.index for request in fresh), start))

    def unscored(self, request: Request, drafted_last: bool) -> int:
        """Upper bound of the request's tokens to review; what drafted last has reviewed all before that draft."""
        bound = min(request.most - self._surely.get(request.index, request.most), _LONGEST)
        return min(bound, self.session.limits.gamma + 1) if drafted_last else bound

    def done(self, requests: Sequence[Request]) -> None:
        """All that is committed has been reviewed."""
        for request in requests:
            self._surely[request.index] = request.length

    def score(self, view: View, logits: torch.Tensor, positions: torch.Tensor) -> None:
        """Reviews those of the committed tokens that these logits predict which were not reviewed before.

        Args:
            view: R requests.
            logits: [R, N, V'] of the drafter after N tokens in a row.
            positions: [R, N] int64 of these tokens, one more from each to the next; negative where there is none.
        """
        assert self._buffers is not None
        reviewed, gain, tokens = self._buffers
        slots, count = view.rows.slots, logits.shape[1]
        step = torch.arange(count, device=logits.device)
        first = positions[:, 0] + 1
        begin = torch.maximum(reviewed.index_select(0, slots), first)
        place = (begin - first)[:, None] + step
        at = place.clamp(max=count - 1)
        judged = (place < count) & (positions.gather(1, at) >= 0) & (begin[:, None] + step < view.length[:, None])
        logits = logits.gather(1, at[..., None].expand(-1, -1, logits.shape[2]))
        columns = ((view.padding + begin)[:, None] + step).clamp(max=view.tokens.shape[1] - 1)
        log_prob = None if view.log_prob is None else view.log_prob.gather(1, columns)
        ids = view.tokens.gather(1, columns)
        chance = acceptance_chance(self.sampler, logits, ids, view, begin, log_prob, self.session.vocab_size)
        found = judged.sum(1)
        gain.index_add_(0, slots, torch.where(judged, chance, 0.0).sum(1))
        tokens.index_add_(0, slots, found)
        reviewed.index_copy_(0, slots, torch.where(found > 0, begin + found, reviewed.index_select(0, slots)))

    def take(self, rows: Rows) -> Review:
        """What has come together since it was taken last."""
        assert self._buffers is not None
        _, gain, tokens = self._buffers
        review = Review(gain.index_select(0, rows.slots), tokens.index_select(0, rows.slots))
        gain.index_fill_(0, rows.slots, 0.0)
        tokens.index_fill_(0, rows.slots, 0)
        return review

    def _obtain(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens reviewed so far, gain and tokens since the last `take`, per slot; an earlier call's are void."""
        kept, slots = self.session.space.scratch, self.session.limits.slots
        if self._name not in kept:
            counts = torch.zeros(2, slots, dtype=torch.long, device=self.device)
            kept[self._name] = counts[0], torch.zeros(slots, device=self.device), counts[1]
        buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = kept[self._name]
        for sums in buffers[1:]:
            sums.zero_()
        return buffers
