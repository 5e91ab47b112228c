"""Saved state: JSON, exact, and refused whole if anything is wrong with it."""

from __future__ import annotations

import copy
import json
import random

import pytest

import hf_psd.bandit as bandit


def played(name, rounds=150, reward="acceptance"):
    selector = bandit.make(name, n_arms=3, seed=5, reward=reward)
    rng = random.Random(2)
    underway = []
    for step in range(rounds):
        context = (1 << step % 2, "greedy", None)
        underway.append((selector.select(context), context))
        if len(underway) > 2:
            arm, its_context = underway.pop(0)
            selector.update(arm, rng.random(), weight=rng.randint(1, 5), context=its_context)
    selector.update_all([0.1, None, 0.7], context=(1, "greedy", None))
    return selector


def continue_playing(selector):
    rng, arms = random.Random(9), []
    for step in range(100):
        context = (1 << step % 2, "greedy", None)
        arms.append(selector.select(context))
        selector.update(arms[-1], rng.random(), weight=3.0, context=context)
    return arms


@pytest.mark.parametrize("reward", ["acceptance", "goodput"])
@pytest.mark.parametrize("name", bandit.names())
def test_state_survives_json_and_continues_exactly(name, reward):
    original = played(name, reward=reward)
    original.add_arm()
    original.retire(0)
    saved = json.loads(json.dumps(original.state_dict()))
    twin = bandit.make(name, n_arms=3, seed=99, reward=reward)
    twin.load_state_dict(saved)
    assert twin.stats() == original.stats()
    assert continue_playing(twin) == continue_playing(original)
    assert json.dumps(twin.state_dict()) == json.dumps(original.state_dict())


def test_state_does_not_alias_the_selector():
    selector = played("sw_ucb")
    saved = selector.state_dict()
    before = json.dumps(saved)
    continue_playing(selector)
    assert json.dumps(saved) == before


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: s.update(version=2),
        lambda s: s.update(name="ucb1"),
        lambda s: s["options"].update(discount=0.5),
        lambda s: s.update(n_arms=4),
        lambda s: s.update(active_arms=[0, 0, 1]),
        lambda s: s.update(rng=[3, [1, 2], None]),
        lambda s: s.pop("tables"),
        lambda s: s["tables"][0][1]["tally"]["gain"].pop(),
        lambda s: s["tables"][1][1].update(pulls=[1, -1, 0]),
        lambda s: s["tables"][1][1].update(own_weight=[1.0, float("nan"), 0.0]),
        lambda s: s["tables"][1].__setitem__(0, {"a": 1}),
    ],
)
def test_spoiled_state_is_refused_whole(spoil):
    saved = played("d_thompson").state_dict()
    spoil(saved)
    selector = played("d_thompson", rounds=30)
    before = copy.deepcopy(selector.state_dict())
    with pytest.raises(ValueError, match="state_dict refused"):
        selector.load_state_dict(saved)
    assert selector.state_dict() == before


def test_reset_forgets_everything():
    selector = bandit.make("thompson", n_arms=3, seed=4)
    first = continue_playing(selector)
    selector.add_arm()
    selector.retire(1)
    selector.reset()
    assert selector.n_arms == 3 and selector.active_arms == [0, 1, 2]
    assert selector.stats()["contexts"] == []
    assert continue_playing(selector) == first


def test_own_selector_state_travels():
    class Counting:
        def __init__(self):
            self.n = 0

        def select(self):
            return 0

        def update(self, arm, reward):
            self.n += 1

        def state_dict(self):
            return {"n": self.n}

        def load_state_dict(self, state):
            self.n = state["n"]

    one = bandit.resolve(Counting(), n_arms=2, seed=0)
    one.update(one.select(), 0.5)
    two = bandit.resolve(Counting(), n_arms=2, seed=0)
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert two.inner.n == 1 and two.stats() == one.stats()
