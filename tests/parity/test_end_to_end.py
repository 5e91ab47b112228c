"""Any call drawn at random equals plain `generate`; coupled sampling depends on its seed alone."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import DRAFTER_KINDS, GREEDY, Fixed, assert_plain, drafters, left_padded, prompts, shared, tiny

import hf_psd

TOKENS = st.integers(3, 63)
CALLS = dict(
    family=st.sampled_from(["llama", "gpt2", "gemma3_text", "mistral"]),
    rows=st.lists(st.lists(TOKENS, min_size=1, max_size=12), min_size=1, max_size=6),
    kinds=st.lists(st.sampled_from(DRAFTER_KINDS), min_size=1, max_size=2),
    psd=st.fixed_dictionaries(dict(gamma=st.integers(1, 9), mode=st.sampled_from(["auto", "ar", "sd", "psd"]))),
    eos=st.none() | st.lists(TOKENS, min_size=1, max_size=12),
    new_tokens=st.integers(1, 20),
    policy=st.none() | st.integers(0, 2**16),
)


def check(family, rows, kinds, psd, eos, new_tokens, policy):
    models = [model for kind in kinds for model in drafters(kind, family)]
    if policy is not None:
        draw = random.Random(policy)
        psd = psd | dict(selector=Fixed(lambda self: draw.randrange(len(models) + 1)))
    arguments = GREEDY | dict(eos_token_id=eos, max_new_tokens=new_tokens)
    assert_plain(shared(family), models, psd, **left_padded(rows), **arguments)
    stats = hf_psd.last_stats()
    assert not stats.errors and stats.accepted <= stats.drafted and stats.emitted <= len(rows) * new_tokens


test_any_call = settings(max_examples=40, deadline=None, derandomize=True)(given(**CALLS)(check))
test_many_calls = pytest.mark.slow(settings(max_examples=1500, deadline=None)(given(**CALLS)(check)))


@functools.cache
def coupled_text(seed: int) -> torch.Tensor:
    return coupled(seed, ["prompt_lookup"], dict(mode="ar"))


def coupled(seed, models, psd, rows=None, temperature=0.9):
    inputs = prompts(5, seed=2)
    if rows is not None:
        psd = psd | dict(request_ids=rows)
        inputs = {name: tensor[rows] for name, tensor in inputs.items()}
    return shared("llama").generate(
        **inputs, do_sample=True, temperature=temperature, top_k=20, top_p=0.95, max_new_tokens=16,
        pad_token_id=0, eos_token_id=[28, 14], assistant_models=models,
        psd=psd | dict(verification="coupled", seed=seed),
    )  # fmt: skip


@pytest.mark.parametrize("kind", DRAFTER_KINDS)
@pytest.mark.parametrize("mode", ["sd", "psd"])
def test_coupled_text_depends_on_the_seed_alone(kind, mode):
    for seed, gamma in ((1, 1), (1, 4), (2, 7)):
        psd = dict(mode=mode, gamma=gamma)
        assert coupled(seed, drafters(kind, "llama"), psd).tolist() == coupled_text(seed).tolist()
        assert not hf_psd.last_stats().errors
    assert coupled_text(1).tolist() != coupled_text(2).tolist()


@pytest.mark.parametrize("mode", ["ar", "sd", "psd"])
@pytest.mark.parametrize("rows", [[3], [4, 2, 0, 1, 3], [1, 4]], ids=str)
def test_coupled_text_follows_its_request_id(rows, mode):
    """A row's text is the same in any batch, where it is found by its request id."""
    width = coupled_text(1).shape[1]
    output = coupled(1, drafters("noisy", "llama"), dict(mode=mode, gamma=3), rows)
    output = torch.nn.functional.pad(output, (0, width - output.shape[1]))
    assert output.tolist() == coupled_text(1)[rows].tolist()


def test_coupled_copies_agree():
    """Drafter and target share their noise, so a copy's drafts are all accepted even at a high temperature."""
    coupled(3, drafters("same", "llama"), dict(mode="sd", selector=Fixed()), temperature=5.0)
    stats = hf_psd.last_stats()
    assert stats.drafted > 30 and stats.acceptance == 1.0


@pytest.mark.parametrize("law", ["rejection", "coupled"])
def test_same_seed_same_text(law):
    arguments = prompts(5, seed=2) | dict(do_sample=True, temperature=1.3, top_k=0, max_new_tokens=12, pad_token_id=0)

    def text(**psd):
        models = drafters("three", "llama")
        return (
            shared("llama").generate(**arguments, assistant_models=models, psd=dict(verification=law, **psd)).tolist()
        )

    assert text(seed=3) == text(seed=3) != text(seed=4)
    torch.manual_seed(7)
    first, state = text(mode="sd"), torch.get_rng_state()
    torch.manual_seed(7)
    assert text(mode="sd") == first != text(mode="sd")
    torch.manual_seed(7)
    torch.randint(2**62, (1,))
    assert torch.equal(torch.get_rng_state(), state), "one draw from the default generator per call"


def test_greedy_draws_no_random_number():
    state = torch.get_rng_state()
    shared("llama").generate(
        **prompts(3), **GREEDY, max_new_tokens=8, assistant_models=drafters("three", "llama"), psd=True
    )
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("mode", ["ar", "sd", "psd"])
def test_return_sequences_are_rows_of_their_own(mode):
    arguments = prompts(4) | dict(do_sample=True, temperature=3.0, top_k=0, max_new_tokens=8, pad_token_id=0)
    models, psd = drafters("noisy", "llama"), dict(mode=mode, seed=1)
    output = shared("llama").generate(**arguments, num_return_sequences=3, assistant_models=models, psd=psd)
    plain = shared("llama").generate(**arguments, num_return_sequences=3)
    assert output.shape[0] == plain.shape[0] == 12
    width = arguments["input_ids"].shape[1]
    assert output[:, :width].tolist() == plain[:, :width].tolist()
    assert len({tuple(row) for row in output[:3, width:].tolist()}) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen3", "mixtral", "gpt_oss"])
def test_half_precision_differs_from_plain_at_near_ties_only(family, dtype):
    """Where the texts part, the two tokens' logits after the common text are within four roundings of each other."""
    target = tiny(family).to(dtype)
    arguments = prompts(5, seed=1) | GREEDY | dict(max_new_tokens=20)
    plain = target.generate(**arguments)
    fast = target.generate(**arguments, assistant_models=[shared(family)], psd=dict(mode="psd"))
    padding = (arguments["attention_mask"] == 0).sum(1).tolist()
    for a, b, blank in zip(plain, fast, padding):
        parting = (a != b).long().argmax().item()
        if a[parting] != b[parting]:
            logits = target(a[None, blank:parting]).logits[0, -1].float()
            assert (logits[a[parting]] - logits[b[parting]]).abs() <= 4 * torch.finfo(dtype).eps * logits.abs().max()
