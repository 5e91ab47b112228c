"""What users pass: resolved, or refused in one line that names the argument, the reason and the remedy."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria

from .drafters.base import Drafter
from .drafters.model import ModelDrafter
from .drafters.prompt_lookup import PromptLookup
from .drafters.retokenized import RetokenizedDrafter
from .drafters.shared_vocabulary import SharedVocabularyDrafter
from .images import media_inputs, refuse_media
from .runner import input_embedding, output_vocab_size
from .support import check_supported
from .turns import cache_of, check_cache

_REFUSED = {
    "assistant_model": "pass drafters as assistant_models=[...] only.",
    "assistant_tokenizer": "pass assistant_tokenizers=[...], one per drafter.",
    "custom_generate": "psd is itself a generation method; drop one of the two.",
    "prompt_lookup_num_tokens": "pass assistant_models=['prompt_lookup'] and set gamma.",
    "inputs_embeds": "drafters need token ids; pass input_ids.",
    "position_ids": "positions follow from the attention mask; leave them out.",
    "adapter_names": "per-row adapters assume that the whole batch runs at once; use one adapter for all rows.",
    "synced_gpus": "ranks would run different numbers of steps; use plain generate.",
    "negative_prompt_ids": "guidance keeps a cache of its own that cannot be rolled back; use plain generate.",
    "token_healing": "it rewrites the prompts before they are decoded; use plain generate.",
    "assistant_early_exit": "pass drafters as assistant_models=[...] only.",
}
_KNOWN_INPUTS = {
    "attention_mask", "position_ids", "cache", "past_key_values", "logits_to_keep", "use_cache", "cache_position",
    "output_attentions", "output_hidden_states", "return_dict", "input_ids",
}  # fmt: skip


def resolve_target(model: Any, plain: Callable[..., Any], kwargs: dict[str, Any]) -> PreTrainedModel:
    """The causal LM inside LoRA or `torch.compile` wrappers."""
    target = _unwrap(model, "the target")
    own = getattr(type(target), "generate", None)
    inherited = (plain, GenerationMixin.generate)
    if own not in inherited and not any(vars(base).get("generate") is own for base in _psd_bases(type(target))):
        raise ValueError(
            f"psd: {type(target).__name__} has a `generate` of its own, which psd cannot serve; call it without psd."
        )
    check_supported(target, "the target")
    return target


def _psd_bases(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if base.__name__ == "PSDGenerationMixin"]


def resolve_drafters(target: PreTrainedModel, entries: Sequence[Any] | None, kwargs: dict[str, Any]) -> list[Drafter]:
    """The drafters for `assistant_models`; checks everything that can be known before a forward."""
    if entries is None:
        entries = ["prompt_lookup"]
    _check_list("assistant_models", entries)
    if not entries:
        raise ValueError("assistant_models is empty: name at least one drafter, or leave it out for prompt lookup.")
    drafters = [_resolve_drafter(entry, number) for number, entry in enumerate(entries)]
    return _with_tokenizers(drafters, kwargs.get("tokenizer"), kwargs.pop("assistant_tokenizers", None))


def resolve_models(target: Any, drafters: Sequence[Any]) -> tuple[PreTrainedModel, list[PreTrainedModel]]:
    """The models themselves: the target's, and those among the drafters that are another's, each once."""
    _check_list("drafters", drafters)
    target = _unwrap(target, "the target")
    models: list[PreTrainedModel] = []
    for number, entry in enumerate(drafters):
        if isinstance(entry, Drafter) or (isinstance(entry, str) and entry == "prompt_lookup"):
            entry = getattr(entry, "model", None)
        if entry is not None:
            models.append(_unwrap(entry, f"drafters[{number}]"))
    return target, [model for model in dict.fromkeys(models) if model is not target]


def _check_list(name: str, entries: Any) -> None:
    if isinstance(entries, (str, torch.nn.Module)) or not isinstance(entries, Sequence):
        raise TypeError(f"{name} must be a list of drafters, got {type(entries).__name__}; wrap it in a list.")


def _with_tokenizers(drafters: list[Drafter], tokenizer: Any, others: Sequence[Any] | None) -> list[Drafter]:
    """Drafters whose tokenizer is given and maps text to other ids than the target's translate between the two."""
    if others is None:
        return drafters
    if not isinstance(others, (list, tuple)) or len(others) != len(drafters):
        raise ValueError(
            f"psd: assistant_tokenizers must be a list with one tokenizer (or None) for each of the {len(drafters)} "
            f"assistant_models, got {f'{len(others)} entries' if isinstance(others, (list, tuple)) else others!r}."
        )
    for number, other in enumerate(others):
        if other is None:
            continue
        if tokenizer is None:
            raise ValueError("psd: assistant_tokenizers need the target's tokenizer beside them: pass tokenizer=...")
        drafter = drafters[number]
        if tokenizer.get_vocab() == other.get_vocab() or isinstance(drafter, RetokenizedDrafter):
            continue
        if type(drafter) is not ModelDrafter:
            raise ValueError(
                f"psd: assistant_tokenizers[{number}] does not map text to the target's ids, and assistant_models"
                f"[{number}] ({drafter.name}) has no model that could use it; pass None in its place."
            )
        assert drafter.model is not None
        drafters[number] = SharedVocabularyDrafter(drafter.model, number, tokenizer, other)
    return drafters


