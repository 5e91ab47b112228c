"""When is what faster: plain decoding, speculation in turn, or two groups that alternate. Pure functions of times.

Seconds are those of one *round*, in which every running request is verified once. With D(n) the time to draft for n
requests and V(n) to verify them, a round takes V(n) without drafts, D(n) + V(n) when both take turns, and
2 max(D(n/2), V(n/2)) when two halves alternate on devices of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

Cost = Callable[[int], float]
"""Seconds for a number of requests."""

MODES = ("ar", "sd", "psd")


def sd_round(draft: Cost, verify: Cost, rows: int) -> float:
    """Seconds of a round in which all `rows` requests are drafted for and then verified."""
    return draft(rows) + verify(rows)


def psd_round(draft: Cost, verify: Cost, rows: int) -> float:
    """Seconds of a round of two halves that alternate on separate devices: two steps of the longer side each."""
    half = math.ceil(rows / 2)
    return 2 * max(draft(half), verify(half))


def psd_gain(draft: Cost, verify: Cost, rows: int) -> float:
    """How many times faster two alternating halves are than turns, with as many requests in flight; at most 2.

    Where verifying takes longer than drafting and V(n) = a + b n, the gain is above 1 exactly if D(n) > a.
    """
    return sd_round(draft, verify, rows) / psd_round(draft, verify, rows)


@dataclass(frozen=True)
class Row:
    """What is known of a running request: `remaining` tokens to its limit, `rate` expected tokens per round."""

    remaining: int
    rate: float


def expected_rounds(row: Row, rows: int) -> float:
    """Rounds after which the slowest of `rows` requests like this one has reached its limit.

    Tokens per round scatter, so the slowest of several falls behind by the expected maximum of as many normal
    variables (Blom's formula); a round of exactly one token has no scatter.
    """
    spread = math.sqrt(max(0.0, row.rate - 1.0) * row.rate)
    behind = NormalDist().inv_cdf((rows - 0.375) / (rows + 0.25)) * spread * math.sqrt(row.remaining / row.rate)
    return max(1.0, (row.remaining + behind) / row.rate)


def makespan(rows: Sequence[Row], seconds: Cost) -> float:
    """Seconds until the last of `rows` has reached its limit, if a round with n running requests takes `seconds(n)`.

    Requests that are done leave the batch, so its later rounds are shorter.
    """
    ends = sorted(expected_rounds(row, len(rows)) for row in rows)
    total, done = 0.0, 0.0
    for place, end in enumerate(ends):
        total += (end - done) * seconds(len(ends) - place)
        done = end
    return total


def throughput(rows: Sequence[Row], seconds: Cost) -> float:
    """Expected tokens per second of the batch as it runs now."""
    return sum(row.rate for row in rows) / seconds(len(rows))


def choose(costs: Mapping[str, float], current: str | None = None, margin: float = 0.02) -> str:
    """The mode of least cost; another than the current one must be better by `margin`, as a share of its cost."""
    best = min(costs, key=lambda mode: costs[mode])
    if current in costs and costs[current] <= costs[best] * (1 + margin):
        return str(current)
    return best
