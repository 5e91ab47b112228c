"""What the README and the docs show can be run, says the defaults that are, and links to what exists."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from dataclasses import fields
from pathlib import Path

import pytest
from tokenizers_of_tests import characters
from zoo import VOCAB, noisy, shared, tiny

import hf_psd

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("kernels/*.md")])


def snippet(document: str) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL)
    return code


def test_readme_snippet(tmp_path):
    code = snippet("README.md").replace('"cuda"', '"cpu"')
    models = tiny("llama"), noisy(tiny("llama"), 0.03)
    for name, model in zip(re.findall(r'"([\w.-]+/[\w.-]+)"', code), models, strict=True):
        place = tmp_path / name.split("/")[1]
        model.save_pretrained(place)
        characters(VOCAB).save_pretrained(place)
        code = code.replace(name, str(place))
    names: dict = {}
    exec(code, names)
    assert names["out"].tolist() == names["target"].generate(**names["inputs"], max_new_tokens=128).tolist()


def test_queue_snippet(capsys):
    model, drafter, tokenizer = shared("llama"), shared("llama", noise=0.03), characters(VOCAB)
    names = {"hf_psd": hf_psd, "model": model, "drafter": drafter, "tokenizer": tokenizer, "ids": [5, 9, 17]}
    code = snippet("docs/continuous-batching.md").replace("ids, ...]", "ids]")
    exec(code.replace(r'["\n"]', '["z"]'), names)  # the tokenizer has letters only
    assert [len(result.generated_tokens) > 0 for result in names["results"].values()] == [True, True]
    assert "# TYPE" in capsys.readouterr().out


def test_bandit_snippet():
    names = {"accepted": 2, "drafted": 4}
    exec(snippet("docs/bandits.md"), names)
    assert names["selector"].stats()["pulls"].count(1) == 1


def test_law_snippet(capsys):
    text = (ROOT / "docs" / "theory.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^    from hf_psd.testing import .*?(?=^\S)", text, re.DOTALL | re.MULTILINE)
    assert "10_000" in code
    model, drafter = (shared("llama", seed, vocab_size=8, initializer_range=0.35) for seed in (0, 5))
    exec(textwrap.dedent(code).replace("10_000", "1_000"), {"model": model, "drafter": drafter, "prompt": [3, 4, 5]})
    assert "joint" in capsys.readouterr().out


def test_settings_of_the_readme_have_their_defaults():
    defaults = {field.name: field.default for field in fields(hf_psd.PSDConfig)}
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Settings")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| `?(.*?)`? \|", section, re.MULTILINE)
    assert len(rows) >= 6
    for name, default in rows:
        shown = None if default == "None" else json.loads(default)
        assert shown == defaults[name], name


def test_quickstart_runs():
    script = str(ROOT / "examples" / "quickstart.py")
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels' / 'torch-ext'}", "OMP_NUM_THREADS": "1"}
    printed = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, env=path).stdout
    assert "same tokens as plain generate: True" in printed
    assert "same sampled tokens with and without drafts: True" in printed


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(document):
    text = document.read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert not [link for link in links if link and not (document.parent / link).exists()]
