"""Prompt lookup decoding (Saxena 2023): drafts what followed the last occurrence of the row's newest n-gram."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from ..phases import Request
from ..reviews import Review
from ..runner import upload
from ..state import View
from .base import Drafter, Outcome, Proposal, Session, Shape, Task


class PromptLookup(Drafter):
    """Drafts by copying from the row's own context; needs no model.

    The longest match wins (from `max_ngram` down to `min_ngram` tokens), among equals the latest. The search is one
    vectorised pass over all rows and runs right after each commit, so that the number of drafts is known a step ahead.

    Args:
        max_ngram: longest suffix that is looked up, in tokens.
        min_ngram: shortest one.
    """

    name = "prompt_lookup"
    announces = True
    capturable = True
    reviews = True

    def __init__(self, max_ngram: int = 3, min_ngram: int = 2):
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"psd: need 1 <= min_ngram <= max_ngram, got {min_ngram} and {max_ngram}.")
        self.max_ngram, self.min_ngram = max_ngram, min_ngram
        self._found: torch.Tensor | None = None
        self._found_at: torch.Tensor | None = None

    @property
    def signature(self) -> Hashable:
        return self.name, self.max_ngram, self.min_ngram

    def start(self, session: Session) -> None:
        limits = session.limits
        self._gamma = limits.gamma
        key, kept = self.signature, session.space.scratch
        if key not in kept:
            found = torch.full((limits.slots, limits.gamma), -1, dtype=torch.long, device=session.device)
            kept[key] = found, torch.zeros_like(found[:, 0])
        self._found, self._found_at = kept[key]

    def prefill(self, view: View) -> None:
        self._search(view)

    def review(self, outcome: Outcome) -> Review:
        """Its drafts up to the first that differs from the committed text; a row without drafts counts as one miss."""
        assert self._found is not None and self._found_at is not None
        view = outcome.view
        found = self._found.index_select(0, view.rows.slots)
        begin = self._found_at.index_select(0, view.rows.slots)
        known = view.length - begin
        step = torch.arange(self._gamma, device=found.device)
        columns = ((view.padding + begin)[:, None] + step).clamp(max=view.tokens.shape[1] - 1)
        same = (found == view.tokens.gather(1, columns)) & (step < known[:, None])
        agreed = same.long().cumprod(1).sum(1)
        tested = torch.minimum((found >= 0).sum(1).clamp(min=1), known)
        return Review(agreed.float(), torch.minimum(agreed + 1, tested))

    def commit(self, outcome: Outcome) -> None:
        self._search(outcome.view)

    def announce(self, view: View) -> torch.Tensor:
        assert self._found is not None
        return (self._found.index_select(0, view.rows.slots) >= 0).sum(1)

    def draft(self, task: Task) -> Proposal:
        return self.propose(task.view, upload(task.budgets, task.view.length.device), Shape(list(task.budgets)))

    def prepare(
        self, requests: Sequence[Request], budgets: Sequence[int], view_of: Callable[[list[int]], View]
    ) -> Shape:
        return Shape(list(budgets))

    def propose(self, view: View, budget: torch.Tensor, shape: Shape) -> Proposal:
        assert self._found is not None
        found = self._found.index_select(0, view.rows.slots)
        step = torch.arange(self._gamma, device=found.device)
        return Proposal(torch.where(step < budget[:, None], found, -1), point_mass=True)

    def end(self) -> None:
        self._found = self._found_at = None

    def _search(self, view: View) -> None:
        assert self._found is not None and self._found_at is not None
        self._found_at.index_copy_(0, view.rows.slots, view.length)
        self._found.index_copy_(0, view.rows.slots, continuation(view, self._gamma, self.max_ngram, self.min_ngram))


def continuation(view: View, count: int, max_ngram: int, min_ngram: int) -> torch.Tensor:
    """Up to `count` tokens that followed the best earlier match of each row's suffix: [R, count] int64, -1 where none.

    Padding columns never match, and a match must be followed by at least one committed token.
    """
    tokens, end = view.tokens, (view.padding + view.length)[:, None]
    width = tokens.shape[1]
    column = torch.arange(width, device=tokens.device)
    # `matched[r, c]`: how many tokens before column c agree with the row's suffix, walking backwards from both.
    matched = torch.zeros_like(tokens)
    alive = (column < end) & (column > view.padding[:, None])
    for back in range(1, min(max_ngram, width - 1) + 1):
        suffix = tokens.gather(1, (end - back).clamp(min=0))
        earlier = tokens[:, : width - back] == suffix
        inside = column[back:] - back >= view.padding[:, None]
        alive = torch.cat([torch.zeros_like(alive[:, :back]), alive[:, back:] & earlier & inside], 1)
        matched = torch.where(alive, back, matched)
    matched = torch.where(matched >= min_ngram, matched, 0)
    best = (matched * width + column).argmax(1, keepdim=True)
    hit = matched.gather(1, best) > 0
    source = best + torch.arange(count, device=tokens.device)
    usable = hit & (source < end)
    return torch.where(usable, tokens.gather(1, source.clamp(max=width - 1)), -1)
