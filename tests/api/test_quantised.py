"""Quantised targets and drafters, as far as they run on a CPU: never moved, equal to plain `generate` on themselves."""

from __future__ import annotations

import copy
import functools
import importlib.util
import tempfile

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig
from zoo import GREEDY, P4, Fixed, noisy, tiny

import hf_psd

ASK = P4() | GREEDY | dict(max_new_tokens=20)
MODES = ("ar", "sd", "psd")
EXACT = ("nf4", "fp4, double", "torchao int8")


def settings(kind: str, dtype: torch.dtype = torch.float32):
    if kind == "torchao int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    if kind == "nf4":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    if kind == "fp4, double":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype)
    return BitsAndBytesConfig(load_in_8bit=True)


@functools.cache
def quantised(kind: str, family: str = "llama", noise: float = 0.0, dtype: torch.dtype = torch.float32):
    """A tiny model saved, and loaded quantised."""
    package = "torchao" if kind.startswith("torchao") else "bitsandbytes"
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    sizes = {} if family == "gpt2" else dict(hidden_size=64, intermediate_size=128)
    if family != "gpt2" and kind == "int8":
        sizes["initializer_range"] = 0.25
    model = tiny(family, **sizes)
    model = noisy(model, noise) if noise else model
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=settings(kind, dtype), device_map="cpu", dtype=dtype
        )


@pytest.fixture(autouse=True)
def nothing_is_moved(monkeypatch):
    """Loading done, `to`, `cuda`, `float` and the like on a quantised module are an error."""
    for kind in (*EXACT, "int8"):
        if importlib.util.find_spec("torchao" if kind.startswith("torchao") else "bitsandbytes"):
            quantised(kind), quantised(kind, noise=0.03)

    def moved(self, *args, original=torch.nn.Module._apply, **kwargs):
        weights = [type(weight).__name__ for weight in self.parameters()]
        assert not {"Params4bit", "Int8Params", "Int8Tensor", "AffineQuantizedTensor"} & set(weights), "it was moved"
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "_apply", moved)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", EXACT)
def test_greedy_text_is_plain(kind, mode):
    target, near = quantised(kind), quantised(kind, noise=0.03)
    assert type(target.model.layers[0].mlp.up_proj.weight) is not torch.nn.Parameter
    expected = target.generate(**ASK).tolist()
    for models in ([near, "prompt_lookup"], [target], [tiny("llama", 11)]):
        output = target.generate(**ASK, assistant_models=models, psd=dict(mode=mode, selector=Fixed()))
        assert output.tolist() == expected and not hf_psd.last_stats().errors
    full = tiny("llama", hidden_size=64, intermediate_size=128)
    output = full.generate(**ASK, assistant_models=[near], psd=dict(mode=mode, selector=Fixed()))
    assert output.tolist() == full.generate(**ASK).tolist() and not hf_psd.last_stats().errors
    assert mode == "ar" or hf_psd.last_stats().accepted > 10


def gap(target, row, at, other):
    """How far the logits of two tokens are apart after the common text, as a share of the largest logit."""
    logits = target(row[None, :at]).logits[0, -1].float()
    return ((logits[row[at]] - logits[other[at]]).abs() / logits.abs().max()).item()


@pytest.mark.parametrize("mode", MODES)
def test_int8_differs_at_near_ties_only(mode):
    """LLM.int8 looks for outliers over all rows at once and multiplies in half precision."""
    target, near = quantised("int8"), quantised("int8", noise=0.03)
    inputs = {name: tensor[:1] for name, tensor in P4().items()}
    plain = target.generate(**inputs, **GREEDY, max_new_tokens=20)
    for models in ([near], [target]):
        psd = dict(mode=mode, selector=Fixed())
        fast = target.generate(**inputs, **GREEDY, max_new_tokens=20, assistant_models=models, psd=psd)
        assert not hf_psd.last_stats().errors
        at = (plain[0] != fast[0]).long().argmax().item()
        assert plain[0, at] == fast[0, at] or gap(target, plain[0], at, fast[0]) < 0.02


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_around_four_bits(dtype):
    """Whatever the compute dtype, keys and values keep the model's own, and both sides may differ."""
    target = quantised("nf4", dtype=dtype)
    output = target.generate(**ASK, assistant_models=[tiny("llama", 11), target], psd=dict(mode="psd"))
    assert output.shape == (4, 27) and not hf_psd.last_stats().errors and hf_psd.last_stats().accepted
    for row, plain in zip(output, target.generate(**ASK)):
        at = (row != plain).long().argmax().item()
        text = slice((plain[:7] == 0).sum(), None)
        assert row[at] == plain[at] or gap(target, plain[text], at - text.start, row[text]) < 0.05


def test_sampled_text_follows_the_seed():
    target, near = quantised("nf4"), quantised("nf4", noise=0.03)
    draw = P4() | dict(do_sample=True, pad_token_id=0, max_new_tokens=12)
    psd = dict(seed=1, verification="coupled")
    expected = target.generate(**draw, psd=psd | dict(mode="ar"))
    assert target.generate(**draw, assistant_models=[near], psd=psd | dict(mode="psd")).tolist() == expected.tolist()


def test_the_self_test_needs_no_quantised_copy():
    before = copy.deepcopy(quantised("nf4").config.to_dict())
    hf_psd.generate(quantised("nf4"), **ASK)
    assert quantised("nf4").config.to_dict() == before
