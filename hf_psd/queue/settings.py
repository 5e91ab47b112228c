"""What a request asks for: prepared by transformers' own `generate`, so that it means here what it means there."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList

from ..arguments import (
    learned_positions,
    left_padding,
    refuse_arguments,
    refuse_generation_config,
    refuse_inputs,
    take_stop_strings,
)
from ..graphs import signature
from ..images import media_names
from ..ledger import StopRules
from ..runner import input_device, input_embedding
from ..turns import cache_of
from ..verify.processors import ProcessorPipeline
from ..verify.sampler import Sampler
from .sampling import RequestSampler

_OF_THE_TEXT_ALONE = {
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper",
    "EpsilonLogitsWarper", "EtaLogitsWarper", "TopHLogitsWarper", "LogitNormalization", "InfNanRemoveLogitsProcessor",
    "SuppressTokensLogitsProcessor", "RepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor",
}  # fmt: skip
"""Stock processors that were told neither the prompt nor its length: requests can share them."""
_ANSWERED_ELSEWHERE = {
    "num_return_sequences": "add the prompt as often as wanted",
    "output_scores": "ask the manager for `return_logprobs=True`",
    "output_logits": "ask the manager for `return_logprobs=True`",
}
_MOST_KNOWN = 1024
_taking_stop_strings = threading.Lock()


@dataclass(frozen=True)
class Settings:
    """A request's settings, resolved.

    Attributes:
        law: draws and judges its tokens; requests of equal settings share one.
        capturable: a key of all the law depends on, None if its steps cannot be captured.
        rules: how it ends.
        eos: its end tokens.
        pad_id: fills what comes after its end.
    """

    law: Sampler
    capturable: Hashable | None
    rules: StopRules
    eos: list[int]
    pad_id: int


class SettingsDesk:
    """Prepares the settings of requests to one target.

    Args:
        model: the target.
        plain: transformers' own `generate`.
        defaults: arguments of `generate` that hold for all requests unless one says otherwise.
        verification: "rejection" or "coupled".
        seed: key of the noise of requests without a seed of their own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        plain: Callable[..., Any],
        defaults: Mapping[str, Any],
        verification: str,
        seed: int,
    ):
        self.model, self.plain, self.defaults = model, plain, dict(defaults)
        self.verification, self.seed = verification, seed
        self._vocabulary = input_embedding(model).shape[0]
        self._window = learned_positions(model) or 2**31
        self._prepared: dict[Hashable, Settings] = {}
        self._laws: dict[Hashable, Sampler] = {}

    def settle(self, prompt: list[int], seed: int | None, own: Mapping[str, Any]) -> Settings:
        """The settings of a prompt under `own` arguments of `generate`.

        Raises:
            ValueError, TypeError: for what `generate` or speculative decoding would refuse.
        """
        arguments = {**self.defaults, **own}
        more = arguments.get("max_new_tokens")
        if not isinstance(more, int) or more < 1:
            return self._prepare(prompt, self.seed if seed is None else seed, arguments)
        key = (seed, _frozen({name: value for name, value in arguments.items() if name != "max_new_tokens"}))
        known = self._prepared.get(key)
        if known is None:
            settings = self._prepare(prompt, self.seed if seed is None else seed, arguments)
            if key[1] is not None and _says_nothing_of_the_prompt(settings):
                _forget_if_many(self._prepared)
                self._prepared[key] = settings
            return settings
        if not prompt or min(prompt) < 0 or max(prompt) >= self._vocabulary or len(prompt) > self._window:
            self._check(torch.tensor([prompt], device="cpu"))
        return replace(known, rules=replace(known.rules, max_columns=len(prompt) + more))

    def _prepare(self, prompt: list[int], seed: int, arguments: dict[str, Any]) -> Settings:
        kept: dict[str, Any] = {}

        def decode(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
            kept.update(processors=logits_processor, criteria=stopping_criteria, config=generation_config)
            kept["inputs"] = model_kwargs
            return input_ids

        for name, advice in _ANSWERED_ELSEWHERE.items():
            if int(arguments.get(name) or 0) > (name == "num_return_sequences"):
                raise ValueError(f"psd: {name}={arguments[name]!r} has no place in a queue; {advice}.")
        refuse_arguments(self.model, arguments)
        if cache_of(arguments) is not None:
            raise ValueError("psd: a queue reads no cache of an earlier turn; add the whole text as the prompt.")
        if media := media_names(self.model, arguments):
            raise ValueError(f"psd: {', '.join(media)} cannot be queued, which reads text alone; use `generate`.")
        ids = torch.tensor([prompt], dtype=torch.long, device="cpu")
        self._check(ids)
        with _taking_stop_strings, take_stop_strings(self.model, arguments), torch.no_grad():
            self.plain(self.model, ids.to(input_device(self.model)), custom_generate=decode, **arguments)
        config: GenerationConfig = kept["config"]
        refuse_generation_config(config)
        refuse_inputs(self.model, kept["inputs"])
        self._refuse_sequences(config)
        rules = StopRules.sort(kept["criteria"])
        rules.max_columns = max(rules.max_columns, len(prompt) + 1)
        pad = config._pad_token_tensor
        law, capturable = self._law(kept["processors"], bool(config.do_sample), seed)
        return Settings(law, capturable, rules, rules.eos_ids, int(pad) if pad is not None else 0)

    def _law(self, processors: LogitsProcessorList, do_sample: bool, seed: int) -> tuple[Sampler, Hashable | None]:
        seed = seed if do_sample else self.seed
        pipeline = ProcessorPipeline(processors, input_device(self.model), batch_size=1)
        known = signature(pipeline.processors)
        key = None if known is None or pipeline.exact_only else (known, do_sample, self.verification, seed)
        if key is None or not _shareable(processors):
            return RequestSampler(pipeline, do_sample, self.verification, seed), None
        # To capture graphs for one request alone takes longer than they save: a seed of its own must come twice.
        common = seed == self.seed or key in self._laws
        if key not in self._laws:
            _forget_if_many(self._laws)
            self._laws[key] = RequestSampler(pipeline, do_sample, self.verification, seed)
        return self._laws[key], key if common else None

    def _check(self, ids: torch.Tensor) -> None:
        if ids.shape[1] == 0:
            raise ValueError("psd: a request needs a prompt of at least one token.")
        left_padding(self.model, ids, None)

    def _refuse_sequences(self, config: GenerationConfig) -> None:
        if (config.num_return_sequences or 1) > 1:
            raise ValueError(
                f"psd: num_return_sequences={config.num_return_sequences} has no place in a queue; "
                f"{_ANSWERED_ELSEWHERE['num_return_sequences']}."
            )


def _shareable(processors: LogitsProcessorList) -> bool:
    return all(type(each).__name__ in _OF_THE_TEXT_ALONE for each in processors)


def _says_nothing_of_the_prompt(settings: Settings) -> bool:
    return settings.capturable is not None and not settings.rules.by_column


def _forget_if_many(known: dict[Hashable, Any]) -> None:
    """Seeds of their own make settings that nobody shares; they must not pile up."""
    if len(known) >= _MOST_KNOWN:
        known.clear()


def _frozen(arguments: Mapping[str, Any]) -> Hashable | None:
    """The arguments as a key; None if one of them is an object whose meaning may change."""
    items: list[Hashable] = []
    for name, value in sorted(arguments.items()):
        if isinstance(value, GenerationConfig):
            items.append((name, repr(sorted(value.to_dict().items(), key=lambda item: item[0]))))
        elif value is None or isinstance(value, (bool, int, float, str)):
            items.append((name, (type(value).__name__, value)))
        elif isinstance(value, (list, tuple)) and all(isinstance(each, (int, str)) for each in value):
            items.append((name, tuple(value)))
        else:
            return None
    return tuple(items)


def prompt_of(ids: Any, name: str = "input_ids") -> list[int]:
    """A prompt's token ids, given as a sequence of ints or a tensor [P] or [1, P].

    Raises:
        TypeError, ValueError: it is something else.
    """
    if isinstance(ids, torch.Tensor):
        if ids.dim() > 2 or (ids.dim() == 2 and ids.shape[0] != 1):
            raise ValueError(f"psd: {name} must be one prompt [P], got {list(ids.shape)}; add prompts one by one.")
        ids = ids.flatten().tolist()
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise TypeError(f"psd: {name} must be a list of token ids, got {type(ids).__name__}; tokenize texts first.")
    ids = list(ids)
    for token in ids:
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise TypeError(f"psd: {name} must hold token ids, got {token!r}; tokenize texts first.")
    return [operator.index(token) for token in ids]
