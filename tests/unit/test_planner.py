"""The rule for when alternating halves pay, and the predicted time of a batch."""

from __future__ import annotations

import random

import pytest

from hf_psd.planner import Row, choose, expected_rounds, makespan, psd_gain, psd_round, sd_round, throughput


@pytest.mark.parametrize(
    ("ratio", "gains"),
    [(0.3, (0.65, 0.76, 1.00, 1.30)), (0.5, (0.75, 0.88, 1.15, 1.50)), (1.0, (1.00, 1.18, 1.54, 2.00))],
)
def test_gain_for_drafters_with_the_batch_profile_of_the_target(ratio, gains):
    for (fixed, per_batch), gain in zip(((1, 0), (0.7, 0.3), (0.3, 0.7), (0, 1)), gains):

        def verify(rows, fixed=fixed, per_batch=per_batch):
            return fixed + per_batch * rows / 16

        assert psd_gain(lambda rows: ratio * verify(rows), verify, 16) == pytest.approx(gain, abs=0.006)


def test_alternating_pays_exactly_if_drafting_takes_longer_than_the_part_of_verifying_that_does_not_shrink():
    rng = random.Random(0)
    for _ in range(300):
        fixed, per_row, rows = rng.uniform(0, 2), rng.uniform(0, 0.1), 2 * rng.randint(1, 64)
        share = rng.uniform(0.05, 1)

        def verify(n, fixed=fixed, per_row=per_row):
            return fixed + per_row * n

        def draft(n, share=share, verify=verify):
            return share * verify(n)

        gain = psd_gain(draft, verify, rows)
        assert gain <= 2 + 1e-9
        assert (gain > 1 + 1e-9) == (draft(rows) > fixed + 1e-9) or abs(draft(rows) - fixed) < 1e-6


def test_an_odd_batch_waits_for_its_larger_half():
    assert psd_round(lambda n: 0, lambda n: n, 5) == 6
    assert sd_round(lambda n: 1, lambda n: n, 5) == 6


def test_one_token_a_round_needs_as_many_rounds_as_tokens():
    assert expected_rounds(Row(96, 1.0), 32) == 96
    assert makespan([Row(96, 1.0)] * 8, lambda rows: 2.0) == 192


def test_the_slowest_of_many_rows_is_expected_where_simulation_finds_it():
    """Accepted drafts are geometric: with chance p each, so a round gives 1 / (1 - p) tokens."""
    rng = random.Random(1)
    for rows, remaining, chance in ((1, 96, 0.5), (8, 96, 0.55), (32, 200, 0.6)):
        slowest = []
        for _ in range(200):
            most = 0
            for _ in range(rows):
                left, rounds = remaining, 0
                while left > 0:
                    rounds += 1
                    left -= 1
                    while rng.random() < chance:
                        left -= 1
                most = max(most, rounds)
            slowest.append(most)
        predicted = expected_rounds(Row(remaining, 1 / (1 - chance)), rows)
        assert predicted == pytest.approx(sum(slowest) / len(slowest), rel=0.08)


def test_rows_that_are_done_make_later_rounds_shorter():
    rows = [Row(10, 1.0), Row(30, 1.0)]
    assert makespan(rows, lambda count: float(count)) == 10 * 2 + 20 * 1


def test_throughput_counts_every_row():
    assert throughput([Row(9, 1.0), Row(9, 3.0)], lambda count: 0.5) == 8.0


def test_a_mode_is_left_only_for_one_that_is_better_by_the_margin():
    assert choose({"ar": 1.00, "sd": 0.99}, "ar") == "ar"
    assert choose({"ar": 1.00, "sd": 0.90}, "ar") == "sd"
    assert choose({"ar": 1.00, "sd": 0.99}) == "sd"
    assert choose({"ar": 1.00}, "psd") == "ar"
