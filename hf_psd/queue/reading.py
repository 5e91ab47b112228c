"""Chunked prefill: the target and the drafters read newcomers' texts, one bounded chunk per step."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from ..drafters.base import Drafter
from ..runner import Rows, upload
from .ticket import Ticket
from .waiting import next_chunk

if TYPE_CHECKING:
    from .engine import QueueEngine


class Reader:
    """Reads all but the last token of each seated text, which the first verification feeds.

    Args:
        engine: whose models read.
    """

    def __init__(self, engine: QueueEngine):
        self.engine = engine
        self.reading: list[Ticket] = []
        """Seated, oldest first, not yet read to the end."""

    def leave(self, ticket: Ticket) -> None:
        """The request has lost its seat."""
        if ticket in self.reading:
            self.reading.remove(ticket)

    def read(self) -> bool:
        """One chunk of the oldest texts; those that are complete join the batch manager. False if none is due."""
        if not self.reading:
            return False
        chunk = [part for part in next_chunk(self.reading, self.engine.sizes.chunk) if part[1] > 0]
        counts = dict(chunk)
        ready = [ticket for ticket in self.reading if ticket.fed + counts.get(ticket, 0) >= ticket.length - 1]
        if ready:
            self._show(ready)
        if chunk:
            try:
                self._feed(chunk)
            except Exception as error:
                for ticket, _ in chunk:
                    self.engine.dismiss(ticket, error)
        ready = [ticket for ticket in ready if ticket in self.reading]
        self.reading = [ticket for ticket in self.reading if ticket not in ready]
        self.engine.manager.add([ticket.request for ticket in ready])
        return True

    def _show(self, ready: list[Ticket]) -> None:
        """Tells drafters of texts that are about to be complete.

        The next draft turn waits for this, but not for the target to have read what comes after.
        """
        engine = self.engine
        with engine.lane.work():
            rows = Rows([ticket.request.slot for ticket in ready], engine.runner.device)
            engine.roster.prefill(engine.state.view(rows))
        engine.lane.mark()

    def _feed(self, chunk: list[tuple[Ticket, int]]) -> None:
        engine, width = self.engine, max(count for _, count in chunk)
        slots = [ticket.request.slot for ticket, _ in chunk]
        pieces = [ticket.text[ticket.fed : ticket.fed + count] for ticket, count in chunk]
        ids = [piece + [0] * (width - len(piece)) for piece in pieces]
        positions = [[*range(ticket.fed, ticket.fed + count), *[-1] * (width - count)] for ticket, count in chunk]
        bound = max(ticket.fed + count for ticket, count in chunk)
        device = engine.runner.device
        with engine.lane.work("prefill"):
            engine.space.pool.upload()
            fed, at = (
                upload([*chain.from_iterable(table)], device).view(len(slots), -1) for table in (ids, positions)
            )
            if engine.space.verify_graphs is not None:
                engine.space.verify_graphs.feed("target", engine.runner, slots, fed, at)
            else:
                engine.runner.forward(Rows(slots, device), fed, at, bound, logits_to_keep=1)
        self._feed_drafters(chunk, slots, ids, positions)
        for ticket, count in chunk:
            ticket.fed += count
        engine.stats.chunks += 1
        engine.stats.prompt_tokens += sum(count for _, count in chunk)

    def _feed_drafters(self, chunk, slots, ids, positions) -> None:
        """Drafters with KV read the same chunk; rows for which one has no blocks left are caught up when it drafts."""
        engine = self.engine
        for key, drafter in list(engine.roster.alive.items()):
            if getattr(drafter.feed, "__func__", None) is Drafter.feed:
                continue  # it keeps nothing
            its_positions = list(positions)
            pool = engine.space.pools.get(key)
            for row, (ticket, count) in enumerate(chunk):
                request = ticket.request
                behind = request.covered.get(key, 0) < ticket.fed
                if behind or (pool is not None and not pool.cover(request.slot, ticket.fed + count)):
                    its_positions[row] = [-1] * len(positions[row])
                else:
                    request.covered[key] = ticket.fed + count
            if pool is not None:
                with engine.roster.lane_of(drafter).work():
                    pool.upload()
            if max(map(max, its_positions)) >= 0:
                engine.roster.feed(key, slots, ids, its_positions)
