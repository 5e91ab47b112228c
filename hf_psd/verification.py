"""Verification on the device: run the target over the drafts, judge them, cut at the end of the text."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .drafters.base import Outcome
from .reviews import Reviewed, read_reviews
from .roster import Roster
from .runner import ModelRunner, Rows
from .state import SequenceState, View
from .verify.sampler import Judgement, Sampler

HiddenStates = tuple[torch.Tensor, ...] | None


@dataclass(frozen=True)
class Packet:
    """What the host learns of one row's verification.

    Attributes:
        ids: the committed ids.
        accepted, drafted: drafts that were accepted, and that there were.
        ended: whether the text ends with these ids.
        bad: the target's scores were NaN, +inf or all -inf.
        failed: the drafter that gave NaN, -1 if none did.
        source: the drafter the drafts came from, -1 if there were none.
        announced: drafts that each drafter which announces them has for the next turn.
        reviews: what drafters thought of committed tokens; None where they are not asked.
        extra: further numbers of the `Verifier`'s owner.
    """

    ids: list[int]
    accepted: int
    drafted: int
    ended: bool
    bad: bool
    failed: int
    source: int
    announced: dict[int, int]
    reviews: Reviewed | None
    extra: list[int]

    @classmethod
    def read(cls, numbers: list[int], width: int, roster: Roster) -> Packet:
        """Takes one row of what a `Verifier` gives for T = `width` apart."""
        count, accepted, drafted, ended, bad, failed, source, *rest = numbers[width:]
        announced, extra = dict(zip(roster.announcers, rest)), rest[len(roster.announcers) :]
        reviews = None
        if roster.board is not None:
            reviews, extra = read_reviews(extra[: roster.board.columns]), extra[roster.board.columns :]
        flags = bool(ended), bool(bad)
        return cls(numbers[:count], accepted, drafted, *flags, failed, source, announced, reviews, extra)


class Verifier:
    """One verification as a function of device state alone, so that it can be captured in a CUDA graph.

    Args:
        runner: the target.
        state: all requests.
        sampler: the output law.
        roster: drafters, told of each commit.
        eos: end tokens on the device: [E] int64 for all requests, [slots, E] for each its own, or None.
        logprobs: whether the packet ends with the bits of each emitted token's log-probability.
    """

    logprobs = False

    def __init__(
        self, runner: ModelRunner, state: SequenceState, sampler: Sampler, roster: Roster, eos: torch.Tensor | None
    ):
        self.runner, self.state, self.sampler, self.roster, self.eos = runner, state, sampler, roster, eos

    def __call__(self, rows: Rows, width: int, kv_length: int) -> tuple[torch.Tensor, Judgement]:
        """Verifies the drafts of R requests and commits what stands.

        Args:
            rows: the requests.
            width: T, tokens fed per row; drafts beyond T - 1 are dropped.
            kv_length: bounds the rows' lengths with their drafts.

        Returns:
            The numbers for the host, [R, T + 7 + announcers] int64, see `Packet`; two more for each drafter that
            reviews; with `logprobs` T more, fp32 bits; and the judgement itself.
        """
        state = self.state
        view = state.view(rows)
        drafts = state.draft_ids.index_select(0, rows.slots)[:, : width - 1]
        self.roster.draft_ahead(view, drafts)
        judgement, hidden_states = judge(
            self.runner, self.sampler, state, view, drafts, kv_length, self.roster.needs_hidden_states
        )
        eos = self.eos
        if eos is not None and eos.dim() == 2:
            eos = eos.index_select(0, rows.slots)
        counts, ended = cut(view, judgement, eos)
        state.commit(view, judgement.ids, counts, ended)
        board = self.roster.board
        if board is not None:
            board.note(view, judgement)
        failed = state.failed_drafter.index_select(0, rows.slots)
        source = state.source.index_select(0, rows.slots)
        state.clear_drafts(rows)
        accepted, drafted = judgement.counts - 1, (drafts >= 0).sum(1)
        announced = self.roster.commit(Outcome(state.view(rows), accepted, hidden_states))
        numbers = [counts, accepted, drafted, ended.long(), judgement.bad.long(), failed, source, *announced]
        parts = [judgement.ids, torch.stack(numbers, 1)]
        if board is not None:
            parts.append(board.take(rows))
        if self.logprobs:
            parts.append(_logprob_bits(judgement))
        return torch.cat(parts, 1), judgement


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
    # Columns after a row's own drafts are computed for the sake of the others; they must not claim memory.
    own = torch.nn.functional.pad(drafts >= 0, (1, 0), value=True)
    positions = torch.where((positions < view.limit[:, None]) & own, positions, -1)
    ids = view.tokens.gather(1, columns)
    features = runner.forward(view.rows, ids, positions, kv_length, hidden_states=hidden_states)
    scores = state.draft_scores
    if scores is not None:
        scores = scores.index_select(0, view.rows.slots)[:, : width - 1]
    point_mass = state.point_mass.index_select(0, view.rows.slots)
    return sampler.judge(features.logits, drafts, view, scores, point_mass), features.hidden_states


def cut(view: View, judgement: Judgement, eos: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of the emitted tokens stand, [R] int64, and which rows end with them, [R] bool.

    `eos`: end token ids on the device, [E] or [R, E], or None.
    """
    room = view.limit - view.length
    counts = torch.minimum(judgement.counts, room)
    ended = counts >= room
    if eos is not None:
        is_end = (judgement.ids[:, :, None] == (eos[:, None] if eos.dim() == 2 else eos)).any(2)
        first = is_end.long().argmax(1) + 1
        hit = is_end.any(1) & (first <= counts)
        counts, ended = torch.where(hit, first, counts), ended | hit
    return torch.where(view.done, 0, counts), ended | view.done


def _logprob_bits(judgement: Judgement) -> torch.Tensor:
    """[R, T] int64: the fp32 bits of log p of each emitted id under the processed scores."""
    scores = judgement.scores.float()
    chosen = scores.gather(2, judgement.ids.clamp(min=0)[:, :, None])[:, :, 0]
    return (chosen - scores.logsumexp(2)).view(torch.int32).long()
