"""The exported folder alone is a generation method of transformers: neither `hf_psd` nor `psd_kernels` is needed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import fields
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM
from zoo import GREEDY, P4, shared, tiny

import hf_psd
from hf_psd import PSDConfig, bandit
from hf_psd.cli import main
from hf_psd.config import field_docs
from hf_psd.export import export_hub


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A repository with the method, and with a tiny model in it."""
    folder = tmp_path_factory.mktemp("repository") / "some-name"
    tiny("llama").save_pretrained(folder)
    main(["export-hub", str(folder)])
    return folder


SCRIPT = """
    import sys
    for name in ("hf_psd", "psd_kernels", "triton", "liger_kernel", "bitsandbytes", "matplotlib", "scipy"):
        sys.modules[name] = None  # importing it fails
    import torch
    from tokenizers_of_tests import characters
    from transformers import AutoModelForCausalLM
    from zoo import GREEDY, P4, Recorder, noisy, tiny

    folder, cwd = sys.argv[1:]
    target, drafter = tiny("llama"), noisy(tiny("llama"), 0.03)
    ask = P4() | GREEDY | dict(max_new_tokens=14)
    method = dict(custom_generate=folder, trust_remote_code=True)

    class Log:
        def __init__(self):
            self.values, self.ends = [], 0
        def put(self, value):
            self.values.append(value.tolist())
        def end(self):
            self.ends += 1

    plain, fast = Log(), Log()
    expected = target.generate(**ask, streamer=plain)
    with Recorder(drafter) as recorder:
        output = target.generate(**ask, **method, assistant_models=[drafter, "prompt_lookup"], streamer=fast)
    assert torch.equal(output, expected) and recorder.forwards > 0
    assert fast.values == plain.values and fast.ends == plain.ends == 1

    ends = expected[0, 12].item()
    target.generation_config.eos_token_id = ends
    assert torch.equal(target.generate(**ask, **method), expected), "an explicit None is passed on"
    del ask["eos_token_id"]
    assert not torch.equal(target.generate(**ask, **method), expected)
    ask["eos_token_id"], target.generation_config.eos_token_id = None, 2

    for settings in (dict(mode="psd", gamma=2), dict(selector="ucb1"), False):
        output = target.generate(**ask, **method, assistant_models=[drafter], psd=settings)
        assert torch.equal(output, expected), settings
    returned = dict(return_dict_in_generate=True, output_scores=True)
    output = target.generate(ask.pop("input_ids"), **ask, **method, **returned, repetition_penalty=1.2)
    theirs = target.generate(**ask | dict(input_ids=P4()["input_ids"]), **returned, repetition_penalty=1.2)
    assert torch.equal(output.sequences, theirs.sequences) and output.psd.emitted == 56
    stops = P4() | GREEDY | dict(max_new_tokens=30, eos_token_id=2, stop_strings=["zs", "U1"], tokenizer=characters(64))
    other = dict(assistant_models=[tiny("llama", 3)], assistant_tokenizers=[characters(64, seed=1)])
    assert torch.equal(target.generate(**stops, **method, **other), target.generate(**stops))
    draw = P4() | dict(do_sample=True, temperature=2.0, pad_token_id=0, max_new_tokens=9)
    torch.manual_seed(1)
    first = target.generate(**draw, **method, assistant_models=[drafter])
    torch.manual_seed(1)
    assert torch.equal(first, target.generate(**draw, **method, assistant_models=[drafter]))
    for wrong, message in ((dict(num_beams=2), "num_beams"), (dict(psd=dict(gama=1)), "gama"), (dict(max_new_token=2), "max_new_token")):
        try:
            target.generate(**P4(), **method, **wrong)
        except ValueError as error:
            assert message in str(error), error
        else:
            raise AssertionError(wrong)

    bound = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert bound.generate.__class__.__name__ == "partial", "transformers has taken the method over"
    ids = P4()["input_ids"][:1]
    plainly = target.generate(ids, **GREEDY, max_new_tokens=12)
    assert torch.equal(bound.generate(ids, **GREEDY, max_new_tokens=12, assistant_models=[drafter]), plainly)
    assert torch.equal(bound.generate(ids, **GREEDY, max_new_tokens=12, revision="main", token=None), plainly)
"""


def run(script: str, folder: Path, tmp_path: Path, *more: str) -> None:
    tests = Path(__file__).parents[1]
    script_file = tmp_path / "script.py"
    script_file.write_text(textwrap.dedent(script))
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(tests), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(script_file), str(folder), *more],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_runs_without_the_package(folder, tmp_path):
    run(SCRIPT, folder, tmp_path, str(tmp_path))


