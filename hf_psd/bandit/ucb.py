"""Upper confidence bounds: UCB1, and its sliding-window and discounted forms."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from .base import BaseSelector
from .checks import check_integer, check_number
from .table import Table
from .tally import DiscountedTally, Tally, WindowedTally


class UCB1(BaseSelector[Table]):
    """UCB1 of Auer, Cesa-Bianchi and Fischer (2002, "Finite-time analysis of the multiarmed bandit problem").

    Arms without any pull come first, in random order; then the arm that maximises

        mean_k + c * sqrt(2 * ln(t) / n_k)

    with `mean_k` the ratio of sums, `n_k` the evidence of arm k (pulls, or trials where weights are given), pulls in
    flight included, and `t` the sum of all `n_k`. c = 1 is the paper's constant for rewards in [0, 1]. An arm whose
    only pulls are in flight is taken to be average.
    """

    name: ClassVar[str] = "ucb1"

    def __init__(self, n_arms: int, seed: int | None = None, *, c: float = 1.0, **common: Any) -> None:
        super().__init__(n_arms, seed, **common)
        self.c = check_number("c", c, 0.0)

    def options(self) -> dict[str, Any]:
        return {**super().options(), "c": self.c}

    def _decide(self, table: Table) -> int:
        return self._pick(table, self._scores(table))

    def _scores(self, table: Table) -> list[float]:
        """Index of each active arm; infinite for an arm never pulled."""
        counts = table.evidence(in_flight=True)
        width = self.c * math.sqrt(2.0 * math.log(max(sum(counts), 1.0)))
        scores = []
        for arm in self._active:
            if counts[arm] <= 0.0:
                scores.append(math.inf)
                continue
            mean = table.mean(arm)
            scores.append((self._average(table) if mean is None else mean) + width / math.sqrt(counts[arm]))
        return scores

    @staticmethod
    def _average(table: Table) -> float:
        means = [table.mean(arm) for arm in range(len(table.pulls))]
        known = [mean for mean in means if mean is not None]
        return sum(known) / len(known) if known else 0.5


class SlidingWindowUCB(UCB1):
    """SW-UCB of Garivier and Moulines (2011, "On upper-confidence bound policies for switching bandit problems").

    The index of UCB1 with `mean_k`, `n_k` and `t` all taken from the last `window` updates, whichever their arms.
    """

    name: ClassVar[str] = "sw_ucb"

    def __init__(
        self, n_arms: int, seed: int | None = None, *, window: int = 300, c: float = 0.3, **common: Any
    ) -> None:
        self.window = check_integer("window", window, 1)
        super().__init__(n_arms, seed, c=c, **common)

    def options(self) -> dict[str, Any]:
        return {**super().options(), "window": self.window}

    def _new_tally(self, n_arms: int) -> Tally:
        return WindowedTally(n_arms, self.window)


class DiscountedUCB(UCB1):
    """D-UCB of Garivier and Moulines (2011): an observation that is i updates old counts `discount**i`.

    The index of UCB1 with `mean_k`, `n_k` and `t` all taken from the discounted sums.
    """

    name: ClassVar[str] = "d_ucb"

    def __init__(
        self, n_arms: int, seed: int | None = None, *, discount: float = 0.995, c: float = 0.25, **common: Any
    ) -> None:
        self.discount = check_number("discount", discount, 0.0, 1.0)
        super().__init__(n_arms, seed, c=c, **common)

    def options(self) -> dict[str, Any]:
        return {**super().options(), "discount": self.discount}

    def _new_tally(self, n_arms: int) -> Tally:
        return DiscountedTally(n_arms, self.discount)
