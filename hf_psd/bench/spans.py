"""What a timeline says in figures."""

from __future__ import annotations

from collections.abc import Sequence

from ..timeline import Span
from .clocks import median


def steady(spans: Sequence[Span]) -> list[Span]:
    """The drafting and verifying in the middle half of its time, where neither start nor tail counts."""
    decoding = [span for span in spans if span.kind != "prefill"]
    if not decoding:
        return []
    first, last = min(span.start for span in decoding), max(span.end for span in decoding)
    low, high = first + (last - first) / 4, last - (last - first) / 4
    return [span for span in decoding if span.start >= low and span.end <= high]


def typical_ms(spans: Sequence[Span], kind: str) -> float | None:
    """Median milliseconds of one piece of work of that kind; None if there is none."""
    lengths = [span.end - span.start for span in spans if span.kind == kind]
    return median(lengths) if lengths else None
