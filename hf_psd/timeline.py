"""What ran when, on every lane: spans of drafting and verifying, from events on the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .hooks import StepContext, StepHook
from .lanes import Lane


class Span(NamedTuple):
    """A piece of work: its lane ("target" or "draft" and the device), its kind ("prefill", "draft" or "verify"), and
    when it began and ended, in milliseconds since the call began."""

    lane: str
    kind: str
    start: float
    end: float


class Timeline(StepHook):
    """Records the spans of a call, as `psd_hooks=[timeline]`. It waits for the devices when the call begins and ends.

    On CUDA a span lasts from the moment its stream reaches the work, other streams waited for, until it is done. The
    clocks of several devices are aligned when the call begins, to about 0.05 ms.

    Attributes:
        spans: of the call that ended last, in order of launch.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._recordings: dict[int, _Recording] = {}

    def on_start(self, context: StepContext) -> None:
        if id(context.stats) not in self._recordings:
            self._recordings[id(context.stats)] = _Recording(context.lanes)

    def on_end(self, context: StepContext) -> None:
        recording = self._recordings.pop(id(context.stats), None)
        if recording is not None:
            self.spans = recording.finish()


class _Recording:
    """The pieces of work of one call."""

    def __init__(self, lanes: Sequence[Lane]):
        self.lanes = lanes
        self._pieces: list[tuple[Lane, str, _Moment, _Moment]] = []
        for lane in lanes:
            lane.wait()
        self._zeros = {id(lane): _Moment(lane) for lane in lanes}
        for lane in lanes:
            lane.watchers.append(self._watch)

    def finish(self) -> list[Span]:
        for lane in self.lanes:
            lane.watchers.remove(self._watch)
            lane.wait()
        return [
            Span(
                f"{lane.name} {lane.device}",
                kind,
                self._zeros[id(lane)].until(start),
                self._zeros[id(lane)].until(end),
            )
            for lane, kind, start, end in self._pieces
        ]

    def _watch(self, lane: Lane, kind: str) -> Callable[[], None]:
        start = _Moment(lane)
        return lambda: self._pieces.append((lane, kind, start, _Moment(lane)))


class _Moment:
    """A point in a lane's work: an event on its stream, or the host's clock on CPU."""

    def __init__(self, lane: Lane):
        self.event: torch.cuda.Event | None = None
        if lane.stream is not None:
            with torch.cuda.device(lane.device):
                self.event = torch.cuda.Event(enable_timing=True)
                self.event.record(lane.stream)
        self.seconds = time.perf_counter()

    def until(self, later: _Moment) -> float:
        """Milliseconds to a later moment of the same lane."""
        if self.event is not None and later.event is not None:
            return self.event.elapsed_time(later.event)
        return (later.seconds - self.seconds) * 1e3


def merged(spans: Sequence[Span], kind: str) -> list[tuple[float, float]]:
    """The times covered by spans of that kind, in order, without overlaps."""
    covered: list[tuple[float, float]] = []
    for start, end in sorted((span.start, span.end) for span in spans if span.kind == kind):
        if covered and start <= covered[-1][1]:
            covered[-1] = (covered[-1][0], max(covered[-1][1], end))
        else:
            covered.append((start, end))
    return covered


def total(times: Sequence[tuple[float, float]]) -> float:
    """Milliseconds covered."""
    return sum(end - start for start, end in times)


def overlap(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> float:
    """Milliseconds covered by both."""
    return sum(max(0.0, min(a_end, b_end) - max(a, b)) for a, a_end in first for b, b_end in second)


def overlap_share(spans: Sequence[Span]) -> float:
    """The part of the shorter of drafting and verifying that ran while the other did, 0 to 1."""
    draft, verify = merged(spans, "draft"), merged(spans, "verify")
    shorter = min(total(draft), total(verify))
    return overlap(draft, verify) / shorter if shorter > 0 else 0.0


def idle_share(spans: Sequence[Span], kind: str = "verify") -> float:
    """The part of the time between the first and the last span of a kind in which none of them ran, 0 to 1."""
    covered = merged(spans, kind)
    if not covered:
        return 0.0
    return 1.0 - total(covered) / (covered[-1][1] - covered[0][0])
