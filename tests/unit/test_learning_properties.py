"""Whatever happens to requests and drafters, what a bandit knows stays sound."""

from __future__ import annotations

import math

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_psd import bandit
from hf_psd.config import PSDConfig
from hf_psd.learning import BanditSelector
from hf_psd.phases import Phase, Request
from hf_psd.selection import Arm, Feedback

FORMS = [
    dict(),
    dict(per_request=True),
    dict(context=["a", "b"] * 50),
    dict(reward="goodput"),
    dict(reward="goodput", gamma="auto", per_request=True),
]
trials = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def check(selector, last=False):
    stats = selector.bandit.stats()
    for mean in stats["means"]:
        assert mean is None or (0 <= mean < math.inf and (mean <= 1 or selector.config.reward == "goodput"))
    assert all(0 <= flying <= pulls for flying, pulls in zip(stats["in_flight"], stats["pulls"]))
    if len(selector.bandit.active_arms) == selector.bandit.n_arms:  # a retired arm may have been better than the rest
        assert stats["regret"] is None or -1e-6 <= stats["regret"] < math.inf
    if isinstance(selector.bandit, bandit.Hedge):
        for context in selector.bandit.contexts:
            chances = selector.bandit.probabilities(context)
            assert abs(sum(chances) - 1) < 1e-9 or not selector.bandit.active_arms
    if last:
        assert sum(stats["in_flight"]) == 0


@trials
@given(st.data(), st.sampled_from(bandit.names()), st.sampled_from(FORMS))
def test_any_course_of_events(data, name, form):
    """Groups take turns; requests end, arrive, are verified without a plan, lose their room; drafters fail."""
    draw = data.draw(st.randoms(use_true_random=False))
    config = PSDConfig(selector=name, **form)
    selector = BanditSelector(name, config, 3, 7, sampled=draw.random() < 0.5)
    alive = [0, 1, 2]
    arrived, groups, under_way = 4, [[], []], []
    groups[0] += [Request(index, index, 0, 5, 99, group=0) for index in range(2)]
    groups[1] += [Request(index, index, 0, 5, 99, group=1) for index in range(2, 4)]
    for step in range(draw.randrange(5, 60)):
        group = groups[step % 2]
        if draw.random() < 0.1 and len(alive) > 1:
            alive.remove(draw.choice(alive))
        if group and draw.random() < 0.9:
            arms = [Arm(key, str(key), key != 2, reviews=key != 1) for key in alive]
            plan = selector.plan(group, arms, 8)
            for key, budgets in plan:
                assert key in alive and len(budgets) == len(group) and all(0 <= budget <= 8 for budget in budgets)
            for key, rows in (selector.due or {}).items():
                assert key in alive and len(rows) == len(group)
        if group:
            selector.launched(group)
            under_way.append(list(group))
        if len(under_way) > draw.randrange(1, 3):
            results = []
            for request in under_way.pop(0):
                if request.phase is Phase.DONE:
                    continue
                drafted = draw.randrange(9)
                accepted = draw.randint(0, drafted)
                reviews = {key: (draw.random() * 5, 5) for key in (0, 2) if draw.random() < 0.6}
                seconds = draw.choice([None, 0.0, 1e-9, 0.01, 1e6])
                results.append(Feedback(request, 0, drafted, accepted, accepted + 1, seconds, reviews))
                request.length += accepted + 1
            if results:
                selector.feedback(results)
        for request in list(group):
            if request.room <= 0 or draw.random() < 0.05:
                request.phase = Phase.DONE
                group.remove(request)
        if draw.random() < 0.1:
            group.append(Request(arrived, arrived % 4, 0, 5, draw.randrange(6, 99), group=step % 2))
            arrived += 1
        check(selector)
    selector.end()
    check(selector, last=True)
    assert selector.bandit.active_arms == list(range(len(selector.arms))), "failed drafters may serve the next call"


@trials
@given(
    st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=40),
    st.sampled_from(bandit.names()),
)
def test_full_information_keeps_its_means(rounds, name):
    """Told of all arms each round, every selector's means are those of the rounds."""
    selector = bandit.make(name, 3, 0)
    for rewards in rounds:
        selector.update_all(rewards, weight=5.0, arm=selector.select())
    for arm, mean in enumerate(selector.stats()["means"]):
        assert abs(mean - sum(rewards[arm] for rewards in rounds) / len(rounds)) < 1e-9
