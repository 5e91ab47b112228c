"""Tiny models and drafting policies for tests."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from .. import bandit
from ..config import PSDConfig
from ..hooks import StepContext, StepHook
from ..learning import BanditSelector
from ..phases import Request
from ..selection import Arm, Feedback, Plan


def tiny_llama(seed: int, vocab_size: int = 8, spread: float = 0.35, lift: float = 0.0) -> LlamaForCausalLM:
    """A random two-layer Llama in fp32 on the CPU.

    Args:
        seed: of the weights; torch's default generator is left as it was.
        spread: standard deviation of the weights; larger makes the laws more peaked.
        lift: added to every logit, which leaves every law alone, though not its rounding.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=spread,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
    if lift:
        model.lm_head.bias = torch.nn.Parameter(torch.full((vocab_size,), lift))
    return model


def noisy_copy(model: PreTrainedModel, amount: float, seed: int = 7) -> PreTrainedModel:
    """A copy whose weights are off by `amount` standard deviations each: a drafter that agrees part of the time."""
    drafter, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * amount * weight.std(correction=0))
    return drafter


class FullDepth:
    """Every row drafts as much as it can, each turn with the next drafter."""

    def __init__(self) -> None:
        self.turn = 0

    def plan(self, requests: Sequence[Request], arms: Sequence[Arm], gamma: int) -> Plan:
        arm = arms[self.turn % len(arms)]
        self.turn += 1
        return [(arm.key, [gamma] * len(requests))]

    def feedback(self, results: Sequence[Feedback]) -> None:
        """Nothing to learn."""


class BothAtOnce(FullDepth):
    """Every row lets all drafters draft, half of the rows preferring each order."""

    def plan(self, requests: Sequence[Request], arms: Sequence[Arm], gamma: int) -> Plan:
        halves = [[gamma * (request.index % 2 == half) for request in requests] for half in (0, 1)]
        full = [gamma] * len(requests)
        return [(arms[0].key, halves[0]), (arms[-1].key, full), (arms[0].key, halves[1])]


class StayOrSwitch(FullDepth):
    """Per row: stays with a drafter whose last draft was wholly accepted, else tries the next at half the depth."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[int, Feedback] = {}

    def plan(self, requests: Sequence[Request], arms: Sequence[Arm], gamma: int) -> Plan:
        budgets = {arm.key: [0] * len(requests) for arm in arms}
        for row, request in enumerate(requests):
            last = self.last.get(request.index)
            pleased = last is None or last.accepted == last.drafted
            key = arms[request.index % len(arms)].key if last is None or last.arm is None else last.arm
            place = [arm.key for arm in arms].index(key)
            chosen = arms[(place + (not pleased)) % len(arms)]
            budgets[chosen.key][row] = gamma if pleased else (gamma + 1) // 2
        return list(budgets.items())

    def feedback(self, results: Sequence[Feedback]) -> None:
        self.last.update((result.request.index, result) for result in results)


class BestForAll(FullDepth):
    """One drafter for all rows: the one with the best acceptance so far over the batch; unknown ones come first."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[int, list[int]] = {}

    def plan(self, requests: Sequence[Request], arms: Sequence[Arm], gamma: int) -> Plan:
        def rate(arm: Arm) -> float:
            accepted, drafted = self.counts.get(arm.key, (1, 0))
            return accepted / max(drafted, 1)

        return [(max(arms, key=rate).key, [gamma] * len(requests))]

    def feedback(self, results: Sequence[Feedback]) -> None:
        for result in results:
            if result.arm is not None:
                counts = self.counts.setdefault(result.arm, [0, 0])
                counts[0] += result.accepted
                counts[1] += result.drafted


class RaggedDepths(FullDepth):
    """Rows draft between no token and gamma tokens, depending on the row and on what was accepted before."""

    def __init__(self) -> None:
        super().__init__()
        self.accepted: dict[int, int] = {}

    def plan(self, requests: Sequence[Request], arms: Sequence[Arm], gamma: int) -> Plan:
        self.turn += 1
        depths = [
            (request.index + self.turn + self.accepted.get(request.index, 0)) % (gamma + 1) for request in requests
        ]
        return [(arms[0].key, depths)]

    def feedback(self, results: Sequence[Feedback]) -> None:
        self.accepted.update((result.request.index, result.accepted) for result in results)


class Peeking(FullDepth, StepHook):
    """Looks at every draft, discarded ones too (pass it as `selector` and in `psd_hooks`; it waits for the device).

    A row that drafted two tokens drafts again only if the second was in the upper half of the vocabulary, else it
    draws its next token plainly, once. Where the first token was rejected, the second was discarded: whoever drew it
    again from the same noise would see its law bent.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.half = vocab_size // 2
        self.seen: dict[int, int] = {}

    def after_draft(self, context: StepContext) -> None:
        assert context.drafts is not None
        for request, ids in zip(context.requests, context.drafts.tolist()):
            if len(ids) > 1 and ids[1] >= 0:
                self.seen[request.index] = ids[1]

    def plan(self, requests: Sequence[Request], arms: Sequence[Arm], gamma: int) -> Plan:
        depths = [gamma if self.seen.pop(request.index, self.half) >= self.half else 0 for request in requests]
        return [(arms[0].key, depths)]


class PeekingChoice(Peeking):
    """Looks at every draft like `Peeking`, and lets it decide which of two drafters draws next."""

    def plan(self, requests: Sequence[Request], arms: Sequence[Arm], gamma: int) -> Plan:
        liked = [self.seen.pop(request.index, self.half) >= self.half for request in requests]
        return [
            (arms[0].key, [gamma * like for like in liked]),
            (arms[-1].key, [gamma * (not like) for like in liked]),
        ]


class EveryBandit(FullDepth):
    """Rows take turns among all shipped bandits, each with one bandit of every kind for its rows.

    Args:
        n_drafters: drafters of the call.
        config: settings of the call that the bandits follow.
    """

    def __init__(self, n_drafters: int, **config: Any) -> None:
        super().__init__()
        settings = PSDConfig(**config)
        self.selectors = [BanditSelector(name, settings, n_drafters, 0, sampled=True) for name in bandit.names()]

    def plan(self, requests: Sequence[Request], arms: Sequence[Arm], gamma: int) -> Plan:
        merged = {arm.key: [0] * len(requests) for arm in arms}
        for turn, selector in enumerate(self.selectors):
            rows = [row for row, request in enumerate(requests) if request.index % len(self.selectors) == turn]
            for key, budgets in selector.plan([requests[row] for row in rows], arms, gamma) if rows else []:
                for row, budget in zip(rows, budgets):
                    merged[key][row] = budget
        return list(merged.items())

    def feedback(self, results: Sequence[Feedback]) -> None:
        for turn, selector in enumerate(self.selectors):
            own = [result for result in results if result.request.index % len(self.selectors) == turn]
            if own:
                selector.feedback(own)

    def launched(self, requests: Sequence[Request]) -> None:
        for selector in self.selectors:
            selector.launched(requests)

    def end(self) -> None:
        for selector in self.selectors:
            selector.end()
