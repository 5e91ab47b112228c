"""Shrinks a model's config so that a copy of its class can be built and run in a moment."""

from __future__ import annotations

import contextlib
from typing import Any

from transformers import PretrainedConfig

WINDOW = 4
_SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_NARROW = {
    "num_attention_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 16,
    "rotary_dim": 8,
    "query_pre_attn_scalar": 16,
    "max_position_embeddings": 64,
    "ffn_dim": 64,
    "ffn_hidden_size": 64,
    "expert_ffn_hidden_size": 32,
    "n_inner": 64,
    "word_embed_proj_dim": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "vocab_size_per_layer_input": 67,
    "hidden_size_per_layer_input": 16,
}
_NARROW_LATENT = {  # compressed KV: these dimensions belong together
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "head_dim": 8,
}


def shrink_depth(config: PretrainedConfig) -> None:
    """Few layers that still show every layer type, a window of 4 and a small vocabulary."""
    text = config.get_text_config(decoder=True)
    layer_types = getattr(text, "layer_types", None)
    kinds = list(dict.fromkeys(layer_types or []))
    layers = min(text.num_hidden_layers, max(2, len(kinds)))
    text.num_hidden_layers = layers
    if layer_types:
        text.layer_types = (kinds + [kinds[-1]] * layers)[:layers]
    for name in ("sliding_window", "window_size"):
        if isinstance(_get(text, name), int) and _get(text, name):
            setattr(text, name, WINDOW)
    if _get(text, "max_window_layers") is not None:
        text.max_window_layers = min(text.max_window_layers, layers)
    text.vocab_size = min(text.vocab_size, 67)
    for name, token in _SPECIAL_TOKENS.items():
        setattr(text, name, token)


def shrink_all(config: PretrainedConfig) -> None:
    """Also narrow: 4 heads (grouped like the model's), small sizes, 4 experts; other towers keep one layer."""
    shrink_depth(config)
    text = config.get_text_config(decoder=True)
    heads, kv_heads = text.num_attention_heads, _get(text, "num_key_value_heads")
    _narrow(text, _NARROW)
    if kv_heads is not None:
        text.num_key_value_heads = 4 if kv_heads == heads else 1 if kv_heads == 1 else 2
    if _get(text, "kv_lora_rank") is not None:
        _narrow(text, _NARROW_LATENT)
    for name in getattr(config, "sub_configs", {}):
        tower = getattr(config, name, None)
        if tower is not None and tower is not text:
            _narrow(tower, _NARROW | {"num_hidden_layers": 1})


def _narrow(config: PretrainedConfig, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        if _get(config, name) is not None:
            with contextlib.suppress(AttributeError):  # derived from the others
                setattr(config, name, size)


def _get(config: PretrainedConfig, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # per-layer attributes of mixed configs refuse to be read as one
        return None
