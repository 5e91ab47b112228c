"""Where texts end: end tokens, lengths, stop strings, criteria, exactly as in plain `generate` on the same batch."""

from __future__ import annotations

import functools
import string
import warnings

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, StoppingCriteria
from zoo import GREEDY, P4, Fixed, assert_plain, left_padded, shared, tiny

import hf_psd

MODES = ("ar", "sd", "psd")
THREE = [28, 34, 14]


def near():
    return shared("llama", noise=0.03)


@functools.cache
def ended_by(token: int | None) -> torch.Tensor:
    return shared("llama").generate(**P4(), **GREEDY | dict(eos_token_id=token, max_new_tokens=30))


@pytest.mark.parametrize("mode, gamma", [("ar", 4), ("sd", 1), ("sd", 4), ("psd", 7)])
def test_every_end_token(mode, gamma):
    """The copy as drafter accepts the end token in the middle of a block."""
    target = shared("llama")
    for token in sorted(set(ended_by(None)[:, 7:].flatten().tolist())):
        arguments = GREEDY | dict(eos_token_id=token, max_new_tokens=30)
        psd = dict(mode=mode, gamma=gamma, selector=Fixed())
        output = target.generate(**P4(), **arguments, assistant_models=[target], psd=psd)
        assert output.tolist() == ended_by(token).tolist()
        ends = (output[:, 7:] == token).long()
        assert (output[:, 7:][ends.cumsum(1) > ends] == 0).all()


FORMS = {
    "list": lambda config: dict(eos_token_id=THREE),
    "tensor": lambda config: dict(eos_token_id=torch.tensor(THREE)),
    "config": lambda config: dict(
        generation_config=GenerationConfig(eos_token_id=THREE, pad_token_id=0, max_new_tokens=40)
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_end_tokens(form, mode):
    target = tiny("llama")
    arguments = FORMS[form](target.generation_config)
    if form != "config":
        arguments = GREEDY | dict(max_new_tokens=40) | arguments
    output = assert_plain(target, [target, near()], dict(mode=mode), **P4(), **arguments)
    assert output.shape == (4, 17) and (output[:, 7:] != 0).sum(1).tolist() == [4, 10, 5, 7]
    assert hf_psd.last_stats().emitted == 26


def test_end_tokens_in_the_models_own_config():
    target = tiny("llama")
    target.generation_config.eos_token_id = THREE
    assert assert_plain(target, [near()], **P4(), max_new_tokens=40, do_sample=False).shape == (4, 17)


LENGTHS = {
    **{f"new{count}": dict(max_new_tokens=count) for count in (1, 2, 3, 4, 5, 20)},
    "max_length": dict(max_length=12),
    "min_new": dict(max_new_tokens=40, min_new_tokens=12, eos_token_id=THREE),
    "min_length": dict(max_new_tokens=40, min_length=15, eos_token_id=THREE),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gamma", [4, 20])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths(lengths, gamma, mode):
    psd = dict(gamma=gamma, mode=mode, selector=Fixed())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for inputs in (P4(), left_padded([[12]])):
            assert_plain(shared("llama"), [shared("llama")], psd, **inputs, **GREEDY | LENGTHS[lengths])


@pytest.mark.parametrize("lengths", [dict(max_new_tokens=0), dict(max_length=7), dict(max_length=3)], ids=str)
def test_no_room_raises_as_plain_does(lengths):
    with pytest.raises(ValueError) as plain:
        shared("llama").generate(**P4(), **GREEDY, **lengths)
    with pytest.raises(ValueError) as fast:
        shared("llama").generate(**P4(), **GREEDY, **lengths, psd=True)
    assert str(fast.value) == str(plain.value)


@pytest.fixture(scope="module")
def tokenizer():
    """One character per token: ids 3 .. 63 are a-z, A-Z, 0-8."""
    characters = string.ascii_lowercase + string.ascii_uppercase + string.digits[:9]
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {character: i for i, character in enumerate(characters, start=3)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


STOPS = ["zs", "U1", "Xh"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("eos, lengths", [(2, [5, 6, 40, 40]), (None, [40] * 4)])
def test_stop_strings(tokenizer, eos, lengths, mode):
    arguments = GREEDY | dict(eos_token_id=eos, max_new_tokens=40, stop_strings=STOPS, tokenizer=tokenizer)
    output = assert_plain(shared("llama"), [near(), "prompt_lookup"], dict(mode=mode), **P4(), **arguments)
    assert (output[:, 7:] != 0).sum(1).tolist() == lengths
    assert tokenizer.decode(output[0, 7:]).startswith("JUPzs")


@pytest.mark.parametrize("mode", MODES)
def test_hooks_hear_of_no_token_after_a_stop_string(tokenizer, mode):
    class Watch(hf_psd.StepHook):
        def on_commit(self, context):
            for request, emitted in zip(context.requests, context.emitted):
                texts[request.index] += emitted

    texts = [[], [], [], []]
    arguments = GREEDY | dict(eos_token_id=2, max_new_tokens=40, stop_strings=STOPS, tokenizer=tokenizer)
    models, psd = [shared("llama")], dict(mode=mode, gamma=7, selector=Fixed())
    output = shared("llama").generate(**P4(), **arguments, assistant_models=models, psd=psd, psd_hooks=[Watch()])
    assert texts == [row[7 : 7 + length] for row, length in zip(output.tolist(), [5, 6, 40, 40])]


@pytest.mark.parametrize("where", ["call", "model"])
def test_stop_strings_in_a_generation_config(tokenizer, where):
    target = tiny("llama")
    config = GenerationConfig(pad_token_id=0, eos_token_id=2, max_new_tokens=40, stop_strings=STOPS)
    arguments = dict(tokenizer=tokenizer)
    if where == "call":
        arguments["generation_config"] = config
    else:
        target.generation_config = config
    output = assert_plain(target, [near()], **P4(), **arguments)
    assert (output[:, 7:] != 0).sum(1).tolist() == [5, 6, 40, 40]
    assert config.stop_strings == STOPS and (where == "call" or target.generation_config is config)


class ManyLarge(StoppingCriteria):
    """Ends a row after five new ids of at least 32."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, 7:] >= 32).sum(1) >= 5


class Columns(StoppingCriteria):
    """Ends the whole batch at 11 columns, by one bool."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= 11


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("eos, lengths", [(2, [12, 6, 10, 5]), (None, [12] * 4)])
def test_custom_criterion(eos, lengths, mode):
    arguments = GREEDY | dict(eos_token_id=eos, max_new_tokens=40, stopping_criteria=[ManyLarge()])
    output = assert_plain(shared("llama"), [shared("llama")], dict(mode=mode), **P4(), **arguments)
    assert (output[:, 7:] != 0).sum(1).tolist() == lengths
    assert hf_psd.last_stats().emitted == sum(lengths)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("eos", [None, THREE])
def test_criteria_together(tokenizer, eos, mode):
    for criteria in ([Columns()], [ManyLarge(), Columns()], [ManyLarge()]):
        for extra in ({}, dict(stop_strings=STOPS, tokenizer=tokenizer), dict(max_time=1e9)):
            arguments = GREEDY | dict(eos_token_id=eos, max_new_tokens=25, stopping_criteria=criteria) | extra
            assert_plain(shared("llama"), [near()], dict(mode=mode), **P4(), **arguments)
