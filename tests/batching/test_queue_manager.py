"""The manager as its users meet it: threads, results, starting and stopping, statistics."""

from __future__ import annotations

import re
import threading

import pytest
import torch
import zoo
from queue_cases import PROMPTS, drafters, plain, target

import hf_psd
from hf_psd.queue.metrics import QueueStats, percentiles, prometheus
from hf_psd.queue.results import RequestCancelled

SMALL = dict(max_batch_size=3, block_size=4, **zoo.GREEDY)


def manager(kind="noisy", **kwargs):
    return hf_psd.ContinuousBatchingManager(
        target(), drafters(kind), **{"psd": dict(mode="psd"), "check": True, **SMALL, **kwargs}
    )


def test_as_a_context_manager():
    with manager() as queue:
        assert queue.is_running()
        names = queue.add_requests(PROMPTS, max_new_tokens=9)
        assert names == [f"req_{number}" for number in range(6)]
        results = {result.request_id: result for result in queue}
        assert results.keys() == set(names) and all(result.is_finished() for result in results.values())
        late = queue.add_request(torch.tensor([PROMPTS[1]]), "mine", max_new_tokens=5)
        assert late == "mine" and queue.get_result("mine").generated_tokens == plain(PROMPTS[1], max_new_tokens=5)
        assert queue.get_result() is None and queue.get_result("mine", timeout=0.1) is None
    assert not queue.is_running()
    for name, prompt in zip(names, PROMPTS):
        assert results[name].generated_tokens == plain(prompt, max_new_tokens=9)
    with pytest.raises(RuntimeError, match="takes no requests"):
        queue.add_request([5])


