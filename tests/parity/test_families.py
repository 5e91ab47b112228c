"""Greedy parity over every causal LM in transformers' own mapping; the grid of the other tests has the usual ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import TYPES, Finding, examine, render

DOCUMENT = Path(__file__).parents[2] / "docs" / "families.md"


@pytest.mark.slow
def test_no_family_is_decoded_differently(request):
    findings = [examine(family) for family in TYPES]
    if request.config.getoption("--write-families"):
        DOCUMENT.write_text(render(findings), encoding="utf-8")
    wrong = [finding for finding in findings if finding.verdict == "differs"]
    assert not wrong, wrong
    assert sum(finding.verdict == "same" for finding in findings) >= 60
    assert len(TYPES) > 100


@pytest.mark.parametrize("family, verdict", [("llama", "same"), ("mamba", "refused"), ("bart", "refused")])
def test_an_examination_tells(family, verdict):
    assert examine(family).verdict in (verdict, "not tried")


def test_the_document_lists_what_differs():
    findings = [Finding("a", "same"), Finding("b", "refused", "its reason."), Finding("c", "differs", "text")]
    text = render([*findings, Finding("d", "not tried", "no")])
    for line in (
        "1 the same, 1 refused with a reason, 1 different, 1 not tried",
        "| `b` | its reason. |",
        "| `c` | text |",
    ):
        assert line in text
