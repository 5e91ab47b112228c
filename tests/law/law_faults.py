"""Faults that bend the law, planted in the running engine by patching what it calls."""

from __future__ import annotations

from dataclasses import replace

import torch
from psd_kernels import naive, philox

from hf_psd import roster
from hf_psd.drafters.base import Proposal
from hf_psd.drafters.model import ModelDrafter
from hf_psd.state import SequenceState
from hf_psd.verify import sampler
from hf_psd.verify.processors import ProcessorPipeline
from hf_psd.verify.sampler import Sampler


def unnormalised_temperature(patch) -> None:
    """log-softmax first, then temperature, and the result taken for log-probabilities."""
    draw, judge, log_prob = Sampler.draw, Sampler.judge, naive._log_prob
    patch.setattr(Sampler, "draw", lambda self, logits, *rest: draw(self, logits.float().log_softmax(-1), *rest))
    patch.setattr(Sampler, "judge", lambda self, logits, *rest: judge(self, logits.float().log_softmax(-1), *rest))
    patch.setattr(naive, "_log_prob", lambda scaled, log_z, ids: log_prob(scaled, torch.zeros_like(log_z), ids))


def raw_q(patch) -> None:
    """Drafts drawn from the processed scores, judged by the drafter's raw logits."""

    def draw_and_return_raw(self, logits, view, step, vocab_size):
        ids, scores, failed = draw(self, logits, view, step, vocab_size)
        return ids, None if scores is None else sampler.fit(logits, vocab_size).float(), failed

    draw = Sampler.draw
    patch.setattr(Sampler, "draw", draw_and_return_raw)


def rounded_q(patch) -> None:
    """q kept in bfloat16 after the draft was drawn from float32."""

    def draw_and_round(self, *arguments):
        ids, scores, failed = draw(self, *arguments)
        return ids, None if scores is None else scores.bfloat16().float(), failed

    draw = Sampler.draw
    patch.setattr(Sampler, "draw", draw_and_round)


def no_residual(patch) -> None:
    """A rejected draft replaced by a draw from p itself."""

    def draw_from_p(scaled, log_z, log_q, draft_ids, *rest):
        return draw(scaled, log_z, log_q, torch.full_like(draft_ids, -1), *rest)

    draw = naive._draw_at_stop
    patch.setattr(naive, "_draw_at_stop", draw_from_p)


def softmax_residual(patch) -> None:
    """The residual normalised by softmax instead of by its sum."""

    def race_softmax(log_weights, seed, position, request, round, purpose):
        if purpose == philox.RESIDUAL:
            residual = log_weights.exp()
            log_weights = torch.where(residual.sum(-1, keepdim=True) < 1 - 1e-4, residual, log_weights)
        return race(log_weights, seed, position, request, round, purpose)

    race = naive.race
    patch.setattr(naive, "race", race_softmax)


def shared_noise(patch) -> None:
    """Draft and residual raced with the same noise."""
    patch.setattr(naive, "RESIDUAL", philox.DRAFT)


def one_uniform(patch) -> None:
    """One accept uniform for all rows of the batch."""
    uniform = naive.uniform
    patch.setattr(naive, "uniform", lambda seed, position, request, *rest: uniform(seed, position, request * 0, *rest))


def roundless_key(patch) -> None:
    """Noise without the round: a position drawn again meets the noise that its discarded draft revealed."""
    uniform, log_exponential = naive.uniform, naive.log_exponential
    patch.setattr(
        naive, "uniform", lambda seed, position, request, round, purpose: uniform(seed, position, request, 0, purpose)
    )
    patch.setattr(
        naive,
        "log_exponential",
        lambda seed, position, request, round, *rest: log_exponential(seed, position, request, 0, *rest),
    )


def requestless_key(patch) -> None:
    """Noise that does not depend on the row."""
    log_exponential = naive.log_exponential
    patch.setattr(
        naive,
        "log_exponential",
        lambda seed, position, request, *rest: log_exponential(seed, position, request * 0, *rest),
    )


def timid_drafter(patch) -> None:
    """A draft token dropped because the drafter itself gave it a low probability."""

    def draft_and_drop(self, task):
        proposal = draft(self, task)
        if proposal.scores is None:
            return proposal
        chance = proposal.scores.softmax(-1).gather(-1, proposal.ids.clamp(min=0)[..., None])[..., 0]
        sure = (chance >= 0.2).long().cumprod(-1).bool()
        return Proposal(torch.where(sure, proposal.ids, -1), proposal.scores, failed=proposal.failed)

    draft = ModelDrafter.draft
    patch.setattr(ModelDrafter, "draft", draft_and_drop)


def second_thoughts(patch) -> None:
    """A selector that sees the drafts of its own round and withdraws those that begin in the lower half."""

    def draft_and_withdraw(self, state, requests, *rest):
        ids = draft(self, state, requests, *rest)
        slots = torch.tensor([request.slot for request in requests])
        state.draft_ids.index_copy_(0, slots, torch.where(ids[:, :1] < 4, -1, ids))
        return ids

    draft = roster.Roster.draft
    patch.setattr(roster.Roster, "draft", draft_and_withdraw)


def late_choice(patch) -> None:
    """A selector that chooses the drafter once all have drafted: the one whose first token has the higher id."""

    def store_chosen(state, rows, proposals, vocab_size):
        highest = torch.stack([proposal.ids[:, 0] for _, proposal in proposals]).amax(0)
        chosen = [
            (key, replace(proposal, ids=torch.where(proposal.ids[:, :1] == highest[:, None], proposal.ids, -1)))
            for key, proposal in proposals
        ]
        return store(state, rows, chosen, vocab_size)

    store = roster.store
    patch.setattr(roster, "store", store_chosen)


def greedy_draft(patch) -> None:
    """The likeliest token drafted, and judged as if it had been drawn."""

    def draw_likeliest(self, *arguments):
        ids, scores, failed = draw(self, *arguments)
        return (ids if scores is None else scores.argmax(-1)), scores, failed

    draw = Sampler.draw
    patch.setattr(Sampler, "draw", draw_likeliest)


def redraw_when_coupled(patch) -> None:
    """Under the coupled law, a draft that differs replaced by a fresh draw instead of the target's own pick."""

    def agree_and_redraw(*arguments):
        agrees, picks, *rest = agreement(*arguments)
        target_logits, _, _, _, _, temperature, law, (seed, position, request, round) = arguments
        if law == "coupled":
            steps = position[:, None] + torch.arange(picks.shape[1])
            scaled = naive._scale(target_logits, temperature)
            picks = naive.race(scaled, seed, steps, request[:, None], round[:, None], philox.RESIDUAL)
        return agrees, picks, *rest

    agreement = naive._agreement
    patch.setattr(naive, "_agreement", agree_and_redraw)


def stale_prefix(patch) -> None:
    """Processors shown the committed text at every position, without the drafts before it."""

    def without_drafts(self, scores, ids, base, rows):
        return torch.cat(
            [call(self, scores[:, step : step + 1], ids, base, rows) for step in range(scores.shape[1])], 1
        )

    call = ProcessorPipeline.__call__
    patch.setattr(ProcessorPipeline, "__call__", without_drafts)


def swapped_rows(patch) -> None:
    """Drafts judged with the q of the row before."""

    def store_swapped(self, rows, ids, point_mass, scores):
        store(self, rows, ids, point_mass, None if scores is None else scores.roll(1, 0))

    store = SequenceState.store_drafts
    patch.setattr(SequenceState, "store_drafts", store_swapped)
