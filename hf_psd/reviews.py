"""The device side of full information: how well each drafter would have guessed what was committed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch

from .runner import Rows
from .state import Limits, View
from .verify.sampler import Judgement

_UNIT = 1 << 20
"""Gains travel to the host as whole multiples of 1 / _UNIT, so that sums do not depend on their order."""


@dataclass(frozen=True)
class Review:
    """What a drafter's guesses at committed tokens of R requests were worth.

    Attributes:
        gain: [R] fp32, the chances that its drafts would have been accepted, summed over the tokens.
        tokens: [R] int64, how many tokens were looked at.
    """

    gain: torch.Tensor
    tokens: torch.Tensor


Reviewed = dict[int, tuple[float, int]]
"""The same of one request on the host: gain and tokens per drafter."""


class ReviewBoard:
    """Sums up reviews until the host reads them with the requests' next verification.

    Its buffers stay where they are, so captured graphs may write to them; it knows nothing of a call on the host, so
    one board serves one call after the other.

    Args:
        limits: sizes of the call.
        drafters: number of drafters.
        device: the target's.
        keep_log_prob: keep each committed token's log-probability under the target, which reviews of rejection
            sampling need.

    Attributes:
        columns: numbers per row that `take` gives.
        key: equal for boards that captured graphs would treat alike.
    """

    def __init__(self, limits: Limits, drafters: int, device: torch.device, keep_log_prob: bool):
        self.columns = 2 * drafters
        self.key: Hashable = (drafters, keep_log_prob)
        self._sums = torch.zeros(limits.slots, drafters, 2, dtype=torch.long, device=device)
        self.log_prob = torch.zeros(limits.slots, limits.capacity, device=device) if keep_log_prob else None

    def show(self, view: View) -> View:
        """The view with what reviews need of the committed tokens."""
        if self.log_prob is None:
            return view
        return replace(view, log_prob=self.log_prob.index_select(0, view.rows.slots))

    def note(self, view: View, judgement: Judgement) -> None:
        """Keeps the log-probabilities of what was emitted after the texts in `view`; call it before drafters review.

        In its first round a request had no tokens to review: what is found there was left by the slot's last owner.
        """
        begun = (view.round > 0).long()[:, None, None]
        self._sums.index_copy_(0, view.rows.slots, self._sums.index_select(0, view.rows.slots) * begun)
        if self.log_prob is None:
            return
        scores = judgement.scores.float()
        chosen = scores.gather(-1, judgement.ids.clamp(min=0)[..., None])[..., 0] - scores.logsumexp(-1)
        columns = (view.padding + view.length)[:, None] + torch.arange(chosen.shape[1], device=chosen.device)
        self.log_prob.index_put_((view.rows.slots[:, None], columns), chosen)

    def add(self, rows: Rows, drafter: int, review: Review) -> None:
        numbers = torch.stack([(review.gain * _UNIT).round().long(), review.tokens], 1)
        self._sums[:, drafter].index_add_(0, rows.slots, numbers)

    def take(self, rows: Rows) -> torch.Tensor:
        """[R, 2 K] int64: what has come together since it was taken last."""
        taken = self._sums.index_select(0, rows.slots)
        self._sums.index_fill_(0, rows.slots, 0)
        return taken.flatten(1)


def read_reviews(numbers: Sequence[int]) -> Reviewed:
    """One row of `ReviewBoard.take` on the host."""
    gains, tokens = numbers[0::2], numbers[1::2]
    return {drafter: (gain / _UNIT, count) for drafter, (gain, count) in enumerate(zip(gains, tokens)) if count}
