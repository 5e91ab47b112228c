"""The explanation holds what was measured and chooses by it."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch

import hf_psd
from hf_psd.explain import _figures, _Run
from hf_psd.timeline import Span

from test_pacing import tiny  # isort: skip


def ids_of(rows):
    torch.manual_seed(rows)
    return torch.randint(3, 60, (rows, 6))


def test_every_batch_size_is_measured_and_printed():
    target = tiny(0, 2)
    ids = ids_of(3)
    explanation = hf_psd.explain(
        target, [copy.deepcopy(target)], input_ids=ids, batch_sizes=[1, 4], do_sample=False, pad_token_id=0
    )
    assert [each.rows for each in explanation.figures] == [1, 4]
    for each in explanation.figures:
        assert each.rate > 3 and set(each.predicted) == {"ar", "sd"} and each.overlap is None
        assert each.choice == max(each.predicted, key=lambda mode: each.predicted[mode])
        assert min(each.draft, each.verify, each.plain) > 0
    text = str(explanation)
    assert "target: cpu" in text and explanation.figures[0].reason in text and "cannot overlap" in text


def test_explain_needs_a_text():
    with pytest.raises(ValueError, match="input_ids"):
        hf_psd.explain(tiny(0))


def spans(kind, start, length, period, count):
    return [Span("lane", kind, start + n * period, start + n * period + length) for n in range(count)]


@pytest.mark.parametrize(("draft", "rate", "choice"), [(1.0, 3.0, "sd"), (30.0, 3.0, "ar"), (9.0, 4.0, "psd")])
def test_the_choice_follows_from_the_times(draft, rate, choice):
    """Plain forwards take 10 ms, verifying 10 ms for all and 7 ms for half, drafting `draft` ms for all or half."""
    turn = 10.0 + draft
    runs = {
        "ar": _Run(spans("verify", 0, 10, 10, 20), 1.0),
        "sd": _Run(spans("draft", 0, draft, turn, 20) + spans("verify", draft, 10, turn, 20), rate),
        "psd": _Run(spans("draft", 0, draft, max(9, draft), 20) + spans("verify", 0, 7, max(9, draft), 20), rate),
    }
    figures = _figures(8, runs, 128)
    assert figures.choice == choice, figures
    assert figures.rounds["sd"] == pytest.approx(turn) and figures.draft == pytest.approx(draft)
    assert figures.verify == 10 and figures.plain == 10


def test_the_command_loads_local_folders_and_prints_the_table(tmp_path, capsys):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from hf_psd.cli import main

    words = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", "Write", "a", "poem"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tiny(0).save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(tmp_path)
    folder = str(tmp_path)
    main(["explain", "--target", folder, "--drafter", folder, "--prompt", "Write a poem", "--batch", "1", "2"])
    printed = capsys.readouterr().out
    assert "target on cpu" in printed and "choice" in printed
    assert printed.count(" tokens a round ") == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"batch_sizes": [0]}, "batch_sizes"),
        ({"batch_sizes": [2, 1.5]}, "batch_sizes"),
        ({"batch_sizes": 8}, "batch_sizes"),
        ({"batch_sizes": []}, "batch_sizes"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": "many"}, "max_new_tokens"),
        ({"input_ids": [[4, 5]]}, "input_ids"),
        ({"input_ids": torch.tensor([4, 5])}, "input_ids"),
        ({"input_ids": torch.empty(0, 4, dtype=torch.long)}, "input_ids"),
        ({"attention_mask": torch.ones(1, 6)}, "attention_mask"),
        ({"psd": {"context": ["a", "b"]}}, "context"),
        ({"psd": {"context": 3}}, "context"),
        ({"psd_hooks": [hf_psd.Timeline()]}, "psd_hooks"),
        ({"streamer": object()}, "streamer"),
        ({"past_key_values": object()}, "past_key_values"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
    ],
)
def test_what_cannot_be_explained_is_refused_before_any_forward(arguments, named, monkeypatch):
    target = tiny(0)
    monkeypatch.setattr(target, "forward", lambda *_, **__: pytest.fail("a forward ran"))
    with pytest.raises(ValueError, match=f"psd: .*{named}"):
        hf_psd.explain(target, **{"input_ids": ids_of(3), "pad_token_id": 0} | arguments)


def test_what_is_given_per_row_follows_the_rows():
    target, ids = tiny(0), ids_of(2)
    psd = {"context": ["a", "b"], "request_ids": [7, 8], "selector": "ucb1"}
    explanation = hf_psd.explain(
        target, [tiny(1)], psd=psd, input_ids=ids, attention_mask=None, batch_sizes=[1, 3], pad_token_id=0
    )
    assert [each.rows for each in explanation.figures] == [1, 3]


@pytest.mark.parametrize("option", ["--batch", "--gamma", "--max-new-tokens"])
def test_the_command_refuses_numbers_below_one(option, capsys):
    from hf_psd.cli import main

    with pytest.raises(SystemExit):
        main(["explain", "--target", "nowhere", option, "0"])
    assert option in capsys.readouterr().err


def test_padding_is_told_from_text_as_in_generate():
    target = tiny(0)
    ids = ids_of(2)
    ids[0, :3] = 0
    seen = []
    target.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    hf_psd.explain(target, [tiny(1)], input_ids=ids, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert seen[0].max(1).values.tolist() == [1, 4]  # the prompts' last token is fed with the first verification


def test_times_that_cannot_be_are_said_to_be_noise(monkeypatch):
    module = importlib.import_module("hf_psd.explain")
    slow = {"ar": spans("verify", 0, 90, 90, 9), "sd": spans("draft", 0, 1, 20, 9) + spans("verify", 1, 10, 20, 9)}
    monkeypatch.setattr(module, "_run", lambda model, drafters, config, batch: _Run(slow[config.mode], 1.5))
    target = tiny(0)
    target.generate(ids_of(1), psd=True, max_new_tokens=2, pad_token_id=0)
    assert "noise" in str(hf_psd.explain(target, [tiny(1)], input_ids=ids_of(2), pad_token_id=0))


@pytest.mark.parametrize("options", [["--target", "/nowhere"], ["--target", "/nowhere", "--gamma", "0"]])
def test_the_command_ends_with_one_line_where_it_cannot_go_on(options, capsys):
    from hf_psd.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["explain", *options])
    assert ended.value.code == 2 and "error: " in capsys.readouterr().err
