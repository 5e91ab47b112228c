"""Arms as pairs of a drafter and a draft length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Arm:
    """What a selector's arm stands for.

    Attributes:
        drafter: index of the drafter, None for plain decoding.
        gamma: drafted tokens per round; 0 exactly if there is no drafter.
    """

    drafter: int | None
    gamma: int

    def __post_init__(self) -> None:
        if self.gamma < 0 or (self.gamma == 0) != (self.drafter is None):
            raise ValueError(f"{self!r}: allowed are a drafter with gamma >= 1, and no drafter with gamma 0.")

    def __str__(self) -> str:
        return "no draft" if self.drafter is None else f"drafter {self.drafter}, gamma {self.gamma}"


def enumerate_arms(n_drafters: int, gammas: Sequence[int] | Sequence[Sequence[int]] = (0, 1, 2, 4, 8)) -> list[Arm]:
    """All arms of `n_drafters` drafters, without duplicates; a gamma of 0 gives one arm for plain decoding, the first.

    Args:
        gammas: draft lengths for every drafter, or one sequence of lengths per drafter.

    Lengths are only comparable by goodput: make the selector with reward="goodput".

    Raises:
        ValueError: no arm results, a negative gamma, or not one sequence per drafter.
    """
    shared = [gamma for gamma in gammas if isinstance(gamma, int)]
    if len(shared) == len(gammas):
        per_drafter = [shared] * n_drafters
    else:
        per_drafter = [list(own) for own in gammas if not isinstance(own, int)]
        if shared or len(per_drafter) != n_drafters:
            raise ValueError(f"gammas={gammas!r}: allowed are integers, or {n_drafters} sequences of integers.")
    lengths = {*shared, *(length for own in per_drafter for length in own)}
    if any(length < 0 for length in lengths):
        raise ValueError(f"gammas={gammas!r}: a draft length is at least 0.")
    plain = [Arm(None, 0)] if 0 in lengths else []
    drafting = [Arm(drafter, g) for drafter, own in enumerate(per_drafter) for g in sorted(set(own)) if g > 0]
    if not plain and not drafting:
        raise ValueError(f"n_drafters={n_drafters}, gammas={gammas!r}: no arm results.")
    return plain + drafting
