"""How long an arm is kept, and what leaving it costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .checks import check_integer, check_number


class Switching:
    """Minimum dwell, hysteresis and the cost of changing to each arm (see `BaseSelector`).

    Attributes:
        handicap: per arm, what its score loses unless it is the current arm; None if no arm's does.
    """

    def __init__(self, n_arms: int, min_dwell: int, hysteresis: float, cost: float | Sequence[float]) -> None:
        self.min_dwell = check_integer("min_dwell", min_dwell, 1)
        self.hysteresis = check_number("hysteresis", hysteresis, 0.0, 1.0)
        self.costs: list[float] = [0.0] * n_arms
        self.handicap: list[float] | None = None
        self.set_costs(cost)

    def set_costs(self, cost: float | Sequence[float]) -> None:
        """One number for all arms, or one per arm."""
        n_arms = len(self.costs)
        if isinstance(cost, str) or not isinstance(cost, (int, float, Iterable)):
            raise ValueError(f"switch_cost={cost!r}: allowed is a number, or one per arm.")
        costs = [cost] * n_arms if isinstance(cost, (int, float)) else list(cost)
        if len(costs) != n_arms:
            raise ValueError(f"{len(costs)} switching costs for {n_arms} arms.")
        self.costs = [check_number("switch_cost", number, 0.0) for number in costs]
        self._weigh()

    def resize(self, n_arms: int) -> None:
        """Drop the last arms, or add arms that cost nothing."""
        self.costs = (self.costs + [0.0] * n_arms)[:n_arms]
        self._weigh()

    def _weigh(self) -> None:
        handicap = [self.hysteresis + cost / self.min_dwell for cost in self.costs]
        self.handicap = handicap if any(handicap) else None
