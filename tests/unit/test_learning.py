"""Bandits as selectors of the step loop: pulls that land, pulls that never do, contexts, determinism."""

from __future__ import annotations

import pytest
import torch
from zoo import GREEDY, P4, noisy, shared, tiny

import hf_psd
from hf_psd import bandit
from hf_psd.config import PSDConfig
from hf_psd.learning import BanditSelector
from hf_psd.phases import Phase, Request
from hf_psd.selection import Arm, Feedback
from hf_psd.testing.toys import FullDepth

ARMS = [Arm(0, "a", True), Arm(1, "b", True)]
ARGUMENTS = P4() | GREEDY | dict(max_new_tokens=24)


def requests(count=2, limit=100):
    return [Request(row, row, 0, 10, limit) for row in range(count)]


def selector(spec="ucb1", sampled=False, **settings):
    return BanditSelector(spec, PSDConfig(selector=spec, **settings), 2, 0, sampled)


def test_a_pull_lands_once_with_the_sums_of_its_rows():
    rows, chooser = requests(), selector()
    ((arm, budgets),) = chooser.plan(rows, ARMS, 4)
    assert budgets == [4, 4]
    chooser.launched(rows)
    chooser.feedback([Feedback(rows[0], arm, 4, 3), Feedback(rows[1], arm, 2, 0)])
    stats = chooser.bandit.stats()
    assert stats["means"][arm] == 3 / 6 and stats["pulls"][arm] == 1 and stats["in_flight"] == [0, 0]


def test_two_groups_have_two_pulls_in_flight():
    rows, chooser = requests(4), selector()
    ((first, _),) = chooser.plan(rows[:2], ARMS, 4)
    ((second, _),) = chooser.plan(rows[2:], ARMS, 4)
    assert sum(chooser.bandit.stats()["in_flight"]) == 2 and first != second
    chooser.launched(rows)
    chooser.feedback([Feedback(row, second, 4, 4) for row in rows[2:]])
    chooser.feedback([Feedback(row, first, 4, 0) for row in rows[:2]])
    assert chooser.bandit.stats()["means"] == [float(first == 1), float(second == 1)]


def test_pulls_that_never_land_do_not_count():
    rows, chooser = requests(), selector()
    chooser.plan(rows, ARMS, 4)
    for row in rows:
        row.phase = Phase.DONE
    others = [Request(9, 0, 0, 10, 100)]
    chooser.plan(others, ARMS, 4)
    assert sum(chooser.bandit.stats()["pulls"]) == 1, "the first pull can never land"
    chooser.end()
    assert chooser.bandit.stats()["pulls"] == chooser.bandit.stats()["in_flight"] == [0, 0]


def test_a_verification_without_a_plan_is_nobodys():
    """Requests may be verified without having been planned for; what comes of it belongs to no pull."""
    rows, chooser = requests(), selector()
    chooser.launched(rows)
    ((arm, _),) = chooser.plan(rows, ARMS, 4)
    chooser.feedback([Feedback(row, None, 0, 0) for row in rows])
    assert chooser.bandit.stats()["means"] == [None, None] and sum(chooser.bandit.stats()["in_flight"]) == 1
    chooser.launched(rows)
    chooser.feedback([Feedback(row, arm, 4, 4) for row in rows])
    assert chooser.bandit.stats()["means"][arm] == 1.0


@pytest.mark.parametrize("settings", [{}, dict(per_request=True)])
def test_requests_that_leave_take_their_pulls_along(settings):
    rows, chooser = requests(3), selector(**settings)
    chooser.plan(rows, ARMS, 4)
    chooser.launched(rows[:2])
    for row in rows:
        chooser.forget(row.index)
    chooser.plan([Request(9, 0, 0, 10, 100)], ARMS, 4)
    assert sum(chooser.bandit.stats()["in_flight"]) == 1
    chooser.end()
    assert sum(chooser.bandit.stats()["pulls"]) == 0


