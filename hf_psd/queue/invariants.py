"""What must hold after every step of a queue, whatever came and went. Tests switch it on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..phases import Phase, Request
from .pressure import reach

if TYPE_CHECKING:
    from .engine import QueueEngine

_ROUNDS_TO_BALANCE = 2


class InvariantChecker:
    """Called with the engine after each step, it raises an `AssertionError` for what must not be.

    It reads device state, so it makes every step wait.
    """

    def __init__(self) -> None:
        self.checks = 0
        self._drafted: dict[int, tuple[int, list[int]]] = {}
        self._members: frozenset[int] = frozenset()
        self._quiet = 0
        self._step = -1
        self._ended: set[int] = set()

    def __call__(self, engine: QueueEngine) -> None:
        self.checks += 1
        engine.space.wait()
        self._seats(engine)
        self._blocks(engine)
        self._ends(engine)
        if engine.step != self._step:
            self._step = engine.step
            self._phases(engine)
            self._balance(engine)

    def launching(self, engine: QueueEngine, requests: list[Request]) -> None:
        """Called before a verification: all that it writes must have its block."""
        for request in requests:
            drafts = max(0, min(request.pending()[1], request.room))
            held = len(engine.space.pool.owned[request.slot])
            assert held >= engine.space.pool.need(reach(request, drafts)), "a verification without its blocks"

    def _seats(self, engine: QueueEngine) -> None:
        slots = [request.slot for request in engine.tickets]
        assert len(set(slots)) == len(slots), "two requests share a seat"
        assert sorted([*slots, *engine.seats.free]) == list(range(engine.sizes.seats)), "a seat is lost"
        assert engine.seating.laws.keys() == set(slots), "a law without a seat, or a seat without one"
        reading = {ticket.request for ticket in engine.reader.reading}
        running = set(engine.manager.requests)
        assert not reading & running and reading | running == engine.tickets.keys(), "a seated request is nowhere"
        assert all(request.phase in (Phase.NEEDS_DRAFT, Phase.HAS_DRAFT) for request in running)

    def _blocks(self, engine: QueueEngine) -> None:
        seated = {request.slot: request for request in engine.tickets}
        for key, pool in engine.space.pools.items():
            pool.check()
            for slot, owned in enumerate(pool.owned):
                assert slot in seated or not owned, f"pool {key}: slot {slot} holds blocks and is nobody's"
        for request in engine.manager.requests:
            held = len(engine.space.pool.owned[request.slot])
            assert held >= engine.space.pool.need(request.length - 1), "committed tokens without a block"

    def _phases(self, engine: QueueEngine) -> None:
        step = engine.newest
        assert not set(step.verify) & set(step.draft), "a request is verified while it is drafted for"
        assert engine.manager.groups == 1 or len({each.group for each in step.draft}) <= 1
        for request in step.verify:
            before = self._drafted.pop(request.index, None)
            if before is not None and request in engine.tickets:
                length, text = before
                now = engine.state.tokens[request.slot, :length].tolist()
                assert now == text, "tokens changed between a draft and its verification"
        for request in step.draft:
            if request in engine.tickets:
                # What is drafted for is read a step late: the device knows the length already.
                length = int(engine.state.length[request.slot])
                self._drafted[request.index] = length, engine.state.tokens[request.slot, :length].tolist()
        alive = {request.index for request in engine.tickets}
        self._drafted = {index: text for index, text in self._drafted.items() if index in alive}

    def _balance(self, engine: QueueEngine) -> None:
        """Two rounds after the last change the groups differ by one at most."""
        running = [request for request in engine.manager.requests if not request.surely_ended]
        members = frozenset(request.index for request in running)
        self._quiet = self._quiet + 1 if members == self._members else 0
        self._members = members
        if engine.manager.groups == 2 and engine.manager.drafting and self._quiet >= 2 * _ROUNDS_TO_BALANCE:
            sizes = [sum(request.group == group for request in running) for group in (0, 1)]
            assert abs(sizes[0] - sizes[1]) <= 1, f"groups of {sizes} two rounds after the last change"

    def _ends(self, engine: QueueEngine) -> None:
        for ticket in engine.tickets.values():
            assert not ticket.ended, "an ended request is still seated"
            text = torch.tensor(ticket.text)
            stored = engine.state.tokens[ticket.request.slot, : len(text)].cpu()
            assert torch.equal(text, stored), "host and device disagree about a text"
        for ticket in engine.waiting:
            assert not ticket.ended and ticket.request is None
