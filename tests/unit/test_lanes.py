"""Lanes on the CPU, and the ring that carries results to the host."""

from __future__ import annotations

from unittest import mock

import torch
from zoo import tiny

import hf_psd  # noqa: F401
from hf_psd.lanes import HostRing, Lane
from hf_psd.roster import Roster
from hf_psd.runner import ModelRunner

CPU = torch.device("cpu")


def test_ring_is_first_in_first_out():
    ring = HostRing(CPU)
    for number in range(3):
        ring.push(f"label {number}", torch.full((2, 2), number))
    assert len(ring) == 3 and ring.oldest == "label 0"
    assert [ring.pop() for _ in range(3)] == [(f"label {n}", [[n, n], [n, n]]) for n in range(3)]
    assert len(ring) == 0


def test_cpu_lanes_need_no_order():
    first, second = Lane(CPU), Lane(CPU)
    tensor = torch.arange(3)
    first.begin()
    with first.work():
        first.mark()
    second.follow(first)
    second.follow(second)
    with second.work():
        assert second.receive(tensor) is tensor
    second.finish()
    assert first.stream is None


def test_drafters_do_not_wait_until_the_target_has_read_the_prompts():
    target, drafter = tiny("llama"), tiny("llama", seed=1)
    arguments = {"assistant_models": [drafter], "psd": True, "max_new_tokens": 4}
    prompts = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    target.generate(prompts, **arguments)  # probes the models, which would be counted
    happened: list[str] = []
    mark, feed, ready = Lane.mark, ModelRunner.feed, Roster.start

    def told(name, function):
        def call(self, *arguments):
            happened.append(name if not isinstance(self, Lane) else f"{self.name} {name}")
            return function(self, *arguments)

        return call

    with (
        mock.patch.object(Lane, "mark", told("marks", mark)),
        mock.patch.object(ModelRunner, "feed", told("reads", feed)),
        mock.patch.object(Roster, "start", told("drafters are ready", ready)),
    ):
        target.generate(prompts, **arguments)
    assert happened[:3] == ["drafters are ready", "target marks", "reads"]
    assert happened[3] != "target marks", "the first draft turn would wait for the target's prefill"
