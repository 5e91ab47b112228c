"""Weighted sums of rewards per arm: over all time, over a sliding window, or discounted.

Means are ratios of sums, `sum(weight * reward) / sum(weight)`, never means of ratios.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

Entry = tuple[int, float, float]
"""One observation: arm, reward, weight."""

NEGLIGIBLE = 1e-12


class Tally:
    """Sums over all time. `weight[k]`, `gain[k]` and `square[k]` hold the sums of w, w * r and w * w of arm k."""

    def __init__(self, n_arms: int) -> None:
        self.weight = [0.0] * n_arms
        self.gain = [0.0] * n_arms
        self.square = [0.0] * n_arms

    def add(self, arm: int, reward: float, weight: float) -> None:
        self.weight[arm] += weight
        self.gain[arm] += weight * reward
        self.square[arm] += weight * weight

    def add_round(self, entries: Iterable[Entry]) -> None:
        """Add what one round told about several arms."""
        for arm, reward, weight in entries:
            Tally.add(self, arm, reward, weight)

    def add_arm(self) -> None:
        for sums in (self.weight, self.gain, self.square):
            sums.append(0.0)

    def pulls(self) -> list[float]:
        """Effective number of pulls per arm, W**2 / sum(w**2) (Kish 1965), which no unit of the weights alters."""
        return [w * w / q if q > 0.0 else 0.0 for w, q in zip(self.weight, self.square, strict=True)]

    def mean(self, arm: int) -> float | None:
        return self.gain[arm] / self.weight[arm] if self.weight[arm] > NEGLIGIBLE else None

    def to_json(self) -> dict[str, Any]:
        return {"weight": list(self.weight), "gain": list(self.gain), "square": list(self.square)}

    def from_json(self, state: dict[str, Any]) -> None:
        n_arms = len(self.weight)
        self.weight, self.gain, self.square = (floats(state[key], n_arms) for key in ("weight", "gain", "square"))


class DiscountedTally(Tally):
    """Every round multiplies all sums by `discount` before its own observations are added."""

    def __init__(self, n_arms: int, discount: float) -> None:
        super().__init__(n_arms)
        self.discount = discount

    def add(self, arm: int, reward: float, weight: float) -> None:
        self._decay()
        super().add(arm, reward, weight)

    def add_round(self, entries: Iterable[Entry]) -> None:
        self._decay()
        super().add_round(entries)

    def _decay(self) -> None:
        discount, weight, gain, square = self.discount, self.weight, self.gain, self.square
        for arm in range(len(weight)):
            weight[arm] *= discount
            gain[arm] *= discount
            square[arm] *= discount


class WindowedTally(Tally):
    """Sums over the last `window` rounds: means *and* counts forget together."""

    def __init__(self, n_arms: int, window: int) -> None:
        super().__init__(n_arms)
        self.window = window
        self._rounds: deque[tuple[Entry, ...]] = deque()
        self._entries = [0] * n_arms
        self._evictions = 0

    def add(self, arm: int, reward: float, weight: float) -> None:
        self.add_round(((arm, reward, weight),))

    def add_round(self, entries: Iterable[Entry]) -> None:
        entries = tuple(entries)
        self._rounds.append(entries)
        for arm, reward, weight in entries:
            self._entries[arm] += 1
            Tally.add(self, arm, reward, weight)
        if len(self._rounds) > self.window:
            self._evict(self._rounds.popleft())

    def add_arm(self) -> None:
        super().add_arm()
        self._entries.append(0)

    def _evict(self, entries: tuple[Entry, ...]) -> None:
        for arm, reward, weight in entries:
            self._entries[arm] -= 1
            emptied = self._entries[arm] == 0
            self.weight[arm] = 0.0 if emptied else self.weight[arm] - weight
            self.gain[arm] = 0.0 if emptied else self.gain[arm] - weight * reward
            self.square[arm] = 0.0 if emptied else self.square[arm] - weight * weight
        self._evictions += 1
        if self._evictions >= self.window:
            self._sum_anew()

    def _sum_anew(self) -> None:
        """Rounding errors of the subtractions would pile up over millions of rounds."""
        self._evictions = 0
        n_arms = len(self.weight)
        self.weight, self.gain, self.square = [0.0] * n_arms, [0.0] * n_arms, [0.0] * n_arms
        for entries in self._rounds:
            super().add_round(entries)

    def to_json(self) -> dict[str, Any]:
        rounds = [[list(entry) for entry in entries] for entries in self._rounds]
        return {**super().to_json(), "rounds": rounds, "evictions": self._evictions}

    def from_json(self, state: dict[str, Any]) -> None:
        super().from_json(state)
        n_arms = len(self.weight)
        rounds: deque[tuple[Entry, ...]] = deque()
        for entries in state["rounds"]:
            rounds.append(tuple(_entry(entry, n_arms) for entry in entries))
        if len(rounds) > self.window:
            raise ValueError(f"the saved window holds {len(rounds)} rounds, this selector's window is {self.window}.")
        self._rounds, self._evictions = rounds, integer(state["evictions"], self.window + 1)
        self._entries = [0] * n_arms
        for entries in rounds:
            for arm, _, _ in entries:
                self._entries[arm] += 1


def _entry(values: Sequence[Any], n_arms: int) -> Entry:
    arm, *sums = values
    reward, weight = floats(sums, 2)
    return integer(arm, n_arms), reward, weight


def floats(values: Sequence[Any], length: int) -> list[float]:
    """Copy of `values` as finite floats, or ValueError."""
    numbers = [float(value) for value in values]
    if len(numbers) != length or not all(abs(number) < float("inf") for number in numbers):
        raise ValueError(f"expected {length} finite numbers, got {values!r}.")
    return numbers


def integers(values: Sequence[Any], length: int) -> list[int]:
    """Copy of `values` as non-negative ints, or ValueError."""
    if len(values) != length:
        raise ValueError(f"expected {length} integers, got {values!r}.")
    return [integer(value, None) for value in values]


def integer(value: Any, below: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0 or (below is not None and value >= below):
        raise ValueError(f"expected an integer from 0 up to (not including) {below}, got {value!r}.")
    return value
