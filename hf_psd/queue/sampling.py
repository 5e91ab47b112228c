"""The output law of a batch whose rows have laws of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..runner import Rows, upload
from ..state import View
from ..verify.processors import ProcessorPipeline
from ..verify.sampler import Judgement, Sampler


class RequestSampler(Sampler):
    """A sampler whose processors were prepared for one prompt: every row it sees is row 0 of a batch of one."""

    def row_index(self, view: View) -> torch.Tensor:
        return torch.zeros_like(view.length)

    def row_number(self, view: View, row: int) -> int:
        return 0

    def elsewhere(self, device: torch.device) -> Sampler:
        return RequestSampler(self.pipeline.to(device), self.do_sample, self.law, self.seed)


@dataclass
class Seating:
    """Which law each slot follows, as the host has seated them.

    Attributes:
        laws: by slot.
        only: the law of every row of the step, where the step is captured and slots are known to the device alone.
        failures: what a slot's processors raised in the newest verification.
    """

    laws: dict[int, Sampler] = field(default_factory=dict)
    only: Sampler | None = None
    failures: dict[int, Exception] = field(default_factory=dict)


class MixedSampler(Sampler):
    """Lets every row be drawn and judged by its own law; rows of equal laws are treated at once.

    Args:
        verification: "rejection" or "coupled", the same for all.
        seating: kept up to date by the queue.
        device: where the rows' tensors are.
        keep_scores: whether judgements carry the processed scores.
    """

    def __init__(self, verification: str, seating: Seating, device: torch.device, keep_scores: bool = False):
        super().__init__(ProcessorPipeline(None, device), True, verification, 0)
        self.seating, self.device, self.keep_scores = seating, device, keep_scores
        self._here: Callable[[Sampler], Sampler] = lambda law: law

    @property
    def needs_scores(self) -> bool:
        laws = set(self.seating.laws.values()) if self.seating.only is None else {self.seating.only}
        return any(law.needs_scores for law in laws)

    def elsewhere(self, device: torch.device) -> Sampler:
        other = MixedSampler(self.law, self.seating, device)
        other._here = lambda law: law.on(device)
        return other

    def draw(
        self, logits: torch.Tensor, view: View, step: int, vocab_size: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        rows = logits.shape[0]
        ids = torch.full((rows,), -1, dtype=torch.long, device=logits.device)
        failed = torch.zeros(rows, dtype=torch.bool, device=logits.device)
        scores = torch.zeros(rows, vocab_size, device=logits.device) if self.needs_scores else None
        for law, _, at, part in self._parts(view):
            try:
                drawn, its_scores, bad = law.draw(_take(logits, at), part, step, vocab_size)
            except Exception:  # the processors will raise again in the verification, which ends these requests
                if self.seating.only is not None:
                    raise
                continue
            if at is None:
                return drawn, scores if its_scores is None else its_scores, bad
            ids.index_copy_(0, at, drawn)
            failed.index_copy_(0, at, bad)
            if its_scores is not None and scores is not None:
                scores.index_copy_(0, at, its_scores)
        return ids, scores, failed

    def judge(
        self,
        logits: torch.Tensor,
        draft_ids: torch.Tensor,
        view: View,
        draft_scores: torch.Tensor | None,
        point_mass: torch.Tensor,
    ) -> Judgement:
        rows, width, vocab = logits.shape
        ids = torch.full((rows, width), -1, dtype=torch.long, device=logits.device)
        counts = torch.zeros(rows, dtype=torch.long, device=logits.device)
        bad = torch.zeros(rows, dtype=torch.bool, device=logits.device)
        scores = torch.zeros(rows, width, vocab, device=logits.device) if self.keep_scores else logits
        for law, numbers, at, part in self._parts(view):
            try:
                judged = law.judge(
                    _take(logits, at), _take(draft_ids, at), part, _take(draft_scores, at), _take(point_mass, at)
                )
            except Exception as error:
                if self.seating.only is not None:  # a graph would go on without it
                    raise
                self.seating.failures.update(dict.fromkeys(numbers, error))
                continue
            if at is None:
                return judged
            ids.index_copy_(0, at, judged.ids)
            counts.index_copy_(0, at, judged.counts)
            bad.index_copy_(0, at, judged.bad)
            if self.keep_scores:
                scores.index_copy_(0, at, judged.scores.float())
        return Judgement(ids, counts, bad, scores, logits)

    def _parts(self, view: View) -> list[tuple[Sampler, list[int], torch.Tensor | None, View]]:
        """Each law of the view with its slots, their places among the rows (None: all) and their own view."""
        if self.seating.only is not None:
            return [(self._here(self.seating.only), [], None, view)]
        numbers = view.rows.numbers
        places: dict[Sampler, list[int]] = {}
        for place, slot in enumerate(numbers):
            places.setdefault(self.seating.laws[slot], []).append(place)
        if len(places) == 1:
            (law,) = places
            return [(self._here(law), numbers, None, view)]
        parts = []
        for law, index in places.items():
            slots, at = [numbers[place] for place in index], upload(index, self.device)
            parts.append((self._here(law), slots, at, view.subset(Rows(slots, self.device), at)))
        return parts


def _take(tensor, at):
    return tensor if tensor is None or at is None else tensor.index_select(0, at)
