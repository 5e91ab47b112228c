"""Exponential weights: Hedge for full information, EXP3-IX for the reward of the pulled arm alone."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from typing import Any, ClassVar

from .base import BaseSelector
from .checks import check_integer
from .table import NO_ARM, Table
from .tally import Entry, Tally, floats

HEAVIEST = 2.0
"""A round weighs at most this many average rounds, so that its loss stays bounded."""


class LossTable(Table):
    """A table with discounted cumulative losses, the effective number of rounds behind them, and the selection
    probabilities of the pulls in flight."""

    def __init__(self, n_arms: int, tally: Tally, ledger: Tally, weights_are_trials: bool) -> None:
        super().__init__(n_arms, tally, ledger, weights_are_trials)
        self.loss = [0.0] * n_arms
        self.rounds = 0.0
        self.odds: list[deque[float]] = [deque() for _ in range(n_arms)]
        self.last_odds = 1.0
        self.landed_odds: float | None = None

    def add_arm(self) -> None:
        super().add_arm()
        self.loss.append(0.0)
        self.odds.append(deque())

    def to_json(self) -> dict[str, Any]:
        odds = [list(queue) for queue in self.odds]
        own = {"loss": list(self.loss), "rounds": self.rounds, "odds": odds, "last_odds": self.last_odds}
        return {**super().to_json(), **own}

    def from_json(self, state: dict[str, Any]) -> None:
        super().from_json(state)
        self.loss = floats(state["loss"], len(self.pulls))
        self.rounds, self.last_odds = floats([state["rounds"], state["last_odds"]], 2)
        self.odds = [deque(floats(queue, n)) for queue, n in zip(state["odds"], self.in_flight, strict=True)]


class ExponentialWeights(BaseSelector[LossTable]):
    """Draws arm k with probability proportional to exp(-rate * L_k), L_k its cumulative loss (loss = 1 - reward).

    `update` adds loss / (p + rate / 2) to the pulled arm's L_k, with p its probability at the time of the draw
    (implicit exploration: Neu 2015); `update_all` adds each arm its own loss, and an arm that was not scored its
    average one. A round of weight w counts w over the average weight, at most 2. Under reward="goodput" a loss is
    taken by the best reward known at its time.

    Args:
        horizon: rounds over which losses fade (by the factor 1 - 1/horizon per update), so that arms are compared on
            about the last `horizon` rounds; None compares them on all. `rate` falls with the number h of rounds
            compared (see the subclasses), which grows up to `horizon`.
    """

    table_kind: ClassVar[type[Table]] = LossTable
    headroom: ClassVar[float] = 1.0

    def __init__(self, n_arms: int, seed: int | None = None, *, horizon: int | None = None, **common: Any) -> None:
        super().__init__(n_arms, seed, **common)
        self.horizon = None if horizon is None else check_integer("horizon", horizon, 2)
        self._keep = 1.0 if horizon is None else 1.0 - 1.0 / horizon

    def options(self) -> dict[str, Any]:
        return {**super().options(), "horizon": self.horizon}

    def probabilities(self, context: Hashable = None) -> list[float]:
        """Probability of each arm at the next free choice; 0 for retired arms."""
        return self._spread(self._chances(self._table(context)) if self._active else [])

    def _rate(self, rounds: float) -> float:
        raise NotImplementedError

    @property
    def _rivals(self) -> int:
        """Arms in play, at least 1: rewards of earlier pulls still land when the last arm has been retired."""
        return max(1, len(self._active))

    def _decide(self, table: LossTable) -> int:
        chances = self._chances(table)
        place = self._rng.choices(range(len(chances)), chances)[0]
        table.last_odds = chances[place]
        return self._active[place]

    def _chances(self, table: LossTable) -> list[float]:
        losses = [table.loss[arm] for arm in self._active]
        handicap = self._switching.handicap
        if handicap is not None and table.incumbent != NO_ARM:
            pairs = zip(self._active, losses, strict=True)
            losses = [x if arm == table.incumbent else x + table.rounds * handicap[arm] for arm, x in pairs]
        rate, least = self._rate(table.rounds), min(losses)
        powers = [math.exp(rate * (least - loss)) for loss in losses]
        total = sum(powers)
        return [power / total for power in powers]

    def _spread(self, chances: list[float]) -> list[float]:
        by_arm = [0.0] * self.n_arms
        for arm, chance in zip(self._active, chances, strict=True):
            by_arm[arm] = chance
        return by_arm

    def _launched(self, table: LossTable, arm: int) -> None:
        table.odds[arm].append(table.last_odds)

    def _landed(self, table: LossTable, arm: int) -> None:
        super()._landed(table, arm)
        table.landed_odds = table.odds[arm].popleft() if table.odds[arm] else None

    def _learn(self, table: LossTable, arm: int, reward: float, weight: float) -> None:
        odds = table.landed_odds
        if odds is None:
            if arm not in self._active:
                return
            odds = self._spread(self._chances(table))[arm]
        loss = self._loss(table, reward) / (odds + 0.5 * self._rate(table.rounds))
        relative = self._relative(table, weight)
        self._fade(table)
        table.loss[arm] += relative * loss

    def _learn_all(self, table: LossTable, entries: list[Entry]) -> None:
        told = {arm: self._loss(table, reward) for arm, reward, _ in entries}
        if len(told) < self.n_arms:
            guess = sum(told.values()) / len(told)
            for arm in range(self.n_arms):
                told.setdefault(arm, table.loss[arm] / table.rounds if table.rounds > 0.0 else guess)
        relative = self._relative(table, entries[0][2])
        self._fade(table)
        for arm, loss in told.items():
            table.loss[arm] += relative * loss

    def _fade(self, table: LossTable) -> None:
        if self._keep < 1.0:
            table.loss = [self._keep * loss for loss in table.loss]
        table.rounds = self._keep * table.rounds + 1.0

    def _seat_newcomer(self, table: LossTable) -> None:
        """The newcomer starts with an even share of the probability."""
        rate, elders = self._rate(table.rounds), [table.loss[arm] for arm in self._active[:-1]]
        if not elders or rate <= 0.0:
            return
        least = min(elders)
        share = sum(math.exp(rate * (least - loss)) for loss in elders) / len(elders)
        table.loss[-1] = least - math.log(share) / rate

    @staticmethod
    def _loss(table: LossTable, reward: float) -> float:
        return 1.0 - reward / table.unit if table.unit > 0.0 else 1.0

    @staticmethod
    def _relative(table: LossTable, weight: float) -> float:
        return min(weight / table.typical_weight(), HEAVIEST)


class Hedge(ExponentialWeights):
    """Hedge of Freund and Schapire (1997), for `update_all`: rate = sqrt(8 ln(K) / h) for K arms and h rounds.

    With the default horizon it follows the traffic: its regret against any arm over any stretch of `horizon` rounds
    is of the order sqrt(horizon ln K). horizon=None is the textbook form against the best fixed arm. `update` is
    accepted too, but feedback of the pulled arm alone is what "exp3" is tuned for.

    Args:
        review_every: in `generate`, drafters that were not chosen are asked after at most so many turns what they
            think of the tokens committed since, which costs each a forward; 0 asks only those that draft.
    """

    name: ClassVar[str] = "hedge"
    full_information: ClassVar[bool] = True

    def __init__(
        self,
        n_arms: int,
        seed: int | None = None,
        *,
        horizon: int | None = 70,
        review_every: int = 8,
        **common: Any,
    ) -> None:
        super().__init__(n_arms, seed, horizon=horizon, **common)
        self.review_every = check_integer("review_every", review_every, 0)

    def _rate(self, rounds: float) -> float:
        return math.sqrt(8.0 * math.log(self._rivals) / max(rounds, 1.0))


class Exp3(ExponentialWeights):
    """EXP3-IX for adversarial rewards (EXP3: Auer et al. 2002; implicit exploration: Neu 2015, "Explore no more").

    rate = sqrt(2 ln(K) / (K h)) for K arms and h rounds, anytime. Implicit exploration bounds the regret with high
    probability, where the original has heavy tails.
    """

    name: ClassVar[str] = "exp3"

    def _rate(self, rounds: float) -> float:
        n_arms = self._rivals
        return math.sqrt(2.0 * math.log(n_arms) / (n_arms * max(rounds, 1.0)))
