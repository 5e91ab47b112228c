"""The notebook's cells, in order, on tiny saved models: without a GPU in float32, and on one in half precision."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from tokenizers_of_tests import characters
from zoo import VOCAB, noisy, tiny

NOTEBOOK = json.loads((Path(__file__).parents[2] / "examples" / "quickstart.ipynb").read_text(encoding="utf-8"))
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    """A target with its tokenizer, and a drafter that agrees with it now and then."""
    target = tiny("llama", hidden_size=64, intermediate_size=128)
    tokenizer = copy.copy(characters(VOCAB))
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    places = [str(tmp_path_factory.mktemp(name)) for name in ("target", "drafter")]
    for model, place in zip((target, noisy(target, 0.03)), places):
        model.save_pretrained(place)
        tokenizer.save_pretrained(place)
    return places


def run(folders: list[str]) -> dict:
    """The namespace after all cells; the one with the models' names is followed by names of local folders."""
    for package in ("bitsandbytes", "triton"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the notebook installs {package}")
    namespace: dict = {"__name__": "__main__"}
    for number, cell in enumerate(CELLS):
        if not cell.startswith("!pip"):
            exec(compile(cell, f"cell {number}", "exec"), namespace)
        if cell.startswith("MODELS ="):
            assert len(namespace["MODELS"]) == 2
            namespace["MODELS"] = folders
    assert namespace["MODELS"] == folders
    return namespace


@pytest.fixture(scope="module")
def ran(folders) -> dict:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        return run(folders)


@pytest.mark.gpu
@pytest.mark.parametrize("capability, dtype", [((7, 5), torch.float16), ((8, 0), torch.bfloat16)], ids=["T4", "A100"])
def test_every_cell_runs_on_a_gpu(folders, capability, dtype, monkeypatch):
    """With the dtype that the cells choose for such a GPU; texts may part there, and the cells say where."""
    real = torch.cuda.get_device_capability

    def told(*device):  # the cells alone: kernels must be compiled for the GPU that is there
        return capability if sys._getframe(1).f_globals.get("__name__") == "__main__" else real(*device)

    monkeypatch.setattr(torch.cuda, "get_device_capability", told)
    names = run(folders)
    assert (names["device"], names["dtype"], names["target"].dtype) == ("cuda", dtype, dtype)
    assert names["stats"].by_drafter[-1].accepted > 0  # random text repeats nothing that prompt lookup could find
    assert [len(result.generated_tokens) > 0 for result in names["results"].values()] == [True] * 8


def test_every_cell_runs_and_texts_are_equal(ran):
    assert ran["dtype"] == torch.float32
    pairs = ("ours", "plain"), ("speculated", "plain"), ("ours_nf4", "plain_nf4"), ("drafted", "undrafted")
    for ours, plain in pairs:
        assert ran[ours].shape[0] == 4 and ran[ours].tolist() == ran[plain].tolist(), ours
    assert all(drafter.accepted > 0 for drafter in ran["stats"].by_drafter)
    assert {span.kind for span in ran["timeline"].spans} == {"prefill", "draft", "verify"}
    assert ran["streamed"].shape[0] == 4
    starts = [result.generated_tokens for result in ran["results"].values()]
    assert len(starts) == 8
    for number, tokens in enumerate(starts):
        assert tokens == ran["plain"][number % 4, : len(tokens)].tolist(), number
        assert len(tokens) == 16 + 8 * number or tokens[-1] == ran["tokenizer"].eos_token_id


def test_comparison_in_half_precision_finds_where_texts_part(ran, capsys):
    """What the T4 prints: no assertion there, but the place and the gap."""
    other = ran["plain"].clone()
    other[2, 5] = (other[2, 5] + 1) % VOCAB
    with pytest.raises(AssertionError):
        ran["compare"](ran["target"], ran["plain"], other)
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ran, "dtype", torch.float16)
        ran["compare"](ran["target"], ran["plain"], other)
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if "same text" in line] == [
        "row 0: same text",
        "row 1: same text",
        "row 3: same text",
    ]
    assert printed[2].startswith("row 2: same for 5 of ")
    prompt = ran["inputs"]["input_ids"][2][ran["inputs"]["attention_mask"][2] == 1]
    text = torch.cat([prompt, ran["plain"][2, :5]])
    logits = ran["target"](text[None]).logits[0, -1]
    gap = logits[ran["plain"][2, 5]] - logits[other[2, 5]]
    assert f"{abs(gap.item()):.4f}" in printed[2]


@pytest.mark.parametrize("capability, dtype", [((7, 5), torch.float16), ((8, 0), torch.bfloat16)], ids=["T4", "A100"])
def test_dtype_follows_the_gpu(capability, dtype, monkeypatch):
    """A T4 only emulates bfloat16, though `is_bf16_supported` says True of it."""
    loading = next(cell for cell in CELLS if "get_device_capability" in cell)
    choice = loading[: loading.index("target, drafter")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    namespace: dict = {}
    exec(choice, namespace)
    assert (namespace["device"], namespace["dtype"]) == ("cuda", dtype)


def test_notebook_is_stored_without_outputs_for_a_t4():
    assert (NOTEBOOK["nbformat"], NOTEBOOK["metadata"]["accelerator"]) == (4, "GPU")
    assert NOTEBOOK["metadata"]["colab"]["gpuType"] == "T4"
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
    for cell in NOTEBOOK["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)
        assert len(cell["source"]) <= 25, "short cells"
