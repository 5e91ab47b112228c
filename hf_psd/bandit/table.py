"""Everything a selector knows about one context."""

from __future__ import annotations

from typing import Any

from .tally import Entry, Tally, floats, integer, integers

NO_ARM = -1
PRIOR_SCATTER = 1.25
"""Squared deviation of five 0/1 rewards of mean 1/2: `scatter` and `coin_scatter` start there, so at a ratio of 1."""
LEAST_DISPERSION = 0.02


class Table:
    """State of one context.

    Attributes:
        tally: the sums the selector decides by (windowed or discounted for some selectors).
        ledger: the sums over all time, for statistics; the same object where the selector forgets nothing.
        weights_are_trials: True under reward="acceptance"; False where they are seconds.
        unit: the reward that counts as 1: the current best and its headroom under reward="goodput", else 1.
        pulls: selections per arm; in_flight: those whose update has not come yet.
        held_back: observations dropped as burn-in, per arm.
        own_weight: weight of the feedback an arm got from its own pulls, not as a bystander of another's.
        updates: observations in the ledger.
        incumbent, dwell: the arm selected last and for how many selections in a row.
        switches, switching_paid: changes of arm and their summed cost.
        scatter, coin_scatter: what `dispersion` or `clumping` is the ratio of.
    """

    def __init__(self, n_arms: int, tally: Tally, ledger: Tally, weights_are_trials: bool) -> None:
        self.tally = tally
        self.ledger = ledger
        self.weights_are_trials = weights_are_trials
        self.unit = 1.0 if weights_are_trials else 0.0
        self.pulls = [0] * n_arms
        self.in_flight = [0] * n_arms
        self.held_back = [0] * n_arms
        self.own_weight = [0.0] * n_arms
        self.updates = 0
        self.incumbent = NO_ARM
        self.dwell = 0
        self.switches = 0
        self.switching_paid = 0.0
        self.scatter = PRIOR_SCATTER
        self.coin_scatter = PRIOR_SCATTER

    def add_arm(self) -> None:
        self.tally.add_arm()
        if self.ledger is not self.tally:
            self.ledger.add_arm()
        for counts in (self.pulls, self.in_flight, self.held_back):
            counts.append(0)
        self.own_weight.append(0.0)

    def record(self, arm: int, reward: float, weight: float) -> None:
        """Enter one observation in the tally and in the ledger."""
        self.updates += 1
        measured = weight > 1.0 or not self.weights_are_trials
        before = self.mean(arm) if measured else None
        self.tally.add(arm, reward, weight)
        if before is not None and self.unit > 0.0:
            self._measure_scatter(before, reward / self.unit, self.mean(arm) or 0.0, weight)
        if self.ledger is not self.tally:
            self.ledger.add(arm, reward, weight)

    def record_round(self, entries: list[Entry]) -> None:
        """The same for all observations of one round."""
        self.updates += len(entries)
        self.tally.add_round(entries)
        if self.ledger is not self.tally:
            self.ledger.add_round(entries)

    def mean(self, arm: int) -> float | None:
        """Mean reward of `arm` by the tally, scaled to [0, 1]; None where nothing is known."""
        raw = self.tally.mean(arm)
        if raw is None:
            return None
        return min(1.0, max(0.0, raw / self.unit)) if self.unit > 0.0 else 0.0

    def typical_weight(self) -> float:
        """Weight of an average observation; 1 before the first."""
        return sum(self.ledger.weight) / self.updates if self.updates else 1.0

    @property
    def dispersion(self) -> float:
        """Goodput: variance of a reward relative to that of a 0/1 reward of the same mean, at most 1."""
        return min(1.0, max(LEAST_DISPERSION, self.scatter / self.coin_scatter))

    @property
    def clumping(self) -> float:
        """Acceptance: correlation of the trials of one round; 0 if they are independent, 1 if they are all alike."""
        return min(1.0, max(0.0, self.scatter / self.coin_scatter))

    def evidence(self, in_flight: bool = False) -> list[float]:
        """Evidence per arm, as a number of independent 0/1 rewards; treat the list as read-only.

        W trials in rounds of w trials count W**2 / (W + clumping * sum(w * (w - 1))): fully if trials are independent,
        once a round if those of a round are all alike. Single trials always count one each. A pull under goodput
        counts 1 / dispersion. Clumping and dispersion are learned from the rewards of all arms and start at 1; and n
        rounds of an arm never count more than n * n, so that no arm is judged by one odd round.

        Args:
            in_flight: count a pull in flight as an average observation.
        """
        tally = self.tally
        flying = self.in_flight if in_flight and any(self.in_flight) else None
        if self.weights_are_trials and tally.weight == tally.square:
            return tally.weight if flying is None else [w + n for w, n in zip(tally.weight, flying, strict=True)]
        pulls = tally.pulls()
        if self.weights_are_trials:
            clumping, typical = self.clumping, self.typical_weight()
            pairs = zip(tally.weight, tally.square, strict=True)
            known = [w * w / (w + clumping * (q - w)) if w > 0.0 < q else 0.0 for w, q in pairs]
            worth = typical / (1.0 + (typical - 1.0) * clumping) if typical > 1.0 else 1.0
        else:
            worth = 1.0 / self.dispersion
            known = [worth * n for n in pulls]
        if flying is not None:
            known = [k + worth * n for k, n in zip(known, flying, strict=True)]
            pulls = [p + n for p, n in zip(pulls, flying, strict=True)]
        return [min(k, max(n, n * n)) for k, n in zip(known, pulls, strict=True)]

    def _measure_scatter(self, before: float, reward: float, after: float, weight: float) -> None:
        """Enter a squared deviation, by the means before and after it (Welford), and its size for 0/1 rewards."""
        deviation, coin = (reward - before) * (reward - after), after * (1.0 - after)
        if self.weights_are_trials:
            self.scatter += weight * deviation - coin
            self.coin_scatter += (weight - 1.0) * coin
        else:
            self.scatter += abs(deviation)
            self.coin_scatter += coin

    def regret(self, active: list[int]) -> float | None:
        """Reward times weight lost to the best active arm, by the means known; None before any feedback."""
        means = [self.ledger.mean(arm) for arm in range(len(self.pulls))]
        known = [mean for arm, mean in enumerate(means) if mean is not None and arm in active]
        if not known:
            return None
        best = max(known)
        return sum(w * (best - mean) for w, mean in zip(self.own_weight, means, strict=True) if mean is not None)

    def to_json(self) -> dict[str, Any]:
        return {
            "unit": self.unit,
            "pulls": list(self.pulls),
            "in_flight": list(self.in_flight),
            "held_back": list(self.held_back),
            "own_weight": list(self.own_weight),
            "updates": self.updates,
            "incumbent": self.incumbent,
            "dwell": self.dwell,
            "switches": self.switches,
            "switching_paid": self.switching_paid,
            "scatter": [self.scatter, self.coin_scatter],
            "tally": self.tally.to_json(),
            "ledger": None if self.ledger is self.tally else self.ledger.to_json(),
        }

    def from_json(self, state: dict[str, Any]) -> None:
        n_arms = len(self.pulls)
        self.pulls = integers(state["pulls"], n_arms)
        self.in_flight = integers(state["in_flight"], n_arms)
        self.held_back = integers(state["held_back"], n_arms)
        self.own_weight = floats(state["own_weight"], n_arms)
        self.unit, self.switching_paid = floats([state["unit"], state["switching_paid"]], 2)
        self.scatter, self.coin_scatter = floats(state["scatter"], 2)
        self.updates, self.dwell, self.switches = integers([state["updates"], state["dwell"], state["switches"]], 3)
        self.incumbent = NO_ARM if state["incumbent"] == NO_ARM else integer(state["incumbent"], n_arms)
        self.tally.from_json(state["tally"])
        if self.ledger is not self.tally:
            self.ledger.from_json(state["ledger"])
