"""HF logits processors, exact at every verified position of every row."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

from .processors_bias import sequence_bias
from .processors_lengths import (
    exponential_decay,
    forced_bos,
    forced_eos,
    min_length,
    min_new_tokens,
    suppress_at_begin,
)
from .processors_prefixes import Prefixes
from .processors_refused import REFUSED, refusal
from .processors_rows import call_for_row
from .processors_rule import Placement, Rule
from .processors_scores import eos_prioritizer, eta, line_by_line, suppress_tokens, top_h
from .processors_tokens import (
    encoder_no_repeat_ngram,
    encoder_repetition_penalty,
    no_repeat_ngram,
    repetition_penalty,
)

_RULES: dict[str, Callable[[Any, Placement], Rule]] = {
    "TemperatureLogitsWarper": line_by_line,
    "TopKLogitsWarper": line_by_line,
    "TopPLogitsWarper": line_by_line,
    "MinPLogitsWarper": line_by_line,
    "TypicalLogitsWarper": line_by_line,
    "EpsilonLogitsWarper": line_by_line,
    "EtaLogitsWarper": eta,
    "TopHLogitsWarper": top_h,
    "LogitNormalization": line_by_line,
    "InfNanRemoveLogitsProcessor": line_by_line,
    "SuppressTokensLogitsProcessor": suppress_tokens,
    "BarkEosPrioritizerLogitsProcessor": eos_prioritizer,
    "MinLengthLogitsProcessor": min_length,
    "MinNewTokensLengthLogitsProcessor": min_new_tokens,
    "ForcedBOSTokenLogitsProcessor": forced_bos,
    "ForcedEOSTokenLogitsProcessor": forced_eos,
    "SuppressTokensAtBeginLogitsProcessor": suppress_at_begin,
    "ExponentialDecayLengthPenalty": exponential_decay,
    "RepetitionPenaltyLogitsProcessor": repetition_penalty,
    "NoRepeatNGramLogitsProcessor": no_repeat_ngram,
    "SequenceBiasLogitsProcessor": sequence_bias,
    "NoBadWordsLogitsProcessor": sequence_bias,
    "EncoderRepetitionPenaltyLogitsProcessor": encoder_repetition_penalty,
    "EncoderNoRepeatNGramLogitsProcessor": encoder_no_repeat_ngram,
}
_ONE_BY_ONE = (
    "PrefixConstrainedLogitsProcessor",
    "WatermarkLogitsProcessor",
    "UnlimitedOcrSlidingWindowNoRepeatNgramLogitsProcessor",
)

PATHS: dict[str, str] = {
    **dict.fromkeys(_RULES, "vectorised"),
    **dict.fromkeys(_ONE_BY_ONE, "one-by-one"),
    **dict.fromkeys(REFUSED, "refused"),
}
"""Path of each transformers logits processor, by class name: "vectorised", "one-by-one" or "refused".

