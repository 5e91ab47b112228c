"""UCB1 and Beta-Bernoulli Thompson sampling written down as in their papers, one pull at a time, rewards in [0, 1].

These are what the shipped selectors are measured against: no pulls in flight, no weights, no contexts.
"""

from __future__ import annotations

import math
import random


class NaiveUCB1:
    """Auer, Cesa-Bianchi and Fischer 2002, with the constant c before the root."""

    def __init__(self, n_arms: int, rng: random.Random, c: float = 1.0) -> None:
        self.sums = [0.0] * n_arms
        self.pulls = [0] * n_arms
        self.rng = rng
        self.c = c

    def select(self) -> int:
        indices = [
            total / n + self.c * math.sqrt(2.0 * math.log(sum(self.pulls)) / n) if n else math.inf
            for total, n in zip(self.sums, self.pulls, strict=True)
        ]
        return _argmax(indices, self.rng)

    def update(self, arm: int, reward: float) -> None:
        self.sums[arm] += reward
        self.pulls[arm] += 1


class NaiveThompson:
    """Agrawal and Goyal 2012: a Beta(1, 1) prior on each arm."""

    def __init__(self, n_arms: int, rng: random.Random) -> None:
        self.alpha = [1.0] * n_arms
        self.beta = [1.0] * n_arms
        self.rng = rng

    def select(self) -> int:
        draws = [self.rng.betavariate(a, b) for a, b in zip(self.alpha, self.beta, strict=True)]
        return _argmax(draws, self.rng)

    def update(self, arm: int, reward: float) -> None:
        self.alpha[arm] += reward
        self.beta[arm] += 1.0 - reward


def _argmax(values: list[float], rng: random.Random) -> int:
    top = max(values)
    best = [arm for arm, value in enumerate(values) if value == top]
    return best[0] if len(best) == 1 else rng.choice(best)
