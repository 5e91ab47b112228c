"""Every causal LM that transformers knows, as small as its own configuration lets itself be made."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from zoo import FAMILIES, GREEDY, P4, Fixed, noisy, shared

import hf_psd
from hf_psd.shrink import shrink_all

TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_MOST_PARAMETERS = 20_000_000
_OTHER_SIZES = dict(
    d_model=64, decoder_layers=2, encoder_layers=2, decoder_ffn_dim=64, encoder_ffn_dim=64, decoder_attention_heads=4,
    encoder_attention_heads=4,
)  # fmt: skip
_ASK = P4() | GREEDY | dict(max_new_tokens=16)
_WHERE_UNSET = dict(
    head_dim=16, num_experts_per_tok=2, n_routed_experts=4, n_group=1, topk_group=1, moe_topk=2, n_shared_experts=1
)


@dataclass
class Finding:
    """What became of one model type: `verdict` is "same", "differs", "refused", or "not tried"; `note` says why."""

    family: str
    verdict: str
    note: str = ""
    seconds: float = 0.0


def examine(family: str) -> Finding:
    """Compares greedy text of a batch in modes "sd" and "psd" with plain `generate`'s."""
    began = time.perf_counter()
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        verdict, note = _examine(family)
    return Finding(family, verdict, note, time.perf_counter() - began)


def _examine(family: str) -> tuple[str, str]:
    try:
        model = shared(family) if family in FAMILIES else _smallest(family)
        plain = model.generate(**_ASK, return_dict_in_generate=True, output_logits=True)
    except Exception as error:
        if getattr(_class_of(family), "_is_stateful", False):
            return "refused", "it keeps a recurrent state (told from its class; no tiny model of it was built)."
        return "not tried", f"no tiny model of it runs ({_line(error)})"
    near = noisy(model, 0.01)
    for mode in ("sd", "psd"):
        try:
            text = model.generate(
                **_ASK, assistant_models=[near, "prompt_lookup"], psd=dict(mode=mode, selector=Fixed((0, 1)))
            )
        except ValueError as error:
            if "is not supported" not in str(error) and "cannot be used with psd" not in str(error):
                return "differs", _line(error)
            return "refused", _reason(str(error))
        except Exception as error:
            return "differs", _line(error)
        if hf_psd.last_stats().errors or not _same_but_for_ties(text, plain):
            return "differs", "; ".join(hf_psd.last_stats().errors) or f'another text in mode="{mode}"'
    accepted = f"{hf_psd.last_stats().accepted} of {hf_psd.last_stats().drafted} drafts accepted"
    return "same", accepted


def _same_but_for_ties(text, plain) -> bool:
    """Whether rows part, if at all, at logits that float32 rounds differently: within 1e-5 of the largest."""
    columns = _ASK["input_ids"].shape[1]
    for row, (ours, theirs) in enumerate(zip(text, plain.sequences)):
        parting = (ours != theirs).long().argmax().item()
        if ours[parting] != theirs[parting]:
            logits = plain.logits[parting - columns][row]
            if (logits[ours[parting]] - logits[theirs[parting]]).abs() > 1e-5 * logits.abs().max():
                return False
    return True


def _class_of(family: str):
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family], None)


def _smallest(family: str):
    config = AutoConfig.for_model(family)
    shrink_all(config)
    for name, size in _OTHER_SIZES.items():
        if name in config.to_dict():
            setattr(config, name, size)
    text = config.get_text_config(decoder=True)
    for name, size in _WHERE_UNSET.items():
        if name in text.to_dict() and text.to_dict()[name] is None:
            setattr(text, name, size)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    text.max_position_embeddings = 128
    with torch.device("meta"):
        size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f} million parameters")
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn_like(weight) * (0.5 if weight.shape[-1] <= 128 else 0.05))
    return model


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:120].replace("|", "/")


def _reason(message: str) -> str:
    reason = message.split("is not supported: ")[-1].split(" Use plain")[0]
    return " ".join(reason.split())[:160].replace("|", "/")


def render(findings: list[Finding]) -> str:
    """docs/families.md."""
    same, refused, missing = (
        [each for each in findings if each.verdict == verdict] for verdict in ("same", "refused", "not tried")
    )
    wrong = [each for each in findings if each.verdict == "differs"]
    lines = [
        "# Model families",
        "",
        "Greedy text of a left-padded batch of four, 16 new tokens, fp32 on the CPU, `mode=\"sd\"` and `\"psd\"` with a noisy copy and",
        f"prompt lookup as drafters, against plain `generate`: all {len(findings)} types of transformers {transformers.__version__}'s causal-LM",
        "mapping, each as a tiny random model of its own class. Written by `pytest tests/parity/test_families.py -m slow --write-families`.",
        "",
        f"{len(same)} the same, {len(refused)} refused with a reason, {len(wrong)} different, {len(missing)} not tried (their tiny model could not be",
        "built or run by plain `generate` either).",
        "",
        "**The same**: " + ", ".join(f"`{each.family}`" for each in same) + ".",
        "",
        "| refused | reason |",
        "|---|---|",
        *(f"| `{each.family}` | {each.note} |" for each in refused),
        "",
    ]  # fmt: skip
    if wrong:
        lines += ["| different | what |", "|---|---|", *(f"| `{each.family}` | {each.note} |" for each in wrong), ""]
    lines += ["**Not tried**: " + ", ".join(f"`{each.family}`" for each in missing) + "."]
    return "\n".join(lines) + "\n"
