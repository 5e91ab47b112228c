"""Sampling over the tokens that two vocabularies share (Timor et al. 2025, arXiv 2502.05202)."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ..runner import output_vocab_size, upload
from ..state import View
from .base import Proposal, Session
from .retokenized import RetokenizedDrafter


class SharedVocabularyDrafter(RetokenizedDrafter):
    """A `RetokenizedDrafter` that samples when the call samples.

    Each draft is drawn from the drafter's distribution limited to the tokens both vocabularies have, in the target's
    ids and through the call's own processors. That distribution is the q of the verification, so the output law is
    exact; greedy calls, and pairs that share no token, re-encode instead.
    """

    kind = "shared_vocabulary"

    def __init__(self, model: PreTrainedModel, key: int, tokenizer: Any, own_tokenizer: Any):
        super().__init__(model, key, tokenizer, own_tokenizer)
        ours, theirs = self.translator.shared_ids()
        width = output_vocab_size(model)
        self._pairs = [(our, their) for our, their in zip(ours, theirs) if their < width]

    def start(self, session: Session) -> None:
        super().start(session)
        pairs = [pair for pair in self._pairs if pair[0] < session.vocab_size]
        self._samples = session.sampler.do_sample and bool(pairs)
        if self._samples:
            self._ours = upload([our for our, _ in pairs], self.device)
            self._theirs = upload([their for _, their in pairs], self.device)
            known = torch.zeros(session.vocab_size, dtype=torch.long, device=self.device)
            self._to_theirs = known.index_copy_(0, self._ours, self._theirs)

    def _propose(self, view: View, texts: list[list[int]], own: list[list[int]], budgets: list[int]) -> Proposal:
        if not self._samples or max(budgets) == 0:
            return super()._propose(view, texts, own, budgets)
        session, budget = self._session, upload(budgets, self.device)
        gamma, depth = session.limits.gamma, max(budgets)
        start = upload([len(ids) for ids in own], self.device)
        ids = torch.full((len(own), gamma), -1, dtype=torch.long, device=self.device)
        failed, all_scores = torch.zeros_like(view.done), []
        logits = self._read(view, own, budgets)
        for step in range(depth):
            mapped = logits.new_full((len(own), session.vocab_size), float("-inf"))
            mapped[:, self._ours] = logits[:, self._theirs]
            drawn, scores, bad = self._sampler.draw(mapped, view, step, session.vocab_size)
            failed = failed | bad & (step < budget)
            drawn = torch.where((step < budget) & ~failed, drawn, -1)
            ids[:, step] = drawn
            all_scores.append(scores)
            view.tokens.scatter_(1, (view.padding + view.length + step)[:, None], drawn[:, None].clamp(min=0))
            if step + 1 < depth:
                fed = self._to_theirs[drawn.clamp(min=0)][:, None]
                at = torch.where(step + 1 < budget, start + step, -1)
                logits = self._forward(view, fed, at[:, None], max(map(len, own)) + step + 1)
        self.forwards += depth
        if not self._sampler.needs_scores:
            return Proposal(ids, failed=failed)
        empty = torch.zeros(len(own), session.vocab_size, device=self.device)
        return Proposal(ids, torch.stack(all_scores + [empty] * (gamma - depth), 1), failed=failed)
