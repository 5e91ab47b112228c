"""Draws draft tokens and judges them so that what is emitted follows the target's law."""

from __future__ import annotations

from typing import Any

import torch
from psd_kernels import COUPLED, DRAFT, bad_rows, sample
from psd_kernels import accepted as accepted_once
from psd_kernels import verify as verify_drafts
from transformers import InfNanRemoveLogitsProcessor

from ..state import View
from .processors import ProcessorPipeline

NEG_INF = float("-inf")


class Judgement:
    """What verification gives: `ids` [R, T] int64 (-1 after the last emitted), `counts` [R] emitted (1 .. T), `bad`
    [R] bool, `scores` [R, T, V] fp32 processed scores, `logits` [R, T, V] as the model gave them."""

    __slots__ = ("bad", "counts", "ids", "logits", "scores")

    def __init__(
        self, ids: torch.Tensor, counts: torch.Tensor, bad: torch.Tensor, scores: torch.Tensor, logits: torch.Tensor
    ):
        self.ids, self.counts, self.bad, self.scores, self.logits = ids, counts, bad, scores, logits


class Sampler:
    """The law of one call: its logits processors, greedy or sampled, rejection or coupled, and its noise.

    Args:
        pipeline: the call's logits processors and warpers, applied at every position with the prefix up to there.
        do_sample: False is greedy.
        law: "rejection" or "coupled".
        seed: 64-bit key of the noise.

    Attributes:
        seeds: the seed on other devices, where it must lie in buffers that captured graphs read.
    """

    def __init__(self, pipeline: ProcessorPipeline, do_sample: bool, law: str, seed: int | torch.Tensor):
        self.pipeline, self.do_sample, self.law, self.seed = pipeline, do_sample, law, seed
        self.seeds: dict[torch.device, torch.Tensor] = {}
        self._elsewhere: dict[torch.device, Sampler] = {}

    @property
    def needs_scores(self) -> bool:
        """Whether verification needs the scores drafts were sampled from."""
        return self.do_sample and self.law == "rejection"

    def on(self, device: torch.device) -> Sampler:
        """The same law with its tensors on another device, for a drafter that lives there."""
        if device not in self._elsewhere:
            self._elsewhere[device] = self.elsewhere(device)
        return self._elsewhere[device]

    def elsewhere(self, device: torch.device) -> Sampler:
        """A copy on another device."""
        seed = self.seeds.get(device, self.seed)
        seed = seed.to(device) if isinstance(seed, torch.Tensor) else seed
        return Sampler(self.pipeline.to(device), self.do_sample, self.law, seed)

    def row_index(self, view: View) -> torch.Tensor:
        """[R] int64, each row's number in the batch that the processors were prepared for."""
        return view.rows.slots

    def row_number(self, view: View, row: int) -> int:
        """The same for one row, on the host."""
        return view.rows.numbers[row]

    def draw(
        self, logits: torch.Tensor, view: View, step: int, vocab_size: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Draws draft number `step` (from 0) of each row.

        Args:
            logits: [R, V'] of the drafter; V' may differ from the target's `vocab_size`.
            view: the rows; `view.tokens` already holds the drafts before this one.

        Returns:
            ids [R] int64 (-1 where the row failed), the processed scores [R, vocab_size] fp32 they were drawn from
            (None when verification needs none), and failed [R] bool: the drafter gave NaN or nothing finite.
        """
        scores = fit(logits, vocab_size)
        failed = bad_rows(scores)
        column = view.padding + view.length + step
        if not self.pipeline.empty:
            scores = self.pipeline.draft(scores.float()[:, None], view.tokens, column, self.row_index(view))[:, 0]
        coupled = self.law == "coupled"
        ids = sample(
            scores,
            temperature=self._temperature(scores),
            seed=self.seed,
            position=view.length + step,
            request=view.request,
            round=torch.zeros_like(view.round) if coupled else view.round,
            purpose=COUPLED if coupled else DRAFT,
        ).ids
        return torch.where(failed, -1, ids), scores.float() if self.needs_scores else None, failed

    def judge(
        self,
        logits: torch.Tensor,
        draft_ids: torch.Tensor,
        view: View,
        draft_scores: torch.Tensor | None,
        point_mass: torch.Tensor,
    ) -> Judgement:
        """Accepts or rejects drafts and draws the token after them.

        Args:
            logits: [R, T, V] of the target; position i has seen i drafts.
            draft_ids: [R, T - 1] int64, -1 where there is none.
            view: the rows before the commit; `view.tokens` already holds the drafts.
            draft_scores: [R, T - 1, V] fp32 that sampled drafts came from, or None.
            point_mass: [R] bool, rows whose drafts have probability 1.
        """
        law: dict[str, Any] = dict(
            temperature=self._temperature(logits),
            law=self.law,
            seed=self.seed,
            request=view.request,
            round=view.round,
        )
        scores = logits
        if self.pipeline.exact_only:
            scores = self._one_by_one(logits, draft_ids, view, draft_scores, point_mass, law)
        elif not self.pipeline.empty:
            scores = self.pipeline(logits.float(), view.tokens, view.padding + view.length, self.row_index(view))
        if draft_scores is None:
            point_mass = torch.ones_like(point_mass)
        verdict = verify_drafts(
            scores, draft_ids, draft_logits=draft_scores, point_mass=point_mass, position=view.length, **law
        )
        repaired = any(type(each) is InfNanRemoveLogitsProcessor for each in self.pipeline.processors)
        bad = verdict.bad if scores is logits or repaired else verdict.bad | bad_rows(logits[:, 0])
        return Judgement(verdict.ids, verdict.n_emitted, bad, scores, logits)

    def _one_by_one(self, logits, draft_ids, view, draft_scores, point_mass, law) -> torch.Tensor:
        """For processors that must see true prefixes only, once: position i is scored when drafts < i are accepted."""
        scores = logits.float().clone()
        alive = list(range(logits.shape[0]))
        ends = (view.padding + view.length).tolist()
        for i in range(logits.shape[1]):
            for row in alive:
                prefix = view.tokens[row : row + 1, : ends[row] + i]
                new = self.pipeline.one(scores[row : row + 1, i], prefix, self.row_number(view, row))
                if new.shape != (1, scores.shape[-1]):
                    raise ValueError(
                        "psd: logits processors are called for one row at a time and must return scores of shape "
                        f"[1, {scores.shape[-1]}], got {list(new.shape)}."
                    )
                scores[row, i] = new[0]
            if i == draft_ids.shape[1]:
                break
            q = None if draft_scores is None else draft_scores[:, i]
            point = torch.ones_like(point_mass) if q is None else point_mass
            stands = accepted_once(
                scores[:, i], draft_ids[:, i], draft_logits=q, point_mass=point, position=view.length + i, **law
            ).tolist()
            alive = [row for row in alive if stands[row]]
            if not alive:
                break
        return scores

    def _temperature(self, scores: torch.Tensor) -> torch.Tensor | None:
        """The warpers have applied the call's temperature; the kernels' own is 1, or None for greedy rows."""
        return torch.ones(scores.shape[0], device=scores.device) if self.do_sample else None


def fit(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Cuts or fills the last dimension to `vocab_size`: ids that only one side knows cannot be drafted."""
    width = logits.shape[-1]
    if width >= vocab_size:
        return logits[..., :vocab_size]
    return torch.nn.functional.pad(logits, (0, vocab_size - width), value=NEG_INF)
