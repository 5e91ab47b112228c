"""Every text of the queue is what `generate` gives for its prompt alone, whatever else is under way."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
import zoo
from queue_cases import PROMPTS, coupled, drafters, new_tokens, plain, target
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import hf_psd
from hf_psd.queue.results import RequestStatus

SMALL = dict(max_batch_size=3, block_size=4)
MODES = ("ar", "sd", "psd")


def lengths(count):
    return [dict(max_new_tokens=3 + 7 * (number % 4)) for number in range(count)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["noisy", "lookup", "both"])
def test_greedy(mode, kind):
    prompts = PROMPTS * 2
    out = hf_psd.generate_batch(
        target(), prompts, drafters(kind), psd=dict(mode=mode), requests=lengths(12), prefill_chunk=8, **SMALL,
        **zoo.GREEDY,
    )  # fmt: skip
    assert list(out) == [f"req_{number}" for number in range(12)]
    for prompt, own, result in zip(prompts, lengths(12), out.values()):
        assert result.error is None and result.status is RequestStatus.FINISHED and result.prompt_ids == prompt
        assert result.generated_tokens == plain(prompt, **own)
    stats = hf_psd.last_stats()
    assert stats.finished == 12 and stats.emitted == sum(len(each.generated_tokens) for each in out.values())
    assert stats.mode == mode and (stats.overlap > 0.5 if mode == "psd" else stats.overlap == 0)


@pytest.mark.parametrize("family", ["gpt2", "mistral", "gemma3_text", "qwen3", "deepseek_v3", "falcon"])
def test_families(family):
    model, near = zoo.shared(family), zoo.shared(family, noise=0.03)
    out = hf_psd.generate_batch(
        model, PROMPTS, [near], psd=dict(mode="psd"), max_new_tokens=12, prefill_chunk=8, **SMALL, **zoo.GREEDY
    )
    for prompt, result in zip(PROMPTS, out.values()):
        expected = new_tokens(model.generate(torch.tensor([prompt]), max_new_tokens=12, **zoo.GREEDY), prompt)
        assert result.error is None and result.generated_tokens == expected


def test_paged_cache_read_in_place():
    """The route that kernels take on CUDA, by its torch twin; heads of 16 are the least it serves."""
    wide = dict(hidden_size=64, head_dim=16)
    model, near = zoo.shared("llama", **wide), zoo.shared("llama", noise=0.03, **wide)
    out = hf_psd.generate_batch(
        model, PROMPTS, [near], psd=dict(mode="psd", attention="triton"), max_new_tokens=9, prefill_chunk=8,
        **SMALL, **zoo.GREEDY,
    )  # fmt: skip
    for prompt, result in zip(PROMPTS, out.values()):
        expected = new_tokens(model.generate(torch.tensor([prompt]), max_new_tokens=9, **zoo.GREEDY), prompt)
        assert result.error is None and result.generated_tokens == expected


OWN = [
    dict(do_sample=False),
    dict(do_sample=True, temperature=0.7),
    dict(do_sample=True, temperature=1.5, top_k=8),
    dict(do_sample=True, top_p=0.8),
    dict(do_sample=True, temperature=1.5, top_k=8),
    dict(do_sample=True, repetition_penalty=1.4),
]


@pytest.mark.parametrize("mode", MODES)
def test_coupled_requests_of_mixed_settings_are_those_of_generate(mode):
    requests = [dict(own, max_new_tokens=6 + 3 * number) for number, own in enumerate(OWN)]
    requests[4]["seed"] = 77
    requests[5] |= dict(seed=77, noise_id=3)
    out = hf_psd.generate_batch(
        target(), PROMPTS, drafters("both"), psd=dict(mode=mode, verification="coupled", seed=5), requests=requests,
        pad_token_id=0, eos_token_id=None, **SMALL,
    )  # fmt: skip
    keys = [(5, 0), (5, 1), (5, 2), (5, 3), (77, 0), (77, 3)]
    for prompt, own, key, result in zip(PROMPTS, requests, keys, out.values()):
        settings = {name: value for name, value in own.items() if name not in ("seed", "noise_id")}
        assert result.error is None and result.generated_tokens == coupled(prompt, *key, **settings)


def test_coupled_texts_survive_preemption():
    requests = [dict(OWN[2], max_new_tokens=14)] * 6
    out = hf_psd.generate_batch(
        target(), PROMPTS, drafters("noisy"), psd=dict(mode="psd", verification="coupled", seed=5), requests=requests,
        pad_token_id=0, eos_token_id=None, max_batch_size=6, block_size=4, kv_memory=13 * 4 * 256 * 2,
    )  # fmt: skip
    assert hf_psd.last_stats().preemptions > 0
    for number, (prompt, result) in enumerate(zip(PROMPTS, out.values())):
        assert result.generated_tokens == coupled(prompt, 5, number, **requests[number])


def test_each_request_has_its_own_ending():
    texts = [plain(prompt, max_new_tokens=20) for prompt in PROMPTS]
    requests = [
        dict(max_new_tokens=20, eos_token_id=texts[0][4]),
        dict(max_new_tokens=20, eos_token_id=[texts[1][2], texts[1][9], 63]),
        dict(max_new_tokens=1),
        dict(max_length=9),
        dict(max_new_tokens=20, min_new_tokens=6, eos_token_id=texts[4][0]),
        dict(max_new_tokens=20, no_repeat_ngram_size=2),
    ]
    out = hf_psd.generate_batch(
        target(), PROMPTS, drafters("both"), psd=dict(mode="psd"), requests=requests, pad_token_id=0, do_sample=False,
        eos_token_id=None, **SMALL,
    )  # fmt: skip
    for prompt, own, result in zip(PROMPTS, requests, out.values()):
        assert result.generated_tokens == plain(prompt, **{k: v for k, v in own.items() if k != "eos_token_id"} | {
            k: tuple(v) if isinstance(v, list) else v for k, v in own.items() if k == "eos_token_id"
        })  # fmt: skip


class After(StoppingCriteria):
    def __init__(self, count):
        self.count = count

    def __call__(self, ids, scores, **kwargs):
        return torch.full((ids.shape[0],), ids.shape[1] >= self.count)


def test_criteria_and_processors_of_ones_own():
    def ban(prompt):
        return lambda ids, scores: scores.index_fill(1, torch.tensor([21, 49]), -math.inf)

    stop, long = len(PROMPTS[0]) + 4, len(PROMPTS[3]) + 9
    requests = [
        dict(stopping_criteria=[After(stop)]),
        dict(logits_processor=[ban(1)]),
        dict(prefix_allowed_tokens_fn=lambda row, ids: [7, 9, 11 + row]),
        dict(stopping_criteria=[After(long)], logits_processor=[ban(3)]),
        dict(),
        dict(encoder_repetition_penalty=1.5),
    ]
    out = hf_psd.generate_batch(
        target(), PROMPTS, drafters("both"), psd=dict(mode="psd"), requests=requests, max_new_tokens=12, **SMALL,
        **zoo.GREEDY,
    )  # fmt: skip
    for prompt, own, result in zip(PROMPTS, requests, out.values()):
        expected = target().generate(torch.tensor([prompt]), max_new_tokens=12, **zoo.GREEDY, **own)
        assert result.error is None and result.generated_tokens == new_tokens(expected, prompt)


class Heard(BaseStreamer):
    def __init__(self):
        self.put_values, self.ended = [], 0

    def put(self, value):
        self.put_values.append(value.tolist())

    def end(self):
        self.ended += 1


def test_streaming_and_times():
    heard = [Heard() for _ in PROMPTS]
    queue = hf_psd.ContinuousBatchingManager(target(), drafters("noisy"), psd=dict(mode="psd"), **SMALL, **zoo.GREEDY)
    for prompt, streamer in zip(PROMPTS, heard):
        queue.add_request(prompt, max_new_tokens=7, streaming=True, streamer=streamer, record_timestamps=True)
    while queue.step():
        pass
    results = list(queue)
    queue.stop()
    for number, (prompt, streamer) in enumerate(zip(PROMPTS, heard)):
        text = plain(prompt, max_new_tokens=7)
        assert streamer.put_values == [[prompt], *([token] for token in text)] and streamer.ended == 1
        parts = [each for each in results if each.request_id == f"req_{number}"]
        assert [part.is_finished() for part in parts] == [False] * (len(parts) - 1) + [True] and len(parts) > 1
        for part in parts:
            assert part.generated_tokens == text[: len(part.generated_tokens)]
            assert len(part.timestamps) == len(part.generated_tokens) and part.timestamps == sorted(part.timestamps)
        last = parts[-1]
        assert last.created_time <= last.lifespan[0] <= last.first_token_time <= last.lifespan[1]
        assert last.first_token_time == last.timestamps[0] and last.time_to_first_token > 0


@pytest.mark.parametrize("law", [dict(do_sample=False), dict(do_sample=True, temperature=1.4, top_k=9)])
def test_logprobs(law):
    out = hf_psd.generate_batch(
        target(), PROMPTS, drafters("both"), psd=dict(mode="psd", seed=1), return_logprobs=True, max_new_tokens=8,
        pad_token_id=0, eos_token_id=None, requests=[law, dict(do_sample=False)] * 3, **SMALL,
    )  # fmt: skip
    for number, (prompt, result) in enumerate(zip(PROMPTS, out.values())):
        ids = torch.tensor([prompt + result.generated_tokens])
        scores = target()(ids).logits[0, len(prompt) - 1 : -1].float()
        if number % 2 == 0 and law["do_sample"]:
            scores = scores / law["temperature"]
            scores = scores.masked_fill(scores < scores.topk(law["top_k"]).values[:, -1:], -math.inf)
        chosen = scores.log_softmax(-1).gather(1, torch.tensor(result.generated_tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(result.logprobs), chosen, atol=1e-4)


def test_long_prompts_are_read_in_chunks_beside_the_others():
    longs = [[3 + (7 * number + place) % 60 for place in range(200)] for number in range(2)]
    prompts = [PROMPTS[0], longs[0], PROMPTS[1], longs[1]]
    with zoo.Recorder(target()) as recorder:
        out = hf_psd.generate_batch(
            target(), prompts, ["prompt_lookup"], psd=dict(mode="sd"), max_new_tokens=30, max_batch_size=4,
            prefill_chunk=16, **zoo.GREEDY,
        )  # fmt: skip
    shapes = recorder.shapes
    assert max(rows * width for rows, width in shapes) <= 4 * 16
    reads = [place for place, (rows, width) in enumerate(shapes) if width == 16]
    assert len(reads) >= 2 * (199 // 16)
    between = [after - before - 1 for before, after in itertools.pairwise(reads)]
    assert max(between) >= 1 and min(between[:8]) >= 0, "others go on between two chunks"
    for prompt, result in zip(prompts, out.values()):
        assert result.generated_tokens == plain(prompt, max_new_tokens=30)


@pytest.mark.parametrize("mode", ["sd", "psd"])
@pytest.mark.parametrize("chunk", [4, 64])
def test_a_twin_drafter_is_always_right(mode, chunk):
    """A drafter whose KV were damaged, by paging, chunks or reused blocks, would guess wrong."""
    seen = []

    class Watch(hf_psd.StepHook):
        def on_commit(self, context):
            for request, drafted, accepted in zip(context.requests, context.drafted, context.accepted):
                if request.length < request.limit:  # drafts beyond the end are not judged
                    seen.append((drafted, accepted))

    out = hf_psd.generate_batch(
        target(), PROMPTS * 3, [copy.deepcopy(target())], psd=dict(mode=mode, selector=zoo.Fixed()), psd_hooks=[Watch()],
        requests=lengths(18), prefill_chunk=chunk, max_batch_size=4, block_size=2, kv_memory=60 * 2 * 256 * 2,
        **zoo.GREEDY,
    )  # fmt: skip
    assert all(result.error is None for result in out.values())
    assert sum(drafted for drafted, _ in seen) > 60 and all(drafted == accepted for drafted, accepted in seen)
