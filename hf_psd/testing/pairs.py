"""Target and drafters of published shapes with random weights and a chosen agreement: real sizes without a hub."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPES: dict[str, dict[str, int]] = {
    "llama-3.1-8b": {"hidden": 4096, "intermediate": 14336, "layers": 32, "heads": 32, "kv_heads": 8, "vocab": 128256},
    "llama-3.2-3b": {"hidden": 3072, "intermediate": 8192, "layers": 28, "heads": 24, "kv_heads": 8, "vocab": 128256},
    "llama-3.2-1b": {"hidden": 2048, "intermediate": 8192, "layers": 16, "heads": 32, "kv_heads": 8, "vocab": 128256},
    "qwen2.5-32b": {"hidden": 5120, "intermediate": 27648, "layers": 64, "heads": 40, "kv_heads": 8, "vocab": 152064},
    "qwen2.5-7b": {"hidden": 3584, "intermediate": 18944, "layers": 28, "heads": 28, "kv_heads": 4, "vocab": 152064},
    "qwen2.5-1.5b": {"hidden": 1536, "intermediate": 8960, "layers": 28, "heads": 12, "kv_heads": 2, "vocab": 151936},
    "tinyllama-1.1b": {"hidden": 2048, "intermediate": 5632, "layers": 22, "heads": 32, "kv_heads": 4, "vocab": 32000},
    "llama-68m": {"hidden": 768, "intermediate": 3072, "layers": 2, "heads": 12, "kv_heads": 12, "vocab": 32000},
    "tiny": {"hidden": 256, "intermediate": 512, "layers": 4, "heads": 4, "kv_heads": 2, "vocab": 8000},
    "tiny-drafter": {"hidden": 128, "intermediate": 256, "layers": 1, "heads": 4, "kv_heads": 2, "vocab": 8000},
}
"""Published sizes by name; all are built as Llama models."""

_SHARPNESS = 4.0


def synthetic_pair(
    target: str = "llama-3.1-8b",
    drafters: Sequence[str] = ("llama-3.2-1b",),
    agreement: float = 0.75,
    layers: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
    drafter_device: torch.device | str | None = None,
) -> tuple[LlamaForCausalLM, list[LlamaForCausalLM]]:
    """Builds models whose greedy choices agree at about the given share of positions.

    A drafter shares the leading columns of the target's embedding and head. What the target's layers add is scaled
    down until the drafter, which does not have those layers, guesses right as often as asked.

    Args:
        target: a name in `SHAPES`.
        drafters: names in `SHAPES`, none wider than the target; they are built with the target's vocabulary.
        agreement: share of positions at which the first drafter's argmax is the target's, 0 .. 0.95.
        layers: build only so many layers of each model.
        dtype: of all weights.
        device: where the target lives; drafters too unless `drafter_device` is given.
        seed: of the weights.
        drafter_device: where the drafters live.

    Returns:
        The target and the drafters, in eval mode. `measure_agreement` tells what was reached.
    """
    width, vocab = SHAPES[target]["hidden"], SHAPES[target]["vocab"]
    torch.manual_seed(seed)
    big = _build(SHAPES[target], layers, dtype, device)
    small = [_build(SHAPES[name] | {"vocab": vocab}, layers, dtype, device) for name in drafters]
    torch.manual_seed(seed + 1)  # the target must not depend on how many drafters were built
    with torch.no_grad():
        embedding = torch.randn(vocab, width, device=device, dtype=torch.float32)
        head = torch.randn(vocab, width, device=device, dtype=torch.float32) * (_SHARPNESS / math.sqrt(width))
        narrowest = min((drafter.config.hidden_size for drafter in small), default=width)
        head[:, narrowest:] = 0  # what a drafter cannot see must not decide
        big.model.embed_tokens.weight.copy_(embedding)
        big.lm_head.weight.copy_(head)
        for drafter in small:
            part = drafter.config.hidden_size
            drafter.model.embed_tokens.weight.copy_(embedding[:, :part])
            drafter.lm_head.weight.copy_(head[:, :part])
    for drafter in small:
        _scale_branches(drafter, 1e-3)
    if small:
        _calibrate(big, small[0], agreement)
    if drafter_device is not None:
        small = [torch.nn.Module.to(drafter, drafter_device) for drafter in small]
    return big, small


@torch.no_grad()
def measure_agreement(
    target: LlamaForCausalLM, drafter: LlamaForCausalLM, seed: int = 1, rows: int = 8, columns: int = 96
) -> float:
    """Share of positions of random text at which both models' argmax is the same id."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, target.config.vocab_size, (rows, columns), generator=generator)
    best = [
        model(input_ids=ids.to(model.device), use_cache=False).logits.argmax(-1).cpu() for model in (target, drafter)
    ]
    return (best[0] == best[1]).float().mean().item()


def _build(shape: dict[str, int], layers: int | None, dtype: torch.dtype, device: Any) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["intermediate"],
        num_hidden_layers=layers or shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(previous)


def _scale_branches(model: LlamaForCausalLM, factor: float) -> None:
    """Multiplies what each layer adds to the residual stream by `factor`."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(factor)
            layer.mlp.down_proj.weight.mul_(factor)


def _calibrate(target: LlamaForCausalLM, drafter: LlamaForCausalLM, agreement: float) -> None:
    """Bisects the scale of the target's branches until the drafter agrees as often as asked."""
    low, high, current = -10.0, 6.0, 0.0  # log2 of the scale
    for _ in range(14):
        middle = (low + high) / 2
        _scale_branches(target, 2.0 ** (middle - current))
        current = middle
        low, high = (middle, high) if measure_agreement(target, drafter) > agreement else (low, middle)
