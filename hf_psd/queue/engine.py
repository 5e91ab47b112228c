"""The step loop over a queue: seats requests, reads them in, makes room for them, lets them go."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..config import PSDConfig
from ..drafters.base import Drafter, Session
from ..engine import may_graph
from ..graphs import bucket
from ..hooks import StepContext, StepHookList
from ..loop import StepLoop
from ..phases import Phase, Request, Step
from ..state import Limits
from ..verify.sampler import Sampler
from .invariants import InvariantChecker
from .metrics import QueueStats
from .pressure import headroom, reach, victim
from .reading import Reader
from .results import RequestCancelled
from .sampling import MixedSampler, Seating
from .seats import NO_TOKEN, Seats
from .sizes import Sizes
from .space import COLUMN_GRANULE, PagedWorkspace
from .ticket import Ticket
from .waiting import WaitingLine


class QueueEngine(StepLoop):
    """Runs tickets to their end. One thread at a time may use it; `turn` does one step.

    Args:
        model: the target.
        drafters: in the user's order.
        config: settings; `mode` is resolved.
        sizes: how much it holds.
        hooks: told of every event; an exception in one ends the requests concerned.
        stats: where counts go.
        logprobs: whether results carry log-probabilities.
        fused: whether fused operators stand in for the models' own.
    """

    stats: QueueStats
    space: PagedWorkspace

    def __init__(
        self,
        model: PreTrainedModel,
        drafters: Sequence[Drafter],
        config: PSDConfig,
        sizes: Sizes,
        hooks: StepHookList,
        stats: QueueStats,
        logprobs: bool = False,
        fused: bool = False,
    ):
        graphs = may_graph(model, config.cuda_graphs, drafters, stats, {})
        gamma = config.most_drafts
        limits = Limits(bucket(sizes.seats) + 1 if graphs else sizes.seats, COLUMN_GRANULE, gamma)
        space = PagedWorkspace(model, limits, 0, graphs, sizes.blocks, sizes.block_size)
        device = space.runner.device
        self.seating, self.fused = Seating(), fused
        sampler = MixedSampler(config.verification, self.seating, device, keep_scores=logprobs)
        eos = torch.full((limits.slots, 1), NO_TOKEN, dtype=torch.long, device=device)
        super().__init__(space, sampler, drafters, config.mode, gamma, hooks, stats, eos)
        self.verifier.logprobs = logprobs
        self.sizes, self.waiting = sizes, WaitingLine()
        self.tickets: dict[Request, Ticket] = {}
        self.reader = Reader(self)
        self._laws: dict[Hashable, Sampler] = {}
        """The law that stands in captured steps, by what it was captured for: its tensors must stay where they are."""
        self.selector: Any = None
        """The policy; told of requests that end by `forget(index)` and of preempted ones by `interrupt(index)`."""
        self.seats = Seats(self, sizes.seats)
        self._left: list[int] = []
        self._doomed: list[tuple[Request, Exception]] = []
        self.checker: InvariantChecker | None = None

    def open(self) -> None:
        """Begins the session."""
        self.lane.begin()
        self.roster.begin()
        vocab = self.runner.vocab_size
        self.tell("on_start", self.context([]))
        with self.lane.work():
            self.state.empty()
            self.roster.open(Session(self.space, self.sampler, vocab, None, self.roster.warn_once))
        self.lane.mark()

    def close(self, error: BaseException | None = None) -> None:
        """Ends the session; requests that are not done end with `error`."""
        self.cancel_all(error)
        self.lane.finish()
        self.roster.finish()
        self.space.wait()  # graphs and buffers go with it, while draft turns of requests that ended may be under way
        self.hooks.end(self.context([]))

    def join(self, ticket: Ticket) -> None:
        """A request arrives; one that could not run even alone ends at once."""
        try:
            self.sizes.check(ticket.limit)
        except ValueError as error:
            self._end(ticket, error)
        else:
            self.waiting.join(ticket)

    def cancel(self, ticket: Ticket, error: BaseException | None = None) -> None:
        """Ends a request that is not done, wherever it stands."""
        if ticket.ended:
            return
        error = error or RequestCancelled("the request was cancelled")
        if ticket.request in self.tickets:
            self.dismiss(ticket, error)
        else:
            self.waiting.leave(ticket)
            self._end(ticket, error)

    def cancel_all(self, error: BaseException | None = None) -> None:
        """Ends every request that is not done."""
        for ticket in [*self.waiting, *self.tickets.values()]:
            self.cancel(ticket, error)

    def turn(self) -> bool:
        """Seats, launches, reads what the step before gave, reads prompts in. False if there is nothing left."""
        self._admit()
        stepped = self.advance()
        read = self.reader.read()
        self._bury()
        self._forget()
        if stepped or read:
            self.stats.count_step(self)
            if self.checker is not None:
                self.checker(self)
        return stepped or read or len(self.waiting) > 0

    def dismiss(self, ticket: Ticket, error: BaseException | None = None, scrub: bool = False) -> None:
        """A seated request has ended: its seat and blocks are free."""
        request = self._unseat(ticket, scrub)
        self.clock.forget(request.index)
        self._left.append(request.index)
        self._end(ticket, error)

    def preempt(self, ticket: Ticket) -> None:
        """Takes seat and blocks from a request, which will be read in again later; nothing is lost but time."""
        request = self._unseat(ticket)
        interrupt = getattr(self.selector, "interrupt", None)
        if interrupt is not None:
            interrupt(request.index)
        ticket.round += 1  # the noise of drafts that were never judged is not drawn again
        ticket.preemptions += 1
        self.stats.preemptions += 1
        self.waiting.join(ticket)

    def make_room(self, step: Step) -> Step:
        """Lookahead blocks for those about to be verified, oldest first; under pressure others lose theirs."""
        oldest_first = sorted(step.verify, key=lambda each: each.index)
        if not all(self._cover(request) for request in oldest_first):
            self.absorb_before(self.step + 1)  # what has ended, or was not accepted, may be enough
            for request in oldest_first:
                while request in self.tickets and not self._cover(request):
                    self.preempt(victim(self.tickets, request, self.reader.reading))
        return Step(*([each for each in part if each in self.tickets] for part in (step.verify, step.draft)))

    def launch(self, requests: list[Request]) -> None:
        for request in requests:
            self.tickets[request].round += 1
        if self.checker is not None:
            self.checker.launching(self, requests)
        self.stats.count_lookahead(self, at_launch=True)
        with self.lane.work():
            self.space.pool.upload()
        self.seating.failures.clear()
        try:
            super().launch(requests)
        except Exception as error:
            self._doomed += [(request, error) for request in requests]
        failures = self.seating.failures
        self._doomed += [(request, failures[request.slot]) for request in requests if request.slot in failures]

    def afford(self, key: int, requests: Sequence[Request], budgets: list[int]) -> list[int]:
        pool = self.space.pools.get(key)
        if pool is None or key not in self.roster.alive:
            return budgets
        budgets = [
            budget if budget and pool.cover(request.slot, min(request.most + budget, pool.columns)) else 0
            for request, budget in zip(requests, budgets)
        ]
        with self.roster.lane_of(self.roster.alive[key]).work():
            pool.upload()
        return budgets

    def capture_key(self, requests: Sequence[Request]) -> Hashable | None:
        self.seating.only = None
        if not self.space.graphs:
            return None
        settings = [self.tickets[request].settings for request in requests]
        key = settings[0].capturable
        if key is None or any(each.capturable != key for each in settings):
            self.stats.note_once("steps over requests of different settings, or with special ones, ran without graphs")
            return None
        self.seating.only = self._laws.setdefault(key, settings[0].law)
        assert self.verifier.eos is not None
        return key, self.verifier.eos.shape[1], self.fused

    def over(self, request: Request) -> bool:
        return request not in self.tickets

    def fail(self, request: Request, error: Exception) -> None:
        self.dismiss(self.tickets[request], error, scrub=True)

    def record(self, request: Request, ids: list[int], ended: bool, extra: list[int]) -> int:
        ticket = self.tickets[request]
        logprobs = torch.tensor(extra, dtype=torch.int32, device="cpu").view(torch.float32).tolist() if extra else []
        try:
            stands, gaps = ticket.commit(ids, ended, logprobs)
        except Exception as error:
            self._doomed.append((request, error))
            return 0
        self.stats.count_tokens(ticket, stands, gaps)
        return stands

    def settle(self, context: StepContext) -> None:
        self._bury()
        for request in context.requests:
            ticket = self.tickets.get(request)
            if ticket is not None and ticket.ledger.ended[0]:
                self.dismiss(ticket)

    def tell(self, event: str, context: StepContext) -> None:
        for hook in self.hooks:
            try:
                getattr(hook, event)(context)
            except Exception as error:
                if not context.requests:
                    raise
                self._doomed += [(request, error) for request in context.requests]

    def _absorb(self, verification, rows) -> None:
        super()._absorb(verification, rows)
        for request in verification.requests:
            if request in self.tickets:
                ahead = max((budget for _, budget in request.proposals), default=0)
                self.space.trim(request.slot, request.most - 1, request.most + ahead)

    def _admit(self) -> None:
        pool = self.space.pool
        lacking = headroom(self.tickets, pool, self.gamma) if len(self.waiting) and self.seats.free else 0
        while len(self.waiting) and self.seats.free:
            ticket = self.waiting.first
            needed = pool.need(min(ticket.length + self.gamma, ticket.limit))
            # Lookahead is allocated for the group that is verified, and given back before the other's turn.
            if self.tickets and needed + lacking // self.manager.groups > pool.free:
                return
            self.waiting.leave(ticket)
            self._seat(ticket)
            lacking += needed - pool.need(ticket.length - 1)

    def _seat(self, ticket: Ticket) -> None:
        try:
            ticket.begin()
        except Exception as error:  # its streamer's
            self._end(ticket, error)
            return
        self.tickets[self.seats.take(ticket)] = ticket
        self.reader.reading.append(ticket)

    def _cover(self, request: Request) -> bool:
        drafts = max(0, min(request.pending()[1], request.room))
        return self.space.pool.cover(request.slot, reach(request, drafts))

    def _unseat(self, ticket: Ticket, scrub: bool = False) -> Request:
        request = ticket.request
        assert request is not None
        del self.tickets[request]
        if request in self.manager.requests:
            self.manager.finish(request)
        else:
            self.reader.leave(ticket)
            request.phase = Phase.DONE
        self.seats.give_back(ticket, scrub)
        return request

    def _end(self, ticket: Ticket, error: BaseException | None) -> None:
        ticket.end(error)
        self.stats.count_end(ticket)

    def _bury(self) -> None:
        doomed, self._doomed = self._doomed, []
        for request, error in doomed:
            if request in self.tickets:
                self.dismiss(self.tickets[request], error, scrub=True)

    def _forget(self) -> None:
        """Lets the selector forget who has left, after it has been told of their last rounds."""
        left, self._left = self._left, []
        forget = getattr(self.selector, "forget", None)
        for index in left if forget is not None else []:
            forget(index)
