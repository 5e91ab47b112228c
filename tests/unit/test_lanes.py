"""Lanes on the CPU, and the ring that carries results to the host."""

from __future__ import annotations

import torch

from hf_psd.lanes import HostRing, Lane

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
