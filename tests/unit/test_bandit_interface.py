"""The interface of the selectors: validation, pulls in flight, contexts, arms that come and go, switching."""

from __future__ import annotations

import ast
import itertools
import random
from collections import Counter
from pathlib import Path

import pytest

import hf_psd.bandit as bandit

ALL = bandit.names()


@pytest.mark.parametrize("name", ALL)
def test_select_gives_arms_and_seed_repeats_them(name):
    def choices(seed):
        selector = bandit.make(name, n_arms=3, seed=seed)
        rewards, arms = random.Random(1), []
        for _ in range(200):
            arms.append(selector.select())
            selector.update(arms[-1], rewards.random())
        return arms

    assert set(choices(0)) == {0, 1, 2}
    assert choices(0) == choices(0)
    assert any(choices(seed) != choices(0) for seed in range(1, 9))


def test_package_imports_no_heavy_module():
    """Only inside functions: at import time the package is pure standard library."""
    for path in Path(bandit.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            for module in modules:
                assert module.split(".")[0] not in {"torch", "numpy", "matplotlib", "scipy", "transformers"}, path


def test_global_generator_is_untouched():
    random.seed(5)
    before = random.getstate()
    for name in ALL:
        selector = bandit.make(name, n_arms=3, seed=1)
        for _ in range(20):
            selector.update(selector.select(), 0.5)
    assert random.getstate() == before


@pytest.mark.parametrize("reward", [-0.01, 1.01, 4, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ALL)
def test_reward_outside_unit_interval_is_refused(name, reward):
    selector = bandit.make(name, n_arms=2, seed=0)
    arm = selector.select()
    before = selector.state_dict()
    with pytest.raises(ValueError, match=r"allowed is \[0, 1\]"):
        selector.update(arm, reward)
    with pytest.raises(ValueError, match=r"allowed is \[0, 1\]"):
        selector.update_all([0.5, reward])
    with pytest.raises(ValueError, match=r"allowed is \[0, 1\]"):
        selector.update_many([0, 1], [0.5, reward])
    assert selector.state_dict() == before
    selector.update(arm, 1.0 + 1e-7)
    assert selector.stats()["means"][arm] == 1.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.update(2, 0.5), "allowed are the integers 0 .. 1"),
        (lambda s: s.update(-1, 0.5), "allowed are the integers"),
        (lambda s: s.update(0.0, 0.5), "allowed are the integers"),
        (lambda s: s.update(0, 0.5, weight=-1.0), "weight=-1.0"),
        (lambda s: s.update(0, 0.5, weight=float("nan")), "weight=nan"),
        (lambda s: s.update(0, 0.5, context=[1]), "context="),
        (lambda s: s.select(context={}), "context="),
        (lambda s: s.select(context=float("nan")), "context="),
        (lambda s: s.update_all([0.5]), "1 rewards for 2 arms"),
        (lambda s: s.update_many([0], [0.5, 0.5]), "lengths"),
        (lambda s: s.cancel(0), "no pull in flight"),
        (lambda s: s.retire(5), "arm=5"),
        (lambda s: s.set_switch_cost([0.1]), "1 switching costs for 2 arms"),
        (lambda s: s.set_switch_cost(-0.1), "switch_cost=-0.1"),
    ],
)
def test_bad_calls_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(bandit.make("ucb1", n_arms=2, seed=0))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ucb2", {}, "allowed are ucb1"),
        ("ucb1", {"window": 3}, "no option window; allowed are c, reward"),
        ("ucb1", {"c": -1.0}, "c=-1.0"),
        ("ucb1", {"hysteresis": "a"}, "hysteresis='a'"),
        ("ucb1", {"fading": "a"}, "fading='a'"),
        ("ucb1", {"switch_cost": "a"}, "switch_cost='a'"),
        ("ucb1", {"switch_cost": None}, "switch_cost=None"),
        ("ucb1:c=1,c=2", {}, "each name once"),
        ("ucb1:c=1 min_dwell=2", {}, "allowed is name=value"),
        ("ucb1:switch_cost=[0,1", {}, "allowed is name=value"),
        ('ucb1:reward="goodput"', {"reward": "acceptance"}, "given reward twice"),
        ("ucb1", {"n_arms": 0}, "n_arms=0"),
        ("ucb1", {"n_arms": True}, "n_arms=True"),
        ("ucb1", {"seed": "x"}, "seed='x'"),
        ("ucb1", {"reward": "tokens"}, "'acceptance', 'goodput'"),
        ("ucb1", {"min_dwell": 0}, "min_dwell=0"),
        ("ucb1", {"hysteresis": 2.0}, "hysteresis=2.0"),
        ("ucb1", {"fading": 0.0}, "fading=0.0"),
        ("ucb1", {"burn_in": -1}, "burn_in=-1"),
        ("sw_ucb", {"window": 0}, "window=0"),
        ("d_ucb", {"discount": 1.5}, "discount=1.5"),
        ("thompson", {"prior": (0.0, 1.0)}, "prior="),
        ("thompson", {"sharpness": 0.0}, "sharpness=0.0"),
        ("hedge", {"horizon": 1}, "horizon=1"),
    ],
)
def test_bad_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        bandit.make(name, **{"n_arms": 2, "seed": 0, **options})


