"""Every planted fault fails a gate, at the level at which the whole family would reject it."""

from __future__ import annotations

import law_faults
import pytest

from hf_psd.testing.gates import GATES, SAMPLES, run_gate
from hf_psd.testing.statistics import ALPHA

TESTS_IN_FAMILY = 100
"""More than the family has; Holm's first step asks for alpha over their number."""

PLANTED = {
    "unnormalised_temperature": "wrong",
    "raw_q": "main",
    "rounded_q": "lifted",
    "greedy_draft": "main",
    "timid_drafter": "main",
    "second_thoughts": "main",
    "late_choice": "both-at-once",
    "no_residual": "main",
    "softmax_residual": "main",
    "shared_noise": "main",
    "one_uniform": "main",
    "requestless_key": "main-coupled",
    "roundless_key": "peeking",
    "redraw_when_coupled": "main-coupled",
    "stale_prefix": "penalty",
    "swapped_rows": "two-groups",
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_fails_the_gate(fault, monkeypatch):
    getattr(law_faults, fault)(monkeypatch)
    results = run_gate(GATES[PLANTED[fault]], samples=SAMPLES)
    for kind, result in results.items():
        print(f"{fault} in {PLANTED[fault]}/{kind}: {result}")
    assert results["joint"].p_value < ALPHA / TESTS_IN_FAMILY


def test_every_fault_is_planted():
    faults = {name for name, made in vars(law_faults).items() if getattr(made, "__module__", "") == "law_faults"}
    assert faults == set(PLANTED)


def test_without_peeking_a_roundless_key_goes_unseen(monkeypatch):
    """It is the policy that sees discarded drafts that turns the roundless key into a fault."""
    law_faults.roundless_key(monkeypatch)
    assert run_gate(GATES["main"], samples=SAMPLES)["joint"].p_value > ALPHA / TESTS_IN_FAMILY
