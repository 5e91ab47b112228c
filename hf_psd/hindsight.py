"""The host side of full information: when drafters review what was committed, and what their reviews tell a bandit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .bandit import BaseSelector
from .selection import Feedback


@dataclass
class Pool:
    """Reviews that wait for the others: arms pulled meanwhile, gain and tokens per drafter."""

    pulled: list[int] = field(default_factory=list)
    gain: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    tokens: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    turns: int = 0
    interval: int = 1

    def add(self, drafter: int, gain: float, tokens: int) -> None:
        self.gain[drafter] += gain
        self.tokens[drafter] += tokens


class Hindsight:
    """Tells a bandit, round by round, what every arm would have yielded, as soon as all have reviewed the same tokens.

    A drafter that drafts reviews the newest tokens as it goes; one that does not has to catch up, which costs a
    forward. That is due after 1, 2, 4, ... turns and then every `review_every` turns. So a bandit learns of its rounds
    in bunches, and each round of a bunch gets the shares of the whole. Drafters that cannot review are known by their
    own rounds alone.

    Args:
        bandit: what learns; its arms are drafters.
        review_every: the longest wait in turns; 0 asks for no forward.

    Attributes:
        able: drafters that can review.
    """

    def __init__(self, bandit: BaseSelector[Any], review_every: int):
        self.bandit, self.review_every = bandit, review_every
        self.able: set[int] = set()
        self._pools: dict[tuple[Hashable, int], Pool] = {}

    def due(self, context: Hashable, group: int) -> bool:
        """Whether all drafters shall review now; called once per turn, context and group."""
        pool = self._pool(context, group)
        pool.turns += 1
        if self.review_every == 0 or pool.turns <= pool.interval:
            return False
        pool.turns, pool.interval = 1, min(2 * pool.interval, self.review_every)
        return True

    def land(self, arm: int, context: Hashable, rows: Sequence[Feedback]) -> None:
        """Takes in the verification of a pull."""
        group = rows[0].request.group
        pool = self._pool(context, group)
        pool.pulled.append(arm)
        for row in rows:
            for drafter, (gain, tokens) in (row.reviews or {}).items():
                pool.add(drafter, gain, tokens)
            if arm not in self.able:
                pool.add(arm, row.accepted, max(row.drafted, 1))
        complete = all(pool.tokens[drafter] for drafter in self.bandit.active_arms if drafter in self.able)
        if complete or len(pool.pulled) > 2 * max(self.review_every, 1):
            self._tell(pool, context)

    def end(self) -> None:
        """Tells what is known of rounds whose reviews will not come any more."""
        for (context, _), pool in self._pools.items():
            self._tell(pool, context)
        self._pools.clear()

    def forget(self, context: Hashable) -> None:
        """Nothing of this context will come any more."""
        for key in [key for key in self._pools if key[0] == context]:
            del self._pools[key]

    def _tell(self, pool: Pool, context: Hashable) -> None:
        tokens = [pool.tokens[arm] for arm in range(self.bandit.n_arms)]
        shares = [pool.gain[arm] / count if count else None for arm, count in enumerate(tokens)]
        for arm in pool.pulled:
            self.bandit.update_all(shares, max(tokens) / len(pool.pulled), context, arm)
        pool.pulled.clear()
        pool.gain.clear()
        pool.tokens.clear()

    def _pool(self, context: Hashable, group: int) -> Pool:
        return self._pools.setdefault((context, group), Pool())
