"""Three drafters, each good at a third of the prompts: full information finds each prompt's own."""

from __future__ import annotations

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_hedge_per_request_nears_the_best_drafter_of_each_prompt(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import mixed_drafters

    experiment = mixed_drafters.Experiment(rows=12, idle_layers=0)
    wanted = {name: way for name, way in mixed_drafters.BANDITS.items() if name.startswith("hedge")}
    monkeypatch.setattr(mixed_drafters, "BANDITS", wanted)
    table = experiment.run(True, range(1), print)
    for way in ("hedge, per request", "hedge, per tag"):
        assert table[way]["of_best_per_prompt"] > 0.9 and table[way]["of_best_single"] > 1.3
    assert table["hedge, per group"]["of_best_single"] > 0.95
    fixed = [row["of_best_per_prompt"] for name, row in table.items() if name.endswith("alone")]
    assert max(fixed) < 0.75, "no drafter suits all prompts"