def test_a_long_queue_leaves_nothing_of_requests_that_are_over():
    chooser = selector("hedge", per_request=True)
    for index in range(20):
        row = Request(index, 0, 0, 10, 100)
        chooser.plan([row], ARMS, 4)
        chooser.launched([row])
        chooser.feedback([Feedback(row, 0, 4, 3)])
        chooser.forget(index)
    assert not chooser.bandit.contexts and not chooser._hindsight._pools


def test_a_class_with_plan_and_feedback_is_made_anew_for_each_call():
    class Counting(FullDepth):
        made = 0

        def __init__(self):
            super().__init__()
            Counting.made += 1

    for _ in range(2):
        shared("llama").generate(**ARGUMENTS, assistant_models=[shared("llama", 11)], psd=dict(selector=Counting))
    assert Counting.made == 2


def test_rows_without_room_are_no_part_of_a_pull():
    rows, chooser = requests(2, limit=11), selector()
    assert chooser.plan(rows, ARMS, 4) == [] and sum(chooser.bandit.stats()["pulls"]) == 0
    rows[1].limit = 50
    ((arm, budgets),) = chooser.plan(rows, ARMS, 4)
    assert budgets == [0, 4]
    chooser.launched(rows)
    chooser.feedback([Feedback(rows[0], None, 0, 0), Feedback(rows[1], arm, 4, 4)])
    assert chooser.bandit.stats()["means"][arm] == 1.0


def test_goodput_needs_a_measured_round():
    rows, chooser = requests(), selector("ucb1:burn_in=0", reward="goodput")
    ((arm, _),) = chooser.plan(rows, ARMS, 4)
    chooser.launched(rows)
    chooser.feedback([Feedback(row, arm, 4, 4, 5, None) for row in rows])
    assert chooser.bandit.stats()["means"] == [None, None] and sum(chooser.bandit.stats()["in_flight"]) == 0
    ((arm, _),) = chooser.plan(rows, ARMS, 4)
    chooser.launched(rows)
    chooser.feedback([Feedback(row, arm, 4, 4, 5, 0.5) for row in rows])
    assert chooser.bandit.stats()["means"][arm] == 20.0


def test_gamma_auto_has_arms_for_lengths_and_for_no_draft():
    chooser = selector("ucb1:burn_in=0", gamma="auto", reward="goodput")
    assert [str(arm) for arm in chooser.arms][:3] == ["no draft", "drafter 0, gamma 1", "drafter 0, gamma 2"]
    assert len(chooser.arms) == 9
    plans = []
    for _ in range(9):
        rows = requests(1)
        plans.append(chooser.plan(rows, ARMS, 8))
        chooser.launched(rows)
        chooser.feedback([Feedback(rows[0], 0, 1, 1, 2, 0.1)])
    assert [] in plans and {(key, budgets[0]) for plan in plans for key, budgets in plan} == {
        (drafter, gamma) for drafter in (0, 1) for gamma in (1, 2, 4, 8)
    }
    chooser.plan(requests(1), [ARMS[1]], 8)
    assert [chooser.arms[arm].drafter for arm in chooser.bandit.active_arms] == [None, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {(1, "greedy", None)}),
        (dict(sampled=True, context="code"), {(1, "sampled", "code")}),
        (dict(reward="goodput"), {(4, "greedy", None)}),
        (dict(context=["a", "b", "a"]), {(1, "greedy", "a"), (1, "greedy", "b")}),
        (dict(per_request=True), {("request", row, 1, "greedy", None) for row in range(3)}),
    ],
)
def test_contexts(settings, expected):
    chooser = selector(**settings)
    chooser.plan(requests(3), ARMS, 4)
    assert set(chooser.bandit.contexts) == expected


def test_rows_with_tags_of_their_own_learn_apart():
    rows, chooser = requests(4), selector(context=["a", "b", "a", "b"])
    for _ in range(60):
        plan = chooser.plan(rows, ARMS, 1)
        chooser.launched(rows)
        for arm, budgets in plan:
            told = [(row, Feedback(row, arm, 1, (row.index % 2) == arm)) for row, b in zip(rows, budgets) if b]
            chooser.feedback([result for _, result in told])
    plan = dict(chooser.plan(rows, ARMS, 1))
    assert plan == {0: [4, 0, 4, 0], 1: [0, 4, 0, 4]}


