"""Rules for processors that look at the tokens of the prefix, or of the prompt."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation.logits_process import EncoderRepetitionPenaltyLogitsProcessor

from .processors_prefixes import Prefixes
from .processors_rule import Placement, Rule, rewrite, send

if TYPE_CHECKING:
    from transformers.generation.logits_process import (
        EncoderNoRepeatNGramLogitsProcessor,
        NoRepeatNGramLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
    )


def _rescale(penalty: float) -> Callable[[Tensor], Tensor]:
    return lambda old: torch.where(old < 0, old * penalty, old / penalty)


def _ban(old: Tensor) -> Tensor:
    return torch.full_like(old, -math.inf)


def repetition_penalty(processor: RepetitionPenaltyLogitsProcessor, placement: Placement) -> Rule:
    """Repetition penalty (Keskar et al. 2019, CTRL), leaving out each row's own ignored columns (its left pads)."""
    ignored = processor.prompt_ignore_length
    if isinstance(ignored, Tensor):
        if placement.batch_size is not None and ignored.shape[0] != placement.batch_size:
            raise ValueError(
                f"RepetitionPenaltyLogitsProcessor: `prompt_ignore_length` has {ignored.shape[0]} entries for a batch "
                f"of {placement.batch_size} rows. Give one per row, counted after `num_return_sequences` expansion."
            )
        ignored = ignored.to(placement.device, non_blocking=True)
    change = _rescale(processor.penalty)

    def apply(scores: Tensor, prefixes: Prefixes) -> Tensor:
        seen = prefixes.visible()
        if isinstance(ignored, Tensor):
            seen = seen & (prefixes.columns() >= ignored[prefixes.rows][:, None, None])
        elif ignored:
            seen = seen & (prefixes.columns() >= ignored)
        return rewrite(scores, prefixes.spread(prefixes.ids), seen.flatten(0, 1), change)

    return Rule(apply)


@cache
def encoder_penalty_follows_copies() -> bool:
    """Whether the installed stock code repeats the prompts for `num_return_sequences`.

    Older releases pair batch row k with prompt k, and leave rows without a prompt of their number alone.
    """
    prompt: Any = torch.zeros(1, 1, dtype=torch.long)
    scores = EncoderRepetitionPenaltyLogitsProcessor(2.0, prompt)(prompt, torch.ones(2, 1))
    return bool(scores[1, 0] != 1)


def encoder_repetition_penalty(processor: EncoderRepetitionPenaltyLogitsProcessor, placement: Placement) -> Rule:
    prompts = processor.encoder_input_ids.to(placement.device, non_blocking=True)
    sources = prompts.shape[0]
    follows = encoder_penalty_follows_copies()
    copies = placement.copies(sources) if follows else 1
    change = _rescale(processor.penalty)

    def apply(scores: Tensor, prefixes: Prefixes) -> Tensor:
        source = prefixes.rows // copies
        tokens = prompts[source if follows else source.clamp(max=sources - 1)]
        return rewrite(scores, prefixes.spread(tokens), prefixes.spread((source < sources)[:, None]), change)

    return Rule(apply)


def no_repeat_ngram(processor: NoRepeatNGramLogitsProcessor, placement: Placement) -> Rule:
    size = processor.ngram_size

    def apply(scores: Tensor, prefixes: Prefixes) -> Tensor:
        if prefixes.width < size:
            return scores
        windows = prefixes.width - size + 1
        suffix = prefixes.tail(size - 1)
        matches = prefixes.columns()[size - 1 :] < prefixes.lengths[..., None]
        for offset in range(size - 1):
            matches = matches & (prefixes.ids[:, None, offset : offset + windows] == suffix[..., offset, None])
        return rewrite(scores, prefixes.spread(prefixes.ids[:, size - 1 :]), matches.flatten(0, 1), _ban)

    return Rule(apply)


def encoder_no_repeat_ngram(processor: EncoderNoRepeatNGramLogitsProcessor, placement: Placement) -> Rule:
    size = processor.ngram_size
    per_prompt = [
        [(*start, follower) for start, followers in ngrams.items() for follower in followers]
        for ngrams in processor.generated_ngrams
    ]
    most = max(1, *map(len, per_prompt))
    filled = [ngrams + [(-2,) * size] * (most - len(ngrams)) for ngrams in per_prompt]
    prompts = send(filled, placement.device, torch.long)
    copies = placement.copies(len(per_prompt))

    def apply(scores: Tensor, prefixes: Prefixes) -> Tensor:
        ngrams = prompts[prefixes.rows // copies]
        suffix = prefixes.tail(size - 1)
        matches = torch.ones((*prefixes.lengths.shape, most), dtype=torch.bool, device=scores.device)
        for offset in range(size - 1):
            matches = matches & (ngrams[:, None, :, offset] == suffix[..., offset, None])
        return rewrite(scores, prefixes.spread(ngrams[..., -1]), matches.flatten(0, 1), _ban)

    return Rule(apply)
