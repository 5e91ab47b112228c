"""Online choice of a drafter (and of a draft length) from past rounds only.

    selector = hf_psd.bandit.make("thompson", n_arms=3, seed=0)
    arm = selector.select()
    selector.update(arm, reward=accepted / drafted, weight=drafted)

Pure Python: importing this package loads neither torch nor numpy.
"""

from __future__ import annotations

from .adapter import AdaptedSelector
from .arms import Arm, enumerate_arms
from .base import BaseSelector
from .context import context_key
from .hedge import Exp3, Hedge
from .imed import IMED
from .protocol import Selector
from .registry import SELECTORS, make, names, resolve
from .reward import RewardScale, acceptance, goodput
from .thompson import DiscountedThompson, SharpThompson, Thompson
from .ucb import UCB1, DiscountedUCB, SlidingWindowUCB

__all__ = [
    "IMED",
    "SELECTORS",
    "UCB1",
    "AdaptedSelector",
    "Arm",
    "BaseSelector",
    "DiscountedThompson",
    "DiscountedUCB",
    "Exp3",
    "Hedge",
    "RewardScale",
    "Selector",
    "SharpThompson",
    "SlidingWindowUCB",
    "Thompson",
    "acceptance",
    "context_key",
    "enumerate_arms",
    "goodput",
    "make",
    "names",
    "resolve",
]
