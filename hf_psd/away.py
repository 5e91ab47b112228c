"""Draft turns of drafters on another CUDA device: one packed copy there, one graph, one packed copy back."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import torch

from .drafters.base import Drafter, Proposal, Session, Shape
from .graphs import StepGraphs
from .lanes import Lane
from .packing import pack_review, unpack_review, unpack_view
from .phases import Request
from .reviews import Review
from .runner import Rows, upload
from .state import View

ViewOf = Callable[[list[int]], View]


class AwayTurns:
    """Replays draft turns on a device that is not the target's. Nothing here waits on the host.

    Args:
        graphs: the graphs of a lane on the drafters' device.
        home: the lane on the target's device that drafts are needed on.
    """

    def __init__(self, graphs: StepGraphs, home: Lane):
        self.graphs, self.lane, self.home = graphs, graphs.lane, home
        self._buffers: dict[Hashable, torch.Tensor] = {}

    def propose(
        self,
        drafter: Drafter,
        key: int,
        requests: Sequence[Request],
        budgets: Sequence[int],
        packed: torch.Tensor,
        session: Session,
        due: Sequence[bool] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts for R requests whose state is in `packed` (`pack_view`, on the target's device, at a graph's size).

        Rows without a budget that are `due` are reviewed. The packed proposal (`pack_proposal`) lies in buffers on the
        target's device that the next turn of the same size overwrites.
        """
        width = session.limits.capacity
        self.lane.follow(self.home)
        try:
            with self.lane.work("draft"):
                rows, arrived, view_of = self._arrive(requests, packed, width)
                size = len(rows)
                review_idle(drafter, requests, budgets, due, view_of)
                shape = replayed(drafter.prepare(requests, budgets, view_of), session, drafter)
                budget = self.graphs.numbers(key, shape.budgets, size)

                def turn() -> tuple[torch.Tensor, torch.Tensor | None]:
                    proposal = drafter.propose(unpack_view(rows, arrived, width), budget, shape)
                    ids, scores = pack_proposal(replace(proposal, review=drafter.reviewed(rows)))
                    # Fetched by another lane, so not left to the memory that graphs share, nor to the next drafter.
                    ids = self._copy(("ids", key), ids, self.lane.device)
                    return ids, None if scores is None else self._copy(("scores", key), scores, self.lane.device)

                name = (session.law, key, drafter.signature, size, shape.width, shape.depth)
                ids, scores = self.graphs.run(name, rows, turn)
        finally:  # `packed` is about to be overwritten, also where the drafter has failed
            self.lane.mark()
            self.home.follow(self.lane)
        with self.home.work():
            ids = self._copy(("ids", key), ids, self.home.device)
            if scores is not None:
                scores = self._copy(("scores", key), scores, self.home.device)
        return ids, scores

    def review(
        self,
        drafter: Drafter,
        key: int,
        requests: Sequence[Request],
        budgets: Sequence[int],
        packed: torch.Tensor,
        session: Session,
        due: Sequence[bool] | None,
    ) -> torch.Tensor | None:
        """The same of a drafter that drafts for none of the requests: what it has to say of those `due`, packed.

        It stays on the drafter's device until it is fetched, so that the target's device can draft meanwhile.
        """
        self.lane.follow(self.home)
        found = None
        try:
            with self.lane.work("draft"):
                rows, _, view_of = self._arrive(requests, packed, session.limits.capacity)
                review_idle(drafter, requests, budgets, due, view_of)
                review = drafter.reviewed(rows)
                if review is not None:
                    found = self._copy(("found", key), pack_review(review), self.lane.device)
        finally:
            self.lane.mark()
            if found is None:
                self.home.follow(self.lane)
        return found

    def fetch(self, key: int, found: torch.Tensor | None) -> Review | None:
        """Brings home what `review` gave for drafter `key`."""
        if found is None:
            return None
        self.home.follow(self.lane)
        with self.home.work():
            return unpack_review(self._copy(("review", key), found, self.home.device))

    def _arrive(
        self, requests: Sequence[Request], packed: torch.Tensor, width: int
    ) -> tuple[Rows, torch.Tensor, ViewOf]:
        """The rows here, their packed state, and the function that gathers the state of some of them."""
        slots, device = [request.slot for request in requests], self.lane.device
        rows, arrived = self.graphs.rows(slots), self._copy("view", packed, device)
        view = unpack_view(rows, arrived, width)

        def view_of(index: list[int]) -> View:
            return view.subset(Rows([slots[row] for row in index], device), upload(index, device))

        return rows, arrived, view_of

    def _copy(self, name: Hashable, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The source's values in a buffer of that name that graphs use; each shape and dtype has its own."""
        key = (name, source.shape, source.dtype, device)
        if key not in self._buffers:
            self._buffers[key] = torch.empty_like(source, device=device)
        return self._buffers[key].copy_(source, non_blocking=True)


def review_idle(
    drafter: Drafter, requests: Sequence[Request], budgets: Sequence[int], due: Sequence[bool] | None, view_of: ViewOf
) -> None:
    """Lets a drafter review the rows that are due and that it does not draft for."""
    idle = [row for row, marked in enumerate(due or []) if marked and budgets[row] == 0]
    drafter.review_idle([requests[row] for row in idle], lambda rows: view_of([idle[row] for row in rows]))


def replayed(shape: Shape, session: Session, drafter: Drafter) -> Shape:
    """A draft turn's shape with few widths, so that few graphs are captured; feeding a token again changes nothing."""
    limits = session.limits
    width = 2 if shape.width <= 2 else limits.gamma + 1
    if session.reviewing and drafter.reviews:
        width = limits.gamma + 2  # the tokens of a round, and the one before them, which predicts the first
    return Shape(shape.budgets, width, shape.depth, limits.capacity - limits.gamma - 1)


def pack_proposal(proposal: Proposal) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Ids, failed flag and review, if there is one: [R, gamma + 1] or [R, gamma + 3] int64; and the scores."""
    failed = torch.zeros_like(proposal.ids[:, 0]) if proposal.failed is None else proposal.failed.long()
    parts = [proposal.ids, failed[:, None]]
    if proposal.review is not None:
        parts.append(pack_review(proposal.review))
    return torch.cat(parts, 1), proposal.scores


def unpack_proposal(packed: torch.Tensor, scores: torch.Tensor | None, gamma: int) -> Proposal:
    """The inverse of `pack_proposal`."""
    review = unpack_review(packed[:, gamma + 1 :]) if packed.shape[1] > gamma + 1 else None
    return Proposal(packed[:, :gamma], scores, failed=packed[:, gamma].bool(), review=review)
