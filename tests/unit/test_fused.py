"""Fused operators are swapped in for the length of a call and leave nothing behind; liger-kernel is stood in for."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from transformers.models.llama import modeling_llama
from zoo import P4, tiny

from hf_psd import fused


class Counting:
    """Stands for one operator; counts its calls."""

    def __init__(self, compute):
        self.compute, self.calls = compute, 0

    def apply(self, *args):
        self.calls += 1
        return self.compute(*args)


def normalise(x, weight, eps, offset, casting, in_place):
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


@pytest.fixture
def operators(monkeypatch):
    found = {
        "rms_norm": ("LigerRMSNormFunction", Counting(normalise)),
        "swiglu": ("LigerSiLUMulFunction", Counting(lambda a, b: torch.nn.functional.silu(a) * b)),
        "rope": ("LigerRopeFunction", Counting(lambda *args: pytest.fail("the kernel got a CPU tensor"))),
    }
    for name in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, (function, stand_in) in found.items():
        module = ModuleType(f"liger_kernel.ops.{name}")
        setattr(module, function, stand_in)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return {name: stand_in for name, (_, stand_in) in found.items()}


def test_operators_are_swapped_in_and_out(operators):
    model, rotation = tiny("llama"), modeling_llama.apply_rotary_pos_emb
    plain = model(**P4()).logits
    with fused.fused([model, model]):
        swapped = model(**P4()).logits
        assert modeling_llama.apply_rotary_pos_emb is not rotation
    assert torch.allclose(plain, swapped, atol=1e-4)
    assert operators["rms_norm"].calls == 2 * model.config.num_hidden_layers + 1
    assert operators["swiglu"].calls == model.config.num_hidden_layers
    assert modeling_llama.apply_rotary_pos_emb is rotation
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(model(**P4()).logits, plain)


def test_an_error_inside_leaves_nothing_behind(operators):
    model, rotation = tiny("llama"), modeling_llama.apply_rotary_pos_emb
    with pytest.raises(KeyError), fused.fused([model]):
        raise KeyError
    assert modeling_llama.apply_rotary_pos_emb is rotation
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_of_the_same_family_on_the_cpu_keeps_its_rotation(operators):
    target, drafter = tiny("llama"), tiny("llama", seed=1)
    plain = drafter(**P4()).logits
    with fused.fused([target]):
        assert torch.equal(drafter(**P4()).logits, plain)


def test_only_what_fits_is_fused():
    assert not fused.fits(tiny("llama"))  # not on CUDA
    assert not fused.fits(tiny("gpt2"))
    assert fused.models_to_fuse([tiny("llama")], False) == []


def test_asking_for_what_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr(fused, "available", lambda: False)
    with pytest.raises(ValueError, match="liger-kernel"):
        fused.models_to_fuse([tiny("llama")], True)
