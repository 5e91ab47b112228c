"""Thompson sampling with Beta posteriors: as published, sharpened, and discounted."""

from __future__ import annotations

from typing import Any, ClassVar

from .base import BaseSelector
from .beta import draw_beta
from .checks import check_number
from .table import Table
from .tally import DiscountedTally, Tally


class Thompson(BaseSelector[Table]):
    """Beta-Bernoulli Thompson sampling (Thompson 1933; Agrawal and Goyal 2012), prior Beta(1, 1).

    Each arm draws from Beta(a + S_k, b + F_k), the largest draw wins. S_k and F_k are the mean and its complement
    times the evidence: rewards of weight 1 add `reward` to S_k and `1 - reward` to F_k, independent trials their
    accepted and rejected numbers, correlated ones less (`Table.evidence`). Pulls in flight need no correction, as
    every draw is anew.

    Args:
        prior: a and b, both positive.
        sharpness, sharpness_after: both parameters are multiplied by 1 + (sharpness - 1) * n / (n + sharpness_after)
            with n = S_k + F_k, which explores less where it exceeds 1 (1 is the published sampling).
    """

    name: ClassVar[str] = "thompson"

    def __init__(
        self,
        n_arms: int,
        seed: int | None = None,
        *,
        prior: tuple[float, float] = (1.0, 1.0),
        sharpness: float = 1.0,
        sharpness_after: float = 0.0,
        **common: Any,
    ) -> None:
        super().__init__(n_arms, seed, **common)
        if len(prior) != 2 or not all(0.0 < count < float("inf") for count in prior):
            raise ValueError(f"prior={prior!r}: allowed are two finite numbers > 0.")
        if not sharpness > 0.0:
            raise ValueError(f"sharpness={sharpness!r}: allowed is a finite number > 0.")
        self.prior = (float(prior[0]), float(prior[1]))
        self.sharpness = check_number("sharpness", sharpness, 0.0)
        self.sharpness_after = check_number("sharpness_after", sharpness_after, 0.0)

    def options(self) -> dict[str, Any]:
        own = {"prior": list(self.prior), "sharpness": self.sharpness, "sharpness_after": self.sharpness_after}
        return {**super().options(), **own}

    def _decide(self, table: Table) -> int:
        evidence, rng = table.evidence(), self._rng
        return self._pick(table, [draw_beta(rng, *self._posterior(table, arm, evidence[arm])) for arm in self._active])

    def _posterior(self, table: Table, arm: int, evidence: float) -> tuple[float, float]:
        """Parameters of the Beta law that `arm` draws from."""
        hits = evidence * (table.mean(arm) or 0.0)
        sharp = self.sharpness
        if self.sharpness_after > 0.0:
            sharp = 1.0 + (sharp - 1.0) * evidence / (evidence + self.sharpness_after)
        return sharp * (self.prior[0] + hits), sharp * (self.prior[1] + evidence - hits)


class SharpThompson(Thompson):
    """Thompson sampling whose posterior counts its evidence up to half as much again, once there is some.

    Parameters are multiplied by 1 + 0.5 n / (n + 30): an arm with little evidence is explored as published, one with
    much of it less. Of the shipped selectors it has the least regret on stationary rewards (docs/bandits.md).
    """

    name: ClassVar[str] = "sharp_thompson"

    def __init__(
        self,
        n_arms: int,
        seed: int | None = None,
        *,
        sharpness: float = 1.5,
        sharpness_after: float = 30.0,
        **common: Any,
    ) -> None:
        super().__init__(n_arms, seed, sharpness=sharpness, sharpness_after=sharpness_after, **common)


class DiscountedThompson(Thompson):
    """Discounted Thompson sampling (Raj and Kalyani 2017, "Taming non-stationary bandits").

    S_k and F_k of all arms shrink by `discount` with every update, so an idle arm returns to its prior. That alone
    would keep on exploring; hence the sharpness of 4.
    """

    name: ClassVar[str] = "d_thompson"

    def __init__(
        self,
        n_arms: int,
        seed: int | None = None,
        *,
        discount: float = 0.99,
        sharpness: float = 4.0,
        **common: Any,
    ) -> None:
        self.discount = check_number("discount", discount, 0.0, 1.0)
        super().__init__(n_arms, seed, sharpness=sharpness, **common)

    def options(self) -> dict[str, Any]:
        return {**super().options(), "discount": self.discount}

    def _new_tally(self, n_arms: int) -> Tally:
        return DiscountedTally(n_arms, self.discount)
