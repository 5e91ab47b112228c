"""Which models can be decoded speculatively: refused by reason, or proven by a self-test on a shrunken copy."""

from __future__ import annotations

import copy
import importlib.util
import inspect
from collections.abc import Callable

import torch
from transformers import PretrainedConfig, PreTrainedModel

from .attention import FAST, MaskBuilder
from .runner import ModelRunner, Rows, input_device
from .shrink import shrink_all, shrink_depth

_TOLERANCE = 1e-3
_SMALLEST_HEAD = 16  # what a matrix product of the attention kernel needs
_LARGEST_COPY = 20_000_000
_ROPE_REFUSED = ("dynamic", "longrope")
_checked: dict[str, str | None] = {}


def check_supported(model: PreTrainedModel, role: str) -> None:
    """Raises a `ValueError` naming `role`, the class and the reason if the model cannot run over ragged rows.

    The verdict is kept per class and configuration. A model passes when a tiny copy of its class (few layers, window
    4, random fp32 weights) gives the same logits on ragged, partly rolled back rows as on each row alone.
    """
    reason = _reason_from_config(model)
    if reason is None:
        implementation = model.config.get_text_config(decoder=True)._attn_implementation
        reason = _verdict(model, implementation if implementation in ("eager", "sdpa") else "sdpa")
    if reason is not None:
        raise ValueError(
            f"psd: {role} {type(model).__name__} (model type {model.config.model_type!r}) is not supported: {reason} "
            "Use plain `generate` for it."
        )


def choose_attention(model: PreTrainedModel, wanted: str) -> str:
    """The attention implementation `model` runs on: the fast route where it is wanted and fits, else a native one.

    Args:
        model: a model that passed `check_supported`.
        wanted: the `attention` setting: "auto" takes the fast route on CUDA with Triton.
    """
    current = model.config.get_text_config(decoder=True)._attn_implementation
    native = current if current in ("eager", "sdpa") else "sdpa"
    on_gpu = input_device(model).type == "cuda" and importlib.util.find_spec("triton") is not None
    if wanted == "native" or (wanted == "auto" and not (on_gpu and _head_dim(model) >= _SMALLEST_HEAD)):
        return native
    reason = _verdict(model, FAST)
    if reason is not None and wanted == "triton":
        raise ValueError(
            f"psd: attention='triton' does not fit {type(model).__name__}: {reason} Use attention='auto'."
        )
    return native if reason is not None else FAST


def _head_dim(model: PreTrainedModel) -> int:
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _verdict(model: PreTrainedModel, implementation: str) -> str | None:
    """The kept result of the self-test of this class and configuration on an attention implementation."""
    text_config = model.config.get_text_config(decoder=True)
    key = f"{type(model).__module__}.{type(model).__qualname__}|{implementation}|{text_config!r}"
    if key not in _checked:
        _checked[key] = _self_test(model, implementation)
    return _checked[key]


def _reason_from_config(model: PreTrainedModel) -> str | None:
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder model."
    if getattr(model, "_is_stateful", False):
        return "it keeps a recurrent state, which cannot be rolled back when drafts are rejected."
    if model.config.model_type == "git":
        return "plain `generate` lets its rows see their left padding, so that there is no text to be equal to."
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" not in parameters:
        return "its forward takes no position_ids, so rows cannot be at different positions."
    if "cache" not in parameters and "past_key_values" not in parameters:
        return "its forward takes no KV cache."
    if "prepare_inputs_for_generation" in vars(model):
        return "its inputs are prepared by an instance override (prompt tuning adds virtual tokens there)."
    text_config = model.config.get_text_config(decoder=True)
    try:
        MaskBuilder(text_config, None)
    except ValueError as error:
        return f"{error}"
    rope = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    kinds = {value.get("rope_type") for value in (rope, *rope.values()) if isinstance(value, dict)}
    bad = sorted(kinds & set(_ROPE_REFUSED))
    if bad:
        return f"its {bad[0]} RoPE depends on the longest row of the batch, rejected drafts included."
    return None


def _self_test(model: PreTrainedModel, implementation: str) -> str | None:
    """None if ragged rows equal single rows, else the reason."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tiny, troubles = None, []
        for shrink in (shrink_all, shrink_depth):
            try:
                tiny = _build(model, shrink, implementation)
                break
            except Exception as error:
                troubles.append(f"{type(error).__name__}: {str(error)[:200]}")
        if tiny is None:
            return f"its self-test could not be set up ({'; '.join(troubles)})."
        try:
            difference = _ragged_error(tiny, implementation)
        except Exception as raised:
            return f"its forward fails on ragged rows ({type(raised).__name__}: {str(raised)[:200]})."
    if not difference < _TOLERANCE:
        return f"its logits on ragged rows differ from single rows by {difference:.1e} of their size."
    return None


def _build(model: PreTrainedModel, shrink: Callable[[PretrainedConfig], None], implementation: str) -> PreTrainedModel:
    config = copy.deepcopy(model.config)
    shrink(config)
    text_config = config.get_text_config(decoder=True)
    config.dtype = text_config.dtype = torch.float32
    for setting in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, setting):
            delattr(config, setting)
    # Single rows are computed by the model's own attention; the fast route is switched on for the ragged rows alone.
    config._attn_implementation = "eager" if implementation == FAST else implementation
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in type(model)(config).parameters())
    if size > _LARGEST_COPY:
        raise ValueError(f"the shrunken copy would have {size} parameters")
    tiny = type(model)(config).float().eval()
    with torch.no_grad():
        for parameter in tiny.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * (0.5 if parameter.shape[-1] <= 128 else 0.05))
        probe = torch.randint(3, text_config.vocab_size, (1, 6))
        if not tiny(input_ids=probe, use_cache=False).logits.isfinite().all():
            raise ValueError("the shrunken copy gives logits that are not finite")
    return tiny


@torch.no_grad()
def _ragged_error(model: PreTrainedModel, implementation: str) -> float:
    """Largest difference, relative to the largest logit, between ragged rows with rollback and the same rows alone."""
    plain = model.config.get_text_config(decoder=True)._attn_implementation
    model.set_attn_implementation(implementation)
    vocab = model.config.get_text_config(decoder=True).vocab_size
    texts = [torch.randint(3, vocab, (length,)) for length in (3, 11, 7)]
    runner = ModelRunner(model, len(texts), 48)
    rows = Rows(range(len(texts)), torch.device("cpu"))
    longest = max(len(text) for text in texts)
    ids, positions = torch.zeros(len(texts), longest, dtype=torch.long), torch.full((len(texts), longest), -1)
    for row, text in enumerate(texts):
        ids[row, longest - len(text) :], positions[row, longest - len(text) :] = text, torch.arange(len(text))
    runner.feed(rows, ids, positions, longest)
    worst = scale = 0.0
    for kept in ((2, 0, 4), (3, 4, 1), (0, 0, 0)):
        block = torch.randint(3, vocab, (len(texts), 4))
        starts = torch.tensor([[len(text)] for text in texts])
        model.set_attn_implementation(implementation)
        logits = runner.forward(rows, block, starts + torch.arange(4), longest + 16).logits
        model.set_attn_implementation(plain)
        for row, text in enumerate(texts):
            alone = model(input_ids=torch.cat([text, block[row]])[None], use_cache=False).logits[0, -4:]
            worst = max(worst, (logits[row] - alone).abs().max().item())
            scale = max(scale, alone.abs().max().item())
            texts[row] = torch.cat([text, block[row, : kept[row]]])
    return worst / scale if scale > 0 else float("nan")
