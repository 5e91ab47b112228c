"""From what a round did to the reward and weight a selector is told."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

REWARDS = ("acceptance", "goodput")


def acceptance(accepted: int | Sequence[int], drafted: int | Sequence[int]) -> tuple[float, float]:
    """Accepted fraction of one round and its number of trials: `sum(accepted) / sum(drafted), sum(drafted)`.

    Args:
        accepted: accepted draft tokens, of one request or per request of the group.
        drafted: drafted tokens, same shape; requests without drafts may be there with 0.

    Raises:
        ValueError: nothing was drafted (such a round has no acceptance: use `goodput`), or more was accepted
            than drafted.
    """
    accepted_rows = [accepted] if isinstance(accepted, int) else list(accepted)
    drafted_rows = [drafted] if isinstance(drafted, int) else list(drafted)
    if len(accepted_rows) != len(drafted_rows):
        raise ValueError(f"accepted has {len(accepted_rows)} rows, drafted has {len(drafted_rows)}.")
    for row, (hits, trials) in enumerate(zip(accepted_rows, drafted_rows, strict=True)):
        if not 0 <= hits <= trials:
            raise ValueError(f"row {row}: {hits} accepted of {trials} drafted; allowed is 0 <= accepted <= drafted.")
    total = sum(drafted_rows)
    if total == 0:
        raise ValueError("nothing was drafted, so there is no accepted fraction; use reward='goodput' with such arms.")
    return sum(accepted_rows) / total, float(total)


def goodput(tokens: int, seconds: float) -> tuple[float, float]:
    """Committed tokens per second of one round, and the seconds as its weight, for selectors with reward="goodput".

    `seconds` covers the round's draft and verify alone: a prefill, a compilation or a graph capture is no property
    of the arm. With the seconds as weights an arm's mean is total tokens over total seconds.

    Raises:
        ValueError: negative `tokens`, or `seconds` not positive and finite.
    """
    if tokens < 0 or not 0.0 < seconds < math.inf:
        raise ValueError(f"tokens={tokens}, seconds={seconds}: allowed are tokens >= 0 and finite seconds > 0.")
    return tokens / seconds, seconds


class RewardScale:
    """Scales non-negative rewards of any unit to [0, 1] by the context's current best, for one's own selector.

    The best is the largest reward seen, fading by `fading` a round so that it can follow the traffic down. Selectors
    made with reward="goodput" do this themselves, without committing old rewards to an outdated scale.
    """

    def __init__(self, fading: float = 0.999) -> None:
        if not 0.0 < fading <= 1.0:
            raise ValueError(f"fading={fading}: allowed is 0 < fading <= 1.")
        self.fading = fading
        self._best: dict[Hashable, float] = {}

    def __call__(self, reward: float, context: Hashable = None) -> float:
        """Return `reward` over the best of `context`, in [0, 1]; 0 as long as every reward was 0."""
        if not 0.0 <= reward < math.inf:
            raise ValueError(f"reward={reward}: allowed is any finite number >= 0.")
        best = max(reward, self._best.get(context, 0.0) * self.fading)
        self._best[context] = best
        return reward / best if best > 0.0 else 0.0
