"""What the graphs of a lane keep, with graphs played by the CPU."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tapes import play
from torch.utils._pytree import tree_leaves
from zoo import GREEDY, P4, VOCAB, shared

import hf_psd
from hf_psd.graphs import StepGraphs
from hf_psd.lanes import Lane
from hf_psd.runner import Rows

CPU = torch.device("cpu")


def test_graphs_that_were_not_replayed_for_longest_go(monkeypatch):
    results = play(monkeypatch)
    monkeypatch.setattr("hf_psd.graphs._MOST_GRAPHS", 2)
    graphs, rows, captured = StepGraphs(Lane(CPU), 1), Rows([0], CPU), []

    def run(key):
        def function():
            captured.append(key)
            return torch.full((1,), key)

        seen = weakref.ref(function)
        assert graphs.run(key, rows, function).item() == key
        return seen

    seen = {key: run(key) for key in (1, 2)}
    run(1)
    captured.clear()
    run(3)
    run(1)
    assert set(captured) == {3} and graphs.captured == 3
    results.clear()
    gc.collect()
    assert seen[1]() is not None and seen[2]() is None
    run(2)
    assert set(captured) == {3, 2} and graphs.captured == 4


def test_slots_are_put_back_when_a_capture_fails(monkeypatch):
    play(monkeypatch)
    graphs = StepGraphs(Lane(CPU), 7)
    rows = graphs.rows([3, 4])
    with pytest.raises(ZeroDivisionError):
        graphs.run("key", rows, lambda: 1 / 0)
    assert rows.slots.tolist() == [3, 4]


@pytest.mark.parametrize("sampled", [False, True])
def test_graphs_keep_no_logits(monkeypatch, sampled):
    captured = play(monkeypatch)
    law = GREEDY | dict(do_sample=sampled, max_new_tokens=6)
    shared("llama").generate(
        **P4(), **law, assistant_models=[shared("llama", 11)], psd=dict(mode="sd", gamma=2, cuda_graphs=True)
    )
    outputs = [leaf for _, _, outputs in captured for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    hf_psd.release()
    assert outputs and all(leaf.shape[-1] != VOCAB for leaf in outputs)
