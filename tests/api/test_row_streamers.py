"""A row streamer gets each row's tokens in order, as soon as nothing can take them back."""

from __future__ import annotations

import pytest
import torch
from tokenizers_of_tests import characters
from transformers import StoppingCriteria
from zoo import GREEDY, P4, Fixed, shared

import hf_psd

MODES = ("ar", "sd", "psd")


class Rows(hf_psd.RowStreamer):
    """Checks the order of calls and keeps the tokens."""

    def __init__(self, fail: bool = False):
        self.prompts, self.texts, self.sizes, self.ended, self.ends, self.fail = None, [], [], [], 0, fail

    def on_prompts(self, prompts):
        assert self.prompts is None and not self.ends
        self.prompts, self.texts = prompts, [[] for _ in prompts]

    def put_row(self, row, ids):
        assert ids and row not in self.ended and not self.ends and all(type(id) is int for id in ids)
        self.texts[row] += ids
        self.sizes.append(len(ids))
        if self.fail:
            raise OSError("broken pipe")

    def end_row(self, row):
        assert row not in self.ended and not self.ends
        self.ended.append(row)

    def end(self):
        self.ends += 1


class ManyLarge(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, 7:] >= 32).sum(1) >= 5


WAYS = {
    "open": {},
    "end tokens": dict(eos_token_id=[28, 34, 14]),
    "criterion": dict(eos_token_id=2, stopping_criteria=[ManyLarge()]),
    "criterion, no end token": dict(stopping_criteria=[ManyLarge()]),
    "stop strings": dict(eos_token_id=2, stop_strings=["zs", "U1", "Xh"], tokenizer=characters(64)),
    "both": dict(eos_token_id=[28, 34, 14], stopping_criteria=[ManyLarge()]),
}


def ends(output, eos):
    """Each row's text up to its end: pads (0) follow it."""
    return [[id for id in row if id != 0] for row in output[:, 7:].tolist()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS)
def test_rows_get_their_texts(way, mode):
    arguments = P4() | GREEDY | dict(max_new_tokens=30) | WAYS[way]
    streamer = Rows()
    output = shared("llama").generate(
        **arguments,
        assistant_models=[shared("llama")],
        psd=dict(mode=mode, gamma=5, selector=Fixed()),
        streamer=streamer,
    )
    assert output.tolist() == shared("llama").generate(**arguments).tolist()
    assert (
        streamer.texts == ends(output, arguments["eos_token_id"])
        and streamer.prompts.tolist() == P4()["input_ids"].tolist()
    )
    assert sorted(streamer.ended) == [0, 1, 2, 3] and streamer.ends == 1
    assert (max(streamer.sizes) > 1) == (mode != "ar")


def test_a_fast_row_does_not_wait():
    """Row 0's drafts are accepted and row 1's are not; columns would hold row 0 back."""
    seen = []

    class Watch(Rows):
        def put_row(self, row, ids):
            super().put_row(row, ids)
            seen.append([len(text) for text in self.texts])

    inputs = {name: tensor[:2] for name, tensor in P4().items()}
    psd = dict(selector=OneRow(), mode="sd")
    shared("llama").generate(
        **inputs, **GREEDY, max_new_tokens=20, assistant_models=[shared("llama")], psd=psd, streamer=Watch()
    )
    assert max(first - second for first, second in seen) > 8


class OneRow(Fixed):
    def plan(self, requests, arms, gamma):
        return [(0, [gamma if request.index == 0 else 0 for request in requests])]


@pytest.mark.parametrize("mode", MODES)
def test_text_of_each_row(mode):
    class Texts(hf_psd.RowTextStreamer):
        def on_text(self, row, text, ended):
            pieces.append((row, text, ended))

    pieces, tokenizer = [], characters(64)
    arguments = P4() | GREEDY | dict(eos_token_id=[28, 34, 14], max_new_tokens=30)
    output = shared("llama").generate(
        **arguments, assistant_models=[shared("llama", noise=0.03)], psd=dict(mode=mode),
        streamer=Texts(tokenizer, skip_special_tokens=True),
    )  # fmt: skip
    for row, ids in enumerate(ends(output, None)):
        assert "".join(text for r, text, _ in pieces if r == row) == tokenizer.decode(ids, skip_special_tokens=True)
        assert [ended for r, _, ended in pieces if r == row].count(True) == 1
        assert [ended for r, _, ended in pieces if r == row][-1]


def test_under_plain_decoding():
    streamer = Rows()
    output = shared("llama").generate(**P4(), **GREEDY, max_new_tokens=6, streamer=streamer)
    assert streamer.texts == output[:, 7:].tolist() and streamer.ends == 1


def test_end_comes_once_after_an_error():
    streamer = Rows(fail=True)
    with pytest.raises(OSError, match="broken pipe"):
        shared("llama").generate(**P4(), **GREEDY, max_new_tokens=6, psd=True, streamer=streamer)
    assert streamer.ends == 1 and len(streamer.sizes) == 1


def test_prints_by_default(capsys):
    one = dict(input_ids=torch.tensor([[5, 9, 17]]))
    output = shared("llama").generate(
        **one, **GREEDY, max_new_tokens=6, psd=True, streamer=hf_psd.RowTextStreamer(characters(64))
    )
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("[0] ") for line in lines)
    assert "".join(line[4:] for line in lines) == characters(64).decode(output[0, 3:])
