"""A causal LM as drafter, with KV, dtype and device of its own."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from ..graphs import StepGraphs, captures
from ..packing import pack_view, unpack_view
from ..phases import Request
from ..reviews import Review
from ..runner import LONGEST_PIECE, ModelRunner, Rows, input_device, upload
from ..state import View
from .base import Drafter, Proposal, Session, Shape, Task
from .reviewer import Reviewer


class ModelDrafter(Drafter):
    """Drafts with a smaller causal LM that shares the target's token ids (its vocabulary may differ by padding rows).

    Args:
        model: the drafter; only read.
        key: its number among the call's drafters, under which requests remember how much of them its KV covers.
    """

    kind = "model"
    capturable = True
    reviews = True

    def __init__(self, model: PreTrainedModel, key: int):
        self._model, self.key = weakref.ref(model), key
        self.name = self._label
        self.device = input_device(model)
        self.capturable = self._captures = captures(model)
        self._runner: ModelRunner | None = None
        self._reviewer: Reviewer | None = None

    @property
    def model(self) -> PreTrainedModel | None:
        """The drafter's model; the caller keeps it alive."""
        return self._model()

    def keyed(self, key: int) -> ModelDrafter:
        """The same drafter under another number; itself if that is its number already."""
        if self.key == key:
            return self
        other = copy.copy(self)
        other.key = key
        if self.name == self._label:
            other.name = other._label
        return other

    @property
    def _label(self) -> str:
        return f"{self.kind}:{type(self.model).__name__}#{self.key}"

    def start(self, session: Session) -> None:
        self._session = session
        self.forwards = self.catch_up_forwards = self.review_forwards = 0
        self._sampler = session.sampler.on(self.device)
        assert self.model is not None
        self._runner = session.space.runner_for(self.model, self.key)
        self.capturable = self._captures and self._runner.fast
        if session.reviewing:
            self._reviewer = Reviewer(session, self.key, self._sampler, self.device)

    def end(self) -> None:
        self._runner = self._reviewer = None

    def feed(self, rows: Rows, ids: torch.Tensor, positions: torch.Tensor, bound: int) -> None:
        assert self._runner is not None
        self.forwards += 1
        positions = torch.where(positions < self._runner.last_position, positions, -1)
        graphs = self._session.space.draft_graphs_on(self.device) if self.capturable else None
        if graphs is not None:
            graphs.feed(self.key, self._runner, rows.numbers, ids, positions)
        else:
            self._runner.forward(rows, ids, positions, bound, logits_to_keep=1)

    def draft(self, task: Task) -> Proposal:
        """Chains forwards for the rows with a budget; rows with a smaller one than the others end early."""
        if self._reviewer is None or task.review is None:
            return self._draft(task)
        idle = [row for row, due in enumerate(task.review) if due and task.budgets[row] == 0]
        requests = [task.requests[row] for row in idle]
        self.review_idle(requests, lambda rows: self._part(task.view, [idle[row] for row in rows]))
        proposal = self._draft(task)
        return replace(proposal, review=self.reviewed(task.view.rows))

    def _draft(self, task: Task) -> Proposal:
        index = [row for row, budget in enumerate(task.budgets) if budget > 0]
        if not index:
            nothing = torch.full((len(task.budgets), self._session.limits.gamma), -1, device=self.device)
            return Proposal(nothing, point_mass=True)
        requests, budgets = [task.requests[row] for row in index], [task.budgets[row] for row in index]
        view = self._part(task.view, index)
        shape = self.prepare(requests, budgets, lambda rows: self._part(view, rows))
        part = self.propose(view, upload(shape.budgets, self.device), shape)
        rows_count = len(task.budgets)
        if len(index) == rows_count:
            return part
        at = upload(index, self.device)
        ids = part.ids.new_full((rows_count, part.ids.shape[1]), -1).index_copy_(0, at, part.ids)
        failed = torch.zeros(rows_count, dtype=torch.bool, device=self.device).index_copy_(0, at, part.failed)
        scores = part.scores
        if scores is not None:
            scores = scores.new_zeros(rows_count, *scores.shape[1:]).index_copy_(0, at, scores)
        return Proposal(ids, scores, failed=failed)

    def prepare(
        self, requests: Sequence[Request], budgets: Sequence[int], view_of: Callable[[list[int]], View]
    ) -> Shape:
        if self._reviewer is not None:
            self._reviewer.begin(requests)
        budgets = [self._within_window(request, budget) for request, budget in zip(requests, budgets)]
        index = [row for row, budget in enumerate(budgets) if budget > 0]
        if not index:
            return Shape(budgets)
        width = self._catch_up([requests[row] for row in index], lambda rows: view_of([index[row] for row in rows]))
        self.forwards += max(budgets)
        return Shape(budgets, width, max(budgets), max(request.most for request in requests))

    def propose(self, view: View, budget: torch.Tensor, shape: Shape) -> Proposal:
        return self._chain(view, budget, shape.width, shape.depth, shape.bound)

    def review_idle(self, requests: Sequence[Request], view_of: Callable[[list[int]], View]) -> None:
        """Reviews rows by one forward over what the KV lacks."""
        if self._reviewer is None:
            return
        self._reviewer.begin(requests)
        index = [row for row, request in enumerate(requests) if self._within_window(request, 1)]
        if not index:
            return
        idle = [requests[row] for row in index]
        self.review_forwards += 1
        self._feed_all_but_the_last(view_of(index), idle, max(2, *map(self._lag, idle)))
        for request in idle:
            request.covered[self.key] = max(request.covered.get(self.key, 0), request.length - 1)
        self._reviewer.done(idle)

    def reviewed(self, rows: Rows) -> Review | None:
        return None if self._reviewer is None else self._reviewer.take(rows)

    def _chain(self, view: View, budget: torch.Tensor, width: int, depth: int, bound: int) -> Proposal:
        """Drafts up to `budget` [R] tokens per row by `depth` forwards, the first over the last `width` tokens.

        `bound` is an upper bound of the rows' lengths. Nothing here depends on values the host would have to read.
        """
        session = self._session
        ids = torch.full((len(view.rows), session.limits.gamma), -1, dtype=torch.long, device=self.device)
        failed = torch.zeros_like(view.done)
        all_scores = []
        fed, positions = view.last_tokens(width)
        positions = torch.where(budget[:, None] > 0, positions, -1)  # rows beyond the model's positions
        for step in range(depth):
            logits = self._forward(view, fed, positions, bound + step)
            drawn, scores, bad = self._sampler.draw(logits, view, step, session.vocab_size)
            failed = failed | bad & (step < budget)
            drawn = torch.where((step < budget) & ~failed, drawn, -1)
            ids[:, step] = drawn
            all_scores.append(scores)
            fed = drawn[:, None]
            view.tokens.scatter_(1, (view.padding + view.length + step)[:, None], fed.clamp(min=0))
            positions = torch.where(step + 1 < budget, view.length + step, -1)[:, None]
        if not self._sampler.needs_scores:
            return Proposal(ids, failed=failed)
        empty = torch.zeros(len(view.rows), session.vocab_size, device=self.device)
        missing = [empty] * (session.limits.gamma - depth)
        return Proposal(ids, torch.stack(all_scores + missing, 1), failed=failed)

    def _within_window(self, request: Request, budget: int) -> int:
        """A row that has outgrown the drafter's positions drafts no more."""
        assert self._runner is not None
        last = self._runner.last_position
        if request.most + budget - 1 > last and budget > 0:
            if request.limit > last:
                self._session.warn(
                    f"psd: drafter {self.name} knows {last} positions; rows that are longer go on without its drafts."
                )
            return max(0, last - request.most + 1)
        return budget

    def _catch_up(self, requests: list[Request], view_of: Callable[[list[int]], View]) -> int:
        """Feeds rows that lag far behind; returns how many of each row's last tokens are left to feed, at least 1."""
        assert self._runner is not None
        lags = [self._lag(request) for request in requests]
        usual = self._session.limits.gamma + (1 if self._reviewer is None else 2)
        late = [row for row, lag in enumerate(lags) if lag > usual]
        if late:
            self.catch_up_forwards += 1
            self._feed_all_but_the_last(view_of(late), [requests[row] for row in late], max(lags[row] for row in late))
            lags = [1 if lag > usual else lag for lag in lags]
        for request in requests:
            request.covered[self.key] = request.length
        if self._reviewer is not None:
            self._reviewer.done(requests)
        return max(lags)

    def _feed_all_but_the_last(self, view: View, requests: Sequence[Request], lag: int) -> None:
        """One forward over the last `lag` tokens but the newest; with a reviewer it tells what it thinks of them."""
        assert self._runner is not None
        self.forwards += 1
        ids, positions = (tensor[:, :-1] for tensor in view.last_tokens(lag))
        bound = max(request.most for request in requests)
        judged = min(lag - 1, max(map(self._unscored, requests)))
        graphs = self._session.space.draft_graphs_on(self.device) if self.capturable else None
        if graphs is not None:
            before = lag - 1 - judged
            graphs.feed(self.key, self._runner, view.rows.numbers, ids[:, :before], positions[:, :before])
            return self._review_by(graphs, view, ids[:, before:], positions[:, before:])
        before = lag - 1 - max(judged, min(lag - 1, LONGEST_PIECE)) if judged else lag - 1
        if before:
            self._runner.feed(view.rows, ids[:, :before], positions[:, :before], bound)
        if judged:
            assert self._reviewer is not None
            ids, positions = ids[:, before:], positions[:, before:]
            logits = self._runner.forward(view.rows, ids, positions, bound, logits_to_keep=judged).logits
            self._reviewer.score(view, logits, positions[:, -judged:])

    def _review_by(self, graphs: StepGraphs, view: View, ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Feeds tokens by replayed forwards and reviews what their logits predict."""
        if not ids.shape[1]:
            return
        assert self._runner is not None and self._reviewer is not None
        reviewer, width = self._reviewer, view.tokens.shape[1]
        packed = graphs.held("reviewed", pack_view(view))

        def look(rows: Rows, logits: torch.Tensor, positions: torch.Tensor) -> None:
            reviewer.score(unpack_view(rows, packed, width), logits, positions)

        name = (self._session.law, self.key, self.signature, packed.shape)
        graphs.feed(name, self._runner, view.rows.numbers, ids, positions, look)

    def _unscored(self, request: Request) -> int:
        return 0 if self._reviewer is None else self._reviewer.unscored(request, request.source == self.key)

    def _lag(self, request: Request) -> int:
        """Upper bound of the committed tokens this drafter's KV lacks, at least 1: the newest token is always fed."""
        lag = max(1, request.most - request.covered.get(self.key, 0))
        # Its own accepted drafts are in the KV already: at most the last of them and the target's token are not.
        lag = min(lag, 2) if request.source == self.key else lag
        return max(lag, 1 + self._unscored(request))

    def _forward(
        self,
        view: View,
        ids: torch.Tensor,
        positions: torch.Tensor,
        bound: int,
    ) -> torch.Tensor:
        assert self._runner is not None
        if self._reviewer is not None and ids.shape[1] > 1:
            logits = self._runner.forward(view.rows, ids, positions, bound).logits
            self._reviewer.score(view, logits[:, :-1], positions[:, :-1])
            return logits[:, -1]
        return self._runner.forward(view.rows, ids, positions, bound, logits_to_keep=1).logits[:, -1]

    def _part(self, view: View, index: list[int]) -> View:
        if len(index) == len(view.rows):
            return view
        rows = Rows([view.rows.numbers[row] for row in index], self.device)
        return view.subset(rows, upload(index, self.device))
