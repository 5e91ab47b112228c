"""Selectors by name."""

from __future__ import annotations

import inspect
import json
from typing import Any

from .adapter import AdaptedSelector
from .base import BaseSelector
from .checks import check_integer
from .hedge import Exp3, Hedge
from .imed import IMED
from .protocol import Selector
from .thompson import DiscountedThompson, SharpThompson, Thompson
from .ucb import UCB1, DiscountedUCB, SlidingWindowUCB

SELECTORS: dict[str, type[BaseSelector[Any]]] = {
    kind.name: kind
    for kind in (
        UCB1,
        SlidingWindowUCB,
        DiscountedUCB,
        Thompson,
        SharpThompson,
        DiscountedThompson,
        IMED,
        Exp3,
        Hedge,
    )
}


def names() -> list[str]:
    return list(SELECTORS)


def make(name: str, n_arms: int, seed: int | None = None, **options: Any) -> BaseSelector[Any]:
    """A new selector with a state of its own.

    Args:
        name: one of `names()`, also with options in JSON: "sw_ucb:window=100,switch_cost=[0,0.1]".
        n_arms, seed, options: see `BaseSelector` and the selector's class.

    Raises:
        ValueError: an unknown name or option, or an option out of range.
    """
    name, _, written = name.partition(":")
    own = _read(written)
    if both := own.keys() & options.keys():
        raise ValueError(
            f"selector {name!r} is given {', '.join(sorted(both))} twice, by its options and beside them."
        )
    options = own | options
    kind = SELECTORS.get(name)
    if kind is None:
        raise ValueError(f"selector {name!r} is unknown; allowed are {', '.join(SELECTORS)}.")
    allowed = _options(kind)
    unknown = [option for option in options if option not in allowed]
    if unknown:
        raise ValueError(f"selector {name!r} has no option {', '.join(unknown)}; allowed are {', '.join(allowed)}.")
    return kind(n_arms, seed, **options)


def resolve(spec: Any, n_arms: int, seed: int | None = None, **options: Any) -> BaseSelector[Any]:
    """The selector that a user means by a name, an instance, or a class of their own.

    A shipped instance is returned as it is and keeps what it has learned; an object with `select` and `update` is
    wrapped (`AdaptedSelector`), and a class is first instantiated with those of `n_arms` and `seed` that it names.

    Raises:
        ValueError: neither of these, or an instance for another number of arms.
    """
    if isinstance(spec, str):
        return make(spec, n_arms, seed, **options)
    if isinstance(spec, BaseSelector):
        if spec.n_arms != n_arms:
            raise ValueError(f"{type(spec).__name__} has {spec.n_arms} arms; this call has {n_arms}.")
        return spec
    if isinstance(spec, type):
        if issubclass(spec, BaseSelector):
            return spec(n_arms, seed, **options)
        parameters = inspect.signature(spec).parameters
        given = {"n_arms": check_integer("n_arms", n_arms, 1), "seed": seed}
        spec = spec(**{name: value for name, value in given.items() if name in parameters})
    if not isinstance(spec, Selector):
        raise ValueError(
            f"selector={spec!r}: allowed are a name ({', '.join(SELECTORS)}), or an object or class with the methods "
            "select() and update(arm, reward)."
        )
    return AdaptedSelector(spec, n_arms, seed, **options)


def _read(written: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    rest = written.strip()
    while rest:
        name, _, rest = rest.partition("=")
        name = name.strip()
        try:
            value, end = json.JSONDecoder().raw_decode(rest := rest.lstrip())
            rest = rest[end:].lstrip()
            if name in options or rest[:1] not in ("", ","):
                raise ValueError
            options[name] = value
        except ValueError as error:
            raise ValueError(
                f"selector options {written!r}: allowed is name=value,name=value, each name once, values in JSON."
            ) from error
        rest = rest[1:].lstrip()
    return options


def _options(kind: type[BaseSelector[Any]]) -> list[str]:
    options: dict[str, None] = {}
    for ancestor in kind.__mro__:
        if "__init__" in vars(ancestor) and ancestor is not object:
            parameters = inspect.signature(ancestor.__init__).parameters.values()  # type: ignore[misc]
            options.update({p.name: None for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY})
    return list(options)
