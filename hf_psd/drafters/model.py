"""A causal LM as drafter, with KV, dtype and device of its own."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ..phases import Request
from ..runner import ModelRunner, Rows, input_device, upload
from ..state import View
from .base import Drafter, Proposal, Session, Task


class ModelDrafter(Drafter):
    """Drafts with a smaller causal LM that shares the target's token ids (its vocabulary may differ by padding rows).

    Args:
        model: the drafter; only read.
        key: its number among the call's drafters, under which requests remember how much of them its KV covers.
    """

    def __init__(self, model: PreTrainedModel, key: int):
        self.model, self.key = model, key
        self.name = f"model:{type(model).__name__}#{key}"
        self.device = input_device(model)
        self._runner: ModelRunner | None = None

    def start(self, session: Session) -> None:
        self._session = session
        self.forwards = 0
        self._sampler = session.sampler.on(self.device)
        self._runner = ModelRunner(self.model, session.limits.slots, session.limits.capacity)

    def end(self) -> None:
        self._runner = None

    def draft(self, task: Task) -> Proposal:
        """Chains up to max(budgets) forwards; a row takes part while its own budget lasts."""
        session, view = self._session, task.view
        gamma, vocab = session.limits.gamma, session.vocab_size
        budgets = [self._within_window(request, budget) for request, budget in zip(task.requests, task.budgets)]
        rows_count = len(budgets)
        ids = torch.full((rows_count, gamma), -1, dtype=torch.long, device=self.device)
        failed = torch.zeros(rows_count, dtype=torch.bool, device=self.device)
        scores = None
        if self._sampler.needs_scores:
            scores = torch.zeros(rows_count, gamma, vocab, device=self.device)
        index = [row for row, budget in enumerate(budgets) if budget > 0]
        if index:
            part, _ = self._part(view, index)
            logits = self._catch_up(part, [task.requests[row] for row in index])
        for step in range(max(budgets)):
            if step > 0:
                keep = [row for row, budget in enumerate(budgets) if budget > step]
                part, at = self._part(view, keep)
                fed = ids[:, step - 1 : step].index_select(0, at)
                bound = max(task.requests[row].most for row in keep) + step
                logits = self._forward(part, fed, part.length[:, None] + step - 1, bound)
                index = keep
            part, at = self._part(view, index)
            drawn, drawn_scores, bad = self._sampler.draw(logits, part, step, vocab)
            bad = failed.index_select(0, at) | bad
            failed.index_copy_(0, at, bad)
            drawn = torch.where(bad, -1, drawn)
            ids[:, step].index_copy_(0, at, drawn)
            if scores is not None:
                scores[:, step].index_copy_(0, at, drawn_scores)
            column = part.padding + part.length + step
            view.tokens.index_put_((at, column), drawn.clamp(min=0))
        return Proposal(ids, scores, failed=failed)

    def _within_window(self, request: Request, budget: int) -> int:
        """A row that has outgrown the drafter's positions drafts no more."""
        assert self._runner is not None
        last = self._runner.last_position
        if request.most + budget - 1 > last and budget > 0:
            self._session.warn(
                f"psd: drafter {self.name} knows {last} positions; rows that are longer go on without its drafts."
            )
            return max(0, last - request.most + 1)
        return budget

    def _catch_up(self, view: View, requests: list[Request]) -> torch.Tensor:
        """Feeds each row what the drafter's KV lacks of it; returns logits [R, V] after the last committed token."""
        lags = [self._lag(request) for request in requests]
        usual = self._session.limits.gamma + 1
        late = [row for row, lag in enumerate(lags) if lag > usual]
        if late:
            part, _ = self._part(view, late)
            ids, positions = part.last_tokens(max(lags[row] for row in late))
            assert self._runner is not None
            self.forwards += 1
            bound = max(requests[row].most for row in late)
            self._runner.feed(part.rows, ids[:, :-1], positions[:, :-1], bound)
            lags = [1 if lag > usual else lag for lag in lags]
        for request in requests:
            request.covered[self.key] = request.length
        ids, positions = view.last_tokens(max(lags))
        return self._forward(view, ids, positions, max(request.most for request in requests))

    def _lag(self, request: Request) -> int:
        """Upper bound of the committed tokens this drafter's KV lacks, at least 1: the newest token is always fed."""
        lag = max(1, request.most - request.covered.get(self.key, 0))
        # Its own accepted drafts are in the KV already: at most the last of them and the target's token are not.
        return min(lag, 2) if request.source == self.key else lag

    def _forward(self, view: View, ids: torch.Tensor, positions: torch.Tensor, bound: int) -> torch.Tensor:
        assert self._runner is not None
        self.forwards += 1
        return self._runner.forward(view.rows, ids, positions, bound, logits_to_keep=1).logits[:, -1]

    def _part(self, view: View, index: list[int]) -> tuple[View, torch.Tensor]:
        at = upload(index, self.device)
        if len(index) == len(view.rows):
            return view, at
        return view.subset(index, Rows([view.rows.numbers[row] for row in index], self.device), at), at
