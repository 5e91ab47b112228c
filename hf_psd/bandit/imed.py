"""Indexed minimum empirical divergence."""

from __future__ import annotations

import math
from typing import ClassVar

from .base import BaseSelector
from .table import NO_ARM, Table


class IMED(BaseSelector[Table]):
    """IMED of Honda and Takemura (2015, "Non-asymptotic analysis of a new bandit algorithm for semi-bounded rewards").

    Arms without any pull come first, in random order; then the arm that minimises

        n_k * kl(mean_k, best mean) + ln(n_k)

    with kl the relative entropy of two Bernoulli laws, which is also valid for any rewards in [0, 1]. Pulls in flight
    count in `n_k`. Deterministic but for ties, without a constant to tune, and with light tails.
    """

    name: ClassVar[str] = "imed"

    def _decide(self, table: Table) -> int:
        counts = table.evidence(in_flight=True)
        unseen = [arm for arm in self._active if counts[arm] <= 0.0]
        if unseen:
            return self._rng.choice(unseen) if len(unseen) > 1 else unseen[0]
        means = [table.mean(arm) for arm in self._active]
        known = [mean for mean in means if mean is not None]
        average = sum(known) / len(known) if known else 0.5
        worths = [average if mean is None else mean for mean in means]
        handicap = self._switching.handicap
        if handicap is not None and table.incumbent != NO_ARM:
            pairs = zip(self._active, worths, strict=True)
            worths = [w if arm == table.incumbent else max(0.0, w - handicap[arm]) for arm, w in pairs]
        best = max(worths)
        indices = [
            counts[arm] * bernoulli_divergence(worth, best) + math.log(counts[arm])
            for arm, worth in zip(self._active, worths, strict=True)
        ]
        least = min(indices)
        if indices.count(least) == 1:
            return self._active[indices.index(least)]
        return self._rng.choice([arm for arm, index in zip(self._active, indices, strict=True) if index == least])


def bernoulli_divergence(p: float, q: float) -> float:
    """Relative entropy of Bernoulli(p) to Bernoulli(q), for 0 <= p <= q <= 1; infinite for p < q = 1."""
    if p >= q:
        return 0.0
    if q >= 1.0:
        return math.inf
    divergence = (1.0 - p) * math.log((1.0 - p) / (1.0 - q))
    if p > 0.0:
        divergence += p * math.log(p / q)
    return max(0.0, divergence)
