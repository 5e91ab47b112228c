"""Verification on the device: run the target over the drafts, judge them, cut at the end of the text."""

from __future__ import annotations

import torch

from .runner import ModelRunner
from .state import SequenceState, View
from .verify.sampler import Judgement, Sampler

HiddenStates = tuple[torch.Tensor, ...] | None


def judge(
    runner: ModelRunner,
    sampler: Sampler,
    state: SequenceState,
    view: View,
    drafts: torch.Tensor,
    kv_length: int,
    hidden_states: bool,
) -> tuple[Judgement, HiddenStates]:
    """Runs the target over each row's last committed token and its drafts [R, T - 1], and judges them.

    `kv_length` bounds the rows' lengths with their drafts; `hidden_states` asks for the target's features.
    """
    width = drafts.shape[1] + 1
    columns = (view.padding + view.length - 1)[:, None] + torch.arange(width, device=drafts.device)
    view.tokens.scatter_(1, columns[:, 1:], drafts.clamp(min=0))
    positions = columns - view.padding[:, None]
    positions = torch.where(positions < view.limit[:, None], positions, -1)
    ids = view.tokens.gather(1, columns)
    features = runner.forward(view.rows, ids, positions, kv_length, hidden_states=hidden_states)
    scores = state.draft_scores
    if scores is not None:
        scores = scores.index_select(0, view.rows.slots)[:, : width - 1]
    point_mass = state.point_mass.index_select(0, view.rows.slots)
    return sampler.judge(features.logits, drafts, view, scores, point_mass), features.hidden_states


def cut(view: View, judgement: Judgement, eos: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of the emitted tokens stand, [R] int64, and which rows end with them, [R] bool.

    `eos`: end token ids on the device, or None.
    """
    room = view.limit - view.length
    counts = torch.minimum(judgement.counts, room)
    ended = counts >= room
    if eos is not None:
        is_end = torch.isin(judgement.ids, eos)
        first = is_end.long().argmax(1) + 1
        hit = is_end.any(1) & (first <= counts)
        counts, ended = torch.where(hit, first, counts), ended | hit
    return torch.where(view.done, 0, counts), ended | view.done
