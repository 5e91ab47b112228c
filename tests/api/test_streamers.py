"""Streamers get what plain `generate` gives them, and their end exactly once, whatever happens."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria, TextIteratorStreamer, TextStreamer
from zoo import GREEDY, P4, Recorder, noisy, shared, tiny

import hf_psd

ONE = dict(input_ids=torch.tensor([[5, 9, 17, 33, 21, 40, 41]]))
THREE = [28, 34, 14]


class Log:
    """Keeps the values of `put` and how often `end` was called; optionally fails at a given put."""

    def __init__(self, fail_at: int | None = None):
        self.values, self.ends, self.fail_at = [], 0, fail_at

    def put(self, value):
        if self.fail_at == len(self.values):
            raise OSError("broken pipe")
        assert isinstance(value, torch.Tensor) and value.device.type == "cpu" and not self.ends
        self.values.append(value.clone())

    def end(self):
        self.ends += 1


@pytest.mark.parametrize("mode", ["ar", "sd", "psd"])
@pytest.mark.parametrize("eos", [None, THREE])
@pytest.mark.parametrize("inputs", [ONE, P4()], ids=["one", "batch"])
def test_same_puts_as_plain(inputs, eos, mode):
    arguments = GREEDY | dict(eos_token_id=eos, max_new_tokens=20)
    plain, fast = Log(), Log()
    shared("llama").generate(**inputs, **arguments, streamer=plain)
    models = [shared("llama", noise=0.03)]
    output = shared("llama").generate(
        **inputs, **arguments, assistant_models=models, psd=dict(mode=mode), streamer=fast
    )
    assert [value.tolist() for value in fast.values] == [value.tolist() for value in plain.values]
    assert fast.values[0].shape == inputs["input_ids"].shape and {value.dim() for value in fast.values[1:]} == {1}
    assert torch.cat([fast.values[0], torch.stack(fast.values[1:], 1)], 1).tolist() == output.tolist()
    assert fast.ends == plain.ends == 1


class Large(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, 7:] >= 32).sum(1) >= 5


@pytest.mark.parametrize("mode", ["sd", "psd"])
def test_rows_cut_by_a_criterion(mode):
    arguments = P4() | GREEDY | dict(eos_token_id=2, max_new_tokens=40, stopping_criteria=[Large()])
    plain, fast = Log(), Log()
    shared("llama").generate(**arguments, streamer=plain)
    shared("llama").generate(**arguments, assistant_models=[shared("llama")], psd=dict(mode=mode), streamer=fast)
    assert [value.tolist() for value in fast.values] == [value.tolist() for value in plain.values]


class Decoder:
    """A tokenizer as streamers need it."""

    def decode(self, ids, **kwargs):
        return "".join(f"{int(i)} " for i in ids)


def test_transformers_own_streamers(capsys):
    arguments = ONE | GREEDY | dict(max_new_tokens=12, assistant_models=[shared("llama")], psd=True)
    expected = shared("llama").generate(**arguments)[0, 7:].tolist()
    shared("llama").generate(**arguments, streamer=TextStreamer(Decoder(), skip_prompt=True))
    assert [int(word) for word in capsys.readouterr().out.split()] == expected
    streamer = TextIteratorStreamer(Decoder(), skip_prompt=True, timeout=5)
    shared("llama").generate(**arguments, streamer=streamer)
    assert [int(word) for word in "".join(streamer).split()] == expected


def test_text_streamer_refuses_a_batch_as_in_plain():
    for psd in (dict(psd=True), {}):
        with Recorder(shared("llama")) as forwards, pytest.raises(ValueError, match="only supports batch size 1"):
            shared("llama").generate(**P4(), **GREEDY, max_new_tokens=4, streamer=TextStreamer(Decoder()), **psd)
        assert forwards.forwards == 0


class Bad(LogitsProcessor):
    def __call__(self, input_ids, scores):
        raise KeyError("bad processor")


class BadCriterion(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        raise KeyError("bad criterion")


class BadHook(hf_psd.StepHook):
    def on_commit(self, context):
        raise KeyError("bad hook")


def broken():
    target = tiny("llama")
    with torch.no_grad():
        target.lm_head.weight[3] = float("nan")
    return target


FAULTS = {
    "processor": (KeyError, dict(logits_processor=[Bad()])),
    "criterion": (KeyError, dict(stopping_criteria=[BadCriterion()])),
    "hook": (KeyError, dict(psd_hooks=[BadHook()])),
    "refused after the prompt was put": (ValueError, dict(penalty_alpha=0.6, top_k=4)),
    "target": (RuntimeError, {}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_end_comes_once_after_an_error(fault):
    error, extra = FAULTS[fault]
    target, log = broken() if fault == "target" else noisy(shared("llama"), 0.0), Log()
    with pytest.raises(error):
        target.generate(**ONE, **GREEDY, max_new_tokens=8, psd=True, streamer=log, **extra)
    assert log.ends == 1 and log.values[0].tolist() == ONE["input_ids"].tolist()


@pytest.mark.parametrize("fail_at, ends", [(0, 0), (1, 1), (3, 1)])
def test_streamer_that_fails(fail_at, ends):
    """One that refuses the prompt has not begun and is not ended, as in plain."""
    log = Log(fail_at)
    with pytest.raises(OSError, match="broken pipe"):
        shared("llama").generate(**ONE, **GREEDY, max_new_tokens=8, psd=True, streamer=log)
    assert log.ends == ends and len(log.values) == fail_at


def test_refused_before_the_prompt_was_put():
    log = Log()
    with pytest.raises(ValueError, match="inputs_embeds"):
        shared("llama").generate(inputs_embeds=torch.zeros(1, 2, 32), psd=True, streamer=log)
    assert not log.values and not log.ends
