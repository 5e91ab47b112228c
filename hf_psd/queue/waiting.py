"""Who is seated next, and how prompts are read in without making anybody wait for more than one chunk."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .ticket import Ticket


class WaitingLine:
    """First come, first served; who was preempted comes back to the place its arrival gives it."""

    def __init__(self) -> None:
        self._tickets: deque[Ticket] = deque()

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self):
        return iter(self._tickets)

    def join(self, ticket: Ticket) -> None:
        place = len(self._tickets)
        if place and self._tickets[-1].number > ticket.number:
            place = next(place for place, each in enumerate(self._tickets) if each.number > ticket.number)
        self._tickets.insert(place, ticket)

    def leave(self, ticket: Ticket) -> None:
        self._tickets.remove(ticket)

    @property
    def first(self) -> Ticket:
        return self._tickets[0]


def next_chunk(reading: Sequence[Ticket], most: int) -> list[tuple[Ticket, int]]:
    """Which texts are read on in this step, and how many tokens of each: at most `most` cells of a rectangle.

    Oldest first. A text that does not fit beside others waits for its turn, and is then read alone, piece by piece.
    """
    chunk: list[tuple[Ticket, int]] = []
    widest = 0
    for ticket in reading:
        left = min(ticket.length - 1 - ticket.fed, most)
        wider = max(widest, left)
        if chunk and wider * (len(chunk) + 1) > most:
            break
        chunk.append((ticket, left))
        widest = wider
    return chunk
