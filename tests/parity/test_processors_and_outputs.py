"""Logits processors at every verified position of a batch, and what `return_dict_in_generate` returns."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessor
from zoo import GREEDY, P4, Fixed, assert_plain, shared

import hf_psd

MODES = ("ar", "sd", "psd")
PROCESSORS = {
    "repetition": dict(repetition_penalty=1.3),
    "ngram": dict(no_repeat_ngram_size=2),
    "bad words": dict(bad_words_ids=[[59], [20, 52]]),
    "suppress": dict(suppress_tokens=[38]),
    "begin": dict(begin_suppress_tokens=[28]),
    "bias": dict(sequence_bias=[[[49], -5.0], [[21, 3], 8.0]]),
    "decay": dict(exponential_decay_length_penalty=(5, 1.5), eos_token_id=2),
    "encoder": dict(encoder_repetition_penalty=1.5),
    "pad is eos, repetition": dict(repetition_penalty=1.3, pad_token_id=28, eos_token_id=28),
    "pad is eos, ngram": dict(no_repeat_ngram_size=2, pad_token_id=28, eos_token_id=28),
    "several": dict(repetition_penalty=1.2, no_repeat_ngram_size=3, min_new_tokens=9, eos_token_id=[28, 34, 14]),
}


def near():
    return shared("llama", noise=0.03)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors(name, mode):
    psd = dict(mode=mode, selector=Fixed())
    arguments = GREEDY | dict(max_new_tokens=30) | PROCESSORS[name]
    assert_plain(shared("llama"), [near()], psd, **P4(), **arguments)


class Recording(LogitsProcessor):
    """Keeps every prefix it is shown, and bans the token before the last."""

    def __init__(self):
        self.seen: list[list[int]] = []

    def __call__(self, input_ids, scores):
        self.seen += input_ids.tolist()
        return scores.scatter(1, input_ids[:, -2:-1], -100.0) if input_ids.shape[1] > 1 else scores


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("eos", [None, [28, 34, 14]])
def test_custom_processor_sees_true_prefixes_only(eos, mode):
    recording = Recording()
    arguments = GREEDY | dict(max_new_tokens=20, eos_token_id=eos, logits_processor=[recording])
    output = assert_plain(shared("llama"), [near(), "prompt_lookup"], dict(mode=mode), **P4(), **arguments)
    recording.seen.clear()
    shared("llama").generate(**P4(), **arguments, assistant_models=[near()], psd=dict(mode=mode))
    lengths = (
        [20] * 4 if eos is None else [next(i for i, t in enumerate(row[7:], 1) if t in eos) for row in output.tolist()]
    )
    texts = [row[: 7 + length] for row, length in zip(output.tolist(), lengths)]
    assert len(recording.seen) >= sum(lengths)
    for seen in recording.seen:
        assert any(seen == text[: len(seen)] and len(seen) >= 7 for text in texts)


@pytest.mark.parametrize("settings", [dict(guidance_scale=1.5)], ids=str)
def test_stateful_processors_are_refused(settings):
    with pytest.raises(ValueError, match="guidance_scale"):
        shared("llama").generate(torch.tensor([[5, 9, 17, 33, 21]]), **GREEDY, **settings, max_new_tokens=5, psd=True)


RETURNED = dict(return_dict_in_generate=True, output_scores=True, output_logits=True, max_new_tokens=20)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("extra", [{}, dict(repetition_penalty=1.3)], ids=["raw", "processed"])
def test_scores_and_logits(extra, mode):
    target, arguments = shared("llama"), GREEDY | RETURNED | extra
    plain = target.generate(**P4(), **arguments)
    fast = target.generate(**P4(), **arguments, assistant_models=[near()], psd=dict(mode=mode))
    assert type(fast) is type(plain) and set(fast.keys()) == set(plain.keys())
    assert fast.sequences.tolist() == plain.sequences.tolist()
    for name in ("scores", "logits"):
        ours, theirs = getattr(fast, name), getattr(plain, name)
        assert len(ours) == len(theirs) == 20
        for a, b in zip(ours, theirs):
            assert a.shape == (4, 64) and a.dtype == torch.float32
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    ours, theirs = (
        target.compute_transition_scores(each.sequences, each.scores, normalize_logits=True) for each in (fast, plain)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert fast.psd is hf_psd.last_stats() and fast.psd.emitted == 80


def test_scores_of_ended_rows_are_zero():
    arguments = GREEDY | RETURNED | dict(eos_token_id=[28, 34, 14])
    target = shared("llama")
    plain = target.generate(**P4(), **arguments)
    fast = target.generate(**P4(), **arguments, assistant_models=[near()], psd=True)
    assert fast.sequences.tolist() == plain.sequences.tolist() and len(fast.scores) == 10
    for row, length in enumerate([4, 10, 5, 7]):
        for column in range(10):
            expected = plain.scores[column][row] if column < length else torch.zeros(64)
            torch.testing.assert_close(fast.scores[column][row], expected, rtol=1e-4, atol=1e-4)


def test_no_sampled_token_has_log_probability_zero():
    target, arguments = (
        shared("llama"),
        dict(do_sample=True, temperature=3.0, top_k=0, pad_token_id=0, eos_token_id=None),
    )
    fast = target.generate(**P4(), **arguments, **RETURNED, assistant_models=[near()], psd=dict(seed=3))
    scores = target.compute_transition_scores(fast.sequences, fast.scores, normalize_logits=True)
    assert scores.shape == (4, 20) and scores.isfinite().all() and (scores < 0).all()


@pytest.mark.parametrize("asked", [(), ("output_scores",), ("output_logits",)], ids=str)
def test_only_what_was_asked_for_is_returned(asked):
    arguments = GREEDY | dict(return_dict_in_generate=True, max_new_tokens=5) | dict.fromkeys(asked, True)
    fast = shared("llama").generate(**P4(), **arguments, psd=True)
    kept = {"sequences"} | {name.removeprefix("output_") for name in asked}
    assert set(fast.keys()) - {"cache", "past_key_values"} == kept


@pytest.mark.parametrize("what", ["output_hidden_states", "output_attentions"])
def test_hidden_states_and_attentions_are_refused(what):
    with pytest.raises(ValueError, match=what):
        shared("llama").generate(
            **P4(), **GREEDY, max_new_tokens=5, return_dict_in_generate=True, psd=True, **{what: True}
        )