def _resolve_drafter(entry: Any, number: int) -> Drafter:
    name = f"assistant_models[{number}]"
    if isinstance(entry, ModelDrafter) and entry.model is None:
        raise ValueError(f"{name}: the drafter's model is gone; keep a reference to it, or pass the model itself.")
    if isinstance(entry, ModelDrafter):
        return entry.keyed(number)
    if isinstance(entry, Drafter):
        return entry
    if isinstance(entry, str):
        if entry != "prompt_lookup":
            raise ValueError(
                f"{name} is {entry!r}; the only drafter known by name is 'prompt_lookup'. Load the model first."
            )
        return PromptLookup()
    if not isinstance(entry, torch.nn.Module):
        raise TypeError(f"{name} must be a causal LM, 'prompt_lookup' or a Drafter, got {type(entry).__name__}.")
    model = _unwrap(entry, name)
    if not isinstance(model, GenerationMixin):
        raise TypeError(f"{name} ({type(model).__name__}) is not a causal LM with a language modelling head.")
    check_supported(model, name)
    return ModelDrafter(model, number)


def _unwrap(model: Any, name: str) -> PreTrainedModel:
    model = getattr(model, "_orig_mod", model)
    if hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
        if getattr(model.active_peft_config, "is_prompt_learning", False):
            raise ValueError(f"psd: {name} uses prompt tuning, whose virtual tokens are not in the prompt; use LoRA.")
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"psd: {name} must be a transformers model, got {type(model).__name__}.")
    offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    if not offloaded and any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"psd: {name} ({type(model).__name__}) is on the meta device; load its weights first.")
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    if any("adapter_names" in getattr(hook, "keywords", {}) for hook in hooks):
        raise ValueError(f"psd: adapter_names cannot be used with psd; {_REFUSED['adapter_names']}")
    return model