def test_requests_from_several_threads_and_results_by_name():
    with manager() as queue:
        failures = []

        def client(number):
            for turn in range(3):
                prompt = PROMPTS[(number + turn) % 6]
                name = queue.add_request(prompt, max_new_tokens=4 + turn, streaming=number == 0)
                parts = list(queue.iter(name))
                if parts[-1].generated_tokens != plain(prompt, max_new_tokens=4 + turn) or not parts[-1].is_finished():
                    failures.append((number, turn, parts))

        threads = [threading.Thread(target=client, args=[number]) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert failures == [] and queue.stats.finished == 12


def test_names_must_differ_and_may_return():
    queue = manager()
    queue.add_request([5], "a", max_new_tokens=2)
    with pytest.raises(ValueError, match="'a' is under way"):
        queue.add_request([6], "a", max_new_tokens=2)
    while queue.step():
        pass
    queue.add_request([6], "a", max_new_tokens=2)
    queue.add_request([7], "req_0", max_new_tokens=2)
    assert queue.add_request([8], max_new_tokens=2) == "req_1"
    queue.stop()
    assert sorted(result.prompt_ids for result in queue) == [[5], [6], [7], [8]]


def test_stopping():
    queue = manager()
    queue.add_requests(PROMPTS, max_new_tokens=40)
    queue.start(), queue.start()
    queue.stop(hard_stop=True)
    results = list(queue)
    assert len(results) == 6 and not queue.is_running()
    assert {type(result.exception) for result in results} <= {RequestCancelled, type(None)}
    assert any(result.exception for result in results)
    queue.start()
    name = queue.add_request(PROMPTS[0], max_new_tokens=6)
    assert queue.get_result(name, timeout=60).generated_tokens == plain(PROMPTS[0], max_new_tokens=6)
    queue.stop()


def test_models_are_free_between_bursts_and_as_they_were():
    model = target()
    before = model.config._attn_implementation
    with manager(check=False) as queue:
        name = queue.add_request(PROMPTS[0], max_new_tokens=4)
        queue.get_result(name, timeout=60)
        text = model.generate(torch.tensor([PROMPTS[1]]), assistant_models=["prompt_lookup"], psd=True, max_new_tokens=6,
                              **zoo.GREEDY)  # fmt: skip
        assert text[0, 3:].tolist() == plain(PROMPTS[1], max_new_tokens=6)
    assert model.config._attn_implementation == before and not model.training


def test_a_longer_request_widens_the_queue():
    long = [3 + number % 60 for number in range(300)]
    queue = manager(kv_memory=200 * 4 * 512)
    queue.add_request(PROMPTS[0], max_new_tokens=20)
    for _ in range(4):
        queue.step()
    queue.add_request(long, max_new_tokens=9)
    queue.stop()
    results = sorted(queue, key=lambda result: result.request_id)
    assert [each.generated_tokens for each in results] == [
        plain(PROMPTS[0], max_new_tokens=20),
        plain(long, max_new_tokens=9),
    ]


def test_seats_are_refilled_first_come_first_served():
    queue = manager(kind="lookup", max_batch_size=2)
    for number in range(7):
        queue.add_request(PROMPTS[number % 5], max_new_tokens=2 + 3 * (number % 3))
    queue.stop()
    began = {result.request_id: result.lifespan[0] for result in queue}
    assert sorted(began, key=began.get) == [f"req_{number}" for number in range(7)]
    assert queue.stats.depth.peak == 5


def test_two_groups_return_when_two_requests_run():
    queue = manager(max_batch_size=4, psd=dict(mode="psd", selector=zoo.Fixed()))
    groups = []
    queue.add_request(PROMPTS[0], max_new_tokens=200)
    for _ in range(12):
        queue.step()
        groups.append(len(queue._worker.engine.newest.verify) and len(queue._worker.engine.newest.draft))
    assert not any(groups), "one request: draft and verify take turns"
    queue.add_request(PROMPTS[3], max_new_tokens=200)
    busy = []
    for _ in range(16):
        queue.step()
        busy.append(bool(queue._worker.engine.newest.verify and queue._worker.engine.newest.draft))
    assert all(busy[6:])
    queue.stop()
    assert [each.error for each in queue] == [None, None]


@pytest.mark.parametrize("mode, most", [("psd", 0.6), ("sd", 0.6)])
def test_deferred_lookahead_holds_fewer_blocks(mode, most):
    hf_psd.generate_batch(
        target(), PROMPTS * 4, drafters("noisy"), psd=dict(mode=mode), max_new_tokens=24, max_batch_size=8,
        block_size=4, **zoo.GREEDY,
    )  # fmt: skip
    stats = hf_psd.last_stats()
    assert 0 < stats.lookahead_share <= most
    assert 0 < stats.lookahead_peak.mean < stats.lookahead_eager_peak.mean


def test_statistics_and_their_text():
    with manager(check=False) as queue:
        queue.add_requests(PROMPTS * 2, max_new_tokens=9)
        list(queue)
    text, stats = queue.metrics(), queue.stats
    assert isinstance(stats, QueueStats) and hf_psd.last_stats() is stats
    assert stats.emitted == 12 * 9 and stats.finished == 12 and len(stats.first_token) == 12
    assert all(value > 0 for value in stats.first_token) and min(stats.gaps) >= 0
    assert 0 < stats.kv_used.mean <= stats.kv_used.peak <= stats.kv_blocks
    assert stats.overlap == pytest.approx(stats.overlapped / stats.steps) and 0 < stats.balance <= 1
    assert sum(pair[0] for pair in stats.by_flight.values()) == stats.steps
    assert stats.overlap_at(2, 3) > 0.5 and stats.overlap_at(99) == 0.0
    for line in text.splitlines():
        assert re.fullmatch(r'# TYPE \w+ \w+|\w+(\{\w+="[\w.]+"\})? [-+\w.]+', line), line
    assert "hf_psd_generated_tokens_total 108" in text and 'hf_psd_requests_total{end="finished"} 12' in text
    assert 'hf_psd_first_token_seconds{quantile="0.5"}' in text
    assert prometheus(QueueStats()).endswith("\n")


def test_percentiles():
    assert percentiles([]) == {}
    assert percentiles(range(1, 101)) == {50: 50, 90: 90, 95: 95, 99: 99}
    assert percentiles([3.0], [0, 50, 100]) == {0: 3.0, 50: 3.0, 100: 3.0}


def test_no_prompts():
    assert hf_psd.generate_batch(target(), [], ["prompt_lookup"]) == {}


def test_progress_bar(capsys):
    hf_psd.generate_batch(target(), PROMPTS, ["prompt_lookup"], max_new_tokens=2, progress_bar=True, **SMALL)
    assert "6/6" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("inputs", "error", "says"),
    [
        (["abc"], TypeError, r"inputs\[0\].*tokenize"),
        ([["a", "b"]], TypeError, r"inputs\[0\].*tokenize"),
        (torch.tensor([[1, 5], [3, 4]]), ValueError, "padded tensor"),
        ([torch.tensor([[1, 5], [3, 4]])], ValueError, r"inputs\[0\] must be one prompt"),
        ([1, 5, 6], TypeError, r"inputs\[0\] must be a list of token ids, got int"),
        ("abc", TypeError, "list of prompts"),
    ],
)
def test_what_is_no_prompt_is_refused_in_one_line(inputs, error, says):
    with pytest.raises(error, match=f"^psd: .*{says}"):
        hf_psd.generate_batch(target(), inputs, max_new_tokens=3)
