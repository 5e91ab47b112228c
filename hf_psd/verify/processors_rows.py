"""Stock processors that know the whole batch, called for one row of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from .processors_rule import Placement
from .processors_tokens import encoder_penalty_follows_copies


def _repetition(processor: RepetitionPenaltyLogitsProcessor, row: int, placement: Placement) -> dict[str, Any]:
    ignored = getattr(processor, "prompt_ignore_length", None)
    return {"prompt_ignore_length": ignored[row : row + 1]} if isinstance(ignored, Tensor) else {}


def _encoder_repetition(
    processor: EncoderRepetitionPenaltyLogitsProcessor, row: int, placement: Placement
) -> dict[str, Any]:
    prompts = processor.encoder_input_ids
    source = row // (placement.copies(prompts.shape[0]) if encoder_penalty_follows_copies() else 1)
    return {"encoder_input_ids": prompts[source : source + 1]}


def _encoder_ngram(processor: EncoderNoRepeatNGramLogitsProcessor, row: int, placement: Placement) -> dict[str, Any]:
    ngrams = processor.generated_ngrams
    return {"generated_ngrams": [ngrams[row // placement.copies(len(ngrams))]], "batch_size": 1}


def _prefix_constrained(processor: PrefixConstrainedLogitsProcessor, row: int, placement: Placement) -> dict[str, Any]:
    allowed, prompt = processor._prefix_allowed_tokens_fn, row // processor._num_beams
    return {"_prefix_allowed_tokens_fn": lambda _, prefix: allowed(prompt, prefix), "_num_beams": 1}


_ATTRIBUTES: dict[type[LogitsProcessor], Callable[[Any, int, Placement], dict[str, Any]]] = {
    RepetitionPenaltyLogitsProcessor: _repetition,
    EncoderRepetitionPenaltyLogitsProcessor: _encoder_repetition,
    EncoderNoRepeatNGramLogitsProcessor: _encoder_ngram,
    PrefixConstrainedLogitsProcessor: _prefix_constrained,
}


def _stock_call(processor: LogitsProcessor, ids: Tensor, scores: Tensor) -> Tensor:
    stock: Any = LogitsProcessorList([processor])
    return stock(ids, scores)


def call_for_row(processor: LogitsProcessor, ids: Tensor, scores: Tensor, row: int, placement: Placement) -> Tensor:
    """`processor(ids [1, cur], scores [1, V])` as it would treat row `row` of the whole batch.

    A stock object is copied with the row's share of its attributes. An instance of a user's subclass is called itself,
    its attributes exchanged for the time of the call, so that what it records about its calls is kept.
    """
    for known, attributes in _ATTRIBUTES.items():
        if isinstance(processor, known):
            changes = attributes(processor, row, placement)
            break
    else:
        changes = {}
    if not changes:
        return _stock_call(processor, ids, scores)
    if type(processor) is known:
        processor = copy.copy(processor)
        vars(processor).update(changes)
        return _stock_call(processor, ids, scores)
    kept = {name: getattr(processor, name) for name in changes}
    vars(processor).update(changes)
    try:
        return _stock_call(processor, ids, scores)
    finally:
        vars(processor).update(kept)
