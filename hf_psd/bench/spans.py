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


def full(spans: Sequence[Span]) -> list[Span]:
    """The drafting and verifying in the first quarter of its time, in which hardly a request has ended, but for the
    first two of each kind, which start up."""
    chosen: list[Span] = []
    for kind in ("draft", "verify"):
        of_kind = sorted((span for span in spans if span.kind == kind), key=lambda span: span.start)
        if of_kind:
            last = of_kind[0].start + (of_kind[-1].end - of_kind[0].start) / 4
            chosen += [span for span in of_kind[2:] if span.end <= last]
    return chosen


def typical_ms(spans: Sequence[Span], kind: str) -> float | None:
    """Median milliseconds of a piece of work of that kind; None if there is none."""
    lengths = [span.end - span.start for span in spans if span.kind == kind]
    return median(lengths) if lengths else None


def draft_ms(spans: Sequence[Span]) -> float | None:
    """Milliseconds of drafting per verification; None if either is missing."""
    drafting, verifications = merged(spans, "draft"), sum(span.kind == "verify" for span in spans)
    return total(drafting) / verifications if drafting and verifications else None
