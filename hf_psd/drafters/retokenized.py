"""A causal LM with a tokenizer of its own: reads the text re-encoded, and its greedy continuation encoded back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from psd_kernels import bad_rows
from transformers import PreTrainedModel

from ..phases import Request
from ..runner import ModelRunner, Rows, upload
from ..state import View
from .base import Proposal, Session, Task
from .model import ModelDrafter
from .translation import GrowingText, Translator

_CAPACITY_GRANULE = 256
_WARN = "psd: drafter {name} knows {last} positions; rows that are longer in its own tokens go on without its drafts."


class Reader:
    """What the drafter has read of one request: its text so far, and the ids its KV holds."""

    def __init__(self, request: Request, translator: Translator):
        self.request, self.text, self.fed = request, GrowingText(translator), []

    fed: list[int]

    def unread(self, ids: list[int]) -> int:
        """How many leading ids of the text the KV already holds; the last one is always fed again."""
        same = 0
        for old, new in zip(self.fed, ids[:-1]):
            if old != new:
                break
            same += 1
        return same


class RetokenizedDrafter(ModelDrafter):
    """Drafts for a target whose token ids mean something else.

    The host decodes each row's committed text, encodes it for the drafter, lets it continue greedily, and encodes the
    continuation for the target. The drafts are a function of the committed tokens alone, so they count as drafted with
    probability 1 and every verification stays exact. It waits for the committed tokens, so its calls are not captured
    in CUDA graphs.

    Args:
        model: the drafter; only read.
        key: its number among the call's drafters.
        tokenizer: the target's tokenizer.
        own_tokenizer: the drafter's tokenizer.
    """

    kind = "retokenized"
    capturable = False
    reviews = False

    def __init__(self, model: PreTrainedModel, key: int, tokenizer: Any, own_tokenizer: Any):
        super().__init__(model, key)
        self.translator = Translator(tokenizer, own_tokenizer)

    def start(self, session: Session) -> None:
        self._session, self.forwards = session, 0
        self._sampler = session.sampler.on(self.device)
        self._readers: dict[int, Reader] = {}
        self._runner = None

    def feed(self, rows: Rows, ids: torch.Tensor, positions: torch.Tensor, bound: int) -> None:
        """Nothing: these are the target's ids; the text is read when a draft is asked for."""

    def end(self) -> None:
        self._runner, self._readers = None, {}

    def draft(self, task: Task) -> Proposal:
        budgets = list(task.budgets)
        tokens, padding, lengths = (each.tolist() for each in (task.view.tokens, task.view.padding, task.view.length))
        texts, own = [], []
        for row, request in enumerate(task.requests):
            text = tokens[row][padding[row] : padding[row] + lengths[row]]
            reader = self._reader(task.view.rows.numbers[row], request)
            texts.append(text)
            own.append(reader.text.translate(text) if budgets[row] > 0 else [])
        self._make_room(own, max(budgets))
        budgets = [self._within_own_window(ids, budget) for ids, budget in zip(own, budgets)]
        return self._propose(task.view, texts, own, budgets)

    def _propose(self, view: View, texts: list[list[int]], own: list[list[int]], budgets: list[int]) -> Proposal:
        """Drafts up to `budgets` tokens for rows with the target's ids `texts` and the drafter's ids `own`."""
        gamma = self._session.limits.gamma
        rows, drafts = len(budgets), [[-1] * gamma for _ in budgets]
        failed = torch.zeros(rows, dtype=torch.bool, device=self.device)
        if max(budgets) > 0:
            drawn, failed = self._continue_greedily(view, own, budgets)
            for row, (ids, budget) in enumerate(zip(drawn, budgets)):
                if budget > 0:
                    new = self.translator.to_target(texts[row], own[row], ids[:budget])[:budget]
                    drafts[row][: len(new)] = new
                    self._readers[view.rows.numbers[row]].fed = own[row] + ids[: budget - 1]
        proposed = upload([id for row in drafts for id in row], self.device).view(rows, gamma)
        return Proposal(proposed.masked_fill(failed[:, None], -1), point_mass=True, failed=failed)

    def _continue_greedily(
        self, view: View, own: list[list[int]], budgets: list[int]
    ) -> tuple[list[list[int]], torch.Tensor]:
        """The `max(budgets)` likeliest next ids of each row in the drafter's vocabulary, and which rows failed."""
        depth, budget = max(budgets), upload(budgets, self.device)
        start = upload([len(ids) for ids in own], self.device)
        logits, drawn = self._read(view, own, budgets), []
        failed = torch.zeros(len(own), dtype=torch.bool, device=self.device)
        for step in range(depth):
            failed = failed | bad_rows(logits) & (step < budget)
            drawn.append(logits.nan_to_num(nan=0.0).argmax(-1))
            if step + 1 < depth:
                at = torch.where(step + 1 < budget, start + step, -1)
                logits = self._forward(view, drawn[-1][:, None], at[:, None], max(map(len, own)) + step + 1)
        self.forwards += depth
        return torch.stack(drawn, 1).tolist(), failed

    def _read(self, view: View, own: list[list[int]], budgets: list[int]) -> torch.Tensor:
        """Feeds what the KV lacks of each row's text; returns the logits after it, [R, V of the drafter]."""
        known = [self._readers[slot].unread(ids) for slot, ids in zip(view.rows.numbers, own)]
        unread = [ids[skip:] if budget > 0 else [] for ids, skip, budget in zip(own, known, budgets)]
        width, bound = max(map(len, unread)), max(map(len, own))
        ids = [[0] * (width - len(new)) + new for new in unread]
        at = [[-1] * (width - len(new)) + list(range(skip, skip + len(new))) for new, skip in zip(unread, known)]
        fed, positions = (
            upload([number for row in rows for number in row], self.device).view(len(own), width) for rows in (ids, at)
        )
        assert self._runner is not None
        self._runner.feed(view.rows, fed[:, :-1], positions[:, :-1], bound)
        for slot, text, budget in zip(view.rows.numbers, own, budgets):
            if budget > 0:
                self._readers[slot].fed = text
        return self._forward(view, fed[:, -1:], positions[:, -1:], bound)

    def _reader(self, slot: int, request: Request) -> Reader:
        reader = self._readers.get(slot)
        if reader is None or reader.request is not request:
            reader = self._readers[slot] = Reader(request, self.translator)
        return reader

    def _make_room(self, own: Sequence[Sequence[int]], budget: int) -> None:
        """Sees to KV for the longest text; a bigger cache starts empty."""
        needed = max(map(len, own)) + budget
        if self._runner is None or self._runner.cache.capacity < needed:
            least = max(needed + _CAPACITY_GRANULE, self._session.limits.capacity)
            capacity = -(-least // _CAPACITY_GRANULE) * _CAPACITY_GRANULE
            assert self.model is not None
            self._runner = ModelRunner(self.model, self._session.limits.slots, capacity)
            for reader in self._readers.values():
                reader.fed = []

    def _within_own_window(self, ids: list[int], budget: int) -> int:
        assert self._runner is not None
        last = self._runner.last_position
        if not ids or budget <= 0:
            return 0
        if len(ids) + budget - 1 > last:
            self._session.warn(_WARN.format(name=self.name, last=last))
        return max(0, min(budget, last - len(ids) + 1))