def test_options_in_a_name_are_json_with_lists_and_spaces():
    selector = bandit.make('sw_ucb: window = 9, switch_cost=[0, 0.5],reward="goodput" ', n_arms=2)
    expected = bandit.make("sw_ucb", n_arms=2, window=9, switch_cost=[0, 0.5], reward="goodput")
    assert selector.options() == expected.options() and selector.reward == "goodput"
    assert selector.state_dict()["switch_cost"] == expected.state_dict()["switch_cost"]


@pytest.mark.parametrize("name", ["ucb1", "sw_ucb", "d_ucb", "imed"])
def test_pulls_in_flight_are_counted(name):
    """Selections without any update must not fall on one arm."""
    selector = bandit.make(name, n_arms=4, seed=3)
    arms = [selector.select() for _ in range(12)]
    assert sorted(arms[:4]) == [0, 1, 2, 3]
    assert max(Counter(arms).values()) == 3
    assert selector.stats()["in_flight"] == [3, 3, 3, 3]


@pytest.mark.parametrize("reward", ["acceptance", "goodput"])
@pytest.mark.parametrize("name", ["ucb1", "sw_ucb", "d_ucb", "imed"])
def test_pulls_in_flight_are_counted_beside_weighted_rounds(name, reward):
    selector = bandit.make(name, n_arms=3, seed=3, reward=reward, burn_in=0)
    for step in range(12):
        selector.update(step % 3, 0.5 + 0.1 * (step // 3 % 2), weight=8)
    assert max(Counter(selector.select() for _ in range(12)).values()) <= 5


@pytest.mark.parametrize("name", ALL)
def test_updates_may_come_out_of_order(name):
    selector = bandit.make(name, n_arms=3, seed=0)
    rng = random.Random(7)
    means, pulls, gained = (0.2, 0.8, 0.5), Counter(), Counter()
    underway = []
    for _ in range(400):
        underway.append(selector.select())
        if len(underway) > 5:
            arm = underway.pop(rng.randrange(len(underway)))
            reward = float(rng.random() < means[arm])
            pulls[arm] += 1
            gained[arm] += reward
            selector.update(arm, reward)
    stats = selector.stats()
    assert sum(stats["in_flight"]) == 5
    assert sum(stats["pulls"]) == 400
    for arm in range(3):
        assert stats["means"][arm] == pytest.approx(gained[arm] / pulls[arm])
        assert stats["in_flight"][arm] == underway.count(arm)


def test_cancelled_pull_leaves_no_trace():
    selector = bandit.make("ucb1", n_arms=2, seed=0)
    arm = selector.select()
    selector.cancel(arm)
    stats = selector.stats()
    assert stats["pulls"] == [0, 0] and stats["in_flight"] == [0, 0]


def test_weightless_update_lands_the_pull_and_teaches_nothing():
    selector = bandit.make("thompson", n_arms=2, seed=0)
    arm = selector.select()
    selector.update(arm, 0.0, weight=0.0)
    stats = selector.stats()
    assert stats["in_flight"] == [0, 0] and stats["means"] == [None, None] and stats["pulls"][arm] == 1


@pytest.mark.parametrize("name", ALL)
def test_contexts_are_independent(name):
    selector = bandit.make(name, n_arms=2, seed=0)
    contexts = {bandit.context_key(3, False): 0, bandit.context_key(9, True, "code"): 1}
    for _ in range(1500):
        for context, best in contexts.items():
            arm = selector.select(context)
            if selector.full_information:
                selector.update_all([float(best == 0), float(best == 1)], context=context, arm=arm)
            else:
                selector.update(arm, float(arm == best), context=context)
    stats = selector.stats()
    assert [part["context"] for part in stats["contexts"]] == [[4, "greedy", None], [16, "sampled", "code"]]
    for part, best in zip(stats["contexts"], contexts.values(), strict=True):
        assert part["pulls"][best] > 1200
    assert sum(stats["pulls"]) == 3000


def test_context_key_buckets_group_sizes():
    assert [bandit.context_key(n, True)[0] for n in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, 16]
    with pytest.raises(ValueError, match="group_size=0"):
        bandit.context_key(0, True)


@pytest.mark.parametrize("name", ALL)
def test_rewards_still_land_when_every_arm_is_retired(name):
    selector = bandit.make(name, 2, seed=0)
    first, second = selector.select(), selector.select()
    for arm in range(2):
        selector.retire(arm)
    selector.update(first, 0.5)
    selector.update(second, 0.1)
    selector.update_all([0.2, 0.3])
    assert not any(getattr(selector, "probabilities", list)())
    assert sum(selector.stats()["pulls"]) == 2
    selector.revive(1)
    assert selector.select() == 1


@pytest.mark.parametrize("name", ALL)
def test_retired_arm_is_never_selected(name):
    selector = bandit.make(name, n_arms=3, seed=0, min_dwell=4)
    flying = selector.select()
    selector.retire(flying)
    selector.retire(flying)
    selector.update(flying, 1.0)
    for _ in range(100):
        arm = selector.select()
        assert arm != flying
        selector.update(arm, 0.1)
    assert selector.active_arms == [arm for arm in range(3) if arm != flying]
    for arm in selector.active_arms:
        selector.retire(arm)
    with pytest.raises(RuntimeError, match="all 3 arms are retired"):
        selector.select()


def test_revived_arm_keeps_what_was_learned():
    selector = bandit.make("ucb1", n_arms=3, seed=0)
    selector.update(0, 0.75, weight=4)
    selector.retire(0)
    selector.revive(0)
    selector.revive(1)
    assert selector.active_arms == [0, 1, 2] and selector.stats()["means"][0] == 0.75


@pytest.mark.parametrize("name", ALL)
def test_added_arm_is_tried_and_found_best(name):
    selector = bandit.make(name, n_arms=2, seed=0)
    rng = random.Random(3)
    means = [0.2, 0.3]

    def play(rounds):
        arms = []
        for _ in range(rounds):
            arm = selector.select()
            rewards = [float(rng.random() < mean) for mean in means]
            if selector.full_information:
                selector.update_all(rewards, arm=arm)
            else:
                selector.update(arm, rewards[arm])
            arms.append(arm)
        return arms

    play(300)
    assert selector.add_arm() == 2
    means.append(0.9)
    arms = play(1500)
    assert arms[-500:].count(2) > 250


def test_new_hedge_arm_gets_an_even_share():
    selector = bandit.make("hedge", n_arms=2, seed=0)
    for _ in range(50):
        selector.update_all([0.4, 0.9])
    old = selector.probabilities()
    selector.add_arm()
    new = selector.probabilities()
    assert sum(new) == pytest.approx(1.0)
    # The rate depends on the number of arms, so the share is even up to that.
    assert 0.05 < new[2] < 0.5 and new[1] > new[0] and old[1] > old[0]


@pytest.mark.parametrize("name", ALL)
def test_minimum_dwell(name):
    selector = bandit.make(name, n_arms=3, seed=0, min_dwell=8)
    arms = []
    for _ in range(240):
        arms.append(selector.select())
        selector.update(arms[-1], 0.5)
    stretches, start = [], 0
    for place in range(1, len(arms)):
        if arms[place] != arms[place - 1]:
            stretches.append(place - start)
            start = place
    assert stretches and min(stretches) >= 8
    assert selector.stats()["switches"] == len(stretches)


@pytest.mark.parametrize("name", ["ucb1", "thompson", "imed", "hedge"])
def test_hysteresis_saves_switches_between_equal_arms(name):
    def switches(**options):
        selector = bandit.make(name, n_arms=2, seed=0, **options)
        rng = random.Random(4)
        for _ in range(2000):
            arm = selector.select()
            rewards = [float(rng.random() < 0.6) for _ in range(2)]
            if selector.full_information:
                selector.update_all(rewards, arm=arm)
            else:
                selector.update(arm, rewards[arm])
        return selector.stats()["switches"]

    free = switches()
    assert switches(hysteresis=0.1) < 0.4 * free
    assert switches(switch_cost=0.8, min_dwell=8) < switches(min_dwell=8)


def test_hysteresis_gives_way_to_a_better_arm():
    selector = bandit.make("ucb1", n_arms=2, seed=0, hysteresis=0.1)
    rng = random.Random(4)
    arms = []
    for _ in range(3000):
        arms.append(selector.select())
        selector.update(arms[-1], float(rng.random() < (0.3, 0.7)[arms[-1]]))
    assert arms[-500:].count(1) > 450


def test_switching_cost_is_counted():
    selector = bandit.make("ucb1", n_arms=2, seed=0, switch_cost=[0.25, 0.5])
    arms = []
    for _ in range(100):
        arms.append(selector.select())
        selector.update(arms[-1], 0.5)
    costs = [(0.25, 0.5)[new] for old, new in itertools.pairwise(arms) if old != new]
    stats = selector.stats()
    assert stats["switches"] == len(costs) > 0
    assert stats["switching_paid"] == pytest.approx(sum(costs))


def test_regret_against_best_fixed_arm():
    selector = bandit.make("ucb1", n_arms=3, seed=0)
    assert selector.stats()["regret"] is None
    selector.update(0, 0.75, weight=4)
    selector.update(1, 0.25, weight=8)
    stats = selector.stats()
    assert stats["means"] == [0.75, 0.25, None]
    assert stats["regret"] == pytest.approx(8 * 0.5)
    selector.update(0, 0.5, context="other")
    assert selector.stats()["regret"] == pytest.approx(8 * 0.5)


def test_full_information_does_not_charge_bystanders():
    selector = bandit.make("hedge", n_arms=2, seed=0)
    for _ in range(10):
        selector.update_all([0.9, 0.4], arm=0)
    assert selector.stats()["regret"] == pytest.approx(0.0)
    selector.update_all([0.9, 0.4], arm=1)
    assert selector.stats()["regret"] == pytest.approx(0.5)


@pytest.mark.parametrize("name", ALL)
def test_full_information_with_gaps(name):
    selector = bandit.make(name, n_arms=3, seed=0)
    for _ in range(60):
        selector.update_all([0.1, None, 0.9], arm=selector.select())
    stats = selector.stats()
    assert stats["means"] == [pytest.approx(0.1), None, pytest.approx(0.9)]
    assert stats["in_flight"] == [0, 0, 0]


def test_update_many_is_one_update_per_request():
    one, many = (bandit.make("ucb1", n_arms=2, seed=0) for _ in range(2))
    rows = [(0, 0.5, 4.0, "a"), (1, 1.0, 2.0, "b"), (0, 0.0, 3.0, "a")]
    for row in rows:
        one.update(*row)
    many.update_many(*zip(*rows, strict=True))
    assert one.state_dict() == many.state_dict()


class OneOfMine:
    """Round robin, with nothing but the two methods and no optional argument."""

    def __init__(self, n_arms):
        self.n_arms, self.turn, self.told = n_arms, 0, []

    def select(self):
        self.turn += 1
        return (self.turn - 1) % self.n_arms

    def update(self, arm, reward):
        self.told.append((arm, reward))


def test_own_selector_as_class_or_instance():
    for spec in (OneOfMine, OneOfMine(3)):
        selector = bandit.resolve(spec, n_arms=3)
        arms = [selector.select(context="x") for _ in range(6)]
        assert arms == [0, 1, 2, 0, 1, 2]
        selector.update(1, 0.5, weight=4, context="x")
        assert selector.inner.told == [(1, 0.5)]
        assert selector.stats()["means"] == [None, 0.5, None]
        with pytest.raises(ValueError, match=r"\[0, 1\]"):
            selector.update(1, 3.0)
        selector.update_all([0.1, 0.2, 0.3])
        assert selector.inner.told[1:] == [(0, 0.1), (1, 0.2), (2, 0.3)]


def test_own_selector_gets_goodput_scaled():
    selector = bandit.resolve(OneOfMine, n_arms=2, reward="goodput", burn_in=0)
    for rate in (50.0, 100.0, 25.0):
        selector.update(selector.select(), rate)
    assert selector.inner.told == [(0, 1.0), (1, 1.0), (0, pytest.approx(0.25, rel=0.01))]


def test_own_selector_that_picks_a_retired_or_wrong_arm():
    selector = bandit.resolve(OneOfMine(3), n_arms=3, seed=0)
    selector.update(2, 0.9)
    selector.retire(0)
    with pytest.warns(UserWarning, match="arm 0, which is retired"):
        assert selector.select() == 2
    wrong = bandit.resolve(OneOfMine(9), n_arms=2)
    assert [wrong.select(), wrong.select()] == [0, 1]
    with pytest.raises(ValueError, match="arm=2"):
        wrong.select()


def test_resolve_takes_names_and_instances_and_refuses_the_rest():
    assert isinstance(bandit.resolve("thompson", n_arms=2), bandit.Thompson)
    assert isinstance(bandit.resolve(bandit.Hedge, n_arms=2), bandit.Hedge)
    mine = bandit.make("ucb1", n_arms=2)
    assert bandit.resolve(mine, n_arms=2) is mine
    with pytest.raises(ValueError, match="2 arms; this call has 3"):
        bandit.resolve(mine, n_arms=3)
    with pytest.raises(ValueError, match="allowed are a name"):
        bandit.resolve(object(), n_arms=3)


def test_arms_are_the_product_with_one_plain_arm():
    arms = bandit.enumerate_arms(2, (0, 1, 4))
    assert arms == [bandit.Arm(None, 0), bandit.Arm(0, 1), bandit.Arm(0, 4), bandit.Arm(1, 1), bandit.Arm(1, 4)]
    assert [str(arm) for arm in arms[:2]] == ["no draft", "drafter 0, gamma 1"]
    assert bandit.enumerate_arms(2, [[4], [0, 2, 2]]) == [bandit.Arm(None, 0), bandit.Arm(0, 4), bandit.Arm(1, 2)]
    assert bandit.enumerate_arms(0, (0,)) == [bandit.Arm(None, 0)]
    for arguments in ((2, (-1,)), (0, (4,)), (2, [[1]]), (2, [1, [2]])):
        with pytest.raises(ValueError, match="gamma|drafter"):
            bandit.enumerate_arms(*arguments)
    with pytest.raises(ValueError, match="gamma 0"):
        bandit.Arm(0, 0)


def test_rewards_of_a_round():
    assert bandit.acceptance([4, 0, 1], [4, 4, 0 + 1]) == (5 / 9, 9.0)
    assert bandit.acceptance(3, 4) == (0.75, 4.0)
    assert bandit.goodput(5, 0.02) == (250.0, 0.02)
    with pytest.raises(ValueError, match="goodput"):
        bandit.acceptance([0, 0], [0, 0])
    with pytest.raises(ValueError, match="row 1: 3 accepted of 2"):
        bandit.acceptance([1, 3], [2, 2])
    for arguments in ((5, 0.0), (-1, 1.0), (5, float("inf"))):
        with pytest.raises(ValueError, match="tokens"):
            bandit.goodput(*arguments)


def test_reward_scale_follows_the_current_best():
    scale = bandit.RewardScale(fading=0.5)
    assert [scale(r) for r in (0.0, 10.0, 2.5, 2.5)] == [0.0, 1.0, 0.5, 1.0]
    assert scale(1.0, context="other") == 1.0
    with pytest.raises(ValueError, match="finite number >= 0"):
        scale(-1.0)
