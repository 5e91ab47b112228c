"""The drafters of a call at work: each on its own lane, retired when it fails, told what was accepted."""

from __future__ import annotations

import time
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain

import torch

from .away import AwayTurns, pack_view, replayed
from .drafters.base import Drafter, Outcome, Proposal, Session, Shape, Task
from .lanes import Lane
from .phases import Request
from .reviews import Review, ReviewBoard
from .runner import Rows, upload
from .selection import Arm, Plan
from .state import SequenceState, View
from .stats import PSDStats
from .workspace import Workspace


class Roster:
    """Holds the call's drafters and runs their turns.

    Args:
        drafters: in the user's order; their place is their key.
        space: the call's device buffers and lanes.
        stats: where retirements are noted.
        board: collects what drafters say of committed tokens; None if they are not asked.
    """

    def __init__(
        self, drafters: Sequence[Drafter], space: Workspace, stats: PSDStats, board: ReviewBoard | None = None
    ):
        self.board = board
        self.drafters, self.space, self.stats = list(drafters), space, stats
        self.device = space.runner.device
        self.alive: dict[int, Drafter] = dict(enumerate(drafters))
        self.law: Hashable | None = None
        """What a captured draft turn depends on beside its shape; None if the next one must run eagerly."""
        self._session: Session | None = None
        self.announcers = [key for key, drafter in self.alive.items() if drafter.announces]
        self.lane = space.draft_lane
        self.lanes: dict[torch.device, Lane] = {self.device: self.lane}
        for drafter in self.drafters:
            device = drafter.device or self.device
            self.lanes.setdefault(device, space.lane_on(device))
        self._warned: set[str] = set()

    @property
    def arms(self) -> list[Arm]:
        """Drafters that can still be chosen."""
        return [Arm(key, drafter.name, not drafter.announces, drafter.reviews) for key, drafter in self.alive.items()]

    @property
    def needs_hidden_states(self) -> bool:
        return any(drafter.needs_hidden_states for drafter in self.alive.values())

    def begin(self) -> None:
        """Lets every lane start after what the caller has enqueued on its device."""
        for lane in self.lanes.values():
            lane.begin()

    def start(self, session: Session, view: View) -> None:
        """Begins the call; `view` shows all rows with their prompts."""
        self.open(session)
        self.prefill(view)

    def open(self, session: Session) -> None:
        """Begins a call whose requests come later."""
        self._session, self.law = session, session.law
        for key, drafter in list(self.alive.items()):
            with self._retiring(key):
                drafter.start(session)

    def prefill(self, view: View) -> None:
        """Shows newcomers, their text complete, to every drafter."""
        for key, drafter in list(self.alive.items()):
            with self._retiring(key):
                drafter.prefill(view)

    def feed(self, key: int, slots: Sequence[int], ids: list[list[int]], positions: list[list[int]]) -> None:
        """Lets a drafter read a piece of newcomers' text: [R][T] ids at positions, negative where there is none."""
        drafter = self.alive[key]
        lane = self.lane_of(drafter)
        with self._retiring(key), lane.work("prefill"):
            shape, bound = (len(ids), -1), max(map(max, positions)) + 1
            fed, at = (upload([*chain.from_iterable(table)], lane.device).view(shape) for table in (ids, positions))
            drafter.feed(Rows(slots, lane.device), fed, at, bound)
        lane.mark()

    def lane_of(self, drafter: Drafter) -> Lane:
        """Where a drafter works."""
        return self.lanes[drafter.device or self.device]

    def draft(
        self,
        state: SequenceState,
        requests: Sequence[Request],
        plan: Plan,
        due: Mapping[int, Sequence[bool]] | None = None,
    ) -> torch.Tensor:
        """Runs the plan's drafters for the requests and stores what they drafted: [R, gamma] ids, -1 where none.

        `due`: rows that drafters shall review although others draft for them.
        """
        assert self._session is not None
        if self._can_replay(plan):
            return self._replay(state, requests, plan)
        with self.lane.work():
            rows = Rows([request.slot for request in requests], self.device)
            view = state.view(rows)
            log_prob = self.board.log_prob if self.board is not None else None
            if log_prob is not None:
                log_prob = log_prob.index_select(0, rows.slots)
        self.lane.mark()
        due = {key: marks for key, marks in (due or {}).items() if key in self.alive and self.board is not None}
        planned = {key for key, _ in plan}
        proposals = []
        for key, budgets in [*plan, *((key, [0] * len(rows)) for key in due if key not in planned)]:
            began = time.perf_counter()
            review = None if self.board is None else due.get(key, [False] * len(rows))
            with self._retiring(key):
                proposal = self._propose(self.alive[key], Task(view, requests, budgets, review, log_prob))
                proposal.check(len(rows), self._session)
                proposals.append((key, proposal))
            self.stats.by_drafter[key].seconds += time.perf_counter() - began
        with self.lane.work():
            ids = _store(state, rows, proposals, self._session.vocab_size)
            for key, proposal in proposals:
                if self.board is not None and proposal.review is not None:
                    self.board.add(rows, key, proposal.review)
        self.lane.mark()
        return ids

    def draft_ahead(self, view: View, drafts: torch.Tensor) -> None:
        """Lets drafters that ask for it work on rows that are being verified."""
        for key, drafter in list(self.alive.items()):
            if drafter.draft_ahead:
                with self._retiring(key):
                    drafter.ahead(view, drafts)

    def commit(self, outcome: Outcome) -> list[torch.Tensor]:
        """Tells every drafter of a commit; returns what each of `announcers` will have next, [R] int64."""
        announced = dict.fromkeys(self.announcers, torch.zeros_like(outcome.accepted))
        for key, drafter in list(self.alive.items()):
            with self._retiring(key):
                review = drafter.review(outcome) if self.board is not None else None
                if self.board is not None and review is not None:
                    self.board.add(outcome.view.rows, key, review)
                drafter.commit(outcome)
                if drafter.announces:
                    announced[key] = drafter.announce(outcome.view).long().view_as(outcome.accepted)
        return list(announced.values())

    def retire(self, key: int, reason: str) -> None:
        """Takes a drafter out for the rest of the call, with one warning."""
        drafter = self.alive.pop(key, None)
        if drafter is not None:
            message = f"psd: drafter {drafter.name} is retired for this call: {reason}"
            self.stats.errors.append(message)
            self.warn_once(message)

    def warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=2)

    def count(self) -> None:
        """Brings the statistics of forwards up to date."""
        for drafter, counts in zip(self.drafters, self.stats.by_drafter):
            counts.forwards, counts.review_forwards = drafter.forwards, drafter.review_forwards
            counts.catch_up_forwards = drafter.catch_up_forwards
        self.stats.draft_forwards = sum(drafter.forwards for drafter in self.drafters)

    def finish(self) -> None:
        """Ends the call for every drafter, also after an error."""
        for lane in self.lanes.values():
            lane.finish()
        self.count()
        for key, drafter in enumerate(self.drafters):
            with self._retiring(key):
                drafter.end()

    def _can_replay(self, plan: Plan) -> bool:
        drafters = [self.alive[key] for key, _ in plan if key in self.alive]
        graphs = self.space.draft_graphs is not None and self.law is not None and len(drafters) == len(plan)
        return graphs and all(each.capturable and self._on_cuda(each) for each in drafters)

    def _on_cuda(self, drafter: Drafter) -> bool:
        return (drafter.device or self.device).type == "cuda"

    def _replay(self, state: SequenceState, requests: Sequence[Request], plan: Plan) -> torch.Tensor:
        """The same as one graph: the host's part of every drafter, then one replay for all that the device does."""
        graphs, session, limits = self.space.draft_graphs, self._session, self.space.limits
        assert graphs is not None and session is not None
        slots = [request.slot for request in requests]
        with self.lane.work():
            rows = graphs.rows(slots)
            away = [key for key, _ in plan if self.drafters[key].device not in (None, self.device)]
            packed = graphs.run(("view", len(rows)), rows, lambda: pack_view(state.view(rows))) if away else None
        self.lane.mark()

        def view_of(index: list[int]) -> View:
            return state.view(Rows([slots[row] for row in index], self.device))

        turns: list[tuple[int, torch.Tensor | None, Shape | None]] = []
        arrived: dict[int, Proposal] = {}
        for key, budgets in plan:
            drafter = self.alive[key]
            with self._retiring(key):
                if key in away:
                    arrived[key] = self._turns_on(drafter.device).propose(
                        drafter, key, requests, budgets, packed, replace(session, law=self.law)
                    )
                    turns.append((key, None, None))
                    continue
                with self.lane.work():
                    shape = replayed(drafter.prepare(requests, budgets, view_of), limits.gamma, limits.capacity)
                    turns.append((key, graphs.numbers(key, shape.budgets, len(rows)), shape))

        def turn() -> torch.Tensor:
            view = state.view(rows)
            proposals = [
                (
                    key,
                    arrived[key]
                    if budget is None or shape is None
                    else self.drafters[key].propose(view, budget, shape),
                )
                for key, budget, shape in turns
            ]
            return _store(state, rows, proposals, session.vocab_size)

        with self.lane.work("draft" if len(turns) > len(arrived) else ""):
            shapes = tuple(
                (self.drafters[key].signature, shape and (shape.width, shape.depth)) for key, _, shape in turns
            )
            ids = graphs.run((self.law, len(rows), shapes), rows, turn)
        self.lane.mark()
        return ids[: len(slots)]

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """Signatures of the drafters that can still be chosen: what a captured verification tells."""
        return tuple(drafter.signature for drafter in self.alive.values())

    def _turns_on(self, device: torch.device) -> AwayTurns:
        """Replayed turns on another device, kept between calls with its graphs."""
        graphs, kept = self.space.graphs_on(device), self.space.scratch
        if ("away", device) not in kept or kept["away", device].graphs is not graphs:
            kept["away", device] = AwayTurns(graphs, self.lane)
        return kept["away", device]

    def _propose(self, drafter: Drafter, task: Task) -> Proposal:
        """Lets a drafter work on its own lane and brings what it drafted to the target's device."""
        device = drafter.device or self.device
        lane = self.lanes[device]
        lane.follow(self.lane)
        with lane.work("draft"):
            if device != self.device:
                rows = Rows(task.view.rows.numbers, device)
                view = View(rows, *(lane.receive(tensor) for tensor in task.view.tensors()))
                log_prob = None if task.log_prob is None else lane.receive(task.log_prob)
                task = replace(task, view=view, log_prob=log_prob)
            proposal = drafter.draft(task)
        if lane is self.lane:
            return proposal
        lane.mark()
        self.lane.follow(lane)
        with self.lane.work():
            ids, scores, failed = (
                None if tensor is None else self.lane.receive(tensor)
                for tensor in (proposal.ids, proposal.scores, proposal.failed)
            )
            review = proposal.review
            if review is not None:
                review = Review(self.lane.receive(review.gain), self.lane.receive(review.tokens))
        assert ids is not None
        return Proposal(ids, scores, proposal.point_mass, failed, review)

    @contextmanager
    def _retiring(self, key: int) -> Iterator[None]:
        """A drafter that raises is retired; the target goes on without it."""
        try:
            yield
        except Exception as error:
            self.retire(key, f"{type(error).__name__}: {error}")


