"""Refusals that name what was given and what is allowed."""

from __future__ import annotations

import math
import operator
from typing import Any

ROUNDING = 1e-6
"""Excess over [0, 1] that is taken for rounding, as in a sum of float32 probabilities."""


def check_arm(arm: Any, n_arms: int) -> int:
    try:
        number = operator.index(arm)
    except TypeError:
        number = -1
    if not 0 <= number < n_arms:
        raise ValueError(f"arm={arm!r}: allowed are the integers 0 .. {n_arms - 1}.")
    return number


def check_fraction(reward: float) -> float:
    reward = float(reward)
    if not -ROUNDING <= reward <= 1.0 + ROUNDING:
        raise ValueError(
            f"reward={reward}: allowed is [0, 1]. Divide accepted by drafted tokens, or make the selector with "
            "reward='goodput', which scales rewards >= 0 itself."
        )
    return min(1.0, max(0.0, reward))


def check_rate(reward: float) -> float:
    reward = float(reward)
    if not 0.0 <= reward < math.inf:
        raise ValueError(f"reward={reward}: allowed is any finite number >= 0 under reward='goodput'.")
    return reward


def check_number(label: str, value: Any, least: float, most: float = math.inf) -> float:
    """Return `value` as a float if it is finite and lies in [least, most]."""
    try:
        inside = least <= value <= most and value != math.inf
    except TypeError:
        inside = False
    if not inside:
        raise ValueError(f"{label}={value!r}: allowed is a finite number from {least:g} to {most:g}.")
    return float(value)


def check_integer(label: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{label}={value!r}: allowed is an integer >= {least}.")
    return value