CHECK = """
    import sys
    for name in ("hf_psd", "psd_kernels", "triton", "liger_kernel", "bitsandbytes", "matplotlib", "scipy"):
        sys.modules[name] = None
    from pathlib import Path
    from transformers.dynamic_module_utils import check_imports, get_relative_import_files
    files = sorted(Path(sys.argv[1], "custom_generate").glob("*.py"))
    for file in files:
        check_imports(file)  # what a download checks of each file
    reached = {Path(each).name for each in get_relative_import_files(files[0].parent / "generate.py")}
    assert reached | {"generate.py"} == {file.name for file in files}
"""


def test_transformers_finds_every_file_and_asks_for_no_other_package(folder, tmp_path):
    run(CHECK, folder, tmp_path)


def test_files(folder, tmp_path):
    names = {path.relative_to(folder).as_posix() for path in export_hub(folder)}
    assert {"README.md", "custom_generate/generate.py", "custom_generate/requirements.txt"} <= names
    assert not [name for name in names if name.count("/") > 1], "transformers copies flat siblings only"
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n") and "- custom_generate\n" in card
    assert f"`hf_psd` {hf_psd.__version__}" in card
    for line in (folder / "custom_generate" / "requirements.txt").read_text().split():
        assert line.count(">=") == 1 and not set(line) & set(",;[@")
    (tmp_path / "kept.txt").write_text("mine")
    export_hub(tmp_path)
    assert (tmp_path / "kept.txt").read_text() == "mine"


def test_card_lists_settings_from_their_documentation(tmp_path):
    docs = field_docs()
    assert list(docs) == [field.name for field in fields(PSDConfig)] and all(docs.values())
    source = " ".join(PSDConfig.__doc__.split())
    assert all(text in source for text in docs.values())
    export_hub(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert f"- `gamma` (`4`): {docs['gamma']}\n" in card and f'- `mode` (`"auto"`): {docs["mode"]}\n' in card
    assert f"- `seed` (`None`): {docs['seed']}\n" in card and "$" not in card
    assert all(f"`{name}`" in card for name in bandit.names())


def test_card_of_a_model_keeps_its_text(tmp_path):
    card = tmp_path / "README.md"
    card.write_text("---\nlicense: mit\nbase_model: some/model\ntags:\n- chat\n---\n\n# My model\n\nIts text.\n")
    for _ in range(2):
        export_hub(tmp_path)
        data = ModelCard.load(card).data
        assert (data.license, data.base_model, data.library_name) == ("mit", "some/model", "transformers")
        assert data.tags == ["chat", "custom_generate"]
        assert card.read_text().endswith("\n# My model\n\nIts text.\n")
    card.write_text("# My model\n")
    export_hub(tmp_path)
    assert ModelCard.load(card).data.tags == ["custom_generate"] and card.read_text().endswith("# My model\n")


CARD = """
    import re, sys
    from pathlib import Path
    for name in ("hf_psd", "psd_kernels", "triton"):
        sys.modules[name] = None
    from tokenizers_of_tests import characters
    from zoo import noisy, tiny

    folder, cwd = Path(sys.argv[1]), Path(sys.argv[2])
    (example,) = re.findall(r"```py\\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    models = {"HuggingFaceTB/SmolLM2-1.7B-Instruct": tiny("llama"), "HuggingFaceTB/SmolLM2-135M-Instruct": noisy(tiny("llama"), 0.03)}
    for name, model in models.items():
        place = cwd / name.split("/")[1]
        model.save_pretrained(place)
        characters(64).save_pretrained(place)
        assert name in example
        example = example.replace(name, str(place))
    assert "path/or/name of this repository" in example
    names = {}
    exec(example.replace("path/or/name of this repository", str(folder)), names)
    plain = names["model"].generate(**names["inputs"], max_new_tokens=64)
    assert names["output"].tolist() == plain.tolist()
"""


def test_example_of_the_card_runs(folder, tmp_path):
    run(CARD, folder, tmp_path, str(tmp_path))


def test_beside_the_installed_package(folder):
    """With `hf_psd` imported, the folder's method is still the folder's."""
    arguments = P4() | GREEDY | dict(max_new_tokens=9)
    expected = shared("llama").generate(**arguments)
    before = hf_psd.last_stats()
    method = dict(custom_generate=str(folder), trust_remote_code=True)
    for extra in ({}, dict(psd=dict(mode="ar")), dict(assistant_models=[shared("llama")])):
        assert shared("llama").generate(**arguments, **method, **extra).tolist() == expected.tolist()
    assert hf_psd.last_stats() is before
    with pytest.raises(ValueError, match="custom_generate"):
        shared("llama").generate(**arguments, **method, psd=True)
    with pytest.raises(ValueError, match="trust_remote_code"):
        shared("llama").generate(**arguments, custom_generate=str(folder), assistant_models=[shared("llama")])
    bound = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert bound.generate(**arguments).tolist() == expected.tolist()
