"""Rules for processors that look at the scores alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributions import Categorical

from .processors_prefixes import Prefixes
from .processors_rule import Placement, Rule, send, token_list, vocabulary_mask

if TYPE_CHECKING:
    from transformers.generation.logits_process import (
        BarkEosPrioritizerLogitsProcessor,
        EtaLogitsWarper,
        LogitsProcessor,
        SuppressTokensLogitsProcessor,
        TopHLogitsWarper,
    )


def line_by_line(processor: LogitsProcessor, placement: Placement) -> Rule:
    """Processors whose stock code treats each line for itself, holds no tensor and never waits for the device."""
    return Rule(lambda scores, prefixes: processor(None, scores))


def suppress_tokens(processor: SuppressTokensLogitsProcessor, placement: Placement) -> Rule:
    suppressed = vocabulary_mask(token_list(processor.suppress_tokens), placement.device)
    return Rule(lambda scores, prefixes: scores.masked_fill(suppressed(scores.shape[-1]), -math.inf))


def eta(processor: EtaLogitsWarper, placement: Placement) -> Rule:
    """Eta sampling (Hewitt et al. 2022, "Truncation Sampling as Language Model Desmoothing").

    The stock code validates the scores, which waits for the device; this rule does not, so NaN scores pass through.
    """
    epsilon = send(processor.epsilon, placement.device)

    def apply(scores: Tensor, prefixes: Prefixes) -> Tensor:
        entropy = Categorical(logits=scores, validate_args=False).entropy()
        threshold = torch.min(epsilon, torch.sqrt(epsilon) * torch.exp(-entropy))[..., None]
        kept = min(processor.min_tokens_to_keep, scores.shape[-1])
        below_kept = scores < torch.topk(scores, kept)[0][..., -1, None]
        return scores.masked_fill((scores.softmax(dim=-1) < threshold) & below_kept, processor.filter_value)

    return Rule(apply)


def top_h(processor: TopHLogitsWarper, placement: Placement) -> Rule:
    """Top-H decoding (Potraghloo et al. 2025), without the stock code's validation, which waits for the device."""

    def apply(scores: Tensor, prefixes: Prefixes) -> Tensor:
        top_scores, top_ids = torch.topk(scores, min(processor.top_n, scores.shape[-1]), dim=-1)
        distribution = Categorical(logits=top_scores, validate_args=False)
        probabilities = distribution.probs
        bound = (distribution.entropy() * processor.top_h)[..., None]
        selected = torch.cumsum(-probabilities * torch.log(probabilities), dim=-1) <= bound
        selected[:, 0] = True
        kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, top_ids, selected)
        return scores.masked_fill(~kept, processor.filter_value)

    return Rule(apply)


def eos_prioritizer(processor: BarkEosPrioritizerLogitsProcessor, placement: Placement) -> Rule:
    tokens = token_list(processor.eos_token_id)
    eos = vocabulary_mask(tokens, placement.device)

    def apply(scores: Tensor, prefixes: Prefixes) -> Tensor:
        if not processor.min_eos_p:
            return scores
        is_eos = eos(scores.shape[-1])
        likely = (scores.float().softmax(dim=-1) > processor.min_eos_p) & is_eos
        return scores.masked_fill(likely.any(dim=-1, keepdim=True) & ~is_eos, -math.inf)

    return Rule(apply, writes=tuple(tokens))
