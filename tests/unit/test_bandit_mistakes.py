"""Known mistakes of drafter selection: each law here holds for the shipped selectors and fails for a planted fault."""

from __future__ import annotations

import math
import random
import statistics

import pytest

import hf_psd.bandit as bandit
from hf_psd.bandit.environments import PUBLISHED, ROTATING
from hf_psd.bandit.naive import NaiveUCB1
from hf_psd.bandit.simulate import EXPERIMENTS, play
from hf_psd.bandit.table import Table
from hf_psd.bandit.tally import Tally, WindowedTally

PUBLISHED_SEEDS = range(500, 512)
TABLES = {seed: PUBLISHED.rewards(seed) for seed in PUBLISHED_SEEDS}


def published_law(make, low, high, worst):
    """Mean regret on the published experiment in [low, high], no seed at `worst` or above."""
    regrets = [play(make(seed), EXPERIMENTS["published"], table).regret for seed, table in TABLES.items()]
    assert max(regrets) < worst, max(regrets)
    assert low <= statistics.fmean(regrets) <= high, statistics.fmean(regrets)


def rotating_law(make, share, regret):
    """After a swap, the new best arm has `share` of rounds 250 to 300; mean regret at most `regret`."""
    runs = [play(make(seed), EXPERIMENTS["rotating"], ROTATING.rewards(seed)) for seed in range(500, 504)]
    assert statistics.fmean(run.shares[5] for run in runs) >= share
    assert statistics.fmean(run.regret for run in runs) <= regret


@pytest.mark.parametrize(
    ("name", "low", "high", "worst"),
    [
        ("ucb1", 80, 115, 526),
        ("thompson", 8, 28, 250),
        ("sharp_thompson", 6, 26, 250),
        ("imed", 8, 28, 250),
        ("sw_ucb", 120, 260, 400),
        ("d_ucb", 120, 320, 450),
        ("d_thompson", 100, 280, 400),
        ("exp3", 60, 250, 600),
        ("hedge", 15, 80, 200),
    ],
)
def test_published_experiment(name, low, high, worst):
    published_law(lambda seed: bandit.make(name, 3, seed), low, high, worst)


@pytest.mark.parametrize(
    ("name", "share", "regret"), [("sw_ucb", 0.88, 420), ("d_ucb", 0.87, 400), ("d_thompson", 0.9, 400)]
)
def test_rotating_experiment(name, share, regret):
    rotating_law(lambda seed: bandit.make(name, 3, seed), share, regret)


def test_hedge_with_full_information_beats_ucb1_on_the_rotating_experiment():
    tables = {seed: ROTATING.rewards(seed) for seed in range(500, 504)}

    def mean(name):
        return statistics.fmean(
            play(bandit.make(name, 3, seed), EXPERIMENTS["rotating"], table).regret for seed, table in tables.items()
        )

    assert mean("hedge") <= 0.6 * mean("ucb1")


def test_ucb1_equals_the_reference_choice_by_choice():
    def differences(selector, steps=4000):
        reference = NaiveUCB1(3, random.Random())
        reference.rng.setstate(selector._rng.getstate())
        wrong = 0
        for row in TABLES[500][:steps]:
            arm, expected = selector.select(), reference.select()
            wrong += arm != expected
            selector.update(expected, row[expected])
            reference.update(expected, row[expected])
            if arm != expected:
                selector.cancel(arm)
        return wrong

    assert differences(bandit.make("ucb1", 3, 0)) == 0
    assert differences(bandit.make("ucb1", 3, 0, c=0.9)) > 0
    assert differences(UncheckedUCB1(3, 0)) == 0
    assert differences(ConstantBonus(3, 0)) > 0


class ConstantBonus(bandit.UCB1):
    """Fault: the pulls of all arms together in the bonus, so that it is the same for all arms."""

    def _scores(self, table):
        counts = table.evidence(in_flight=True)
        bonus = math.sqrt(2 * math.log(max(sum(counts), 1)) / max(sum(counts), 1))
        return [math.inf if n == 0 else table.mean(arm) + bonus for arm, n in enumerate(counts)]


class UncheckedUCB1(bandit.UCB1):
    """Accepts any reward, as a base for the next fault."""

    def update(self, arm, reward, weight=1.0, context=None):
        table = self._table(context)
        self._landed(table, arm)
        table.record(arm, reward, weight)


class GammaScale(UncheckedUCB1):
    """Fault: rewards on the scale of gamma = 4 with c = 1."""

    def update(self, arm, reward, weight=1.0, context=None):
        table = self._table(context)
        self._landed(table, arm)
        table.record(arm, 4.0 * reward, weight)

    def _scores(self, table):
        counts = table.evidence(in_flight=True)
        width = math.sqrt(2 * math.log(max(sum(counts), 1)))
        pairs = zip(table.tally.gain, counts, strict=True)
        return [gain / n + width / math.sqrt(n) if n else math.inf for gain, n in pairs]