def refuse_arguments(target: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Refuses arguments of `generate` that speculative decoding cannot honour."""
    for name, advice in _REFUSED.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise ValueError(f"psd: {name} cannot be used with psd; {advice}")
    implementation = kwargs.get("cache_implementation")
    if implementation is None:
        implementation = getattr(kwargs.get("generation_config"), "cache_implementation", None)
    if implementation not in (None, "dynamic"):
        raise ValueError(
            f"psd: cache_implementation={implementation!r} cannot be combined with psd, which keeps its own cache."
        )
    parameters = inspect.signature(target.forward).parameters
    refuse_inputs(target, {name: value for name, value in kwargs.items() if name in parameters})
    if cache_of(kwargs) is not None:
        check_cache(cache_of(kwargs))


def refuse_inputs(target: PreTrainedModel, inputs: dict[str, Any]) -> None:
    """Refuses model inputs that are neither text nor media of the prompt."""
    media = media_inputs(target, inputs)
    extra = [name for name, value in inputs.items() if value is not None and name not in media.keys() | _KNOWN_INPUTS]
    if extra:
        raise ValueError(
            f"psd: model input(s) {', '.join(extra)} cannot be used with psd, which gives {type(target).__name__} "
            "text ids and their mask alone; use plain `generate`."
        )
    refuse_media(target, media)


def refuse_generation_config(config: GenerationConfig) -> None:
    """Refuses settings of the merged generation config."""
    refusals = {
        "num_beams": (config.num_beams or 1) > 1,
        "num_beam_groups": (getattr(config, "num_beam_groups", None) or 1) > 1,
        "penalty_alpha": getattr(config, "penalty_alpha", None) is not None,
        "dola_layers": getattr(config, "dola_layers", None) is not None,
        "use_mtp": bool(getattr(config, "use_mtp", None)),
        "token_healing": bool(config.token_healing),
        "output_attentions": bool(config.output_attentions),
        "output_hidden_states": bool(config.output_hidden_states),
        "cache_implementation": config.cache_implementation not in (None, "dynamic"),
        "prompt_lookup_num_tokens": config.prompt_lookup_num_tokens is not None,
    }
    for name, refused in refusals.items():
        if refused:
            raise ValueError(f"psd: {name}={getattr(config, name)!r} cannot be combined with psd; use plain generate.")


def left_padding(model: PreTrainedModel, prompts: torch.Tensor, mask: torch.Tensor | None) -> list[int]:
    """Left-padding columns of each row of `prompts` [B, P]; checks ids, mask [B, P] and length."""
    columns = prompts.shape[1]
    vocab = input_embedding(model).shape[0]
    mask = torch.ones_like(prompts) if mask is None else mask.to(prompts.device)
    if mask.shape != prompts.shape:
        raise ValueError(
            f"psd: attention_mask must be {list(prompts.shape)} like input_ids, got {list(mask.shape)}; pass the "
            "whole text as input_ids and one number per token."
        )
    real = mask.bool()
    padding = (~real).sum(1)
    expected = torch.arange(columns, device=prompts.device) >= padding[:, None]
    outside = ((prompts < 0) | (prompts >= vocab)) & real
    graded = (mask != 0) & (mask != 1)
    empty, holes, strange, weighed, longest = torch.stack(
        [(padding == columns).any(), (real != expected).any(), outside.any(), graded.any(), (columns - padding).max()]
    ).tolist()
    if weighed:
        raise ValueError("psd: attention_mask must hold 0 and 1 alone; plain `generate` serves graded masks.")
    if empty:
        raise ValueError("psd: attention_mask has a row without any token; every row needs a prompt.")
    if holes:
        raise ValueError(
            "psd: attention_mask must be zeros then ones in every row (left padding); "
            "set padding_side='left' on the tokenizer."
        )
    if strange:
        raise ValueError(f"psd: input_ids must lie in 0 .. {vocab - 1}, the target's vocabulary.")
    window = learned_positions(model)
    if window is not None and longest > window:
        raise ValueError(
            f"psd: a prompt of {longest} tokens is longer than the model's {window} positions; shorten it."
        )
    return padding.tolist()


def learned_positions(model: PreTrainedModel) -> int | None:
    """Positions a model has weights for; None if it computes them (RoPE), so that it may run past its length."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None):
        return None
    return getattr(config, "max_position_embeddings", None)


@contextmanager
def take_stop_strings(target: PreTrainedModel, kwargs: dict[str, Any]) -> Iterator[None]:
    """Turns `stop_strings`, from wherever generate would take them, into a stopping criterion in `kwargs`.

    transformers drops the tokenizer on the way to a custom decoding method, and then refuses the stop strings.
    """
    tokenizer = kwargs.pop("tokenizer", None)
    given: GenerationConfig | None = kwargs.get("generation_config")
    stop_strings = kwargs.pop("stop_strings", None)
    if given is not None and given.stop_strings is not None:
        stop_strings = given.stop_strings if stop_strings is None else stop_strings
        kwargs["generation_config"] = given = copy.deepcopy(given)
        given.stop_strings = None
    default, stripped = target.generation_config, None
    if default is not None and default.stop_strings is not None:
        stop_strings = default.stop_strings if stop_strings is None else stop_strings
        target.generation_config = stripped = copy.deepcopy(default)
        stripped.stop_strings = None
    try:
        if stop_strings is not None:
            if tokenizer is None:
                raise ValueError("stop_strings need the tokenizer: pass tokenizer=... to generate.")
            criterion = StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer)
            kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or []), criterion])
        yield
    finally:
        if stripped is not None and target.generation_config is stripped:
            target.generation_config = default


def foreign_vocabularies(target: PreTrainedModel, drafters: Sequence[Drafter]) -> list[str]:
    """Remarks on drafters whose vocabulary is so much smaller or larger than the target's that ids may mean others."""
    remarks, ours = [], output_vocab_size(target)
    for drafter in drafters:
        model = drafter.model if type(drafter) is ModelDrafter else None
        theirs = ours if model is None else output_vocab_size(model)
        if max(ours, theirs) > 2 * min(ours, theirs):
            remarks.append(
                f"drafter {drafter.name} has {theirs} token ids, the target {ours}: if its tokenizer differs, pass "
                "tokenizer= and assistant_tokenizers=."
            )
    return remarks
