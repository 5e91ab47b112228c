"""How long rounds take, measured on the device and read when its results are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .phases import Phase, Request

Mark = torch.cuda.Event | float
"""A moment: an event with timing on CUDA, `time.perf_counter()` on the CPU."""


class RoundClock:
    """Tells, for each verification, the seconds since the one before it of the same requests.

    That span is a whole round: drafting, verification, the waits between them and, with two groups, the other group's
    turn. Prefill lies before a request's first verification, so no round contains it.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, Mark]] = {}

    def forget(self, index: int) -> None:
        """The request of this index is gone."""
        self._last.pop(index, None)

    def lap(self, step: int, requests: Sequence[Request], mark: Mark) -> float | None:
        """Seconds of the round that ended at `mark`, which has been reached; None if the requests had none before.

        Requests that came together from several groups have the round of those verified last.
        """
        known = [self._last[request.index] for request in requests if request.index in self._last]
        for request in requests:
            self._last[request.index] = step, mark
            if request.phase is Phase.DONE:
                del self._last[request.index]
        if not known:
            return None
        _, before = max(known, key=lambda entry: entry[0])
        if isinstance(mark, torch.cuda.Event):
            assert isinstance(before, torch.cuda.Event)
            return before.elapsed_time(mark) / 1e3
        assert isinstance(before, float)
        return mark - before