def _store(state: SequenceState, rows: Rows, proposals: list[tuple[int, Proposal]], vocab_size: int) -> torch.Tensor:
    """Keeps, per row, the drafts of the first drafter that has any, up to an id outside the target's vocabulary."""
    device = state.device
    ids = torch.full((len(rows), state.gamma), -1, dtype=torch.long, device=device)
    point_mass = torch.zeros(len(rows), dtype=torch.bool, device=device)
    failed_drafter = torch.full((len(rows),), -1, dtype=torch.long, device=device)
    source = failed_drafter.clone()
    scores = None
    for key, proposal in proposals:
        sound = ((proposal.ids >= 0) & (proposal.ids < vocab_size)).long().cumprod(1).bool()
        use = sound[:, 0] & (source < 0)
        source = torch.where(use, key, source)
        ids = torch.where(use[:, None], torch.where(sound, proposal.ids, -1), ids)
        point_mass = torch.where(use, proposal.point_mass, point_mass)
        if proposal.scores is not None:
            scores = proposal.scores if scores is None else torch.where(use[:, None, None], proposal.scores, scores)
        if proposal.failed is not None:
            failed_drafter = torch.where(proposal.failed, key, failed_drafter)
    state.failed_drafter.index_copy_(0, rows.slots, failed_drafter)
    state.source.index_copy_(0, rows.slots, source)
    state.store_drafts(rows, ids, point_mass, scores)
    return ids
