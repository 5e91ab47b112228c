"""The doors: from `generate` arguments to a validated call, and back to transformers' return values."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from .arguments import (
    foreign_vocabularies,
    left_padding,
    refuse_arguments,
    refuse_generation_config,
    refuse_inputs,
    resolve_drafters,
    resolve_target,
    take_stop_strings,
)
from .compiled import compiled
from .config import PSDConfig
from .drafters.base import Drafter
from .drafters.model import ModelDrafter
from .engine import Call, Engine
from .fused import fused, models_to_fuse
from .hooks import StepHook, StepHookList
from .images import read_media
from .learning import make_selector
from .ledger import Ledger, StopRules
from .outputs import shape_output
from .row_streaming import RowStreamer, RowStreamHook
from .runner import inference_state, input_device, one_call_at_a_time
from .selection import SelectionHook
from .stats import PSDStats, StatsHook
from .streaming import StreamHook, ending_streamer
from .support import choose_attention
from .turns import cache_of, covered, fill
from .verify.processors import ProcessorPipeline
from .verify.sampler import Sampler

_MARK = "_hf_psd_original"
_last_stats: PSDStats | None = None


@dataclass(frozen=True)
class Ask:
    """What the user asked for beyond transformers' own arguments."""

    drafters: list[Drafter]
    config: PSDConfig
    hooks: list[StepHook]
    streamer: Any
    cache_given: bool


def generate(
    model: PreTrainedModel,
    inputs: torch.Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    assistant_models: Sequence[Any] | None = None,
    psd: PSDConfig | Mapping[str, Any] | bool = True,
    psd_hooks: Sequence[StepHook] = (),
    **kwargs: Any,
) -> Any:
    """Decodes a batch speculatively; the result is what `model.generate(inputs, **kwargs)` gives, sooner.

    Greedy output is token-identical to plain `generate` on the same batch in fp32; sampled output follows the same
    law.

    Args:
        model: a decoder-only causal LM (LoRA-wrapped and compiled models too).
        inputs: [B, P] int64 prompt ids, left-padded, as in `generate`; or pass `input_ids=` and `attention_mask=`.
        generation_config: as in `generate`.
        assistant_models: drafters in order: causal LMs with the target's token ids, `"prompt_lookup"`, or `Drafter`
            objects. None means prompt lookup alone.
        psd: True, a `PSDConfig` or a dict of its fields.
        psd_hooks: `StepHook` objects.
        **kwargs: arguments of `generate`.

    Returns:
        [B, P + N] int64, or transformers' `GenerateDecoderOnlyOutput` with the statistics as its attribute `psd`.

    Raises:
        ValueError, TypeError: for what cannot be honoured, before any forward of the given models, naming the
            argument.
    """
    config = PSDConfig.resolve(psd)
    if generation_config is not None:
        kwargs["generation_config"] = generation_config
    target = resolve_target(model, plain_generate(), kwargs)
    refuse_arguments(target, kwargs)
    drafters = resolve_drafters(target, assistant_models, kwargs)
    hooks = list(StepHookList(psd_hooks))
    models = [target, *(drafter.model for drafter in drafters if isinstance(drafter, ModelDrafter))]
    with (
        one_call_at_a_time(models),
        take_stop_strings(target, kwargs),
        ending_streamer(kwargs.get("streamer")) as streamer,
    ):
        kwargs["streamer"] = streamer
        ask = Ask(drafters, config, hooks, streamer, cache_given=cache_of(kwargs) is not None)
        decode = functools.partial(_decode, psd_ask=ask)
        return plain_generate()(target, inputs, custom_generate=decode, **kwargs)


def last_stats() -> PSDStats | None:
    """Statistics of the newest speculative call of this process, None before the first."""
    return _last_stats


def remember(stats: PSDStats) -> None:
    """Makes these what `last_stats` returns."""
    global _last_stats
    _last_stats = stats


def _decode(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    psd_ask: Ask | None = None,
    **model_kwargs: Any,
) -> Any:
    """The decoding method that transformers calls once it has prepared inputs, processors and criteria."""
    assert psd_ask is not None
    refuse_generation_config(generation_config)
    refuse_inputs(model, model_kwargs)
    config, device = psd_ask.config, input_device(model)
    prompts = input_ids.to(device)
    padding = left_padding(model, prompts, model_kwargs.get("attention_mask"))
    request_ids = _request_ids(config, prompts.shape[0])
    check_tags(config.context, prompts.shape[0])
    pad = generation_config._pad_token_tensor
    rules = StopRules.sort(stopping_criteria)
    rules.max_columns = max(rules.max_columns, prompts.shape[1] + 1)  # plain `generate` emits a token before it asks
    by_row = psd_ask.streamer is not None and isinstance(psd_ask.streamer.streamer, RowStreamer)
    by_column = psd_ask.streamer is not None and not by_row
    ledger = Ledger(prompts.cpu(), rules, int(pad) if pad is not None else 0, device, track_columns=by_column)
    pipeline = ProcessorPipeline(logits_processor, device, batch_size=prompts.shape[0])
    seed = _seed(config, generation_config.do_sample)
    sampler = Sampler(pipeline, generation_config.do_sample, config.verification, seed)
    selector = make_selector(config, seed, len(psd_ask.drafters), bool(generation_config.do_sample))
    as_dict = generation_config.return_dict_in_generate
    cache = cache_of(model_kwargs)
    known = covered(cache, prompts) if psd_ask.cache_given else 0
    read = read_media(model, prompts, cache, known, model_kwargs)
    call = Call(
        model,
        psd_ask.drafters,
        config,
        prompts,
        padding,
        sampler,
        ledger,
        request_ids,
        keep_scores=bool(as_dict and (generation_config.output_scores or generation_config.output_logits)),
        cache=cache if psd_ask.cache_given else read,
    )
    call.stats.notes += foreign_vocabularies(model, psd_ask.drafters)
    remember(call.stats)
    call.full_information = bool(getattr(selector, "full_information", False))
    models = [model, *(drafter.model for drafter in psd_ask.drafters if isinstance(drafter, ModelDrafter))]
    fusing = models_to_fuse(models, config.fused_ops)
    call.fused = bool(fusing)
    attention = {each: choose_attention(each, config.attention) for each in models}
    compiling = compiled(models if config.compile else [])
    with torch.no_grad(), inference_state(attention), fused(fusing), compiling:
        engine = Engine(call, hooks := StepHookList())
        hooks.append(SelectionHook(selector, lambda: engine.roster.arms))
        hooks.append(StatsHook(call.stats))
        if engine.pacer is not None:
            hooks.append(engine.pacer)
        if by_column:
            hooks.append(StreamHook(psd_ask.streamer, ledger))
        elif by_row:
            hooks.append(RowStreamHook(psd_ask.streamer.streamer, ledger))
        hooks.extend(psd_ask.hooks)
        engine.run()
        if cache is not None and (as_dict or psd_ask.cache_given):
            lengths = [prompts.shape[1] + len(row) for row in ledger.rows]
            fill(cache, engine.runner, padding, lengths, ledger.sequences())
    return shape_output(ledger, engine.kept, generation_config, input_ids.device, call.stats, cache)


