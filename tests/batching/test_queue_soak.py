"""Ten thousand requests through a queue whose KV pool holds a fifth of what its seats could ask for."""

from __future__ import annotations

import gc
import os
import random

import psutil
import pytest
import zoo
from queue_cases import drafters, plain, target

from hf_psd import ContinuousBatchingManager
from hf_psd.queue.invariants import InvariantChecker
from hf_psd.queue.results import RequestCancelled

SEATS, BLOCK, LONGEST, MOST = 32, 4, 24, 40
POOL = SEATS * -(-(LONGEST + MOST) // BLOCK) // 5
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4


def soak(count, seed=0):
    """Adds requests as fast as they leave; gives the manager, results, expectations and memory in use on the way."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(3, 64) for _ in range(draw.randint(1, LONGEST))] for _ in range(40)]
    queue = ContinuousBatchingManager(
        target(), drafters("both"), psd=dict(mode="psd"), max_batch_size=SEATS, block_size=BLOCK, prefill_chunk=64,
        kv_memory=POOL * BLOCK * TOKEN_BYTES * 2, **zoo.GREEDY,
    )  # fmt: skip
    expected, results, cancelled, used, checker = {}, {}, set(), [], InvariantChecker()
    process = psutil.Process(os.getpid())
    while len(results) < count:
        while queue.total < count and queue.total - len(results) < 3 * SEATS:
            prompt = draw.choice(prompts)
            more = min(MOST, 1 + int(draw.expovariate(1 / 12)))
            expected[queue.add_request(prompt, max_new_tokens=more)] = (prompt, more)
        if draw.random() < 0.1:
            under_way = sorted(expected.keys() - results.keys())
            cancelled.add(name := draw.choice(under_way))
            queue.cancel(name)
        queue.step()
        engine = queue._worker.engine
        if engine.step % 25 == 0:
            checker._quiet = 0
            checker(engine)
        while (result := queue.get_result()) is not None:
            assert result.request_id not in results, "a request ended twice"
            results[result.request_id] = result
            if len(results) % 500 == 0:
                gc.collect()
                used.append(process.memory_info().rss)
    return queue, results, expected, cancelled, used


def judge(queue, results, expected, cancelled):
    assert results.keys() == expected.keys()
    for name, result in results.items():
        prompt, more = expected[name]
        text = plain(prompt, max_new_tokens=MOST)[:more]
        if result.exception is None:
            assert result.generated_tokens == text
        else:
            assert name in cancelled and isinstance(result.exception, RequestCancelled)
            assert result.generated_tokens == text[: len(result.generated_tokens)]
    engine = queue._worker.engine
    while queue.step():
        pass
    assert all(pool.used == 0 for pool in engine.space.pools.values())
    for pool in engine.space.pools.values():
        pool.check()
    assert not engine.tickets and not engine.selector.records and not engine.clock._last and not queue._tickets
    queue.stop()


def test_short_soak():
    queue, results, expected, cancelled, _ = soak(200)
    judge(queue, results, expected, cancelled)
    stats = queue.stats
    assert stats.preemptions > 0 and stats.cancelled > 0


@pytest.mark.slow
def test_ten_thousand_requests():
    queue, results, expected, cancelled, used = soak(10_000)
    judge(queue, results, expected, cancelled)
    stats = queue.stats
    print(
        f"{stats.finished} finished, {stats.cancelled} cancelled, {stats.preemptions} preempted, {stats.steps} steps, "
        f"overlap {stats.overlap:.3f}, KV {stats.kv_used.mean / stats.kv_blocks:.2f} used on average, "
        f"memory {[round(each / 2**20) for each in used]} MiB"
    )
    results_kept = 8_000 * 2_500  # what the test itself holds on to
    assert used[-1] - used[3] < results_kept
    assert stats.finished + stats.cancelled == 10_000 and stats.failed == 0 and stats.preemptions > 20
