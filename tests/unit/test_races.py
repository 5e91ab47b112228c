"""No two lanes touch the same memory without an order: the step loop and the queue under the race detector."""

from __future__ import annotations

import random

import pytest
import torch
from races import Races
from tapes import play
from test_reviews import SAMPLED, Listener
from zoo import GREEDY, P4, shared, tiny

import hf_psd
from hf_psd import ContinuousBatchingManager
from hf_psd.drafters.model import ModelDrafter
from hf_psd.graphs import StepGraphs, captures
from hf_psd.lanes import Lane
from hf_psd.runner import Rows

HARMLESS = (
    "scatter_ (model.py",  # drafts kept past the end of a text that another drafter copies: nobody reads them there
    "seats.py",  # a request that has ended is marked while it is drafted for in vain
    "blocks.py",  # tables of blocks: the host writes its own, and waits for the first copy
)
LAWS = {
    "greedy": (GREEDY, {}),
    "coupled": (SAMPLED, dict(verification="coupled")),
    "rejection": (SAMPLED, dict(verification="rejection")),
}


def watch(patch, far, graphs):
    """The detector, and three drafters of which those numbered in `far` live on a second device."""
    drafters = [shared("llama", noise=0.03), shared("llama", 11), "prompt_lookup"]
    play(patch, [drafters[number] for number in far])
    models = (shared("llama"), *drafters[:2])
    return Races(patch, [weight for model in models for weight in model.parameters()], idle_row=graphs), drafters


def found(races: Races) -> list[str]:
    return [race for race in races.found if not any(place in race for place in HARMLESS)]


def decode(mode, law, far, graphs, monkeypatch, selector=None, tokens=16) -> list[str]:
    races, drafters = watch(monkeypatch, far, graphs)
    settings, verification = LAWS[law]
    psd = dict(selector=selector or Listener(3, 4), gamma=3, mode=mode, seed=4, cuda_graphs=graphs, **verification)
    with races:
        shared("llama").generate(**P4(), **settings | dict(max_new_tokens=tokens), assistant_models=drafters, psd=psd)
    assert not hf_psd.last_stats().errors
    hf_psd.release()
    return found(races)


@pytest.mark.parametrize("law", ["greedy", "rejection"])
def test_drafters_that_share_a_far_device_overwrite_nothing_of_each_other(law, monkeypatch):
    class Shared(Listener):
        """Every other row is drafted for by the second drafter."""

        def plan(self, requests, arms, gamma):
            super().plan(requests, arms, gamma)
            return [(key, [gamma * (row % 2 == key) for row in range(len(requests))]) for key in (0, 1)]

    assert decode("sd", law, (0, 1), True, monkeypatch, Shared(), tokens=8) == []


CASES = [
    ("psd", "greedy", (0, 1), False),
    ("psd", "greedy", (0, 1), True),
    ("psd", "coupled", (), True),
    ("sd", "rejection", (1,), True),
]


@pytest.mark.parametrize(("mode", "law", "far", "graphs"), CASES)
def test_lanes_of_a_call_wait_for_each_other(mode, law, far, graphs, monkeypatch):
    assert decode(mode, law, far, graphs, monkeypatch) == []


@pytest.mark.parametrize("mode", ["sd", "psd"])
def test_lanes_of_a_queue_wait_for_each_other(mode, monkeypatch):
    races, drafters = watch(monkeypatch, (0,), True)
    monkeypatch.setattr("hf_psd.queue.engine.may_graph", lambda model, wanted, *more: wanted is not False)
    lots = random.Random(3)
    psd = dict(mode=mode, gamma=3, seed=1, cuda_graphs=True)
    sizes = dict(max_batch_size=4, block_size=8, kv_memory=2**18)
    with races:
        queue = ContinuousBatchingManager(shared("llama"), drafters[:1], psd=psd, **sizes, **GREEDY)
        for _ in range(8):
            prompt = [lots.randrange(3, 60) for _ in range(lots.choice([1, 7, 20]))]
            queue.add_request(prompt, max_new_tokens=lots.choice([1, 8, 12]))
        queue.run_to_end()
    assert not queue.stats.errors and queue.stats.acceptance > 0.3
    assert found(races) == []


def test_a_missing_wait_is_found(monkeypatch):
    races, drafters = watch(monkeypatch, (0, 1), False)
    monkeypatch.setattr(Lane, "follow", lambda lane, other: None)
    with races:
        shared("llama").generate(**P4(), **GREEDY | dict(max_new_tokens=8), assistant_models=drafters, psd=True)
    assert found(races)


def test_memory_of_graphs_is_its_lanes_own(monkeypatch):
    races, _ = watch(monkeypatch, (), True)
    own, other = Lane(torch.device("cpu"), "own"), Lane(torch.device("cpu"), "other")
    graphs, rows = StepGraphs(own, 1), Rows([0], torch.device("cpu"))
    values = torch.ones(1, 2)
    with races:
        for keep in (False, True):
            with own.work():
                out = graphs.run(keep, rows, lambda keep=keep: graphs.held("kept", values + 1) if keep else values + 1)
            own.mark()
            other.follow(own)
            with other.work():
                out.clone()
            assert len(found(races)) == 1, "the first output lies where any graph of the lane may write"


def test_eight_bit_layers_are_not_captured():
    class Linear8bitLt(torch.nn.Linear):
        """Named as the layer of bitsandbytes."""

    model = tiny("llama")
    assert captures(model) and ModelDrafter(model, 0).capturable
    model.model.layers[0].mlp.up_proj = Linear8bitLt(8, 8)
    assert not captures(model) and not ModelDrafter(model, 0).capturable
