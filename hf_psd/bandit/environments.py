"""Reward tables for simulation: every selector meets the same rewards, drawn before any of them chooses.

The tables come from generators of their own, so no selector's generator can be in step with them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from .arms import Arm


@dataclass(frozen=True)
class Bernoulli:
    """Rewards of 0 and 1; the means change from phase to phase.

    Attributes:
        phases: means per arm, for each phase in turn and then from the start again.
        phase_length, rounds: in rounds.
    """

    name: str
    phases: tuple[tuple[float, ...], ...]
    phase_length: int
    rounds: int = 10_000

    @property
    def n_arms(self) -> int:
        return len(self.phases[0])

    def means(self, step: int) -> tuple[float, ...]:
        return self.phases[step // self.phase_length % len(self.phases)]

    def rewards(self, seed: int) -> list[list[float]]:
        """Table [rounds][n_arms] of 0.0 and 1.0."""
        draw = random.Random(f"environment {self.name} {seed}").random
        return [[1.0 if draw() < mean else 0.0 for mean in self.means(step)] for step in range(self.rounds)]


PUBLISHED = Bernoulli("published", ((0.3, 0.7, 0.5),), 10_000)
"""The regret experiment of FlashSpec's paper."""

ROTATING = Bernoulli("rotating", ((0.3, 0.7, 0.5), (0.5, 0.3, 0.7), (0.7, 0.5, 0.3)), 1_000)
"""Every 1,000 rounds the means move on by one arm: the second-best arm becomes the best, the best the worst."""

ROTATING_BACK = Bernoulli("rotating-back", ((0.3, 0.7, 0.5), (0.7, 0.5, 0.3), (0.5, 0.3, 0.7)), 1_000)
"""The same the other way round: the worst arm becomes the best, the best the second-best."""


@dataclass(frozen=True)
class Outcome:
    """What one round of one request yields with one arm."""

    accepted: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Speculation:
    """Rounds of speculative decoding with a model of their time.

    Each drafted token is accepted with its drafter's probability until the first rejection; the round commits one
    token more than it accepts. A round takes `verify_seconds` and a draft forward per drafted token, times a
    log-normal factor.

    Attributes:
        acceptance, draft_seconds: per drafter.
        noise: standard deviation of the logarithm of a round's time.
    """

    arms: tuple[Arm, ...]
    acceptance: tuple[float, ...] = (0.6, 0.75)
    draft_seconds: tuple[float, ...] = (0.0005, 0.004)
    verify_seconds: float = 0.010
    noise: float = 0.05
    rounds: int = 3_000

    @property
    def n_arms(self) -> int:
        return len(self.arms)

    def expected(self, arm: Arm) -> tuple[float, float]:
        """Tokens and seconds of a round, on average and without noise."""
        if arm.drafter is None:
            return 1.0, self.verify_seconds
        chance = self.acceptance[arm.drafter]
        tokens = sum(chance**drafted for drafted in range(arm.gamma + 1))
        return tokens, self.verify_seconds + arm.gamma * self.draft_seconds[arm.drafter]

    def goodputs(self) -> list[float]:
        """Tokens per second of each arm."""
        return [tokens / seconds for tokens, seconds in map(self.expected, self.arms)]

    def outcomes(self, seed: int) -> list[list[Outcome]]:
        """Table [rounds][n_arms]."""
        rng = random.Random(f"environment speculation {seed}")
        return [[self._outcome(arm, rng) for arm in self.arms] for _ in range(self.rounds)]

    def _outcome(self, arm: Arm, rng: random.Random) -> Outcome:
        accepted = 0
        while accepted < arm.gamma and rng.random() < self._chance(arm):
            accepted += 1
        seconds = self.expected(arm)[1] * rng.lognormvariate(0.0, self.noise)
        return Outcome(accepted, accepted + 1, seconds)

    def _chance(self, arm: Arm) -> float:
        return 0.0 if arm.drafter is None else self.acceptance[arm.drafter]


ENVIRONMENTS: Sequence[Bernoulli] = (PUBLISHED, ROTATING, ROTATING_BACK)
