"""liger-kernel's fused RMSNorm, rotary embedding and SwiGLU, on one instance and only for the length of a call."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

_ROPE, _MARK = "apply_rotary_pos_emb", "_psd_fused"
_SILU = ("SiLU", "SiLUActivation")
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose norm, MLP and rotary embedding are the ones these operators compute."""


def available() -> bool:
    """Whether liger-kernel is installed."""
    return importlib.util.find_spec("liger_kernel") is not None


def fits(model: PreTrainedModel) -> bool:
    """Whether the fused operators compute what this model's do: a known family, unquantised, on one CUDA device."""
    return (
        model.config.model_type in _FAMILIES
        and model.device.type == "cuda"
        and getattr(model, "hf_device_map", None) is None
        and getattr(model, "hf_quantizer", None) is None
    )


def models_to_fuse(models: Sequence[PreTrainedModel], wanted: bool | str) -> list[PreTrainedModel]:
    """Those of `models` to run with fused operators under the `fused_ops` setting `wanted`."""
    if wanted is True and not available():
        raise ValueError(
            "psd: fused_ops=True needs liger-kernel: pip install 'hf_psd[fused]', or use fused_ops='auto'."
        )
    return [model for model in models if fits(model)] if wanted and available() else []


@contextmanager
def fused(models: Sequence[PreTrainedModel]) -> Iterator[None]:
    """Replaces the operators of `models` inside the block; instances and modules are as before after it."""
    with ExitStack() as undo:
        for model in dict.fromkeys(models):
            for module in model.modules():
                forward = _forward_for(module)
                if forward is not None and "forward" not in vars(module):
                    module.forward = forward
                    undo.callback(vars(module).pop, "forward")
            home = sys.modules[type(model).__module__]
            original = vars(home).get(_ROPE)
            if original is not None and not hasattr(original, _MARK):
                setattr(home, _ROPE, _rotation(original))
                undo.callback(setattr, home, _ROPE, original)
        yield


def _forward_for(module: torch.nn.Module) -> Callable[..., torch.Tensor] | None:
    name = type(module).__name__
    if name.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
        return _normaliser(module)
    act = getattr(module, "act_fn", None)
    if name.endswith("MLP") and type(act).__name__ in _SILU and hasattr(module, "gate_proj"):
        return _gated(module)
    return None


def _normaliser(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        return LigerRMSNormFunction.apply(hidden_states, module.weight, module.variance_epsilon, 0.0, "llama", False)

    return forward


def _gated(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def forward(x: torch.Tensor) -> torch.Tensor:
        return module.down_proj(LigerSiLUMulFunction.apply(module.gate_proj(x), module.up_proj(x)))

    return forward


def _rotation(original: Callable[..., Any]) -> Callable[..., Any]:
    """`apply_rotary_pos_emb` as one kernel for q and k [R, H, T, D]; models of the family on the CPU keep theirs."""
    from liger_kernel.ops.rope import LigerRopeFunction

    @functools.wraps(original)
    def rotate(q: torch.Tensor, k: torch.Tensor, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        if q.device.type != "cuda":
            return original(q, k, cos, sin, *args, **kwargs)
        return LigerRopeFunction.apply(q, k, cos, sin)

    setattr(rotate, _MARK, True)
    return rotate
