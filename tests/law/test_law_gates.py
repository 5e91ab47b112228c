"""The published gates as hard tests: family-wise alpha 0.01 by Holm's procedure, fixed seeds."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from hf_psd.testing.gates import GATES, SAMPLES, main, run_family
from hf_psd.testing.statistics import ALPHA, holm


@cache
def results(name):
    return run_family([name])


@pytest.mark.parametrize("name", GATES)
def test_gate(name):
    for kind, result in results(name).items():
        print(f"{kind}: {result}")
        assert result.n >= 10_000 and result.outside == 0
        assert abs(result.z) < 5


def test_no_gate_of_the_family_is_rejected():
    p_values = {kind: result.p_value for name in GATES for kind, result in results(name).items()}
    assert holm(p_values, ALPHA) == []
    assert len(p_values) <= 100


def test_gates_are_published_with_their_seeds():
    text = (Path(__file__).parents[2] / "docs" / "theory.md").read_text()
    published = dict(re.findall(r"^\| `([\w-]+)` \| (\d+) \|", text, re.MULTILINE))
    assert published == {name: str(gate.seed) for name, gate in GATES.items()}
    assert len({gate.seed for gate in GATES.values()}) == len(GATES)
    assert all(gate.samples >= SAMPLES for gate in GATES.values())


def test_the_main_gate_has_its_proven_power():
    assert GATES["main"].setting.law.cells.shape == (210, 3)


def test_command_line(capsys):
    assert main(["plain", "--fresh"]) in (0, 1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("plain/joint") and "alpha 0.01" in lines[-1]
    with pytest.raises(SystemExit):
        main(["nonsense"])
    assert "known are main" in capsys.readouterr().err