Any class of the user's own, subclasses included, goes "one-by-one"; a subclass of a refused class is refused.
"""


def unlisted_processors() -> list[str]:
    """Names of the logits processors in the installed `transformers.generation.logits_process` that `PATHS` lacks."""
    return sorted(
        name
        for name, cls in vars(logits_process).items()
        if inspect.isclass(cls)
        and issubclass(cls, LogitsProcessor)
        and cls is not LogitsProcessor
        and cls.__module__ == logits_process.__name__
        and name not in PATHS
    )


def _rule(processor: LogitsProcessor, placement: Placement) -> Rule | None:
    name = type(processor).__name__
    if name not in _RULES or type(processor) is not getattr(logits_process, name, None):
        return None
    return _RULES[name](processor, placement)


class ProcessorPipeline:
    """A `LogitsProcessorList` applied at T positions of R rows of different length, bit for bit as `generate` would.

    The result equals calling each processor, in list order, on every true prefix `ids[r, : base[r] + i]`. Processors
    are read once, at construction. NaN scores pass through (stock eta and top-h sampling raise on them).

    On several CPU threads a sum over one line of 32768 or more scores may round otherwise than a sum over many lines,
    in the stock code as here; this concerns typical and eta sampling, whose thresholds are such sums.

    Args:
        processors: As `generate` prepares them; None means none.
        device: Where scores and ids will be.
        batch_size: Rows of the original batch, after `num_return_sequences` expansion. Needed only with encoder
            penalties and more than one return sequence, to find each row's prompt.

    Raises:
        ValueError: A processor keeps state between calls, is made for other models, or for another batch size.
    """

    def __init__(
        self,
        processors: LogitsProcessorList | Iterable[LogitsProcessor] | None,
        device: torch.device | str,
        batch_size: int | None = None,
    ) -> None:
        self.processors = LogitsProcessorList(processors or ())
        for processor in self.processors:
            message = refusal(processor, PATHS)
            if message is not None:
                raise ValueError(message)
        self._placement = Placement(torch.device(device), batch_size)
        self._rules = [_rule(processor, self._placement) for processor in self.processors]
        self._checked_vocabularies: set[int] = set()

    @property
    def device(self) -> torch.device:
        """Where the pipeline's tensors are."""
        return self._placement.device

    @property
    def empty(self) -> bool:
        """True if there is nothing to apply."""
        return not self.processors

    @property
    def exact_only(self) -> bool:
        """True if a processor must be called one prefix at a time, through `one`."""
        return None in self._rules

    def to(self, device: torch.device | str) -> ProcessorPipeline:
        """A copy whose tensors are on `device`; a second stream of the same device needs its own copy, too."""
        return ProcessorPipeline(self.processors, device, self._placement.batch_size)

    def __call__(self, scores: Tensor, ids: Tensor, base: Tensor, rows: Tensor) -> Tensor:
        """Apply every processor at every position, without waiting for the device.

        Args:
            scores: `[R, T, V]` fp32; left as it is.
            ids: `[R, W]` int64; per row left pads, prompt, committed tokens and drafts, contiguous. What comes after
                the last prefix is ignored.
            base: `[R]` int64; columns before the first position, left pads included. `base + T - 1 <= W`.
            rows: `[R]` int64; index of each row in the original batch. A row past it (one that fills a captured
                group up) is treated like the batch's last.

        Returns:
            `[R, T, V]` fp32; `scores` itself if there is nothing to apply.

        Raises:
            RuntimeError: `exact_only`; use `one`.
            ValueError: A processor names a token id outside the vocabulary.
        """
        if self.exact_only:
            names = [type(p).__name__ for p, rule in zip(self.processors, self._rules, strict=True) if rule is None]
            raise RuntimeError(f"{', '.join(names)} must be called one prefix at a time: use ProcessorPipeline.one.")
        self._check_vocabulary(scores.shape[-1])
        return self.draft(scores, ids, base, rows)

    def draft(self, scores: Tensor, ids: Tensor, base: Tensor, rows: Tensor) -> Tensor:
        """Apply the vectorisable processors only, for a drafter: arguments and result as for a call.

        User code is never called. V may be the drafter's own vocabulary: what concerns tokens outside it is left out.
        """
        rules = [rule for rule in self._rules if rule is not None]
        if not rules:
            return scores
        if self._placement.batch_size is not None:
            rows = rows.clamp(max=self._placement.batch_size - 1)
        prefixes = Prefixes(ids, base, rows, scores.shape[1])
        lines = scores.flatten(0, 1)
        for rule in rules:
            lines = rule.apply(lines, prefixes)
        return lines.reshape(scores.shape)

    def one(self, scores: Tensor, ids: Tensor, row: int) -> Tensor:
        """Call the stock and the user's processors, in list order, on one true prefix.

        Each row is judged alone. This shows where return sequences share a prompt and `prefix_allowed_tokens_fn`
        leaves one of them only scores of -inf: releases that force such tokens do so only once all are in that state.

        Args:
            scores: `[1, V]` fp32; left as it is.
            ids: `[1, cur]` int64, left pads included. Processors get a copy, which they may keep.
            row: Index of the row in the original batch, as `prefix_allowed_tokens_fn` and the like shall see it.

        Returns:
            `[1, V]` fp32.
        """
        if self.empty:
            return scores
        scores, ids = scores.clone(), ids.clone()
        for processor in self.processors:
            scores = call_for_row(processor, ids, scores, row, self._placement)
        return scores

    def prepare(self, vocabulary: int, width: int) -> None:
        """Copy to the device what calls with V = `vocabulary` and W <= `width` need, as the first call else does."""
        index = torch.zeros(1, dtype=torch.long, device=self.device)
        self.draft(torch.zeros(1, 1, vocabulary, device=self.device), index.expand(1, width), index + 1, index)

    def _check_vocabulary(self, vocabulary: int) -> None:
        if vocabulary in self._checked_vocabularies:
            return
        for processor, rule in zip(self.processors, self._rules, strict=True):
            outside = [] if rule is None else sorted(token for token in rule.writes if token >= vocabulary)
            if outside:
                raise ValueError(
                    f"{type(processor).__name__} names token ids {outside}, but the model's vocabulary has "
                    f"{vocabulary} tokens: ids must be below {vocabulary}."
                )
        self._checked_vocabularies.add(vocabulary)