def test_a_call_ends_with_nothing_in_flight_and_reports():
    """Also where the call ends by an error, and for requests of one's own bandit that later calls do not meet again."""
    target, models = shared("llama"), [shared("llama", noise=0.03), shared("llama", 11)]
    own = bandit.make("thompson", 2, 0)
    for mode in ("sd", "psd"):
        target.generate(**ARGUMENTS, assistant_models=models, psd=dict(selector=own, mode=mode, gamma=2))
        stats = hf_psd.last_stats()
        assert stats.selector["in_flight"] == [0, 0] and stats.selector["regret"] >= 0
        assert stats.selector["arms"] == ["drafter 0, gamma 2", "drafter 1, gamma 2"]
        assert sum(own.stats()["pulls"]) > 5 and "0.0" not in hf_psd.stats.summary(stats)

    class Stop(hf_psd.StepHook):
        def before_verify(self, context):
            raise KeyError("stop")

    before = own.stats()
    with pytest.raises(KeyError):
        target.generate(
            **ARGUMENTS, assistant_models=models, psd=dict(selector=own, mode="sd", gamma=2), psd_hooks=[Stop()]
        )
    assert own.stats()["pulls"] == before["pulls"] and own.stats()["in_flight"] == [0, 0]

    psd = dict(selector=own, mode="sd", gamma=2, per_request=True)
    target.generate(**ARGUMENTS, assistant_models=models, psd=psd)
    assert len(hf_psd.last_stats().selector["contexts"]) == 5
    assert own.contexts == [(1, "greedy", None)]


@pytest.mark.parametrize("name", bandit.names())
def test_the_same_seed_gives_the_same_choices(name):
    target, models = shared("llama"), [shared("llama", noise=0.03), shared("llama", 11)]
    pulls = []
    for seed in (5, 5, 6):
        psd = dict(selector=name, seed=seed, gamma=2, mode="psd")
        arguments = P4() | dict(do_sample=True, pad_token_id=0, eos_token_id=None, max_new_tokens=24)
        text = target.generate(**arguments, assistant_models=models, psd=psd)
        pulls.append((hf_psd.last_stats().selector, text.tolist()))
    assert pulls[0] == pulls[1] and pulls[0][1] != pulls[2][1]


def test_summary_names_the_selectors_pulls():
    target, models = shared("llama"), [shared("llama", noise=0.03), "prompt_lookup"]
    target.generate(**ARGUMENTS, assistant_models=models, psd=dict(selector="ucb1", mode="sd"))
    text = hf_psd.stats.summary(hf_psd.last_stats())
    assert "ucb1:" in text and "drafter 1, gamma 4" in text and "regret" in text
    target.generate(**ARGUMENTS, assistant_models=models, psd=True)
    assert hf_psd.last_stats().selector is None


def test_a_selector_of_ones_own_that_names_no_arm_is_named():
    class Wild:
        def select(self):
            return 5

        def update(self, arm, reward):
            pass

    with pytest.raises(ValueError, match=r"Wild.select\(\) gave arm=5: allowed are the integers 0 .. 0"):
        shared("llama").generate(**ARGUMENTS, assistant_models=[shared("llama")], psd=dict(selector=Wild, mode="sd"))


def test_arms_that_fail_leave_the_rest(recwarn):
    class Failing(hf_psd.Drafter):
        name = "failing"

        def draft(self, task):
            raise ValueError("no drafts")

    target = tiny("llama")
    expected = target.generate(**ARGUMENTS)
    auto = dict(gamma="auto", reward="goodput", per_request=True)
    for psd in (dict(selector="thompson", mode="sd"), dict(selector="ucb1", mode="sd", **auto)):
        output = target.generate(**ARGUMENTS, assistant_models=[Failing(), noisy(target, 0.03)], psd=psd)
        assert torch.equal(output, expected)
        selector = hf_psd.last_stats().selector
        assert all("drafter 0" not in selector["arms"][arm] for arm in selector["active_arms"])
