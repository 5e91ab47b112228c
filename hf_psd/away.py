"""Draft turns of drafters on another CUDA device: one packed copy there, one graph, one packed copy back."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from .drafters.base import Drafter, Proposal, Session, Shape
from .graphs import StepGraphs
from .lanes import Lane
from .phases import Request
from .runner import Rows, upload
from .state import View


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
    ) -> Proposal:
        """Drafts for R requests whose state is in `packed` (`pack_view`, on the target's device, at a graph's size).

        The proposal lies in buffers on the target's device that the next turn of the same size overwrites.
        """
        slots, limits, device = [request.slot for request in requests], session.limits, self.lane.device
        self.lane.follow(self.home)
        with self.lane.work("draft"):
            rows = self.graphs.rows(slots)
            size = len(rows)
            arrived = self._copy(("view", size), packed, device)
            view = unpack_view(rows, arrived)

            def view_of(index: list[int]) -> View:
                return view.subset(Rows([slots[row] for row in index], device), upload(index, device))

            shape = replayed(drafter.prepare(requests, budgets, view_of), limits.gamma, limits.capacity)
            budget = self.graphs.numbers(key, shape.budgets, size)

            def turn() -> tuple[torch.Tensor, torch.Tensor | None]:
                return pack_proposal(drafter.propose(unpack_view(rows, arrived), budget, shape))

            name = (session.law, key, drafter.signature, size, shape.width, shape.depth)
            ids, scores = self.graphs.run(name, rows, turn)
        self.lane.mark()
        self.home.follow(self.lane)
        with self.home.work():
            ids = self._copy(("ids", key, size), ids, self.home.device)
            if scores is not None:
                scores = self._copy(("scores", key, size), scores, self.home.device)
        return Proposal(ids[:, :-1], scores, failed=ids[:, -1].bool())

    def _copy(self, name: Hashable, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The source's values in a buffer of that name that graphs read."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = self._buffers[name] = torch.empty_like(source, device=device)
        return buffer.copy_(source, non_blocking=True)


def replayed(shape: Shape, gamma: int, capacity: int) -> Shape:
    """A draft turn's shape with few widths, so that few graphs are captured; feeding a token again changes nothing."""
    return Shape(shape.budgets, 2 if shape.width <= 2 else gamma + 1, shape.depth, capacity - gamma - 1)


def pack_view(view: View) -> torch.Tensor:
    """A view as one [R, W + 6] int64 tensor."""
    numbers = [view.padding, view.length, view.limit, view.round, view.request, view.done.long()]
    return torch.cat([view.tokens, torch.stack(numbers, 1)], 1)


def unpack_view(rows: Rows, packed: torch.Tensor) -> View:
    """The inverse of `pack_view`; shares the tensor's memory."""
    padding, length, limit, rounds, request, done = packed[:, -6:].unbind(1)
    return View(rows, packed[:, :-6], padding, length, limit, rounds, request, done.bool())


def pack_proposal(proposal: Proposal) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Ids with the failed flag as a last column, [R, gamma + 1] int64, and the scores."""
    failed = torch.zeros_like(proposal.ids[:, 0]) if proposal.failed is None else proposal.failed.long()
    return torch.cat([proposal.ids, failed[:, None]], 1), proposal.scores
