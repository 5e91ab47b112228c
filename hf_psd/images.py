"""Images, video and sound in a prompt: the target reads them by its own forward; everything after is text."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from .runner import implementation_of, inference_state
from .turns import CACHE_NAMES

_MEDIA = {
    "mm_encoder_outputs", "pixel_values", "pixel_mask", "pixel_attention_mask", "pixel_values_images",
    "pixel_values_videos", "input_features", "input_features_mask", "feature_attention_mask", "input_values",
    "input_values_mask", "padding_mask", "num_local_patches", "high_res_pixel_values", "image_patches_indices",
    "image_patches", "image_sizes", "image_sizes_videos", "image_grid_thw", "video_grid_thw", "image_position_ids",
}  # fmt: skip
_PER_TOKEN = {"token_type_ids", "mm_token_type_ids"}


def media_inputs(model: PreTrainedModel, arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of `arguments` that a multimodal model reads in the prompt alone; nothing for other models."""
    kinds = getattr(model, "input_modalities", "text")
    if ({kinds} if isinstance(kinds, str) else set(kinds)) <= {"text"}:
        return {}
    names = _MEDIA | _PER_TOKEN
    return {name: value for name, value in arguments.items() if name in names and value is not None}


def media_names(model: PreTrainedModel, arguments: dict[str, Any]) -> list[str]:
    """Names of the media inputs that hold something, in order."""
    return sorted(
        name for name, value in media_inputs(model, arguments).items() if not isinstance(value, dict) or value
    )


def refuse_media(model: PreTrainedModel, inputs: dict[str, Any]) -> None:
    """Raises a `ValueError` where positions after an image are not those of the text."""
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    sections = "mrope_section" in rope or hasattr(model.base_model, "rope_deltas")
    if sections and inputs.keys() - _PER_TOKEN:
        raise ValueError(
            f"psd: {', '.join(sorted(inputs))} cannot be used with psd: {type(model).__name__} counts positions "
            "after an image in three directions; use plain `generate`."
        )


@torch.no_grad()
def read_media(
    model: PreTrainedModel, prompts: torch.Tensor, cache: DynamicCache | None, known: int, arguments: dict[str, Any]
) -> DynamicCache | None:
    """If a prompt has media, reads all columns of `prompts` [B, P] but the last as plain `generate` would.

    Args:
        model: the target.
        prompts: ids with placeholders where the media belong.
        cache: filled here if it is given and empty; else a new one is.
        known: columns that `cache` holds.
        arguments: the model inputs that transformers has prepared, media included.

    Returns:
        The filled cache, None for a prompt that is text alone.

    Raises:
        ValueError: there are media beside a cache that already holds a part of the prompt.
    """
    media = media_names(model, arguments)
    columns = prompts.shape[1] - 1
    if not media or columns == 0:
        return None
    if known:
        raise ValueError(
            f"psd: {', '.join(media)} beside a cache of an earlier turn cannot be read; leave the cache out."
        )
    cache = DynamicCache(config=model.config.get_text_config(decoder=True)) if cache is None else cache
    inputs = {name: value for name, value in arguments.items() if value is not None and name not in CACHE_NAMES}
    for name in ("attention_mask", "position_ids", *_PER_TOKEN):
        if name in inputs:
            inputs[name] = inputs[name][..., :columns]
    inputs["cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"] = cache
    with inference_state({model: implementation_of(model)}):
        prepare: Any = model.prepare_inputs_for_generation
        prepared = prepare(prompts[:, :columns], is_first_iteration=True, **inputs)
        model(**prepared, return_dict=True)
    return cache
