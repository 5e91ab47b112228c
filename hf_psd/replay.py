"""Draft turns by captured graphs: the host's part of every drafter, then one replay for all that the device does."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from .away import AwayTurns, replayed, review_idle, unpack_proposal
from .drafters.base import Drafter, Proposal, Shape
from .packing import pack_view
from .phases import Request
from .reviews import Review
from .runner import Rows
from .selection import Plan
from .state import SequenceState, View

if TYPE_CHECKING:
    from .roster import Roster

Marks = Mapping[int, Sequence[bool]]
"""For each drafter, the rows that it shall review although others draft for them."""


@dataclass(frozen=True)
class _Turn:
    """One drafter's part: what its work on the target's device depends on, or buffers with what came from another."""

    key: int
    drafter: Drafter
    budget: torch.Tensor | None = None
    shape: Shape | None = None
    arrived: tuple[torch.Tensor, torch.Tensor | None] | None = None

    @property
    def name(self) -> Hashable:
        shape = self.shape
        return self.key, self.drafter.signature, shape and (shape.width, shape.depth)

    def propose(self, view: View, gamma: int) -> Proposal:
        if self.arrived is not None:
            return unpack_proposal(*self.arrived, gamma)
        assert self.budget is not None and self.shape is not None
        proposal = self.drafter.propose(view, self.budget, self.shape)
        return replace(proposal, review=self.drafter.reviewed(view.rows))


class ReplayedTurns:
    """Runs a roster's draft turns where the work of all drafters concerned can be captured.

    Args:
        roster: the call's drafters.
    """

    def __init__(self, roster: Roster):
        self.roster, self.space, self.lane = roster, roster.space, roster.lane

    def draft(self, state: SequenceState, requests: Sequence[Request], plan: Plan, due: Marks) -> torch.Tensor:
        """Stores what the plan's drafters draft, [R, gamma] ids, and tells the board what they and those due found."""
        roster, graphs, board = self.roster, self.space.draft_graphs, self.roster.board
        assert graphs is not None and roster.session is not None
        session = replace(roster.session, law=roster.law)
        slots, planned = [request.slot for request in requests], {key for key, _ in plan}
        everyone = with_idle(plan, due, len(requests))
        with self.lane.work():
            rows = graphs.rows(slots)
            packed = None
            if any(self._is_away(key) for key, _ in everyone):
                name = ("view", None if board is None else board.key, len(rows))
                packed = graphs.run(name, rows, lambda: graphs.held("view", pack_view(roster.view(state, rows))))
        self.lane.mark()

        def view_of(index: list[int]) -> View:
            return roster.view(state, Rows([slots[row] for row in index], roster.device))

        turns: list[_Turn] = []
        reviews: list[tuple[int, Callable[[], Review | None]]] = []
        for key, budgets in everyone:
            drafter = roster.alive[key]
            with roster.retiring(key):
                if self._is_away(key):
                    assert packed is not None
                    work = (drafter, key, requests, budgets, packed, session, due.get(key))
                    away = self._turns_of(drafter)
                    if key in planned:
                        turns.append(_Turn(key, drafter, arrived=away.propose(*work)))
                    else:
                        reviews.append((key, partial(away.fetch, key, away.review(*work))))
                    continue
                with self.lane.work():
                    review_idle(drafter, requests, budgets, due.get(key), view_of)
                    if key not in planned:
                        reviews.append((key, partial(drafter.reviewed, rows)))
                        continue
                    shape = replayed(drafter.prepare(requests, budgets, view_of), session, drafter)
                    turns.append(_Turn(key, drafter, graphs.numbers(key, shape.budgets, len(rows)), shape))

        def tell(key: int, review: Review | None) -> None:
            if board is not None and review is not None:
                board.add(rows, key, review)

        asked: list[_Turn] = []

        def turn() -> torch.Tensor:
            view, proposals = roster.view(state, rows), []
            for each in turns:
                asked[:] = [each]
                proposals.append((each.key, each.propose(view, session.limits.gamma)))
            asked.clear()
            for key, proposal in proposals:
                tell(key, proposal.review)
            return store(state, rows, proposals, session.vocab_size)

        with self.lane.work("draft" if any(each.arrived is None for each in turns) else ""):
            while True:
                try:
                    ids = graphs.run((roster.law, len(rows), tuple(each.name for each in turns)), rows, turn)
                    break
                except Exception as error:
                    if not asked:
                        raise
                    failed = asked.pop()
                    roster.retire(failed.key, f"{type(error).__name__}: {error}")
                    turns[:] = [each for each in turns if each is not failed]
            for key, fetch in reviews:
                with roster.retiring(key):
                    tell(key, fetch())
        self.lane.mark()
        return ids[: len(slots)]

    def _is_away(self, key: int) -> bool:
        return self.roster.drafters[key].device not in (None, self.roster.device)

    def _turns_of(self, drafter: Drafter) -> AwayTurns:
        """Replayed turns on the drafter's device, kept between calls with its graphs."""
        device = drafter.device
        assert device is not None
        graphs, kept = self.space.graphs_on(device), self.space.scratch
        if ("away", device) not in kept or kept["away", device].graphs is not graphs:
            kept["away", device] = AwayTurns(graphs, self.lane)
        turns: AwayTurns = kept["away", device]
        return turns


def with_idle(plan: Plan, due: Marks, rows: int) -> Plan:
    """The plan, and after it those who only review, with nothing to draft."""
    planned = {key for key, _ in plan}
    return [*plan, *((key, [0] * rows) for key in due if key not in planned)]


def store(state: SequenceState, rows: Rows, proposals: list[tuple[int, Proposal]], vocab_size: int) -> torch.Tensor:
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
