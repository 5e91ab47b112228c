"""Arrivals of tokens, spans of a timeline, and the figures made from them."""

from __future__ import annotations

import pytest
import torch

from hf_psd.bench.clocks import TokenClock, decode_rate, percentiles
from hf_psd.bench.measure import target_idle
from hf_psd.bench.spans import draft_ms, full, steady, typical_ms
from hf_psd.hooks import StepContext
from hf_psd.phases import Request
from hf_psd.timeline import Span


class TestClock:
    def test_streamer_side(self, monkeypatch):
        clock = ticking(monkeypatch, TokenClock(2))
        clock.put(torch.tensor([[7, 8], [9, 9]]))  # the prompt
        for _ in range(3):
            clock.put(torch.tensor([1, 2]))
        assert clock.latencies_ms() == {"ttft": [1000.0] * 2, "e2e": [3000.0] * 2, "tpot": [1000.0] * 2}
        assert clock.step_ms() == [1000.0, 1000.0]
        assert decode_rate(clock.arrivals) == 2.0

    def test_assisted_decoding_puts_several_tokens(self, monkeypatch):
        clock = ticking(monkeypatch, TokenClock(1))
        clock.put(torch.tensor([[7]]))
        clock.put(torch.tensor([[1, 2, 3]]))
        clock.put(torch.tensor([[4, 5]]))
        assert clock.latencies_ms()["tpot"] == [250.0]

    def test_hook_side_notes_each_request(self, monkeypatch):
        clock = ticking(monkeypatch, TokenClock(2))
        rows = [Request(index, index, 0, 5, 20) for index in range(2)]
        for requests, emitted in ((rows, [[1], []]), (rows, [[1, 2], [3]]), (rows[1:], [[4]])):
            context = StepContext(0, requests, 4)
            context.emitted = emitted
            clock.on_commit(context)
        assert clock.latencies_ms() == {"ttft": [1000.0, 2000.0], "e2e": [2000.0, 3000.0], "tpot": [500.0, 1000.0]}

    def test_the_decode_rate_leaves_out_the_first_tokens_and_the_time_to_them(self, monkeypatch):
        clock = ticking(monkeypatch, TokenClock(2))
        rows = [Request(index, index, 0, 5, 20) for index in range(2)]
        for emitted in ([[1, 2], [3]], [[4], [5]], [[6, 7], []]):
            clock.on_commit(StepContext(0, rows, 4, emitted=emitted))
        assert decode_rate(clock.arrivals) == 4 / 2
        assert decode_rate([(5.0, 3), (1.0, 9), (3.0, 2)]) == 5 / 4  # of several processes, in any order
        assert decode_rate([]) is decode_rate([(1.0, 2)]) is None

    def test_percentiles(self):
        assert percentiles([]) is None
        assert percentiles([1.0, 3.0]) == {"p50": 2.0, "p95": pytest.approx(2.9), "p99": pytest.approx(2.98)}


def ticking(monkeypatch, clock: TokenClock) -> TokenClock:
    now = iter(range(100))
    monkeypatch.setattr("hf_psd.bench.clocks.time.perf_counter", lambda: float(next(now)))
    clock.start()
    return clock


class TestSpans:
    def test_the_steady_part_has_neither_start_nor_tail_nor_prompts(self):
        spans = [Span("a", "prefill", 0, 50), *[Span("a", "verify", 50 + i, 51 + i) for i in range(8)]]
        assert steady(spans) == [Span("a", "verify", 50 + i, 51 + i) for i in range(2, 6)]
        assert steady(spans[:1]) == []

    def test_a_round_may_have_several_pieces_of_drafting(self):
        spans = [
            Span("a", "verify", 0, 4),
            Span("b", "draft", 0, 1),
            Span("b", "draft", 2, 4),
            Span("a", "verify", 4, 5),
        ]
        assert typical_ms(spans, "verify") == 2.5 and draft_ms(spans) == 1.5
        assert draft_ms(spans[:1]) is None and typical_ms(spans[1:3], "verify") is None

    def test_full_rounds_are_those_before_requests_end(self):
        lengths = [9, 9, 5, 5, 5, *[1] * 80]  # starting up, all requests, a long tail
        begins = [sum(lengths[:place]) for place in range(len(lengths))]
        spans = [Span("a", "verify", begin, begin + length) for begin, length in zip(begins, lengths)]
        assert [span.start for span in full(spans)] == [18, 23] and typical_ms(full(spans), "verify") == 5
        assert typical_ms(full(spans), "draft") is None and full(spans[:2]) == []


class TestTargetIdle:
    def test_reading_prompts_is_work_and_only_the_targets_lane_counts(self):
        verify = [Span("target", "verify", start, start + 2) for start in (0, 4, 8)]
        assert target_idle(verify, verify) == pytest.approx(0.4)
        more = [*verify, Span("target", "prefill", 2, 3), Span("draft", "draft", 6, 8), Span("draft", "prefill", 2, 4)]
        assert target_idle(more, more) == pytest.approx(0.3)
        assert target_idle(more, verify[1:]) == pytest.approx(1 / 3) and target_idle(more, []) == 0.0
