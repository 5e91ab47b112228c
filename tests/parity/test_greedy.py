"""Greedy text is plain `generate`'s own: ragged batches, several drafters, padded vocabularies, sliding windows."""

from __future__ import annotations

import random

import pytest
import torch
from zoo import GREEDY, P4, WINDOW, Fixed, assert_plain, left_padded, noisy, prompts, shared, tiny

import hf_psd

FIRST_EIGHT = [
    [38, 49, 44, 28, 21, 21, 21, 3],
    [49, 49, 49, 19, 49, 56, 20, 58],
    [56, 18, 31, 50, 14, 20, 36, 52],
    [38, 40, 32, 47, 61, 36, 34, 61],
]
G40 = GREEDY | dict(max_new_tokens=40)
RAGGED = ("sd", "psd")


def drafter(kind: str, family: str = "llama"):
    return {"C": shared(family), "N": shared(family, noise=0.03), "R": shared(family, 11)}[kind]


@pytest.mark.parametrize("mode", RAGGED)
@pytest.mark.parametrize("gamma", [1, 2, 4, 7])
@pytest.mark.parametrize("kind", "CNR")
def test_ragged_batch(kind, gamma, mode):
    output = assert_plain(shared("llama"), [drafter(kind)], dict(gamma=gamma, mode=mode), **P4(), **G40)
    assert output[:, 7:15].tolist() == FIRST_EIGHT


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("mode", RAGGED)
def test_rows_are_independent(family, mode):
    """Order, duplicates and company of a row do not matter to its text."""
    target, models, inputs = shared(family), [drafter("N", family)], P4()
    whole = assert_plain(target, models, dict(mode=mode), **inputs, **G40)
    for order in ([2, 0, 3, 1], [1, 1, 0, 3, 2, 1], [3]):
        picked = {name: tensor[order] for name, tensor in inputs.items()}
        output = assert_plain(target, models, dict(mode=mode), **picked, **G40)
        assert output.tolist() == whole[order].tolist()
    assert_plain(target, models, dict(mode=mode), **prompts(16, seed=3), **G40)


@pytest.mark.parametrize("seed", range(1, 6))
def test_other_models_and_lengths(seed):
    target = tiny("llama", seed)
    models = [noisy(target, 0.03), "prompt_lookup"]
    assert_plain(target, models, dict(mode="psd"), **prompts(5, seed, max_len=40), **GREEDY, max_new_tokens=30)


@pytest.mark.parametrize("mode", ["ar", "sd", "psd"])
def test_last_position_of_learned_embeddings(mode):
    target = shared("gpt2")
    assert_plain(target, [target], dict(mode=mode, gamma=7), **P4(), **GREEDY, max_length=128)
    full = left_padded([list(range(3, 60)) * 2 + [5, 6, 7, 8], [9]])
    assert_plain(target, [target], dict(mode=mode, gamma=7), **full, **GREEDY, max_length=128)


@pytest.mark.parametrize("mode", ["ar", "sd", "psd"])
def test_long_prompts_are_read_in_pieces(mode):
    target = tiny("mistral", max_position_embeddings=2048, sliding_window=600)
    inputs = prompts(3, seed=1, max_len=1400)
    assert inputs["input_ids"].shape[1] > 1024
    assert_plain(target, [noisy(target, 0.03)], dict(mode=mode), **inputs, **GREEDY, max_new_tokens=12)


