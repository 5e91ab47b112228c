"""The drafters of a call at work: each on its own lane, retired when it fails, told what was accepted."""

from __future__ import annotations

import time
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain

import torch

from .drafters.base import Drafter, Outcome, Proposal, Session, Task
from .lanes import Lane
from .phases import Request
from .replay import ReplayedTurns, store, with_idle
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
        self.session: Session | None = None
        self.announcers = [key for key, drafter in self.alive.items() if drafter.announces]
        self.lane = space.draft_lane
        self.lanes: dict[torch.device, Lane] = {self.device: self.lane}
        for drafter in self.drafters:
            device = drafter.device or self.device
            self.lanes.setdefault(device, space.lane_on(device))
        self._replayed = ReplayedTurns(self)
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
        self.session, self.law = session, session.law
        for key, drafter in list(self.alive.items()):
            with self.retiring(key):
                drafter.start(session)

    def prefill(self, view: View) -> None:
        """Shows newcomers, their text complete, to every drafter."""
        for key, drafter in list(self.alive.items()):
            with self.retiring(key):
                drafter.prefill(view)

    def feed(self, key: int, slots: Sequence[int], ids: list[list[int]], positions: list[list[int]]) -> None:
        """Lets a drafter read a piece of newcomers' text: [R][T] ids at positions, negative where there is none."""
        drafter = self.alive[key]
        lane = self.lane_of(drafter)
        with self.retiring(key), lane.work("prefill"):
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
        assert self.session is not None
        due = {key: marks for key, marks in (due or {}).items() if key in self.alive and self.board is not None}
        if self._can_replay([*(key for key, _ in plan), *due]):
            return self._replayed.draft(state, requests, plan, due)
        with self.lane.work():
            rows = Rows([request.slot for request in requests], self.device)
            view = self.view(state, rows)
        self.lane.mark()
        proposals = []
        for key, budgets in with_idle(plan, due, len(rows)):
            began = time.perf_counter()
            review = None if self.board is None else due.get(key, [False] * len(rows))
            with self.retiring(key):
                proposal = self._propose(self.alive[key], Task(view, requests, budgets, review))
                proposal.check(len(rows), self.session)
                proposals.append((key, proposal))
            self.stats.by_drafter[key].seconds += time.perf_counter() - began
        with self.lane.work():
            ids = store(state, rows, proposals, self.session.vocab_size)
            for key, proposal in proposals:
                if self.board is not None and proposal.review is not None:
                    self.board.add(rows, key, proposal.review)
        self.lane.mark()
        return ids

    def view(self, state: SequenceState, rows: Rows) -> View:
        """What drafters may know of the rows."""
        view = state.view(rows)
        return view if self.board is None else self.board.show(view)

    def draft_ahead(self, view: View, drafts: torch.Tensor) -> None:
        """Lets drafters that ask for it work on rows that are being verified."""
        for key, drafter in list(self.alive.items()):
            if drafter.draft_ahead:
                with self.retiring(key):
                    drafter.ahead(view, drafts)

    def commit(self, outcome: Outcome) -> list[torch.Tensor]:
        """Tells every drafter of a commit; returns what each of `announcers` will have next, [R] int64."""
        announced = dict.fromkeys(self.announcers, torch.zeros_like(outcome.accepted))
        for key, drafter in list(self.alive.items()):
            with self.retiring(key):
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
            with self.retiring(key):
                drafter.end()

    def _can_replay(self, keys: Sequence[int]) -> bool:
        graphs = self.space.draft_graphs is not None and self.law is not None
        drafters = [self.alive.get(key) for key in keys]
        return graphs and all(each is not None and each.capturable and self._on_cuda(each) for each in drafters)

    def _on_cuda(self, drafter: Drafter) -> bool:
        return (drafter.device or self.device).type == "cuda"

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """Numbers and signatures of the drafters that can still be chosen: what a captured verification tells."""
        return tuple((key, drafter.signature) for key, drafter in self.alive.items())

    def _propose(self, drafter: Drafter, task: Task) -> Proposal:
        """Lets a drafter work on its own lane and brings what it drafted to the target's device."""
        device = drafter.device or self.device
        lane = self.lanes[device]
        lane.follow(self.lane)
        with lane.work("draft"):
            if device != self.device:
                rows = Rows(task.view.rows.numbers, device)
                view = View(rows, *(lane.receive(tensor) for tensor in task.view.tensors()))
                task = replace(task, view=view)
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
    def retiring(self, key: int) -> Iterator[None]:
        """A drafter that raises is retired; the target goes on without it."""
        try:
            yield
        except Exception as error:
            self.retire(key, f"{type(error).__name__}: {error}")
