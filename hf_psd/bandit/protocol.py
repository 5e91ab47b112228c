"""What a selector of one's own must offer."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol, runtime_checkable


@runtime_checkable
class Selector(Protocol):
    """Two methods; `weight` and `context` may be left out of their signatures (see `resolve`)."""

    def select(self, context: Hashable = None) -> int: ...

    def update(self, arm: int, reward: float, weight: float = 1.0, context: Hashable = None) -> None: ...