DRAFTER_LISTS = ("C", "N", "CNR", "RR", "NN", "T")
POLICIES = {
    "composite": lambda seed: "composite",
    "turns": lambda seed: Fixed((0, 1, 2)),
    "random": lambda seed: Fixed(lambda self, draw=random.Random(seed): draw.randrange(3)),  # noqa: B008
    "past": lambda seed: Fixed(lambda self: sum(result.accepted for result in self.results) % 3),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kinds", DRAFTER_LISTS)
def test_several_drafters(kinds, policy):
    models = [shared("llama") if kind == "T" else drafter(kind) for kind in kinds]
    for seed, mode in enumerate(RAGGED):
        psd = dict(selector=POLICIES[policy](seed), mode=mode)
        assert_plain(shared("llama"), models, psd, **P4(), **G40)
        stats = hf_psd.last_stats()
        for count in ("drafted", "accepted"):
            assert sum(getattr(by, count) for by in stats.by_drafter) == getattr(stats, count)
        assert sum(by.rounds for by in stats.by_drafter) <= stats.rounds
        assert stats.emitted == 160


def test_own_copy_has_every_draft_accepted():
    class Watch(hf_psd.StepHook):
        full = []

        def on_commit(self, context):
            self.full += [(d, a) for d, a in zip(context.drafted, context.accepted) if d == 4]

    for mode in RAGGED:
        shared("llama").generate(
            **P4(), **G40, assistant_models=[drafter("C")], psd=dict(selector=Fixed(), mode=mode), psd_hooks=[Watch()]
        )
    assert len(Watch.full) >= 48 and set(Watch.full) == {(4, 4)}


def test_rounds_add_up_when_every_round_drafts():
    selector = Fixed((0, 1, 2))
    models = [drafter(kind) for kind in "CNR"]
    assert_plain(shared("llama"), models, dict(selector=selector, gamma=2), **P4(), **GREEDY, max_new_tokens=19)
    stats = hf_psd.last_stats()
    empty = sum(result.arm is None for result in selector.results)
    assert sum(by.rounds for by in stats.by_drafter) == stats.rounds - empty and all(
        by.rounds for by in stats.by_drafter
    )


def test_models_are_only_read():
    target, first = tiny("gpt2", 1), tiny("gpt2", 2)  # dropout 0.1
    near = noisy(target, 0.03)
    expected = target.generate(**P4(), **G40)
    target.train(), near.train(), first.transformer.h[0].train()
    models = [target, near, first]
    before = [snapshot(model) for model in models]
    output = target.generate(**P4(), **G40, assistant_models=[near, first], psd=True)
    assert output.tolist() == expected.tolist()
    for model, (weights, config, modules) in zip(models, before):
        assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
        assert (config, modules) == snapshot(model)[1:]


def snapshot(model):
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    modules = [
        (name, module.training, "forward" in vars(module), *(len(getattr(module, hook)) for hook in hooks))
        for name, module in model.named_modules()
    ]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return weights, (model.generation_config.to_dict(), model.config.to_dict()), modules


@pytest.mark.parametrize("mode", RAGGED)
@pytest.mark.parametrize("wide, narrow", [(72, 64), (64, 72), (64, 200)])
def test_vocabularies_padded_differently(wide, narrow, mode):
    target = tiny("llama", vocab_size=wide)
    models = [tiny("llama", 3, vocab_size=narrow), noisy(tiny("llama", vocab_size=narrow), 0.03)]
    output = assert_plain(target, models, dict(mode=mode), **P4(), **G40)
    if wide == 72:
        single = assert_plain(target, models, dict(mode=mode), input_ids=torch.tensor([[5, 9, 17, 33, 21]]), **G40)
        assert [i for i, token in enumerate(single[0, 5:22].tolist()) if token >= 64] == [4, 5, 6, 16]
        assert output.max() >= 64
    assert not hf_psd.last_stats().errors


def test_padded_vocabulary_sampled():
    """Ids that the drafter does not know come as often as the target's own law says."""
    target, rows = tiny("llama", vocab_size=72), 3000
    arguments = dict(do_sample=True, top_k=0, temperature=8.0, max_new_tokens=2, pad_token_id=0, eos_token_id=None)
    inputs = torch.tensor([[5, 9, 17]]).repeat(rows, 1)
    psd = dict(seed=5, selector=Fixed(), gamma=2)
    output = target.generate(inputs, **arguments, assistant_models=[tiny("llama", 3)], psd=psd)
    assert hf_psd.last_stats().drafted > rows / 2
    logits = target(output[:, :4]).logits[:, 2:] / 8.0
    share = logits.softmax(-1)[..., 64:].sum(-1)
    seen = (output[:, 3:] >= 64).float()
    spread = (share * (1 - share)).sum(0).sqrt()
    assert (((seen - share).sum(0)).abs() < 4 * spread).all() and (share.mean(0) > 0.02).all()


@pytest.mark.parametrize("window", [4, 8, 16])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", "CNR")
def test_sliding_window(window, attention, kind):
    target = shared("mistral", sliding_window=window, attn_implementation=attention)
    assert target.config._attn_implementation == attention
    models = {"C": target, "N": noisy(target, 0.03), "R": drafter("R")}
    for mode in RAGGED:
        assert_plain(target, [models[kind]], dict(mode=mode), **P4(), **G40)


@pytest.mark.parametrize("kind", "CNR")
@pytest.mark.parametrize(
    "family", ["gemma2", "gemma3_text", "cohere2", "gpt_oss", "olmo3", "exaone4", "qwen2", "smollm3"]
)
def test_mixed_windows(family, kind):
    assert set(shared(family).config.layer_types) == {"sliding_attention", "full_attention"} and WINDOW < 40
    for mode in RAGGED:
        assert_plain(shared(family), [drafter(kind, family)], dict(mode=mode), **P4(), **G40)
