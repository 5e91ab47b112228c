"""What the queue captures in CUDA graphs, with stand-ins on the CPU that run the captured functions anew."""

from __future__ import annotations

import warnings
from contextlib import contextmanager

import pytest
import torch
import zoo
from queue_cases import PROMPTS, coupled, drafters, plain, target

import hf_psd
from hf_psd.graphs import StepGraphs
from hf_psd.hooks import StepHook
from hf_psd.lanes import Lane
from hf_psd.queue.engine import QueueEngine
from hf_psd.queue.sampling import MixedSampler, RequestSampler, Seating
from hf_psd.queue.space import PagedWorkspace
from hf_psd.roster import Roster
from hf_psd.state import SequenceState
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


@pytest.fixture
def entered(monkeypatch):
    """Names of the lanes whose work is being enqueued."""
    names, work = [], Lane.work

    @contextmanager
    def working(lane, kind=""):
        names.append(lane.name)
        with work(lane, kind):
            yield
        names.pop()

    monkeypatch.setattr(Lane, "work", working)
    return names


def test_buffers_are_replaced_only_when_all_lanes_rest(captured, entered, monkeypatch):
    happened, mark, widen = [], Lane.mark, SequenceState.widen
    monkeypatch.setattr(Lane, "wait", lambda lane: happened.append(f"wait for {lane.name}"))
    monkeypatch.setattr(Lane, "mark", lambda lane: (happened.append(f"mark {lane.name}"), mark(lane)))
    monkeypatch.setattr(
        SequenceState, "widen", lambda state, width: (happened.append(f"widen on {entered}"), widen(state, width))
    )
    monkeypatch.setattr(PagedWorkspace, "forget_graphs", lambda space: happened.append("graphs go"))
    long = [3 + number % 60 for number in range(300)]
    out = hf_psd.generate_batch(target(), [PROMPTS[0], long], drafters("noisy"), max_new_tokens=4, **zoo.GREEDY)
    at = happened.index("widen on ['target']")
    assert happened[at - 2 : at] == ["wait for target", "wait for draft"]
    assert happened[at + 1 : at + 3] == ["mark target", "graphs go"]
    assert out["req_1"].generated_tokens == plain(long, max_new_tokens=4)


def test_drafters_make_their_buffers_on_the_lane_that_uses_them(entered, monkeypatch):
    seen, opening = [], Roster.open
    monkeypatch.setattr(Roster, "open", lambda roster, session: (seen.append(list(entered)), opening(roster, session)))
    hf_psd.generate_batch(target(), PROMPTS[:1], ["prompt_lookup"], max_new_tokens=2, **zoo.GREEDY)
    assert seen == [["target"]]


