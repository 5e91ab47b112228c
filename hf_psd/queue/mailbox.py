"""Results on their way from the thread that generates to whoever waits for them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from .results import Result

_PATIENCE = 0.02


class Mailbox:
    """Holds results until somebody takes them; those of one request can be taken apart from the others'."""

    def __init__(self) -> None:
        self._new: queue.Queue[Result] = queue.Queue()
        self._set_aside: list[Result] = []
        self._lock = threading.Lock()

    def put(self, result: Result) -> None:
        self._new.put(result)

    def take_all(self) -> list[Result]:
        """All results that are here."""
        taken = []
        while (result := self._set_aside_for(None)) is not None:
            taken.append(result)
        while not self._new.empty():
            taken.append(self._new.get())
        return taken

    def get(self, request_id: str | None, timeout: float | None, more_may_come: Callable[[], bool]) -> Result | None:
        """The next result, of one request if named; None after `timeout` seconds or when no more may come."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            more = more_may_come()  # asked first: what comes between the question and the look is found
            result = self._set_aside_for(request_id) or self._take_new(more)
            if result is None:
                if not more or (until is not None and time.monotonic() >= until):
                    return None
            elif request_id in (None, result.request_id):
                return result
            else:
                with self._lock:
                    self._set_aside.append(result)

    def _take_new(self, wait: bool) -> Result | None:
        try:
            return self._new.get(timeout=_PATIENCE) if wait else self._new.get_nowait()
        except queue.Empty:
            return None

    def _set_aside_for(self, request_id: str | None) -> Result | None:
        with self._lock:
            for place, result in enumerate(self._set_aside):
                if request_id in (None, result.request_id):
                    return self._set_aside.pop(place)
        return None
