"""Arithmetic on a timeline's spans `(lane, kind, start_ms, end_ms)`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Span = tuple[str, str, float, float]


def without_reading(spans: Sequence[Span]) -> list[Span]:
    """The spans of drafting and verifying; those of reading prompts are left out."""
    return [span for span in spans if "prefill" not in span[1] and "prompt" not in span[1]]


def steady(spans: Sequence[Span]) -> list[Span]:
    """The drafting and verifying in the middle half of its time, where neither start nor tail counts."""
    decoding = without_reading(spans)
    if not decoding:
        return []
    first, last = min(span[2] for span in decoding), max(span[3] for span in decoding)
    low, high = first + (last - first) / 4, last - (last - first) / 4
    return [span for span in decoding if span[2] >= low and span[3] <= high]


def lanes(spans: Sequence[Span]) -> dict[str, list[tuple[float, float]]]:
    """The busy intervals of each lane, merged and in order."""
    return {
        lane: _merged((start, end) for name, _, start, end in spans if name == lane)
        for lane in dict.fromkeys(span[0] for span in spans)
    }


def overlap_share(spans: Sequence[Span]) -> float | None:
    """How much of the less busy lane's time the other was busy too; None unless there are exactly two lanes."""
    busy = list(lanes(spans).values())
    if len(busy) != 2:
        return None
    shorter = min(map(_length, busy))
    shared = sum(max(0.0, min(one[1], two[1]) - max(one[0], two[0])) for one in busy[0] for two in busy[1])
    return shared / shorter if shorter else None


def idle_share(spans: Sequence[Span], kind: str = "verify") -> float | None:
    """Share of the time between the first start and the last end in which the lane of that kind of work was idle.

    None if there is no such lane.
    """
    lane = next((span[0] for span in spans if kind in span[1]), None)
    busy = lanes(spans).get(lane or "")
    if not busy or busy[-1][1] == busy[0][0]:
        return None
    return 1.0 - _length(busy) / (busy[-1][1] - busy[0][0])


def _merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _length(intervals: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)
