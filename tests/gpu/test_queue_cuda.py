"""The queue on CUDA: paged KV, graphs, two devices, preemption. Runs under pytest, or alone with `python`."""

from __future__ import annotations

import functools
import random
import sys
import time
import traceback
from collections import Counter
from contextlib import contextmanager
from unittest import mock

import torch
from test_engine_cuda import needs_two_devices, noisy, tiny, wide
from transformers import LlamaForCausalLM

import hf_psd
from hf_psd import ContinuousBatchingManager, Timeline
from hf_psd.bench.queued import Relay
from hf_psd.graphs import StepGraphs
from hf_psd.timeline import idle_share, overlap_share

try:
    import pytest

    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
except ImportError:  # a bare GPU machine: `python tests/gpu/test_queue_cuda.py`
    pass

SEATS, REQUESTS, SEED = 6, 24, 5
BLOCK = 16
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
SAMPLED = GREEDY | {"do_sample": True, "temperature": 2.0, "top_k": 20}
LOTS = random.Random(3)
PROMPTS = [[LOTS.randrange(3, 64) for _ in range(LOTS.choice([1, 2, 7, 20, 45]))] for _ in range(REQUESTS)]
LENGTHS = [LOTS.choice([1, 3, 12, 25, 40]) for _ in range(REQUESTS)]
MODES = ("ar", "sd", "psd")


@functools.cache
def target() -> LlamaForCausalLM:
    return tiny().cuda()


@functools.cache
def drafter_on(device: str) -> LlamaForCausalLM:
    return noisy(tiny(), 0.03).to(device)


@functools.cache
def alone(sampled: bool) -> list[list[int]]:
    """What `generate` gives for each prompt by itself: plain, or coupled with the noise the queue gives it."""
    texts = []
    for number, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS)):
        ids = torch.tensor([prompt], device="cuda")
        if sampled:
            psd = {"mode": "ar", "verification": "coupled", "seed": SEED, "request_ids": [number]}
            out = target().generate(ids, max_new_tokens=length, psd=psd, **SAMPLED)
        else:
            out = target().generate(ids, max_new_tokens=length, attention_mask=torch.ones_like(ids), **GREEDY)
        texts.append(out[0, len(prompt) :].tolist())
    return texts


@contextmanager
def counted_graphs():
    """Counts how often graphs are replayed, by what they do."""
    runs: Counter[str] = Counter()
    real = StepGraphs.run

    def run(graphs, key, rows, function):
        runs["feed" if key[0] == "feed" else "view" if key[0] == "view" else graphs.lane.name] += 1
        return real(graphs, key, rows, function)

    with mock.patch.object(StepGraphs, "run", run):
        yield runs


def through_the_queue(sampled: bool, drafters: list, mode: str, graphs: bool, **more) -> list[list[int]]:
    psd = {"mode": mode, "verification": "coupled", "seed": SEED, "cuda_graphs": graphs}
    own = [{"max_new_tokens": length} for length in LENGTHS]
    settings = {"max_batch_size": SEATS, "block_size": BLOCK, "prefill_chunk": 64} | more
    results = hf_psd.generate_batch(
        target(), PROMPTS, drafters, psd=psd, requests=own, **settings, **(SAMPLED if sampled else GREEDY)
    )
    stats = hf_psd.last_stats()
    assert not stats.errors and not stats.notes, (stats.errors, stats.notes)
    assert all(result.exception is None for result in results.values()), [each.error for each in results.values()]
    return [result.generated_tokens for result in results.values()]


def check_texts(device: str) -> None:
    near = [drafter_on(device)]
    runs = [(sampled, True, mode, near) for sampled in (False, True) for mode in MODES]
    runs += [(True, False, mode, near) for mode in MODES] + [(True, True, "psd", ["prompt_lookup", *near])]
    for sampled, graphs, mode, drafters in runs:
        with counted_graphs() as replays:
            texts = through_the_queue(sampled, drafters, mode, graphs)
        where, stats = (device, sampled, graphs, mode, len(drafters)), hf_psd.last_stats()
        wrong = [number for number, pair in enumerate(zip(texts, alone(sampled))) if pair[0] != pair[1]]
        assert not wrong, (where, "requests", wrong)
        if graphs:
            assert replays["target"] == stats.target_forwards and replays["feed"], (where, replays)
            assert (replays["draft"] > 0) == (mode != "ar"), (where, replays)
            assert (replays["view"] > 0) == (mode != "ar" and device != "cuda:0"), (where, replays)
        else:
            assert not replays, (where, replays)
        assert mode == "ar" or stats.acceptance > 0.2, (where, stats.acceptance)
        assert mode != "psd" or stats.overlapped > stats.steps / 2, (where, stats.overlapped, stats.steps)


def test_texts_are_those_of_generate_on_one_device():
    check_texts("cuda:0")


def test_texts_are_those_of_generate_on_two_devices():
    if not needs_two_devices():
        check_texts("cuda:1")


def check_preemption(device: str) -> None:
    token_bytes = 2 * 2 * 2 * 16 * 4  # layers, keys and values, KV heads, head size, fp32
    memory = 12 * BLOCK * token_bytes * 2  # twelve blocks of each of two models
    for sampled, graphs, mode in [(False, True, "psd"), (True, True, "psd"), (True, True, "sd"), (True, False, "psd")]:
        texts = through_the_queue(sampled, [drafter_on(device)], mode, graphs, kv_memory=memory, check=True)
        assert texts == alone(sampled), (device, sampled, graphs, mode)
        assert hf_psd.last_stats().preemptions > 0, (device, sampled, graphs, mode)


def test_preempted_requests_keep_their_texts_on_one_device():
    check_preemption("cuda:0")


