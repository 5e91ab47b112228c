"""The device side of all requests, one row per slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .runner import Rows


@dataclass(frozen=True)
class Limits:
    """Sizes fixed for one call: `slots` requests of at most `columns` ids (padding included), `gamma` drafts each."""

    slots: int
    columns: int
    gamma: int

    @property
    def capacity(self) -> int:
        """KV positions a request may need, drafts included."""
        return self.columns + self.gamma + 1


@dataclass(frozen=True)
class View:
    """What a step reads of its R requests, gathered from `SequenceState` (all tensors on one device).

    Attributes:
        rows: their slots.
        tokens: [R, W] int64, each row's left padding, prompt and committed tokens, then undefined ids.
        padding: [R] int64, left-padding columns.
        length: [R] int64, committed tokens, padding not counted.
        limit: [R] int64, the length at which the request must end.
        round: [R] int64, verifications of the request so far.
        request: [R] int64, key of the request's noise.
        done: [R] bool, ended; the host may not know it yet.
        log_prob: [R, W] fp32, log-probability under the target of each committed new token, where reviews need it.
    """

    rows: Rows
    tokens: torch.Tensor
    padding: torch.Tensor
    length: torch.Tensor
    limit: torch.Tensor
    round: torch.Tensor
    request: torch.Tensor
    done: torch.Tensor
    log_prob: torch.Tensor | None = None

    def last_tokens(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The last `count` committed ids and their positions, both [R, count]; negative before the start."""
        positions = self.length[:, None] - count + torch.arange(count, device=self.length.device)
        ids = self.tokens.gather(1, (positions + self.padding[:, None]).clamp(min=0))
        return ids, positions

    def subset(self, rows: Rows, at: torch.Tensor) -> View:
        """The view of some of its rows: `at` [r] their places in it, `rows` their slots."""
        return View(rows, *(tensor.index_select(0, at) for tensor in self.tensors()))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that there are, in the order of the fields."""
        arrays = (self.tokens, self.padding, self.length, self.limit, self.round, self.request, self.done)
        return arrays if self.log_prob is None else (*arrays, self.log_prob)


class SequenceState:
    """Tokens, lengths and drafts of every request, indexed by slot. Rows of different slots never touch.

    Args:
        limits: sizes.
        device: where it lives (the target's input device).
        pad_id: fills rows past their end.
    """

    def __init__(self, limits: Limits, device: torch.device, pad_id: int):
        slots, self.gamma = limits.slots, limits.gamma
        width = limits.capacity
        self.device = device
        self.tokens = torch.full((slots, width), pad_id, dtype=torch.long, device=device)
        self.padding, self.length, self.limit, self.round, self.request = (
            torch.zeros(slots, dtype=torch.long, device=device) for _ in range(5)
        )
        self.done = torch.zeros(slots, dtype=torch.bool, device=device)
        self.draft_ids = torch.full((slots, self.gamma), -1, dtype=torch.long, device=device)
        self.point_mass = torch.zeros(slots, dtype=torch.bool, device=device)
        self.draft_scores: torch.Tensor | None = None
        self.failed_drafter = torch.full((slots,), -1, dtype=torch.long, device=device)
        self.source = torch.full((slots,), -1, dtype=torch.long, device=device)

    def empty(self) -> None:
        """Empties all slots: they are done, with one token and no room, so that steps may run over them."""
        for array, value in ((self.padding, 0), (self.length, 1), (self.limit, 1), (self.round, 0), (self.request, 0)):
            array.fill_(value)
        for array in (self.draft_ids, self.failed_drafter, self.source):
            array.fill_(-1)
        self.done.fill_(True)

    def fill(self, prompts: torch.Tensor, padding: torch.Tensor, max_columns: int, request_ids: torch.Tensor) -> None:
        """Seats a batch in slots 0 .. B-1: `prompts` [B, P] left-padded ids, `padding` [B] columns of padding."""
        batch, prompt_columns = prompts.shape
        self.empty()
        self.done[:batch] = False
        self.tokens[:batch, :prompt_columns] = prompts
        self.padding[:batch] = padding
        self.length[:batch] = prompt_columns - padding
        self.limit[:batch] = max_columns - padding
        self.request[:batch] = request_ids

    def seat(self, slot: int, ids: torch.Tensor, limit: int, round: int, request: int) -> None:
        """Gives a slot to a request: `ids` [L] int64 so far, which end at `limit` at the latest."""
        self.tokens[slot, : ids.shape[0]] = ids
        for array, value in (
            (self.padding, 0), (self.length, ids.shape[0]), (self.limit, limit), (self.round, round),
            (self.request, request), (self.done, False), (self.draft_ids, -1), (self.failed_drafter, -1),
            (self.source, -1),
        ):  # fmt: skip
            array[slot].fill_(value)

    def vacate(self, slot: int) -> None:
        """Takes a slot back; steps that still run over it change nothing."""
        self.done[slot].fill_(True)

    def widen(self, width: int) -> None:
        """Makes room for `width` ids per slot. Graphs captured over the old array are void."""
        more = width - self.tokens.shape[1]
        if more > 0:
            self.tokens = torch.nn.functional.pad(self.tokens, (0, more))

    def view(self, rows: Rows) -> View:
        arrays = (self.tokens, self.padding, self.length, self.limit, self.round, self.request, self.done)
        return View(rows, *(array.index_select(0, rows.slots) for array in arrays))

    def clear_drafts(self, rows: Rows) -> None:
        self.draft_ids.index_fill_(0, rows.slots, -1)

    def store_drafts(
        self, rows: Rows, ids: torch.Tensor, point_mass: torch.Tensor, scores: torch.Tensor | None
    ) -> None:
        """Keeps the drafts of R requests until they are verified.

        Args:
            rows: the requests.
            ids: [R, gamma] int64, -1 after the last draft.
            point_mass: [R] bool, True where the drafter gave its ids probability 1.
            scores: [R, gamma, V] fp32, the processed scores each id was sampled from; None if nothing needs them.
        """
        self.draft_ids.index_copy_(0, rows.slots, ids)
        self.point_mass.index_copy_(0, rows.slots, point_mass)
        if scores is not None:
            if self.draft_scores is None:
                self.draft_scores = scores.new_zeros(self.draft_ids.shape + scores.shape[-1:])
            self.draft_scores.index_copy_(0, rows.slots, scores)

    def commit(self, view: View, ids: torch.Tensor, counts: torch.Tensor, ended: torch.Tensor) -> None:
        """Appends the first `counts` [R] of `ids` [R, T] to each request and moves to its next round."""
        columns = (view.padding + view.length)[:, None] + torch.arange(ids.shape[1], device=self.device)
        self.tokens.index_put_((view.rows.slots[:, None], columns), ids.clamp(min=0))
        self.length.index_copy_(0, view.rows.slots, view.length + counts)
        self.round.index_copy_(0, view.rows.slots, view.round + 1)
        self.done.index_copy_(0, view.rows.slots, ended)