@pytest.mark.parametrize("fault", [ConstantBonus, GammaScale])
def test_ucb1_law_catches(fault):
    with pytest.raises(AssertionError):
        published_law(lambda seed: fault(3, seed), 80, 115, 526)


class NoPrior(bandit.BaseSelector):
    """Fault: normal posterior with the sample variance and no prior; equal first rewards give variance zero."""

    name = "no prior"

    def _decide(self, table):
        draws = []
        for arm in self._active:
            n, mean = table.tally.weight[arm], table.mean(arm)
            if n < 1:
                return arm
            variance = mean * (1 - mean) * n / max(n - 1, 1)
            draws.append(self._rng.gauss(mean, math.sqrt(variance / n)))
        return self._pick(table, draws)


def test_thompson_law_catches_a_posterior_without_prior():
    with pytest.raises(AssertionError):
        published_law(lambda seed: NoPrior(3, seed), 8, 28, 250)


@pytest.mark.parametrize("name", ["thompson", "sharp_thompson", "d_thompson", "ucb1", "imed"])
def test_arm_of_identical_first_rewards_is_revisited(name):
    """Three failures in a row must not lock an arm out, whatever the others have shown."""

    def visits(selector):
        for arm, reward in [(0, 0.0)] * 3 + [(1, 1.0)] * 30 + [(1, 0.0)] * 10:
            selector.update(arm, reward)
        rng, count = random.Random(8), 0
        for _ in range(3000):
            if selector.select() == 0:
                count += 1
                selector.cancel(0)
            else:
                selector.update(1, float(rng.random() < 0.75))
        return count

    assert visits(bandit.make(name, 2, seed=0)) > 3
    assert visits(NoPrior(2, 0)) == 0


def clumped_law(kind):
    """Up to 32 trials a round, all alike: a round must not count as 32 pulls, or an unlucky first one decides."""
    for seed in (500, 501, 502):
        run = play(kind(3, seed), EXPERIMENTS["clumped"], TABLES[seed])
        assert run.regret < 700, run.regret


@pytest.mark.parametrize("name", bandit.names())
def test_trials_of_one_round_that_are_all_alike(name):
    clumped_law(bandit.SELECTORS[name])


def trials_as_they_are(table, in_flight=False):
    """Fault: every trial is evidence of its own."""
    flying = [n * table.typical_weight() * in_flight for n in table.in_flight]
    return [w + f for w, f in zip(table.tally.weight, flying, strict=True)]


@pytest.mark.parametrize("name", ["thompson", "sharp_thompson", "imed"])
def test_clumped_law_catches_trials_taken_for_independent(name, monkeypatch):
    monkeypatch.setattr(Table, "evidence", trials_as_they_are)
    with pytest.raises(AssertionError):
        clumped_law(bandit.SELECTORS[name])


class AllTimeCounts(bandit.SlidingWindowUCB):
    """Fault: windowed means with all-time counts in the bonus."""

    def _scores(self, table):
        counts = table.ledger.weight
        width = self.c * math.sqrt(2 * math.log(max(sum(counts), 1)))
        means = [table.mean(arm) for arm in self._active]
        return [
            math.inf if n == 0 else (0.0 if mean is None else mean) + width / math.sqrt(n)
            for mean, n in zip(means, counts, strict=True)
        ]


def test_rotating_law_catches_all_time_counts():
    with pytest.raises(AssertionError):
        rotating_law(lambda seed: AllTimeCounts(3, seed), 0.88, 420)


def test_window_forgets_counts_and_means_together():
    def check(tally):
        for step in range(1000):
            tally.add(0, 1.0, 2.0) if step < 990 else tally.add(1, 0.25, 3.0)
        assert tally.weight == [0.0, 30.0] and tally.pulls() == [0.0, 10.0]
        assert tally.mean(0) is None and tally.mean(1) == 0.25

    check(WindowedTally(2, 10))
    with pytest.raises(AssertionError):
        check(Tally(2))


@pytest.mark.parametrize("name", bandit.names())
def test_means_are_ratios_of_sums(name):
    """One round of 1 in 1 and one of 0 in 9 make 0.1; the mean of the ratios would be 0.5."""
    selector = bandit.make(name, 2, seed=0)
    selector.update(0, 1.0, weight=1)
    selector.update(0, 0.0, weight=9)
    assert selector.stats()["means"][0] == pytest.approx(0.1)


def ratio_law(kind):
    """Arm 0: long rounds that fail and short ones that succeed, 0.18 over all; arm 1: 0.4 throughout."""
    selector = kind(2, 0)
    rng, arms = random.Random(5), []
    for _ in range(1500):
        arm = selector.select()
        arms.append(arm)
        if arm == 1:
            selector.update(1, 0.4, weight=5)
        elif rng.random() < 0.5:
            selector.update(0, 1.0, weight=1)
        else:
            selector.update(0, 0.09, weight=9)
    assert arms[-500:].count(1) > 400


