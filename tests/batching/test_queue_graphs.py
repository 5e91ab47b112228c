"""What the queue captures in CUDA graphs, with stand-ins on the CPU that run the captured functions anew."""

from __future__ import annotations

import pytest
import torch
import zoo
from queue_cases import PROMPTS, coupled, drafters, plain, target

import hf_psd
from hf_psd.graphs import StepGraphs
from hf_psd.roster import Roster
from hf_psd.workspace import Workspace


@pytest.fixture
def captured(monkeypatch):
    """Steps count as capturable; gives the keys of what would have been captured, and how often each ran."""
    keys = {}

    def run(graphs, key, rows, function):
        if key not in keys:
            wanted = rows.slots.clone()
            rows.slots.fill_(graphs.idle_slot)
            function()  # the warm-up, over a slot that nobody owns
            rows.slots.copy_(wanted)
        keys[key] = keys.get(key, 0) + 1
        rows.numbers[:] = [None] * len(rows)  # a replay knows slots on the device alone
        return function()

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(StepGraphs, "run", run)
    monkeypatch.setattr(Roster, "_on_cuda", lambda roster, drafter: True)
    monkeypatch.setattr(Workspace, "draft_graphs_on", lambda space, device: space.draft_graphs)
    monkeypatch.setattr("hf_psd.queue.engine.may_graph", lambda *args: True)
    monkeypatch.setattr("hf_psd.drafters.model.ModelDrafter.capturable", property(lambda self: True, lambda *_: None))
    return keys


def laws(keys):
    """Captured verifications: their first part is what `capture_key` gave."""
    return {key[0] for key in keys if isinstance(key[0], tuple)}


@pytest.mark.parametrize("mode", ["ar", "sd", "psd"])
@pytest.mark.parametrize("kind", ["noisy", "both"])
def test_equal_settings_are_captured(captured, mode, kind):
    lengths = [dict(max_new_tokens=3 + 5 * (number % 4), eos_token_id=number) for number in range(12)]
    out = hf_psd.generate_batch(
        target(), PROMPTS * 2, drafters(kind), psd=dict(mode=mode), requests=lengths, max_batch_size=3, block_size=4,
        prefill_chunk=8, do_sample=False, pad_token_id=0,
    )  # fmt: skip
    for prompt, own, result in zip(PROMPTS * 2, lengths, out.values()):
        text = target().generate(torch.tensor([prompt]), do_sample=False, pad_token_id=0, **own)
        assert result.error is None and result.generated_tokens == text[0, len(prompt) :].tolist()
    assert len(laws(captured)) == 1 and sum(captured.values()) > 20
    assert ("feed", "target", 4, 16) in captured or ("feed", "target", 1, 16) in captured
    assert hf_psd.last_stats().notes == []


@pytest.mark.parametrize("seats", [1, 3])
def test_mixed_settings_run_eagerly_while_they_meet(captured, seats):
    own = [dict(do_sample=False), dict(do_sample=True, temperature=1.4)]
    requests = [dict(own[number % 2], max_new_tokens=8) for number in range(6)]
    out = hf_psd.generate_batch(
        target(), PROMPTS, drafters("both"), psd=dict(mode="sd", verification="coupled", seed=2), requests=requests,
        max_batch_size=seats, block_size=4, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    for number, (prompt, result) in enumerate(zip(PROMPTS, out.values())):
        settings = dict(own[number % 2], max_new_tokens=8)
        expected = plain(prompt, **settings) if number % 2 == 0 else coupled(prompt, 2, number, **settings)
        assert result.error is None and result.generated_tokens == expected
    notes = " ".join(hf_psd.last_stats().notes)
    assert ("different settings" in notes) == (seats == 3)
    assert len(laws(captured)) == 2 or seats == 3


def test_a_widened_queue_gives_its_graphs_up(captured):
    long = [3 + number % 60 for number in range(300)]
    queue = hf_psd.ContinuousBatchingManager(
        target(), ["prompt_lookup"], kv_memory=200 * 4 * 256, block_size=4, check=True, **zoo.GREEDY
    )
    queue.add_request(PROMPTS[0], max_new_tokens=40)
    for _ in range(4):
        queue.step()
    before = queue._worker.engine.space.verify_graphs
    queue.add_request(long, max_new_tokens=9)
    queue.step()
    assert queue._worker.engine.space.verify_graphs is not before
    queue.stop()
    texts = {result.request_id: result.generated_tokens for result in queue}
    assert texts == {"req_0": plain(PROMPTS[0], max_new_tokens=40), "req_1": plain(long, max_new_tokens=9)}
