"""Gives a selector of one's own what the shipped ones have: bookkeeping, statistics, retirement, dwell."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Hashable
from typing import Any, ClassVar

from .base import BaseSelector
from .checks import check_arm
from .protocol import Selector
from .table import Table
from .tally import Entry


class AdaptedSelector(BaseSelector[Table]):
    """Wraps any object with `select()` and `update(arm, reward)`.

    `context` and `weight` are passed on where its signatures name them. Where it offers `update_all`, that is called
    with full information, otherwise one `update` per scored arm. Should it choose a retired arm, the active arm of
    the best mean is taken instead. Rewards reach it in [0, 1] (see `BaseSelector`, `reward`).
    """

    name: ClassVar[str] = "adapted"
    headroom: ClassVar[float] = 1.0

    def __init__(self, inner: Selector, n_arms: int, seed: int | None = None, **common: Any) -> None:
        self.inner = inner
        super().__init__(n_arms, seed, **common)
        self._context: Hashable = None
        self._warned = False

    @property
    def full_information(self) -> bool:  # type: ignore[override]
        return bool(getattr(self.inner, "full_information", False))

    @property
    def review_every(self) -> int:
        """See `Hedge`."""
        return int(getattr(self.inner, "review_every", 8))

    def select(self, context: Hashable = None) -> int:
        self._context = context
        return super().select(context)

    def update(self, arm: int, reward: float, weight: float = 1.0, context: Hashable = None) -> None:
        self._context = context
        super().update(arm, reward, weight, context)

    def update_all(self, rewards: Any, weight: float = 1.0, context: Hashable = None, arm: int | None = None) -> None:
        self._context = context
        super().update_all(rewards, weight, context, arm)

    def state_dict(self) -> dict[str, Any]:
        own = getattr(self.inner, "state_dict", None)
        return {**super().state_dict(), "inner": None if own is None else own()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if state_dict.get("inner") is not None:
            self.inner.load_state_dict(state_dict["inner"])  # type: ignore[attr-defined]

    def _decide(self, table: Table) -> int:
        chosen = _call(self.inner.select, context=self._context)
        try:
            arm = check_arm(chosen, self.n_arms)
        except ValueError as error:
            raise ValueError(f"{type(self.inner).__name__}.select() gave {error}") from error
        if arm in self._active:
            return arm
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{type(self.inner).__name__}.select() chose arm {arm}, which is retired; the best active arm serves "
                "in its place.",
                stacklevel=3,
            )
        means = [table.mean(active) for active in self._active]
        return self._pick(table, [0.5 if mean is None else mean for mean in means])

    def _learn(self, table: Table, arm: int, reward: float, weight: float) -> None:
        _call(self.inner.update, arm, self._scaled(table, reward), weight=weight, context=self._context)

    def _learn_all(self, table: Table, entries: list[Entry]) -> None:
        update_all = getattr(self.inner, "update_all", None)
        if update_all is None or len(entries) < self.n_arms:
            for arm, reward, weight in entries:
                self._learn(table, arm, reward, weight)
            return
        rewards = [self._scaled(table, reward) for _, reward, _ in entries]
        _call(update_all, rewards, weight=entries[0][2], context=self._context)

    @staticmethod
    def _scaled(table: Table, reward: float) -> float:
        return reward / table.unit if table.unit > 0.0 else 0.0


def _call(method: Callable[..., Any], *arguments: Any, **optional: Any) -> Any:
    """Call `method` with those of the optional arguments that it names."""
    parameters = inspect.signature(method).parameters.values()
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        known = {parameter.name for parameter in parameters}
        optional = {name: value for name, value in optional.items() if name in known}
    return method(*arguments, **optional)
