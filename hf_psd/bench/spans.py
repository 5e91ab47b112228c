"""What a timeline says in figures."""

from __future__ import annotations

from collections.abc import Sequence

from ..timeline import Span, merged, total
from .clocks import median


def steady(spans: Sequence[Span]) -> list[Span]:
    """The drafting and verifying in the middle half of its time, where neither start nor tail counts."""
    decoding = [span for span in spans if span.kind != "prefill"]
    if not decoding:
        return []
    first, last = min(span.start for span in decoding), max(span.end for span in decoding)
    low, high = first + (last - first) / 4, last - (last - first) / 4
    return [span for span in decoding if span.start >= low and span.end <= high]


def verify_ms(spans: Sequence[Span]) -> float | None:
    """Median milliseconds of a verification; None if there is none."""
    lengths = [span.end - span.start for span in spans if span.kind == "verify"]
    return median(lengths) if lengths else None


def draft_ms(spans: Sequence[Span]) -> float | None:
    """Milliseconds of drafting per verification; None if either is missing."""
    drafting, verifications = merged(spans, "draft"), sum(span.kind == "verify" for span in spans)
    return total(drafting) / verifications if drafting and verifications else None
