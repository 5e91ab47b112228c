"""Properties of the selectors under any sequence of calls."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_psd.bandit as bandit
from hf_psd.bandit.beta import draw_beta
from hf_psd.bandit.imed import bernoulli_divergence
from hf_psd.bandit.tally import DiscountedTally, WindowedTally

NAMES = st.sampled_from(bandit.names())
FRACTIONS = st.floats(0.0, 1.0)
WEIGHTS = st.one_of(st.just(0.0), st.floats(1e-9, 1e9))
CONTEXTS = st.sampled_from([None, "chat", (4, "greedy", None)])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("select"), CONTEXTS),
        st.tuples(st.just("land"), st.integers(0, 9), FRACTIONS, WEIGHTS),
        st.tuples(st.just("unasked"), st.integers(0, 9), FRACTIONS, WEIGHTS, CONTEXTS),
        st.tuples(st.just("all"), st.lists(st.one_of(st.none(), FRACTIONS), min_size=10, max_size=10), WEIGHTS),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("add")),
        st.tuples(st.just("retire"), st.integers(0, 9)),
    ),
    max_size=60,
)


def carry_out(selector, steps, unit=1.0):
    """Run `steps`, checking each choice; returns the pulls still in flight."""
    underway = []
    for kind, *values in steps:
        if kind == "select" and selector.active_arms:
            arm = selector.select(values[0])
            assert arm in selector.active_arms
            underway.append((arm, values[0]))
        elif kind == "land" and underway:
            arm, context = underway.pop(values[0] % len(underway))
            selector.update(arm, unit * values[1], values[2], context)
        elif kind == "unasked":
            arm = values[0] % selector.n_arms
            if (arm, values[3]) not in underway:
                selector.update(arm, unit * values[1], values[2], values[3])
        elif kind == "all":
            rewards = [None if r is None else unit * r for r in values[0]] + [None] * selector.n_arms
            selector.update_all(rewards[: selector.n_arms], values[1])
        elif kind == "cancel" and underway:
            selector.cancel(*underway.pop(values[0] % len(underway)))
        elif kind == "add" and selector.n_arms < 8:
            selector.add_arm()
        elif kind == "retire" and len(selector.active_arms) > 1:
            selector.retire(values[0] % selector.n_arms)
    return underway


@settings(max_examples=150, deadline=None)
@given(NAMES, st.integers(1, 5), STEPS, st.integers(1, 4), st.sampled_from([0.0, 0.2]))
def test_any_sequence_keeps_the_books(name, n_arms, steps, min_dwell, hysteresis):
    selector = bandit.make(name, n_arms, seed=0, min_dwell=min_dwell, hysteresis=hysteresis)
    carry_out(selector, steps)
    stats = selector.stats()
    assert all(mean is None or -1e-9 <= mean <= 1.0 + 1e-9 for mean in stats["means"])
    assert all(count >= 0 for part in stats["contexts"] for count in part["in_flight"] + part["pulls"])
    assert stats["regret"] is None or math.isfinite(stats["regret"])
    assert selector.select() in selector.active_arms


@settings(max_examples=80, deadline=None)
@given(NAMES, STEPS, st.floats(1e-6, 1e6))
def test_any_sequence_under_goodput(name, steps, unit):
    selector = bandit.make(name, 3, seed=0, reward="goodput")
    carry_out(selector, steps, unit)
    assert all(mean is None or -1e-9 <= mean <= unit * (1 + 1e-9) for mean in selector.stats()["means"])
    assert selector.select() in selector.active_arms


@settings(max_examples=60, deadline=None)
@given(NAMES, STEPS)
def test_any_state_can_be_saved_and_continued(name, steps):
    selector, twin = bandit.make(name, 3, seed=0), bandit.make(name, 3, seed=1)
    carry_out(selector, steps)
    twin.load_state_dict(selector.state_dict())
    for _ in range(20):
        assert selector.select() == twin.select()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), FRACTIONS, st.integers(1, 40)), min_size=1, max_size=80))
def test_all_time_means_are_exact_ratios(observations):
    selector = bandit.make("sw_ucb", 3, seed=0, window=7)
    for arm, reward, weight in observations:
        selector.update(arm, reward, weight)
    for arm in range(3):
        own = [(reward, weight) for k, reward, weight in observations if k == arm]
        mean = selector.stats()["means"][arm]
        if own:
            assert mean == pytest.approx(sum(r * w for r, w in own) / sum(w for _, w in own))
        else:
            assert mean is None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), FRACTIONS, st.floats(0.5, 9.0)), max_size=90),
    st.integers(1, 20),
    st.floats(0.5, 1.0),
)
def test_windowed_and_discounted_sums_equal_their_definitions(observations, window, discount):
    windowed, discounted = WindowedTally(3, window), DiscountedTally(3, discount)
    for observation in observations:
        windowed.add(*observation)
        discounted.add(*observation)
    age = len(observations)
    for arm in range(3):
        recent = [(r, w) for k, r, w in observations[-window:] if k == arm]
        assert windowed.weight[arm] == pytest.approx(sum(w for _, w in recent), abs=1e-9)
        assert windowed.gain[arm] == pytest.approx(sum(r * w for r, w in recent), abs=1e-9)
        faded = [discount ** (age - 1 - i) * w for i, (k, _, w) in enumerate(observations) if k == arm]
        assert discounted.weight[arm] == pytest.approx(sum(faded), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", bandit.names())
def test_ties_are_broken_evenly(name):
    """Equal arms: over many seeds each comes first equally often, and so it does after equal feedback."""
    first, later = Counter(), Counter()
    for seed in range(900):
        selector = bandit.make(name, 3, seed=seed)
        first[selector.select()] += 1
        selector = bandit.make(name, 3, seed=seed)
        for reward in (0.5, 1.0, 0.0):
            selector.update_all([reward] * 3)
        later[selector.select()] += 1
    for counts in (first, later):
        chi_square = sum((counts[arm] - 300) ** 2 / 300 for arm in range(3))
        assert chi_square < 13.8, counts


@pytest.mark.parametrize("name", ["sw_ucb", "d_ucb", "d_thompson", "exp3", "hedge"])
def test_long_runs_stay_finite(name):
    """The selectors that fade, on a hundred thousand rounds whose rewards and weights take every size."""
    selector = bandit.make(name, 3, seed=0)
    rng = random.Random(1)
    for step in range(100_000):
        arm = step % 3 if step % 1000 < 500 else 0
        selector.update(arm, (0.0, 1.0, rng.random())[rng.randrange(3)], 10.0 ** rng.uniform(-6, 6))
    table = selector._tables[None]
    numbers = [*table.tally.weight, *table.tally.gain, *table.tally.square, *getattr(table, "loss", [])]
    assert all(math.isfinite(number) for number in numbers)
    assert all(mean is None or 0.0 <= mean <= 1.0 for mean in map(table.mean, range(3)))
    assert {selector.select() for _ in range(300)} <= {0, 1, 2}


@pytest.mark.parametrize("name", bandit.names())
def test_huge_evidence_stays_finite(name):
    selector = bandit.make(name, 3, seed=0)
    for step in range(2000):
        selector.update(step % 3, (0.0, 1.0, 0.5)[step % 3], 1e12)
    means = selector.stats()["means"]
    assert means == [pytest.approx(0.0), pytest.approx(1.0), pytest.approx(0.5)]
    assert selector.select() in (0, 1, 2)


@settings(max_examples=40, deadline=None)
@given(st.floats(1.0, 1e7), st.floats(1.0, 1e7), st.integers(0, 99))
def test_beta_draws_lie_in_the_unit_interval(alpha, beta, seed):
    rng = random.Random(seed)
    assert all(0.0 <= draw_beta(rng, alpha, beta) <= 1.0 for _ in range(20))


@pytest.mark.parametrize(("alpha", "beta"), [(1.2, 7.0), (30.0, 2.0), (1.1, 1.1), (300.0, 500.0)])
def test_beta_draws_have_the_law_of_the_standard_library(alpha, beta):
    """Two-sample Kolmogorov-Smirnov at 1e-4."""
    n, rng = 30_000, random.Random("laws of Beta")
    ours = sorted(draw_beta(rng, alpha, beta) for _ in range(n))
    theirs = sorted(rng.betavariate(alpha, beta) for _ in range(n))
    distance, place = 0.0, 0
    for rank, value in enumerate(ours):
        while place < n and theirs[place] <= value:
            place += 1
        distance = max(distance, abs((rank + 1) / n - place / n))
    assert distance < 2.23 * math.sqrt(2 / n)


@given(FRACTIONS, FRACTIONS)
def test_bernoulli_divergence(p, q):
    low, high = sorted((p, q))
    divergence = bernoulli_divergence(low, high)
    assert divergence >= 0.0 and not math.isnan(divergence)
    assert bernoulli_divergence(high, low) == 0.0
    if high < 1.0:
        assert divergence >= 2.0 * (high - low) ** 2 - 1e-12


@pytest.mark.parametrize(("spread", "low", "high"), [(None, 0.9, 1.1), (0.05, 0.0, 0.06)])
def test_rounds_that_vary_little_tell_more(spread, low, high):
    """Rewards of 0 and 80 count once; rewards within a few percent of each other count many times."""
    selector = bandit.make("ucb1", 2, seed=0, reward="goodput", burn_in=0)
    rng = random.Random(2)
    for step in range(400):
        rate = 80.0 * (rng.random() < 0.5) if spread is None else 80.0 * rng.uniform(1.0 - spread, 1.0 + spread)
        selector.update(step % 2, rate)
    table = selector._tables[None]
    # A 0/1 reward of mean m, scaled to m / headroom, keeps (1 - m) / (headroom - m) of its variance.
    share = 0.5 / (selector.headroom - 0.5) if spread is None else 1.0
    assert low <= table.dispersion / share <= high
    assert table.evidence()[0] == pytest.approx(200 / table.dispersion)


def test_low_noise_is_used():
    """Arms 15 % apart in goodput at 3 % of noise: the best has most rounds after the first hundred."""
    for name in ("ucb1", "thompson", "sharp_thompson", "imed"):
        selector, rng, arms = bandit.make(name, 3, seed=3, reward="goodput"), random.Random(3), []
        for _ in range(400):
            arm = selector.select()
            arms.append(arm)
            selector.update(arm, (70.0, 100.0, 85.0)[arm] * rng.gauss(1.0, 0.03), weight=0.02)
        assert arms[100:].count(1) > 200, name


@pytest.mark.parametrize(("alike", "low", "high"), [(False, 0.0, 0.02), (True, 0.9, 1.0)])
def test_clumping_is_learned(alike, low, high):
    """32 trials a round: independent ones count nearly in full, identical ones as one."""
    selector, rng = bandit.make("thompson", 2, seed=0), random.Random(4)
    for step in range(600):
        chance = (0.4, 0.7)[step % 2]
        hits = 32 * (rng.random() < chance) if alike else sum(rng.random() < chance for _ in range(32))
        selector.update(step % 2, hits / 32, weight=32)
    table = selector._tables[None]
    assert low <= table.clumping <= high
    assert table.evidence()[0] == pytest.approx(300 * 32 / (1 + 31 * table.clumping))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), FRACTIONS, st.integers(1, 50)), max_size=60), st.booleans())
def test_evidence_lies_between_rounds_and_trials(observations, in_flight):
    selector = bandit.make("ucb1", 3, seed=0)
    for arm, reward, weight in observations:
        selector.update(arm, reward, weight)
    table = selector._table(None)
    table.in_flight = [0, 1, 2]
    for arm, evidence in enumerate(table.evidence(in_flight)):
        flying = table.in_flight[arm] * in_flight
        pulls, trials = table.tally.pulls()[arm], table.tally.weight[arm]
        assert pulls - 1e-6 <= evidence <= trials + flying * max(table.typical_weight(), 1.0) + 1e-6
        assert evidence <= max(pulls + flying, (pulls + flying) ** 2) + 1e-6


def test_single_trials_count_one_each():
    """The published setting: rewards of weight 1, whatever they are, leave nothing to correct."""
    for name in ("ucb1", "sw_ucb", "d_ucb"):
        selector, rng = bandit.make(name, 2, seed=0), random.Random(1)
        for _ in range(50):
            selector.update(selector.select(), rng.random())
        table = selector._tables[None]
        assert table.evidence() == table.tally.weight and table.clumping == 1.0
