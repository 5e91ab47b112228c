"""Rules for processors that look at the scores and at the length of the prefix, left pads included."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.generation.logits_process import ExponentialDecayLengthPenalty

from .processors_prefixes import Prefixes
from .processors_rule import Placement, Rule, send, token_list, vocabulary_mask

if TYPE_CHECKING:
    from transformers.generation.logits_process import (
        ForcedBOSTokenLogitsProcessor,
        ForcedEOSTokenLogitsProcessor,
        MinLengthLogitsProcessor,
        MinNewTokensLengthLogitsProcessor,
        SuppressTokensAtBeginLogitsProcessor,
    )


def _ban_below(minimum: int, tokens: list[int], placement: Placement) -> Rule:
    banned = vocabulary_mask(tokens, placement.device)

    def apply(scores: Tensor, prefixes: Prefixes) -> Tensor:
        return scores.masked_fill((prefixes.line_lengths < minimum) & banned(scores.shape[-1]), -math.inf)

    return Rule(apply)


def min_length(processor: MinLengthLogitsProcessor, placement: Placement) -> Rule:
    return _ban_below(processor.min_length, token_list(processor.eos_token_id), placement)


def min_new_tokens(processor: MinNewTokensLengthLogitsProcessor, placement: Placement) -> Rule:
    minimum = processor.prompt_length_to_skip + processor.min_new_tokens
    return _ban_below(minimum, token_list(processor.eos_token_id), placement)


def suppress_at_begin(processor: SuppressTokensAtBeginLogitsProcessor, placement: Placement) -> Rule:
    suppressed = vocabulary_mask(token_list(processor.begin_suppress_tokens), placement.device)
    begin = processor.begin_index

    def apply(scores: Tensor, prefixes: Prefixes) -> Tensor:
        return scores.masked_fill((prefixes.line_lengths == begin) & suppressed(scores.shape[-1]), -math.inf)

    return Rule(apply)


def _force_at(length: int, tokens: list[int], placement: Placement, writes: tuple[int, ...]) -> Rule:
    forced = vocabulary_mask(tokens, placement.device)

    def apply(scores: Tensor, prefixes: Prefixes) -> Tensor:
        only_forced = torch.where(forced(scores.shape[-1]), 0.0, -math.inf).to(scores.dtype)
        return torch.where(prefixes.line_lengths == length, only_forced, scores)

    return Rule(apply, writes)


def forced_bos(processor: ForcedBOSTokenLogitsProcessor, placement: Placement) -> Rule:
    return _force_at(1, token_list(processor.bos_token_id), placement, writes=())


def forced_eos(processor: ForcedEOSTokenLogitsProcessor, placement: Placement) -> Rule:
    tokens = token_list(processor.eos_token_id)
    return _force_at(processor.max_length - 1, tokens, placement, writes=tuple(tokens))


@cache
def decay_leaves_infinite_scores() -> bool:
    """Whether the installed stock decay keeps an infinite eos score; older releases turn -inf into NaN."""
    decay = ExponentialDecayLengthPenalty((0, 2.0), 0, 0)
    return not decay(torch.zeros(1, 1, dtype=torch.long), torch.tensor([[-math.inf]])).isnan().item()


def _decay_step(factor: float, step: int) -> float:
    try:
        return float(pow(factor, step) - 1)
    except OverflowError:
        return math.inf


def exponential_decay(processor: ExponentialDecayLengthPenalty, placement: Placement) -> Rule:
    """The stock code raises `OverflowError` where `factor ** step` leaves the float range; here the penalty is inf."""
    tokens = token_list(processor.eos_token_id)
    start, factor = processor.regulation_start, processor.regulation_factor
    leaves_infinite = decay_leaves_infinite_scores()

    tables: list[Tensor] = []

    def increases(steps: int) -> Tensor:
        if not tables or tables[-1].shape[0] < steps:
            # Powers are taken on the host in double precision, as in the stock code: a device pow may round otherwise.
            values = [_decay_step(factor, step) for step in range(1 << steps.bit_length())]
            # A shorter table stays alive: a captured graph may still read it.
            tables.append(send(torch.tensor(values, dtype=torch.float64).to(torch.float32), placement.device))
        return tables[-1]

    @cache
    def eos_columns(vocabulary: int) -> Tensor:
        return send([token for token in tokens if 0 <= token < vocabulary], placement.device, torch.long)

    def apply(scores: Tensor, prefixes: Prefixes) -> Tensor:
        most = prefixes.width - start
        columns = eos_columns(scores.shape[-1])
        if most <= 0 or columns.numel() == 0:
            return scores
        table = increases(most + 1)
        step = (prefixes.line_lengths - start).clamp(0, table.shape[0] - 1)
        old = scores.index_select(1, columns)
        penalty = old.abs() * table[step]
        if leaves_infinite:
            penalty = penalty.masked_fill(~torch.isfinite(old), 0.0)
        return scores.index_copy(1, columns, torch.where(step > 0, old + penalty, old))

    return Rule(apply, writes=tuple(tokens))
