"""The simulation: environments, pairing, summaries, command line, picture."""

from __future__ import annotations

import json

import pytest

import hf_psd.bandit as bandit
from hf_psd.bandit import simulate
from hf_psd.bandit.environments import PUBLISHED, ROTATING, ROTATING_BACK, Speculation


class Always:
    def __init__(self, arm):
        self.arm, self.told = arm, []

    def select(self):
        return self.arm

    def update(self, arm, reward):
        self.told.append((arm, reward))


def test_environments_are_as_described():
    assert PUBLISHED.rounds == 10_000 and PUBLISHED.means(9_999) == (0.3, 0.7, 0.5)
    assert [ROTATING.means(step).index(0.7) for step in (0, 999, 1000, 2000, 3000, 9999)] == [1, 1, 2, 0, 1, 1]
    assert [ROTATING_BACK.means(step).index(0.7) for step in (0, 1000, 2000, 3000)] == [1, 0, 2, 1]
    table = PUBLISHED.rewards(0)
    assert len(table) == 10_000 and {value for row in table for value in row} == {0.0, 1.0}
    for arm, mean in enumerate((0.3, 0.7, 0.5)):
        assert sum(row[arm] for row in table) / 10_000 == pytest.approx(mean, abs=0.025)
    assert table == PUBLISHED.rewards(0) != PUBLISHED.rewards(1)


def test_pseudo_regret_and_shares():
    run = simulate.play(Always(1), simulate.EXPERIMENTS["published"], PUBLISHED.rewards(0))
    assert run.regret == 0.0 and run.shares == [] and len(run.curve) == 100
    run = simulate.play(Always(0), simulate.EXPERIMENTS["published"], PUBLISHED.rewards(0))
    assert run.regret == pytest.approx(4000.0) and run.curve[49] == pytest.approx(2000.0)
    run = simulate.play(Always(1), simulate.EXPERIMENTS["rotating"], ROTATING.rewards(0))
    assert run.regret == pytest.approx(3 * 400 + 3 * 200)
    assert run.shares == [pytest.approx(3 / 9)] * 20


def test_delayed_rewards_are_those_of_the_pull():
    rewards = PUBLISHED.rewards(3)
    selector = Always(2)
    simulate.play(selector, simulate.Experiment("late", PUBLISHED, delay=3), rewards)
    assert selector.told == [(2, row[2]) for row in rewards[:-3]]


def test_delay_costs_little():
    rewards = PUBLISHED.rewards(11)
    for name in ("ucb1", "thompson", "imed"):
        assert simulate.play(bandit.make(name, 3, 11), simulate.EXPERIMENTS["delayed"], rewards).regret < 250


def test_recovery_and_summary():
    assert simulate.recovery([0.5, 0.89, 0.9, 0.8]) == 150
    assert simulate.recovery([0.5]) is None
    summary = simulate.summarise([1.0, 2.0, 3.0, 6.0])
    assert summary["mean"] == 3.0 and summary["max"] == 6.0 and summary["median"] == 2.5
    assert summary["ci95"] == pytest.approx(1.96 * summary["sd"] / 2)


def test_speculation_environment_agrees_with_its_expectation():
    environment = Speculation(tuple(bandit.enumerate_arms(2, (0, 2, 4))), rounds=4000)
    table = environment.outcomes(0)
    for place, goodput in enumerate(environment.goodputs()):
        column = [row[place] for row in table]
        measured = sum(o.tokens for o in column) / sum(o.seconds for o in column)
        assert measured == pytest.approx(goodput, rel=0.03)


def test_goodput_prefers_the_faster_arm_where_acceptance_prefers_the_slower():
    environment = Speculation(tuple(bandit.enumerate_arms(2, (4,))), (0.6, 0.75), (0.0005, 0.004), rounds=1500)
    assert environment.goodputs()[0] > 1.5 * environment.goodputs()[1]
    share = {}
    for reward in ("acceptance", "goodput"):
        selector, arms = bandit.make("sharp_thompson", 2, seed=0, reward=reward), []
        for row in environment.outcomes(5):
            arm = selector.select()
            arms.append(arm)
            outcome = row[arm]
            if reward == "goodput":
                selector.update(arm, *bandit.goodput(outcome.tokens, outcome.seconds))
            else:
                selector.update(arm, *bandit.acceptance(outcome.accepted, 4))
        share[reward] = arms[-500:].count(0) / 500
    assert share["goodput"] > 0.9 and share["acceptance"] < 0.1


def test_specs_carry_options():
    selector = simulate.build("d_ucb:discount=0.9,c=0.5", 3, 0)
    assert selector.discount == 0.9 and selector.c == 0.5
    with pytest.raises(ValueError, match="no option horizon"):
        simulate.build("ucb1:horizon=3", 3, 0)


def test_command_line_writes_json_and_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["--seeds", "2", "--first-seed", "7", "--experiments", "published", "speculation"]
    arguments += ["--selectors", "naive_ucb1", "ucb1", "hedge", "--json", str(out), "--plot", str(picture)]
    simulate.main(arguments)
    content = json.loads(out.read_text())
    assert content["seeds"] == [7, 8]
    assert set(content["experiments"]["published"]) == {"naive_ucb1", "ucb1", "hedge"}
    assert set(content["experiments"]["speculation"]) == {"ucb1"}
    assert len(content["experiments"]["published"]["ucb1"]["regrets"]) == 2
    ucb1, naive = (content["experiments"]["published"][spec]["regrets"] for spec in ("ucb1", "naive_ucb1"))
    difference = (ucb1[0] - naive[0] + ucb1[1] - naive[1]) / 2
    assert content["experiments"]["published"]["ucb1"]["minus_reference"]["mean"] == pytest.approx(
        difference, abs=1e-3
    )
    assert "minus_reference" not in content["experiments"]["published"]["hedge"]
    assert "curve_sd" not in content["experiments"]["published"]["ucb1"]
    assert content["step_microseconds"]["ucb1"]["3"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "published, seeds 7..8" in capsys.readouterr().out


def test_picture_needs_an_experiment_to_show(tmp_path):
    pytest.importorskip("matplotlib")
    from hf_psd.bandit.plots import plot_regret

    with pytest.raises(ValueError, match="nothing to plot in speculation"):
        plot_regret({"speculation": {}}, tmp_path / "out.png")