@pytest.mark.parametrize("name", ["ucb1", "sw_ucb", "d_ucb", "thompson", "sharp_thompson", "d_thompson", "imed"])
def test_choices_follow_ratios_of_sums(name):
    ratio_law(bandit.SELECTORS[name])

    class MeanOfRatios(bandit.SELECTORS[name]):
        def update(self, arm, reward, weight=1.0, context=None):
            super().update(arm, reward, 1.0, context)

    with pytest.raises(AssertionError):
        ratio_law(MeanOfRatios)


@pytest.mark.parametrize("name", bandit.names())
def test_first_rounds_of_an_arm_may_hold_a_compilation(name):
    """Two equal arms at 100 tokens a second; the first round of each call to an arm takes 5 s more."""

    def means(**options):
        selector = bandit.make(name, 2, seed=0, reward="goodput", **options)
        slow = {0: 5.0, 1: 0.5}
        for _ in range(200):
            arm = selector.select()
            selector.update(arm, *bandit.goodput(4, 0.04 + slow.pop(arm, 0.0)))
        return selector.stats()["means"]

    assert means() == [pytest.approx(100.0)] * 2
    assert min(means(burn_in=0)) < 95.0


def fresh_law(kind):
    """What one selector was taught is unknown to the next, for equal seeds and in one process."""
    one = kind(3, 1)
    for _ in range(100):
        one.update(one.select("ctx"), 1.0, context="ctx")
    two, three = kind(3, 1), kind(3, 1)
    assert two.stats()["pulls"] == [0, 0, 0] and two.stats()["contexts"] == []
    assert [two.select() for _ in range(5)] == [three.select() for _ in range(5)]


@pytest.mark.parametrize("name", bandit.names())
def test_no_state_leaks_between_selectors(name):
    fresh_law(bandit.SELECTORS[name])
    shared = {}

    class Leaking(bandit.SELECTORS[name]):
        def _start_over(self):
            super()._start_over()
            self._tables = shared

    with pytest.raises(AssertionError):
        fresh_law(Leaking)


def apart_law(kind):
    """A selector draws other numbers than a generator of the same seed, which may be the one of the rewards."""
    streams = [kind(3, 7)._rng, random.Random(7), random.Random("environment published 7")]
    assert len({stream.random() for stream in streams}) == len(streams)


@pytest.mark.parametrize("name", bandit.names())
def test_selector_and_environment_draw_from_different_generators(name):
    apart_law(bandit.SELECTORS[name])

    class InStep(bandit.SELECTORS[name]):
        def _start_over(self):
            super()._start_over()
            self._rng = random.Random(self.seed)

    with pytest.raises(AssertionError):
        apart_law(InStep)


@pytest.mark.parametrize("name", bandit.names())
def test_goodput_choices_do_not_depend_on_the_unit(name):
    """Scaling all rewards by a power of two, and all weights by another, changes no choice at all."""

    def choices(reward_unit, second_unit):
        selector = bandit.make(name, 3, seed=2, reward="goodput")
        rng, arms = random.Random(3), []
        for _ in range(600):
            arm = selector.select()
            arms.append(arm)
            seconds = rng.uniform(0.5, 1.5)
            reward = (20.0, 60.0, 40.0)[arm] * rng.uniform(0.5, 1.5)
            selector.update(arm, reward * reward_unit, weight=seconds * second_unit)
        return arms

    assert choices(1.0, 1.0) == choices(2.0**-20, 1.0) == choices(2.0**30, 2.0**-12)


@pytest.mark.parametrize("experiment", ["scaled-0.001", "scaled-80"])
@pytest.mark.parametrize("name", bandit.names())
def test_no_lockout_at_any_reward_scale(name, experiment):
    for seed in (500, 501):
        run = play(bandit.make(name, 3, seed, reward="goodput"), EXPERIMENTS[experiment], TABLES[seed])
        assert run.regret < 1000


@pytest.mark.parametrize("name", ["thompson", "sharp_thompson", "imed", "ucb1", "sw_ucb", "d_ucb", "d_thompson"])
def test_one_odd_round_does_not_condemn_an_arm(name):
    """Rewards hardly vary, so few pulls tell much; yet the best arm survives a stalled round."""
    selector = bandit.make(name, 3, seed=1, reward="goodput", burn_in=0)
    rng, arms = random.Random(3), []
    stalled = {2}
    for _ in range(600):
        arm = selector.select()
        arms.append(arm)
        rate = (60.0, 80.0, 100.0)[arm] * rng.uniform(0.95, 1.05)
        if arm in stalled:
            stalled.remove(arm)
            rate *= 0.01
        selector.update(arm, rate)
    assert arms[-200:].count(2) > 120
