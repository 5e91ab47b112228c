"""Tiny random causal language models of many families, prompts for them, and a counter of their forwards."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 64
WINDOW = 8

_COMMON = dict(
    vocab_size=VOCAB,
    initializer_range=0.5,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)
_LLAMA = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)
_GPT2 = dict(n_embd=32, n_layer=2, n_head=4, n_positions=128)
_MIXED_LAYERS = dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"])
_SMALL_HEADS = dict(head_dim=8)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)

_SETTINGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA | dict(sliding_window=WINDOW),
    "qwen2": _LLAMA | dict(use_sliding_window=True, max_window_layers=1) | _MIXED_LAYERS,
    "qwen3": _LLAMA | _SMALL_HEADS,
    "qwen2_moe": _LLAMA | _EXPERTS | dict(shared_expert_intermediate_size=32),
    "qwen3_moe": _LLAMA | _SMALL_HEADS | _EXPERTS,
    "mixtral": _LLAMA | dict(num_local_experts=4, num_experts_per_tok=2),
    "gemma": _LLAMA | _SMALL_HEADS,
    "gemma2": _LLAMA | _SMALL_HEADS | _MIXED_LAYERS | dict(query_pre_attn_scalar=8),
    "gemma3_text": _LLAMA | _SMALL_HEADS | _MIXED_LAYERS | dict(query_pre_attn_scalar=1),
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neox": _LLAMA | dict(initializer_range=1.0),
    "gptj": _GPT2 | dict(rotary_dim=4),
    "phi3": _LLAMA | dict(sliding_window=WINDOW),
    "phi": _LLAMA,
    "cohere": _LLAMA | dict(logit_scale=1.0, num_hidden_layers=4),
    "cohere2": _LLAMA
    | dict(logit_scale=1.0, num_hidden_layers=4, sliding_window=WINDOW)
    | dict(layer_types=["sliding_attention"] * 3 + ["full_attention"]),
    "olmo": _LLAMA,
    "olmo2": _LLAMA,
    "olmo3": _LLAMA | _MIXED_LAYERS,
    "stablelm": _LLAMA,
    "starcoder2": _LLAMA | dict(sliding_window=WINDOW),
    "gpt_oss": _LLAMA | _SMALL_HEADS | _MIXED_LAYERS | dict(num_local_experts=4, num_experts_per_tok=2),
    "smollm3": _LLAMA | _MIXED_LAYERS | dict(use_sliding_window=True, no_rope_layers=[1, 0]),
    "granite": _LLAMA,
    "granitemoe": _LLAMA | dict(num_local_experts=4, num_experts_per_tok=2),
    "glm4": _LLAMA | _SMALL_HEADS | dict(initializer_range=1.0),
    "nemotron": _LLAMA,
    "falcon": _LLAMA,
    "exaone4": _LLAMA | _MIXED_LAYERS,
    "ernie4_5": _LLAMA | _SMALL_HEADS,
    "opt": dict(
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        word_embed_proj_dim=32,
    ),
    "deepseek_v3": _LLAMA
    | dict(
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        n_shared_experts=1,
        first_k_dense_replace=1,
    ),
}

# Factors on weights whose names hold the key. Without them these families soon repeat one or two tokens for ever.
_FACTORS: dict[str, dict[str, float]] = {
    "qwen3": {"q_norm": 4.0},
    "qwen3_moe": {"q_norm": 4.0},
    "olmo2": {"q_norm": 4.0},
    "olmo3": {"q_norm": 4.0},
    "exaone4": {"q_norm": 4.0},
    "gemma2": {"embed_tokens": 0.25},
    "gemma3_text": {"embed_tokens": 0.25},
    "mixtral": {"embed_tokens": 0.5},
    "deepseek_v3": {"embed_tokens": 0.5},
    "gptj": {"wte": 0.25, "out_proj": 2.0},
    "phi": {"self_attn.dense": 2.0},
    "cohere": {"o_proj": 2.0},
    "cohere2": {"o_proj": 3.0},
}

FAMILIES: list[str] = [family for family in _SETTINGS if family in CONFIG_MAPPING]


def tiny(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Builds a random float32 model of two or four layers, in eval mode; torch's generator is left as it was."""
    config = AutoConfig.for_model(family, **{**_COMMON, **_SETTINGS[family], **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            for part, factor in _FACTORS.get(family, {}).items():
                if part in name:
                    weight.mul_(factor)
    return model.eval()


def noisy(model: PreTrainedModel, scale: float, seed: int = 7) -> PreTrainedModel:
    """Copies a model and adds noise of `scale` times each weight's spread: it then agrees only part of the time."""
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in copied.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.numel() > 1:
                weight.add_(noise * scale * weight.std())
    return copied.eval()


def left_padded(rows: list[list[int]], pad: int = 0) -> dict[str, torch.Tensor]:
    """Returns `input_ids` and `attention_mask`, int64 [rows, longest row], with the padding in front."""
    width = max(len(row) for row in rows)
    return {
        "input_ids": torch.tensor([[pad] * (width - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    }


def P4() -> dict[str, torch.Tensor]:
    """Four fixed prompts of 7, 3, 1 and 5 tokens."""
    return left_padded([[5, 9, 17, 33, 21, 40, 41], [7, 8, 9], [12], [30, 31, 32, 33, 34]])


def prompts(batch: int, seed: int = 0, max_len: int = 12, vocab: int = VOCAB) -> dict[str, torch.Tensor]:
    """Random prompts of 1 to `max_len` tokens, unequal in length where the batch allows it; no special ids."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, max_len + 1, (batch,), generator=generator).tolist()
    return left_padded([torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths])


@dataclass
class Recorder:
    """Counts a model's forwards through a hook while used as a context manager.

    `shapes` holds [rows, tokens] of the ids of each forward, in order.
    """

    model: PreTrainedModel
    shapes: list[tuple[int, int]] = field(default_factory=list)

    def __enter__(self) -> Recorder:
        self._handle = self.model.register_forward_pre_hook(self._record, with_kwargs=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.remove()

    def _record(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"] if kwargs.get("input_ids") is not None else args[0]
        self.shapes.append((ids.shape[0], ids.shape[1]))

    @property
    def forwards(self) -> int:
        return len(self.shapes)

    @property
    def rows(self) -> list[int]:
        return [rows for rows, _ in self.shapes]


GREEDY = dict(do_sample=False, pad_token_id=0, eos_token_id=None)


@functools.cache
def shared(family: str, seed: int = 0, noise: float = 0.0, **overrides: Any) -> PreTrainedModel:
    """A model (a noisy copy of it if `noise`) that is built once per process; tests must leave it as it is."""
    return noisy(shared(family, seed, **overrides), noise) if noise else tiny(family, seed, **overrides)


DRAFTER_KINDS = ("same", "noisy", "unrelated", "lookup", "three")


def drafters(kind: str, family: str) -> list[Any]:
    """The drafters of the parity grid for the target `shared(family)`."""
    model, near, far = shared(family), shared(family, noise=0.03), shared(family, 11)
    return {
        "same": [model],
        "noisy": [near],
        "unrelated": [far],
        "lookup": ["prompt_lookup"],
        "three": ["prompt_lookup", near, far],
    }[kind]


def assert_plain(target: PreTrainedModel, models: list[Any], psd: Any = True, **arguments: Any) -> torch.Tensor:
    """Asserts that speculative decoding gives exactly what plain `generate` gives; returns the sequences."""
    expected = target.generate(**arguments)
    output = target.generate(**arguments, assistant_models=models, psd=psd)
    assert output.tolist() == expected.tolist()
    return output


class Fixed:
    """A selector that asks one drafter for all drafts each turn, in an order given as keys or drawn by a function."""

    def __init__(self, keys: Any = (0,)):
        self.keys, self.turn, self.results = keys, 0, []

    def plan(self, requests, arms, gamma):
        key = self.keys(self) if callable(self.keys) else self.keys[self.turn % len(self.keys)]
        self.turn += 1
        return [(key, [gamma] * len(requests))] if key in [arm.key for arm in arms] else []

    def feedback(self, results):
        self.results += results