def test_preempted_requests_keep_their_texts_on_two_devices():
    if not needs_two_devices():
        check_preemption("cuda:1")


def test_a_queue_that_stays_open_captures_nothing_twice():
    drafters = [drafter_on("cuda:1" if torch.cuda.device_count() > 1 else "cuda:0")]
    queue = ContinuousBatchingManager(
        target(), drafters, psd={"mode": "psd", "seed": SEED, "selector": "ucb1"}, max_batch_size=SEATS,
        kv_memory=2**24, prefill_chunk=64, **GREEDY,
    )  # fmt: skip
    captured = []
    for _ in range(3):
        for prompt, length in zip(PROMPTS, LENGTHS):
            queue.add_request(prompt, max_new_tokens=length)
        assert [result.generated_tokens for result in queue.drain()] == alone(False)
        captured.append(queue.captured)
    print("graphs after each call:", captured)
    assert captured[0] > 0 and captured[2] == captured[1], captured
    queue.stop()
    assert queue.captured == 0


def test_a_wider_request_gives_graphs_up_and_loses_nothing():
    devices = ["cuda:0", "cuda:1"] if torch.cuda.device_count() > 1 else ["cuda:0"]
    wide = [LOTS.randrange(3, 64) for _ in range(300)]
    ids = torch.tensor([wide], device="cuda")
    expected = (
        target().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, **GREEDY)[0, 300:].tolist()
    )
    for device in devices:
        for mode in ("sd", "psd"):
            queue = ContinuousBatchingManager(
                target(), [drafter_on(device)], psd={"mode": mode}, max_batch_size=SEATS, kv_memory=2**24, **GREEDY
            )
            for prompt, length in zip(PROMPTS[:8], LENGTHS):
                queue.add_request(prompt, max_new_tokens=length)
            for _ in range(6):
                queue.step()
            queue.add_request(wide, max_new_tokens=9)
            for prompt, length in zip(PROMPTS[8:], LENGTHS[8:]):
                queue.add_request(prompt, max_new_tokens=length)
            texts = [result.generated_tokens for result in sorted(queue.drain(), key=arrival)]
            assert texts == [*alone(False)[:8], expected, *alone(False)[8:]], (device, mode)
            queue.stop()


def arrival(result) -> int:
    return int(result.request_id.removeprefix("req_"))


def test_requests_that_come_from_another_thread_during_captures():
    with ContinuousBatchingManager(
        target(), [drafter_on("cuda:0")], psd={"mode": "psd"}, max_batch_size=SEATS, kv_memory=2**24, **GREEDY
    ) as queue:
        names = []
        for number, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS)):
            # Settings of its own make each request go through the whole preparation, which uses the device.
            names.append(queue.add_request(prompt, max_new_tokens=length, temperature=1.0 + number))
            time.sleep(0.02)
        texts = [queue.get_result(name, timeout=60).generated_tokens for name in names]
    assert queue.fatal_error is None and texts == alone(False)


def test_the_loop_never_waits_for_a_device():
    devices = ["cuda:0", "cuda:1"] if torch.cuda.device_count() > 1 else ["cuda:0"]
    for device in devices:
        for mode, graphs in (("psd", True), ("sd", True), ("psd", False)):
            psd = {"mode": mode, "verification": "coupled", "seed": SEED, "cuda_graphs": graphs}
            queue = ContinuousBatchingManager(
                target(), [drafter_on(device)], psd=psd, max_batch_size=SEATS, kv_memory=2**24, **SAMPLED
            )
            for forbidden in (False, True):  # what is captured or compiled may wait
                for number, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS)):
                    queue.add_request(prompt, max_new_tokens=length, noise_id=number)
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error" if forbidden else "default")
                try:
                    results = queue.drain()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                assert [result.error for result in results] == [None] * REQUESTS, (device, mode, graphs)
                assert [result.generated_tokens for result in results] == alone(True), (device, mode, graphs)
            assert not queue.stats.errors, queue.stats.errors
            queue.stop()


def overlap_on(device: str) -> float:
    big, small = wide(32, 0).cuda(), wide(10, 1).to(device)
    relay, timeline = Relay(), Timeline()
    queue = ContinuousBatchingManager(
        big, [small], psd={"mode": "psd", "selector": "ucb1"}, psd_hooks=[relay], max_batch_size=8, kv_memory=2**28,
        max_new_tokens=40, **GREEDY,
    )  # fmt: skip
    for watching in ([], [timeline]):  # the first time the graphs are captured
        queue.add_requests([[LOTS.randrange(3, 512) for _ in range(8)] for _ in range(16)])
        relay.come(watching)
        queue.drain()
        relay.go()
    assert not queue.stats.notes and not queue.stats.errors, queue.stats
    share, lanes = overlap_share(timeline.spans), {span.lane for span in timeline.spans}
    print(
        f"drafter on {device}: overlap {share:.2f}, target idle {idle_share(timeline.spans):.2f}, steps with both groups "
        f"{queue.stats.overlap:.2f}"
    )
    queue.stop()
    assert {"target cuda:0", f"draft {device}"} <= lanes, lanes
    return share


def test_drafting_and_verifying_overlap_on_one_device():
    assert overlap_on("cuda:0") > 0.3


def test_drafting_and_verifying_overlap_on_two_devices():
    if not needs_two_devices():
        assert overlap_on("cuda:1") > 0.3


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    failed, began = 0, time.perf_counter()
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            try:
                test()
                print(f"passed {name} at {time.perf_counter() - began:.0f} s", flush=True)
            except Exception:
                failed += 1
                torch.cuda.set_sync_debug_mode("default")
                print("FAILED", name, traceback.format_exc(limit=-6), flush=True)
    sys.exit(failed)