def _seed(config: PSDConfig, do_sample: bool) -> int:
    """One draw from torch's default generator per sampling call, none when greedy, unless the seed is given."""
    if config.seed is not None:
        return config.seed
    return int(torch.randint(2**62, (1,), device="cpu")) if do_sample else 0


def _request_ids(config: PSDConfig, batch: int) -> list[int]:
    if config.request_ids is None:
        return list(range(batch))
    ids = list(config.request_ids) if isinstance(config.request_ids, Iterable) else []
    ints = all(isinstance(number, int) and not isinstance(number, bool) for number in ids)
    if not ints or len(ids) != batch or len(set(ids)) != batch or min(ids) < 0 or max(ids) >= 2**31:
        raise ValueError(
            f"psd: request_ids must be {batch} ints in 0 .. 2**31 - 1, one per row and no two alike (rows with the "
            f"same id would share their noise), got {config.request_ids!r}."
        )
    return ids


def check_tags(tags: Any, batch: int) -> None:
    """Refuses a `context` that is neither a tag nor one per row."""
    if tags is None or isinstance(tags, str):
        return
    if not (isinstance(tags, Sequence) and len(tags) == batch and all(isinstance(tag, str) for tag in tags)):
        raise ValueError(f"psd: context must be a tag or {batch} tags, one per row, got {tags!r}.")


def plain_generate() -> Callable[..., Any]:
    """transformers' own `generate`, whether or not it is wrapped."""
    current = GenerationMixin.generate
    return getattr(current, _MARK, current)


def enable() -> None:
    """Makes `model.generate(..., psd=...)` work on every instance. Importing the package does it; calls may repeat."""
    if not hasattr(GenerationMixin.generate, _MARK):
        setattr(GenerationMixin, "generate", _wrap(GenerationMixin.generate))  # noqa: B010


def disable() -> None:
    """Gives transformers its own `generate` back."""
    setattr(GenerationMixin, "generate", plain_generate())  # noqa: B010


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def generate_or_speculate(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = {"psd", "assistant_models", "psd_hooks"} & kwargs.keys()
        if not ours or (isinstance(kwargs.get("custom_generate"), str) and kwargs.get("psd") is not True):
            return original(self, *args, **kwargs)
        return _dispatch(original, self, *args, **kwargs)

    setattr(generate_or_speculate, _MARK, original)
    return generate_or_speculate


def _dispatch(
    original: Callable[..., Any],
    model: Any,
    *args: Any,
    psd: Any = None,
    assistant_models: Sequence[Any] | None = None,
    psd_hooks: Sequence[StepHook] = (),
    **kwargs: Any,
) -> Any:
    if psd is not None and psd is not False:
        kwargs |= _by_name(original, args, kwargs)
        return generate(model, assistant_models=assistant_models, psd=psd, psd_hooks=psd_hooks, **kwargs)
    for name, given in (("assistant_models", assistant_models is not None), ("psd_hooks", bool(psd_hooks))):
        if psd is None and given:
            raise ValueError(f"{name} needs psd=True (or psd=False to decode plainly).")
    if psd is False:
        kwargs.pop("assistant_tokenizers", None)
    return original(model, *args, **kwargs)


def _by_name(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Positional arguments of transformers' `generate` by their names; a `TypeError` as Python's own if that fails."""
    names = [*inspect.signature(original).parameters][1:-1]
    if len(args) > len(names):
        raise TypeError(f"generate() takes at most {len(names)} positional arguments, got {len(args)}.")
    given = dict(zip(names, args))
    for name in given.keys() & kwargs.keys():
        raise TypeError(f"generate() got multiple values for argument {name!r}.")
    return given


class PSDGenerationMixin:
    """For `class MyModel(PSDGenerationMixin, LlamaForCausalLM)`: speculates without a wrapped library."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`generate` of transformers, with `psd=`, `assistant_models=` and `psd_hooks=`."""
        return _dispatch(plain_generate(), self, *args, **kwargs)
