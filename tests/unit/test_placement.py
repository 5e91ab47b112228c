"""Decisions about devices, with devices made up; nothing is moved on a machine without a GPU."""

from __future__ import annotations

import pytest
import torch

import hf_psd
from hf_psd.placement import decide

from test_pacing import tiny  # isort: skip

GIB = 2**30
TWO = {"cuda:0": 80 * GIB, "cuda:1": 80 * GIB}


def test_one_gpu_holds_everything():
    decision = decide(16 * GIB, [2 * GIB], ["cuda:0"], {"cuda:0": 40 * GIB})
    assert (decision.target, decision.drafters) == (["cuda:0"], ["cuda:0"])
    assert "shares cuda:0" in decision.reasons[0]


def test_a_drafter_gets_a_device_of_its_own():
    decision = decide(16 * GIB, [2 * GIB, 6 * GIB], list(TWO), TWO)
    assert (decision.target, decision.drafters, decision.reasons) == (["cuda:0"], ["cuda:1", "cuda:1"], [])


def test_drafters_are_apart_from_each_other_only_where_memory_asks_for_it():
    free = dict.fromkeys(("cuda:0", "cuda:1", "cuda:2"), 10 * GIB)
    assert decide(5 * GIB, [6 * GIB, 6 * GIB], list(free), free).drafters == ["cuda:2", "cuda:1"]


def test_a_large_target_is_spread_over_the_others():
    free = dict.fromkeys(("cuda:0", "cuda:1", "cuda:2"), 80 * GIB)
    decision = decide(110 * GIB, [2 * GIB], list(free), free)
    assert (decision.target, decision.drafters) == (["cuda:0", "cuda:1"], ["cuda:2"])
    decision = decide(150 * GIB, [2 * GIB], list(free), free)
    assert (decision.target, decision.drafters) == (list(free), ["cuda:2"])


def test_the_target_takes_the_first_device_that_holds_it():
    assert decide(16 * GIB, [], ["cuda:0", "cuda:1"], {"cuda:0": 8 * GIB, "cuda:1": 80 * GIB}).target == ["cuda:1"]


def test_what_must_not_be_moved_stays():
    decision = decide(None, [None, GIB], list(TWO), TWO)
    assert (decision.target, decision.drafters) == ([], [None, "cuda:1"])
    assert len(decision.reasons) == 2


@pytest.mark.parametrize(("target", "drafter"), [(200 * GIB, GIB), (60 * GIB, 70 * GIB)])
def test_weights_that_do_not_fit_are_refused_with_their_size(target, drafter):
    with pytest.raises(ValueError, match="GiB"):
        decide(target, [drafter], list(TWO), TWO)


def test_without_a_gpu_nothing_moves(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    target, drafter = tiny(0), tiny(1)
    placement = hf_psd.place(target, [drafter, "prompt_lookup"])
    assert (placement.target, placement.drafters, placement.spread) == ("cpu", ["cpu"], False)
    assert "no accelerator" in str(placement)


def test_named_devices_are_checked_and_used():
    target, drafter = tiny(0).double(), tiny(1)
    assert hf_psd.place(target, [drafter], devices=["cpu"], max_memory={"cpu": "1GiB"}).target == "cpu"
    with pytest.raises(ValueError, match="GiB"):
        hf_psd.place(target, [drafter], devices=["cpu"], max_memory={"cpu": 100})
    with pytest.raises(ValueError, match="no device cuda:7"):
        hf_psd.place(target, devices=[7])


def test_quantised_and_spread_models_are_left_alone(monkeypatch):
    target, drafter = tiny(0), tiny(1)
    target.hf_device_map = {"model": 0, "lm_head": 1}
    drafter.is_quantized = True
    monkeypatch.setattr(torch.nn.Module, "to", lambda *_: pytest.fail("moved"))
    placement = hf_psd.place(target, [drafter], devices=["cpu"])
    assert len(placement.reasons) == 2


def test_a_target_is_spread_by_accelerate(monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    target, seen = tiny(0, layers=4), {}
    size = sum(parameter.nbytes for parameter in target.parameters())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(size * 0.8), size))
    monkeypatch.setattr(accelerate, "dispatch_model", lambda model, layout: seen.update(layout))
    placement = hf_psd.place(target)
    assert placement.spread and len(set(seen.values())) > 1
    assert set(seen.values()) <= {0, 1, 2}


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"target": None}, TypeError, "target"),
        ({"drafters": tiny(1)}, TypeError, "drafters"),
        ({"drafters": "prompt_lookup"}, TypeError, "drafters"),
        ({"drafters": [3]}, TypeError, r"drafters\[0\]"),
        ({"devices": None}, TypeError, "devices"),
        ({"devices": "warp"}, ValueError, "warp"),
        ({"devices": [-1]}, ValueError, "-1"),
        ({"devices": [1.5]}, ValueError, "1.5"),
        ({"devices": "meta"}, ValueError, "lost"),
        ({"devices": "cpu", "max_memory": {"cuda:7": "1GiB"}}, ValueError, "cuda:7"),
        ({"devices": "cpu", "max_memory": {"cpu": -1}}, ValueError, "cpu"),
        ({"devices": "cpu", "max_memory": {"cpu": float("nan")}}, ValueError, "cpu"),
        ({"devices": "cpu", "max_memory": ["1GiB"]}, TypeError, "max_memory"),
    ],
)
def test_what_cannot_be_placed_is_refused_and_stays(arguments, error, named, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "to", lambda *_: pytest.fail("moved"))
    with pytest.raises(error, match=named):
        hf_psd.place(**{"target": tiny(0)} | arguments)


def test_models_inside_wrappers_and_drafters_are_placed_and_each_counts_once(monkeypatch):
    peft = pytest.importorskip("peft")
    from hf_psd.drafters.model import ModelDrafter

    target, held = tiny(0), tiny(1)
    adapted = peft.get_peft_model(tiny(2), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    moved = []
    monkeypatch.setattr(torch.nn.Module, "to", lambda model, device: moved.append(model))
    drafters = [target, adapted, ModelDrafter(held, 2), held, "prompt_lookup"]
    placement = hf_psd.place(target, drafters, devices=["cpu", "cpu"], max_memory={"cpu": 1e9})
    assert moved == [target, adapted.get_base_model(), held] and placement.drafters == ["cpu", "cpu"]
