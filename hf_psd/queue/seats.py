"""Seats: slots of the device's state, given to requests and taken back."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import torch

from ..phases import Request
from ..runner import upload
from .ticket import Ticket

if TYPE_CHECKING:
    from .engine import QueueEngine

NO_TOKEN = -2
"""Fills a slot's end tokens; no id is this, nor what stands where nothing was emitted."""


class Seats:
    """Hands out an engine's slots, the lowest first.

    Drafters hear of a newcomer when its text is about to be complete, so draft turns need not wait for what is done
    here.

    Args:
        engine: whose slots.
        count: how many.
    """

    def __init__(self, engine: QueueEngine, count: int):
        self.engine = engine
        self.free = list(range(count))

    def take(self, ticket: Ticket) -> Request:
        """Seats a ticket: its text goes to the device, its KV blocks are allocated but not filled."""
        engine, space = self.engine, self.engine.space
        space.widen_for(ticket.limit)
        slot = heapq.heappop(self.free)
        request = Request(ticket.number, slot, 0, ticket.length, ticket.limit, tokens=list(ticket.ledger.rows[0]))
        ticket.request, ticket.fed = request, 0
        engine.seating.laws[slot] = ticket.settings.law
        covered = space.pool.cover(slot, ticket.length - 1)
        assert covered, "a request was admitted without blocks for its text"
        engine.lane.follow(engine.roster.lane)  # a draft turn of the slot's last owner may still be under way
        with engine.lane.work():
            text = upload(ticket.text, engine.runner.device)
            engine.state.seat(slot, text, ticket.limit, ticket.round, ticket.noise)
            self._set_eos(slot, ticket.settings.eos)
        return request

    def give_back(self, ticket: Ticket, scrub: bool) -> None:
        """Frees a ticket's slot and blocks; `scrub` if these may hold NaN."""
        engine, request = self.engine, ticket.request
        assert request is not None
        blocks = engine.space.release(request.slot)
        engine.seating.laws.pop(request.slot)
        with engine.lane.work():
            engine.state.vacate(request.slot)
            if scrub:
                engine.space.scrub(blocks)
        heapq.heappush(self.free, request.slot)
        ticket.request = None

    def _set_eos(self, slot: int, ids: list[int]) -> None:
        eos = self.engine.verifier.eos
        assert eos is not None
        if len(ids) > eos.shape[1]:
            eos = torch.nn.functional.pad(eos, (0, len(ids) - eos.shape[1]), value=NO_TOKEN)
            self.engine.verifier.eos = eos
        eos[slot].copy_(upload([*ids, *[NO_TOKEN] * (eos.shape[1] - len(ids))], eos.device))
