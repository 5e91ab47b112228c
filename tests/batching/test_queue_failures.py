"""What fails ends alone: a request's own code, its scores, a forward, a hook, a drafter; and what is refused."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import zoo
from queue_cases import PROMPTS, drafters, plain, target
from transformers import LogitsProcessor

import hf_psd
from hf_psd.drafters.base import Proposal
from hf_psd.queue.results import RequestCancelled, RequestStatus

SMALL = dict(max_batch_size=4, block_size=4)
ARGUMENTS = dict(max_new_tokens=12, **SMALL, **zoo.GREEDY)


class Broken(RuntimeError):
    pass


def breaks_after(count):
    def broken(ids, scores):
        if ids.shape[1] >= count:
            raise Broken(f"at {ids.shape[1]}")
        return scores

    return broken


class BrokenCriterion:
    def __init__(self, count):
        self.count = count

    def __call__(self, ids, scores, **kwargs):
        breaks_after(self.count)(ids, scores)
        return torch.zeros(ids.shape[0], dtype=torch.bool)


class Spoils(LogitsProcessor):
    """Sets every score to NaN, or lets no token pass, from a length on."""

    def __init__(self, count, value):
        self.count, self.value = count, value

    def __call__(self, ids, scores):
        return torch.full_like(scores, self.value) if ids.shape[1] >= self.count else scores


class BrokenStreamer:
    def __init__(self, event):
        self.event, self.puts = event, 0

    def put(self, value):
        self.puts += 1
        if (self.event == "prompt" and self.puts == 1) or (self.event == "token" and self.puts == 3):
            raise Broken(self.event)

    def end(self):
        if self.event == "end":
            raise Broken(self.event)


def run(odd, place=1, **kwargs):
    """Runs all prompts with odd settings for one of them; the others must be as without it. Returns its result."""
    requests = [odd if number == place else {} for number in range(len(PROMPTS))]
    out = hf_psd.generate_batch(
        target(), PROMPTS, kwargs.pop("models", drafters("both")), requests=requests, psd=dict(mode="psd"),
        **{**ARGUMENTS, **kwargs},
    )  # fmt: skip
    for number, (prompt, result) in enumerate(zip(PROMPTS, out.values())):
        if number != place:
            assert result.error is None and result.generated_tokens == plain(prompt, max_new_tokens=12)
    return out.get(f"req_{place}")


@pytest.mark.parametrize("place", [0, 1, 5])
@pytest.mark.parametrize("kind", ["processor", "criterion"])
def test_a_request_whose_own_code_raises_ends_alone(kind, place):
    count = len(PROMPTS[place]) + 4
    odd = (
        dict(logits_processor=[breaks_after(count)])
        if kind == "processor"
        else dict(stopping_criteria=[BrokenCriterion(count)])
    )
    result = run(odd, place)
    assert isinstance(result.exception, Broken) and result.error == f"Broken: at {count}"
    assert result.status is RequestStatus.FAILED and result.is_finished()
    assert result.generated_tokens == plain(PROMPTS[place], max_new_tokens=12)[: len(result.generated_tokens)]


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_request_without_a_possible_token_ends_alone(value):
    result = run(dict(logits_processor=[Spoils(len(PROMPTS[1]) + 3, value)]))
    assert isinstance(result.exception, RuntimeError) and "NaN, +inf or no possible token" in result.error
    assert result.generated_tokens == plain(PROMPTS[1], max_new_tokens=12)[:3]


@pytest.mark.parametrize("event", ["prompt", "token", "end"])
def test_a_streamer_that_raises(event):
    result = run(dict(streamer=BrokenStreamer(event)))
    assert isinstance(result.exception, Broken) and result.error == f"Broken: {event}"


class BadDrafter(hf_psd.Drafter):
    name = "bad"

    def __init__(self, event):
        self.event = event

        def broken(*args):
            raise Broken(event)

        setattr(self, event, broken)

    def draft(self, task):
        return Proposal(torch.full((len(task.budgets), 4), -1), point_mass=True)


@pytest.mark.parametrize("event", ["start", "prefill", "draft", "commit", "feed"])
def test_a_drafter_that_raises_is_retired_and_all_requests_go_on(event):
    with pytest.warns(UserWarning, match="drafter bad is retired"):
        run({}, place=-1, models=[BadDrafter(event), zoo.shared("llama", noise=0.03)])
    assert any("bad" in error for error in hf_psd.last_stats().errors)


class NaNFor:
    """Spoils what a model computes for rows that hold a token, as a broken weight for that token would."""

    def __init__(self, model, token):
        self.model, self.token = model, token

    def __enter__(self):
        embedding = self.model.get_input_embeddings()

        def spoil(module, args, output):
            return output.masked_fill((args[0] == self.token)[..., None], math.nan)

        self.handle = embedding.register_forward_hook(spoil)

    def __exit__(self, *error):
        self.handle.remove()


def test_nan_in_one_text_reaches_nobody_through_reused_blocks():
    prompts = [[50, 51, 52, 53, 54, 60, 55], PROMPTS[2], PROMPTS[0], PROMPTS[1]] * 3
    near = zoo.shared("llama", 5)
    with NaNFor(target(), 60):
        out = hf_psd.generate_batch(
            target(), prompts, [near], psd=dict(mode="psd"), max_batch_size=2, block_size=8, max_new_tokens=8,
            kv_memory=6 * 8 * 256 * 2, **zoo.GREEDY,
        )  # fmt: skip
    for prompt, result in zip(prompts, out.values()):
        if 60 in prompt:
            assert "NaN" in result.error
        else:
            assert result.error is None and result.generated_tokens == plain(prompt, max_new_tokens=8)


class Fails(hf_psd.StepHook):
    def __init__(self, event):
        def fail(context):
            if any(request.index == 1 and len(request.tokens) > 2 for request in context.requests):
                raise Broken(event)

        setattr(self, event, fail)


@pytest.mark.parametrize("event", ["before_draft", "after_draft", "before_verify", "after_verify", "on_commit"])
def test_a_hook_that_raises_ends_those_it_was_told_of(event):
    prompts = [*PROMPTS, *PROMPTS]
    out = hf_psd.generate_batch(
        target(), prompts, drafters("noisy"), psd=dict(mode="psd"), psd_hooks=[Fails(event)], **ARGUMENTS
    )
    ends = [result.exception for result in out.values()]
    assert isinstance(ends[1], Broken) and ends[6:] == [None] * 6
    for prompt, result in zip(prompts, out.values()):
        text = plain(prompt, max_new_tokens=12)
        assert result.generated_tokens == text[: len(result.generated_tokens)]
        assert result.exception is not None or result.generated_tokens == text


def test_a_forward_that_raises_ends_those_it_was_for(monkeypatch):
    model, calls = zoo.tiny("llama"), []
    forward = model.forward

    @functools.wraps(forward)
    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 12:
            raise Broken("forward")
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", failing)
    out = hf_psd.generate_batch(model, PROMPTS * 2, ["prompt_lookup"], psd=dict(mode="psd"), **ARGUMENTS)
    ends = [result.exception for result in out.values()]
    assert 0 < sum(isinstance(each, Broken) for each in ends) <= 4
    for prompt, result in zip(PROMPTS * 2, out.values()):
        if result.exception is None:
            assert result.generated_tokens == plain(prompt, max_new_tokens=12)


def test_a_failed_step_loop_ends_every_request(monkeypatch):
    def collapse(engine):
        raise Broken("loop")

    monkeypatch.setattr("hf_psd.queue.engine.QueueEngine.advance", collapse)
    with pytest.raises(Broken):
        hf_psd.generate_batch(target(), PROMPTS, ["prompt_lookup"], **ARGUMENTS)
    queue = hf_psd.ContinuousBatchingManager(target(), ["prompt_lookup"], **SMALL, **zoo.GREEDY)
    names = queue.add_requests(PROMPTS, max_new_tokens=4)
    with queue:
        results = [queue.get_result(name, timeout=30) for name in names]
    assert all(isinstance(result.exception, Broken) for result in results)
    with pytest.raises(RuntimeError, match="takes no requests"):
        queue.add_request([5])


REFUSED = {
    "unknown": (dict(foo=3), ValueError, "foo"),
    "beams": (dict(num_beams=2), ValueError, "num_beams"),
    "sequences": (dict(num_return_sequences=2), ValueError, "num_return_sequences"),
    "sequences in a config": (dict(generation_config="n=2"), ValueError, "num_return_sequences"),
    "scores": (dict(output_scores=True), ValueError, "return_logprobs"),
    "cache": (dict(past_key_values=object()), ValueError, "cache|past_key_values"),
    "assistant_model": (dict(assistant_model=1), ValueError, "assistant_model"),
    "seats": (dict(max_batch_size=0), ValueError, "max_batch_size"),
    "block": (dict(block_size=2.5), ValueError, "block_size"),
    "memory": (dict(kv_memory=10), ValueError, "holds no KV block"),
    "chunk": (dict(prefill_chunk=0), ValueError, "prefill_chunk"),
    "request ids": (dict(psd=dict(request_ids=[1])), ValueError, "noise_id"),
    "tags": (dict(psd=dict(context=["a", "b"])), ValueError, "context tag"),
    "too long": (dict(kv_memory=3 * 4 * 512, max_new_tokens=99), ValueError, "raise kv_memory"),
    "stop strings": (dict(stop_strings=["a"]), ValueError, "tokenizer"),
    "requests": (dict(requests=[{}]), ValueError, "one mapping per prompt"),
    "noise": (dict(requests=[dict(noise_id=-1)] * 2), ValueError, "noise_id"),
    "mode": (dict(psd=dict(mode="fast")), ValueError, "mode"),
    "drafters": (dict(assistant_models=[]), ValueError, "empty"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_any_forward(case):
    kwargs, kind, words = REFUSED[case]
    kwargs = dict(kwargs)
    if kwargs.get("generation_config"):
        kwargs["generation_config"] = hf_psd.queue.manager.GenerationConfig(num_return_sequences=2, do_sample=True)
    else:
        kwargs = {**zoo.GREEDY, **kwargs}
    with zoo.Recorder(target()) as recorder, pytest.raises(kind, match=words):
        hf_psd.generate_batch(target(), [[5, 6], [7]], **{"assistant_models": ["prompt_lookup"], **SMALL, **kwargs})
    assert recorder.forwards == 0


@pytest.mark.parametrize("prompt, words", [([], "at least one token"), ([64], "0 .. 63"), ([-1], "0 .. 63")])
def test_prompts_that_cannot_be(prompt, words):
    with pytest.raises(ValueError, match=words):
        hf_psd.generate_batch(target(), [[5], prompt], ["prompt_lookup"], **ARGUMENTS)


def test_cancelling():
    queue = hf_psd.ContinuousBatchingManager(target(), drafters("noisy"), check=True, **SMALL, **zoo.GREEDY)
    names = queue.add_requests(PROMPTS, max_new_tokens=30)
    for _ in range(6):
        queue.step()
    queue.cancel(names[0]), queue.cancel(names[5]), queue.cancel("nobody")
    while queue.step():
        pass
    results = {result.request_id: result for result in queue}
    queue.stop()
    for number in (0, 5):
        result = results[names[number]]
        assert isinstance(result.exception, RequestCancelled) and result.status is RequestStatus.FAILED
        assert result.error == "the request was cancelled"
        text = plain(PROMPTS[number], max_new_tokens=30)
        assert len(result.generated_tokens) < 30 and text[: len(result.generated_tokens)] == result.generated_tokens
    assert results[names[0]].generated_tokens
    for number in (1, 2, 3, 4):
        assert results[names[number]].generated_tokens == plain(PROMPTS[number], max_new_tokens=30)
    assert (queue.stats.cancelled, queue.stats.finished, queue.stats.failed) == (2, 4, 0)
