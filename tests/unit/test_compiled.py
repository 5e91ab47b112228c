"""`compile=True`: parts of the models are compiled during the call and as they were after it."""

from __future__ import annotations

import pytest
import torch

from hf_psd.compiled import compiled

from test_pacing import tiny  # isort: skip


def run(target, drafter, **psd):
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    return target.generate(
        ids, attention_mask=torch.ones_like(ids), assistant_models=[drafter], psd={"mode": "sd", **psd}, do_sample=False,
        max_new_tokens=24, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip


def test_what_is_compiled_runs_and_is_undone(monkeypatch):
    target, calls = tiny(0, 2), []

    def compiling(function, **options):
        assert options == {"dynamic": True}
        return lambda *args: calls.append(function.__self__) or function(*args)

    monkeypatch.setattr(torch, "compile", compiling)
    expected = run(target, tiny(3))
    assert not calls
    assert torch.equal(run(target, tiny(3), compile=True), expected)
    assert {type(module).__name__ for module in calls} == {"LlamaMLP", "LlamaRMSNorm"}
    assert not any("forward" in vars(module) for module in target.modules())


def test_a_module_with_a_forward_of_its_own_keeps_it():
    target = tiny(0)
    own = target.model.norm.forward = lambda hidden: hidden
    with compiled([target]):
        assert target.model.norm.forward is own
    assert target.model.norm.forward is own


@pytest.mark.slow
def test_compiled_parts_give_the_same_text():
    target, drafter = tiny(0, 2), tiny(3)
    assert torch.equal(run(target, drafter, compile=True), run(target, drafter))
