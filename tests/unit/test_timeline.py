"""Spans and what is computed from them."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_psd.hooks import StepHook
from hf_psd.timeline import Span, Timeline, idle_share, merged, overlap_share

from test_pacing import tiny  # isort: skip


def test_a_call_leaves_its_spans_in_order():
    target = tiny(0)
    ids = torch.randint(3, 60, (2, 5))
    timeline = Timeline()
    target.generate(
        ids, attention_mask=torch.ones_like(ids), assistant_models=[copy.deepcopy(target)], do_sample=False,
        psd={"mode": "sd"}, psd_hooks=[timeline], max_new_tokens=20, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    kinds = [span.kind for span in timeline.spans]
    assert kinds[0] == "prefill" and {"draft", "verify"} <= set(kinds)
    assert all(0 <= span.start <= span.end for span in timeline.spans)
    assert {span.lane for span in timeline.spans} == {"target cpu", "draft cpu"}
    assert overlap_share(timeline.spans) == 0.0  # one CPU thread does one thing at a time


def test_spans_are_recorded_only_while_a_timeline_is_there():
    target, timeline = tiny(0), Timeline()
    ids = torch.randint(3, 60, (1, 5))
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "pad_token_id": 0}
    target.generate(ids, psd=True, psd_hooks=[timeline], **settings)
    before = list(timeline.spans)
    target.generate(ids, psd=True, **settings)
    assert timeline.spans == before


def test_several_timelines_record_the_same_call():
    target, timelines, lanes = tiny(0), [Timeline(), Timeline()], Lanes()
    ids = torch.randint(3, 60, (2, 5))
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "pad_token_id": 0}
    target.generate(ids, psd=True, psd_hooks=[*timelines, timelines[0], lanes], **settings)
    first, second = ([span.kind for span in timeline.spans] for timeline in timelines)
    assert first == second and "verify" in first
    assert not any(lane.watchers for lane in lanes.seen)


class CallsAgain(StepHook):
    """Decodes once more in the middle of a call."""

    def __init__(self, call):
        self.call = call

    def after_verify(self, context):
        call, self.call = self.call, None
        if call is not None:
            call()


def test_a_timeline_of_a_call_within_a_call_leaves_nothing_behind():
    target, timeline = tiny(0), Timeline()
    ids = torch.randint(3, 60, (1, 5))
    settings = {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0, "psd": True}
    inner = []

    def call():
        target.generate(ids, psd_hooks=[timeline], max_new_tokens=2, **settings)
        inner.extend(timeline.spans)

    lanes = Lanes()
    target.generate(ids, psd_hooks=[timeline, CallsAgain(call), lanes], max_new_tokens=9, **settings)
    assert len(timeline.spans) > len(inner) > 0
    assert not any(lane.watchers for lane in lanes.seen)


class Lanes(StepHook):
    """Keeps the lanes of a call."""

    def on_end(self, context):
        self.seen = context.lanes


@pytest.mark.parametrize(
    ("draft", "verify", "share"),
    [
        ([(0, 2), (4, 6)], [(0, 10)], 1.0),
        ([(0, 2), (4, 6)], [(2, 4), (6, 8)], 0.0),
        ([(0, 4)], [(2, 6)], 0.5),
        ([], [(2, 6)], 0.0),
        ([(0, 10)], [(1, 3)], 1.0),
    ],
)
def test_overlap_is_a_share_of_the_shorter_side(draft, verify, share):
    spans = [Span("a", "draft", *times) for times in draft] + [Span("b", "verify", *times) for times in verify]
    assert overlap_share(spans) == share


def test_idle_time_is_what_no_span_covers():
    spans = [
        Span("a", "verify", 0, 4),
        Span("a", "verify", 3, 5),
        Span("a", "verify", 9, 10),
        Span("b", "draft", 5, 9),
    ]
    assert merged(spans, "verify") == [(0, 5), (9, 10)]
    assert idle_share(spans) == pytest.approx(0.4)
