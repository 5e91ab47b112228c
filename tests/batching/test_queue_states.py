"""Arrivals, ends, cancellations, preemptions and long prompts in any order, on a pool that is too small for all."""

from __future__ import annotations

import pytest
import zoo
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from queue_cases import PROMPTS, coupled, drafters, plain, target

from hf_psd import ContinuousBatchingManager
from hf_psd.queue.results import RequestCancelled

SEED = 11
LENGTHS = (1, 2, 5, 9, 14)
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # two layers, two KV heads of 8, fp32, keys and values
WARM = dict(do_sample=True, temperature=1.3, top_k=20)


class Broken(RuntimeError):
    pass


class Breaks:
    """A stopping criterion that raises once the text has so many tokens."""

    def __init__(self, length):
        self.length = length

    def __call__(self, ids, scores):
        if ids.shape[1] >= self.length:
            raise Broken(f"at {ids.shape[1]}")
        return ids.new_zeros(ids.shape[0], dtype=bool)


class QueueMachine(RuleBasedStateMachine):
    """Every step is checked by the invariant checker, every text in the end by `generate` of its prompt alone."""

    requests = Bundle("requests")

    @initialize(
        mode=st.sampled_from(["psd", "psd", "sd", "ar"]),
        kind=st.sampled_from(["noisy", "lookup", "both"]),
        seats=st.integers(1, 5),
        blocks=st.integers(12, 40),
        gamma=st.integers(1, 4),
        chunk=st.sampled_from([4, 16, 64]),
    )
    def open_queue(self, mode, kind, seats, blocks, gamma, chunk):
        models = drafters(kind)
        pools = 1 + sum(not isinstance(each, str) for each in models)
        self.queue = ContinuousBatchingManager(
            target(),
            models,
            psd=dict(mode=mode, gamma=gamma, verification="coupled", seed=SEED),
            max_batch_size=seats,
            block_size=4,
            kv_memory=blocks * 4 * TOKEN_BYTES * pools,
            prefill_chunk=chunk,
            check=True,
            pad_token_id=0,
            eos_token_id=None,
        )
        self.expected, self.cancelled, self.results = {}, set(), {}

    @rule(
        target=requests,
        prompt=st.integers(0, len(PROMPTS) - 1),
        length=st.sampled_from(LENGTHS),
        warm=st.booleans(),
        seed=st.sampled_from([None, None, 3]),
    )
    def arrive(self, prompt, length, warm, seed):
        settings = dict(WARM if warm else zoo.GREEDY, max_new_tokens=length)
        number = self.queue._numbers
        name = self.queue.add_request(PROMPTS[prompt], seed=seed, **settings)
        if warm:
            key = (SEED, number) if seed is None else (seed, 0)
            self.expected[name] = coupled(PROMPTS[prompt], *key, **settings)
        else:
            self.expected[name] = plain(PROMPTS[prompt], max_new_tokens=length)
        return name

    @rule(prompt=st.integers(0, len(PROMPTS) - 1), after=st.integers(0, 5))
    def arrive_and_break(self, prompt, after):
        criterion = Breaks(len(PROMPTS[prompt]) + 1 + after)
        name = self.queue.add_request(
            PROMPTS[prompt], max_new_tokens=6, do_sample=False, stopping_criteria=[criterion]
        )
        self.expected[name] = Broken

    @rule(steps=st.integers(1, 4))
    def steps(self, steps):
        for _ in range(steps):
            self.queue.step()
        self.collect()

    @rule(name=requests)
    def cancel(self, name):
        self.queue.cancel(name)
        if name not in self.results:
            self.cancelled.add(name)

    @rule(place=st.integers(0, 4))
    def preempt(self, place):
        engine = self.queue._worker.engine
        if engine is None or not engine.tickets:
            return
        with self.queue._worker.work():
            engine.absorb_before(engine.step + 1)
            seated = list(engine.tickets.values())
            if seated:
                engine.preempt(seated[place % len(seated)])

    @rule(groups=st.sampled_from([1, 2]))
    def change_groups(self, groups):
        if self.queue._worker.engine is not None:
            self.queue._worker.engine.manager.groups = groups

    def collect(self):
        while (result := self.queue.get_result()) is not None:
            assert result.request_id not in self.results, "a request ended twice"
            self.results[result.request_id] = result

    def teardown(self):
        if not hasattr(self, "queue"):
            return
        for _ in range(10_000):
            if not self.queue.step():
                break
        else:
            raise AssertionError("the queue does not come to its end")
        self.collect()
        engine = self.queue._worker.engine
        assert self.results.keys() == self.expected.keys()
        for name, result in self.results.items():
            expected = self.expected[name]
            if expected is Broken:
                assert isinstance(result.exception, Broken)
            elif name in self.cancelled and result.exception is not None:
                assert isinstance(result.exception, RequestCancelled)
                assert result.generated_tokens == expected[: len(result.generated_tokens)]
            else:
                assert result.error is None and result.generated_tokens == expected
        assert all(pool.used == 0 for pool in engine.space.pools.values())
        assert not engine.tickets and not len(engine.waiting)
        self.queue.stop()


def run(examples, steps):
    run_state_machine_as_test(
        QueueMachine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_interleavings():
    run(30, 25)


@pytest.mark.slow
def test_thousands_of_interleavings():
    run(2000, 40)
