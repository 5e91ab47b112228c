"""Context keys: rounds that share a key share one table of statistics, rounds that do not share nothing."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any


def context_key(group_size: int, sampled: bool, domain: str | None = None) -> tuple[int, str, str | None]:
    """Key for a round: group size rounded up to a power of two, decoding kind, and the user's domain tag.

    Raises:
        ValueError: `group_size` below 1.
    """
    if group_size < 1:
        raise ValueError(f"group_size={group_size}: a group holds at least one request.")
    return 1 << (group_size - 1).bit_length(), "sampled" if sampled else "greedy", domain


def check_context(context: Any) -> Hashable:
    """Return `context` if it survives a round trip through JSON, raise ValueError otherwise."""
    if context is None or isinstance(context, (str, int)):
        return context
    if isinstance(context, float) and math.isfinite(context):
        return context
    if isinstance(context, tuple):
        for part in context:
            check_context(part)
        return context
    raise ValueError(
        f"context={context!r} of type {type(context).__name__}: allowed are None, str, int, bool, finite float "
        "and tuples of those."
    )


def context_to_json(context: Hashable) -> Any:
    return [context_to_json(part) for part in context] if isinstance(context, tuple) else context


def context_from_json(value: Any) -> Hashable:
    return tuple(context_from_json(part) for part in value) if isinstance(value, list) else value