def test_a_captured_law_stays_though_the_desk_has_forgotten_it(captured, monkeypatch):
    monkeypatch.setattr("hf_psd.queue.settings._MOST_KNOWN", 1)
    laws, real = {}, QueueEngine.capture_key

    def key_of(engine, requests):
        key = real(engine, requests)
        laws.setdefault(key, set()).add(engine.seating.only)
        return key

    monkeypatch.setattr(QueueEngine, "capture_key", key_of)
    own = [dict(temperature=1.0 + number % 2) for number in range(6)]
    hf_psd.generate_batch(
        target(), PROMPTS, drafters("noisy"), requests=own, max_batch_size=1, max_new_tokens=3, do_sample=True,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    assert [len(found) for found in laws.values()] == [1, 1]


@pytest.mark.parametrize(("sampled", "seeds", "graphs"), [(False, 4, 1), (True, 4, 0), (True, 2, 2)])
def test_a_seed_of_one_request_alone_has_no_graphs_of_its_own(captured, sampled, seeds, graphs):
    own = [dict(seed=number % seeds, do_sample=sampled, max_new_tokens=5) for number in range(4)]
    settings = dict(max_batch_size=1, pad_token_id=0, eos_token_id=None)
    psd = dict(mode="sd", verification="coupled", seed=9)
    out = hf_psd.generate_batch(target(), PROMPTS[:4], drafters("noisy"), psd=psd, requests=own, **settings)
    for number, (prompt, result) in enumerate(zip(PROMPTS, out.values())):
        alone = coupled(prompt, number % seeds, 0, max_new_tokens=5) if sampled else plain(prompt, max_new_tokens=5)
        assert result.error is None and result.generated_tokens == alone
    assert len(laws(captured)) == graphs


@pytest.mark.parametrize("part", ["draw", "judge"])
def test_a_law_that_fails_in_a_capture_is_heard_of(captured, monkeypatch, part):
    def breaks(*args, **kwargs):
        raise torch.OutOfMemoryError("no memory for scores")

    queue = hf_psd.ContinuousBatchingManager(target(), drafters("noisy"), kv_memory=2**20, **zoo.GREEDY)
    monkeypatch.setattr(RequestSampler, part, breaks)
    names = queue.add_requests(PROMPTS[:2], max_new_tokens=6)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(60):
            queue.step()
    results = [queue.get_result(name, timeout=0) for name in names]
    queue.stop(hard_stop=True)
    if part == "judge":
        assert all(isinstance(result.exception, torch.OutOfMemoryError) for result in results)
    else:
        assert [result.generated_tokens for result in results] == [plain(p, max_new_tokens=6) for p in PROMPTS[:2]]
        assert "no memory for scores" in str(warned[0].message)


def test_a_greedy_step_needs_no_scores_though_others_that_are_seated_do():
    class Law:
        def __init__(self, needs_scores):
            self.needs_scores = needs_scores

    seating = Seating({0: Law(False), 1: Law(True)})
    sampler = MixedSampler("rejection", seating, torch.device("cpu"))
    assert sampler.needs_scores
    seating.only = seating.laws[0]
    assert not sampler.needs_scores


def test_a_verification_captured_before_there_were_scores_is_not_replayed_with_them(captured, monkeypatch):
    class LookupFirst(StepHook):
        def before_draft(self, context):
            key = 0 if context.step < 6 else 1
            context.plan = [(key, [context.gamma] * len(context.requests))]

    seen, run = {}, StepGraphs.run

    def running(graphs, key, rows, function):
        if len(key) == 5:  # a verification's
            seen.setdefault(key, set()).add(engine().state.draft_scores is not None)
        return run(graphs, key, rows, function)

    def engine():
        return queue._worker.engine

    monkeypatch.setattr(StepGraphs, "run", running)
    queue = hf_psd.ContinuousBatchingManager(
        target(), drafters("both"), psd=dict(mode="sd", gamma=3), psd_hooks=[LookupFirst()], max_batch_size=2,
        max_new_tokens=16, do_sample=True, temperature=0.1, pad_token_id=0, eos_token_id=None, kv_memory=2**22,
    )  # fmt: skip
    queue.add_requests([PROMPTS[4], PROMPTS[5]])
    queue.stop()
    wide = {key: found for key, found in seen.items() if key[3] == 4}
    assert {frozenset(found) for found in wide.values()} == {frozenset([False]), frozenset([True])}


def test_draft_turns_wait_for_newcomers_to_be_known_and_not_for_the_target_to_read_them(monkeypatch):
    happened, mark, work = [], Lane.mark, Lane.work

    @contextmanager
    def working(lane, kind=""):
        with work(lane, kind):
            yield
        happened.append(f"{lane.name} {kind}".strip())

    monkeypatch.setattr(Lane, "work", working)
    monkeypatch.setattr(Lane, "mark", lambda lane: (happened.append(f"mark {lane.name}"), mark(lane)))
    monkeypatch.setattr(
        Roster, "prefill", lambda roster, view: happened.append(f"{len(view.rows)} are shown to drafters")
    )
    queue = hf_psd.ContinuousBatchingManager(
        target(), drafters("noisy"), prefill_chunk=8, kv_memory=2**22, max_new_tokens=3, max_batch_size=3, **zoo.GREEDY
    )
    for name in ("seat", "vacate"):
        real = getattr(SequenceState, name)
        monkeypatch.setattr(
            SequenceState, name, lambda *args, name=name, real=real: (happened.append(name), real(*args))
        )
    queue.add_requests([PROMPTS[2], PROMPTS[5], PROMPTS[1]])  # one token, several chunks, beside others
    queue.step()
    at = happened.index("1 are shown to drafters")
    assert happened[at : at + 3] == ["1 are shown to drafters", "target", "mark target"]
    queue.stop()
    reads = [place for place, what in enumerate(happened) if what == "target prefill"]
    assert len(reads) > 4 and all(happened[place + 1] == "draft" for place in reads)  # not "mark target"
    seats = [place for place, what in enumerate(happened) if what in ("seat", "vacate")]
    assert len(seats) == 6 and all(happened[place + 1] == "target" for place in seats)
    assert ["mark target"] not in [happened[place + 2 : place + 3] for place in seats]
    assert sum(what.endswith("are shown to drafters") for what in happened) >= 2
    texts = {result.request_id: result.generated_tokens for result in queue}
    assert texts == {
        f"req_{number}": plain(PROMPTS[place], max_new_tokens=3) for number, place in enumerate((2, 5, 1))
    }
