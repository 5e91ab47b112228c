"""Which choice of a bandit each verification belongs to."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from .phases import Phase, Request


@dataclass(eq=False)
class Pull:
    """A choice on its way to its verification: the arm, and the context it was chosen in."""

    arm: int
    context: Hashable


class PullsInFlight:
    """Follows pulls from the plan through the launch of the verification to its result, request by request.

    A verification may have no pull (its requests were not planned for), and a pull may lose some or all of its
    requests.
    """

    def __init__(self) -> None:
        self._open: list[Pull] = []
        self._requests: dict[int, Request] = {}
        self._planned: dict[int, Pull] = {}
        self._verifying: dict[int, deque[Pull | None]] = {}

    def plan(self, request: Request, pull: Pull) -> None:
        """The request's next drafts belong to `pull`."""
        self._requests[request.index] = request
        self._planned[request.index] = pull
        if pull not in self._open:
            self._open.append(pull)

    def launch(self, requests: Sequence[Request]) -> None:
        """The requests are being verified."""
        for request in requests:
            self._requests[request.index] = request
            self._verifying.setdefault(request.index, deque()).append(self._planned.pop(request.index, None))

    def land(self, request: Request) -> Pull | None:
        """The pull of the request's oldest verification under way."""
        verifying = self._verifying.get(request.index)
        return verifying.popleft() if verifying else None

    def forget(self, index: int) -> None:
        """What was under way for the request of this index will have no result."""
        for known in (self._requests, self._planned, self._verifying):
            known.pop(index, None)

    def close(self, pull: Pull) -> None:
        """The pull has been told of."""
        if pull in self._open:
            self._open.remove(pull)

    def take_lost(self) -> list[Pull]:
        """Pulls that no running request waits for any more; they are forgotten."""
        for index in [index for index, request in self._requests.items() if request.phase is Phase.DONE]:
            del self._requests[index]
            self._planned.pop(index, None)
            self._verifying.pop(index, None)
        waiting = {*self._planned.values(), *(pull for queue in self._verifying.values() for pull in queue)}
        lost = [pull for pull in self._open if pull not in waiting]
        self._open = [pull for pull in self._open if pull in waiting]
        return lost

    def take_all(self) -> list[Pull]:
        """All pulls that have not been told of; they are forgotten."""
        lost = self._open
        self._open = []
        for known in (self._requests, self._planned, self._verifying):
            known.clear()
        return lost
