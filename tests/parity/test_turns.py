"""A chat goes on from a returned cache: what comes back is what plain `generate` gives, and what goes in is read."""

from __future__ import annotations

import copy
import inspect
import warnings

import pytest
import torch
from transformers import DynamicCache, StaticCache
from zoo import GREEDY, P4, assert_plain, left_padded, shared, tiny

import hf_psd
from hf_psd.turns import cache_of

MODES = ("ar", "sd", "psd")
WAYS = [
    *(("llama", mode) for mode in MODES),
    *((family, "psd") for family in ("gpt2", "mistral", "gemma2", "deepseek_v3")),
]
THREE = [28, 34, 14]
TURN = GREEDY | dict(max_new_tokens=14, return_dict_in_generate=True)


@pytest.fixture(autouse=True)
def deprecations():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def longer(sequences: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """The next turn's inputs: everything so far and two more tokens; columns of `mask` [B, P] come first."""
    more = torch.tensor([[44, 45]]).repeat(len(sequences), 1)
    ids = torch.cat([sequences, more], 1)
    new = torch.ones(len(ids), ids.shape[1] - (0 if mask is None else mask.shape[1]), dtype=torch.long)
    return dict(input_ids=ids, attention_mask=new if mask is None else torch.cat([mask, new], 1))


def layers(cache):
    return [(layer.keys, layer.values) for layer in cache.layers]


@pytest.mark.parametrize("eos", [None, THREE])
@pytest.mark.parametrize("family, mode", WAYS)
def test_the_returned_cache_is_the_plain_one(family, eos, mode):
    target, models = shared(family), [shared(family, noise=0.03), "prompt_lookup"]
    arguments = P4() | TURN | dict(eos_token_id=eos, max_new_tokens=25)
    plain = target.generate(**arguments)
    fast = target.generate(**arguments, assistant_models=models, psd=dict(mode=mode))
    assert fast.sequences.tolist() == plain.sequences.tolist() and set(fast.keys()) == set(plain.keys())
    ours, theirs = cache_of(fast), cache_of(plain)
    assert ours.get_seq_length() == theirs.get_seq_length() == plain.sequences.shape[1] - 1
    assert [type(layer) for layer in ours.layers] == [type(layer) for layer in theirs.layers]
    real = arguments["attention_mask"].bool()
    real = torch.cat([real, torch.ones(4, ours.get_seq_length() - 7, dtype=torch.bool)], 1)
    for both in zip(layers(ours), layers(theirs)):
        for a, b in zip(*both):
            assert a.shape == b.shape and a.dtype == b.dtype
            seen = real[:, -a.shape[2] :]
            torch.testing.assert_close(a.transpose(1, 2)[seen], b.transpose(1, 2)[seen], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family, mode", WAYS)
def test_three_turns(family, mode):
    """Each cache is read by plain `generate` and by ours alike; every turn equals plain without any cache."""
    target, near = shared(family), shared(family, noise=0.03)
    inputs, mask, cache = P4(), P4()["attention_mask"], None
    for _ in range(3):
        expected = target.generate(**inputs, **TURN).sequences
        with_cache = {} if cache is None else dict(past_key_values=copy.deepcopy(cache))
        assert target.generate(**inputs, **TURN, **with_cache).sequences.tolist() == expected.tolist()
        given = {} if cache is None else dict(past_key_values=cache)
        output = target.generate(**inputs, **TURN, **given, assistant_models=[near], psd=dict(mode=mode))
        assert output.sequences.tolist() == expected.tolist() and not hf_psd.last_stats().errors
        assert cache is None or cache_of(output) is cache
        inputs, cache = longer(output.sequences, mask), cache_of(output)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
@pytest.mark.parametrize("mode", MODES)
def test_a_cache_of_plain_generate(mode, name):
    target = tiny("llama")
    if name not in (*inspect.signature(target.forward).parameters, "past_key_values"):
        pytest.skip("this transformers knows the cache by its older name alone")
    first = target.generate(torch.tensor([[5, 9, 17, 33, 21]]), **TURN | dict(max_new_tokens=8))
    inputs = longer(first.sequences)
    expected = target.generate(**inputs, **TURN).sequences
    output = target.generate(
        **inputs, **TURN, **{name: cache_of(first)}, assistant_models=[target], psd=dict(mode=mode)
    )
    assert output.sequences.tolist() == expected.tolist()


def test_the_prefix_is_not_computed_again():
    target, shapes = tiny("llama"), []
    first = target.generate(**P4(), **TURN, psd=True)
    inputs = longer(first.sequences, P4()["attention_mask"])
    hook = target.register_forward_pre_hook(
        lambda m, a, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    target.generate(**inputs, **TURN, past_key_values=cache_of(first), psd=dict(mode="ar"))
    hook.remove()
    assert shapes[0] == (4, 2)


def test_an_empty_cache_is_filled_as_by_plain():
    target, ours, theirs = shared("llama"), DynamicCache(), DynamicCache()
    arguments = P4() | GREEDY | dict(max_new_tokens=9)
    expected = target.generate(**arguments, past_key_values=theirs)
    output = target.generate(**arguments, past_key_values=ours, psd=True)
    assert output.tolist() == expected.tolist() and ours.get_seq_length() == theirs.get_seq_length() == 15


def test_cut_by_a_criterion_in_the_middle_of_a_block():
    from transformers import StoppingCriteria

    class ManyLarge(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return (input_ids[:, 7:] >= 32).sum(1) >= 5

    target = shared("llama")
    arguments = P4() | TURN | dict(eos_token_id=2, max_new_tokens=40, stopping_criteria=[ManyLarge()])
    plain = target.generate(**arguments)
    fast = target.generate(**arguments, assistant_models=[target], psd=dict(mode="psd", gamma=7))
    for both in zip(layers(cache_of(fast)), layers(cache_of(plain))):
        for a, b in zip(*both):
            torch.testing.assert_close(a[:, :, 7:], b[:, :, 7:], rtol=1e-3, atol=1e-3)


def test_without_a_cache_none_is_returned():
    arguments = P4() | TURN | dict(use_cache=False)
    assert cache_of(shared("llama").generate(**arguments, psd=True)) is None
    assert set(shared("llama").generate(**arguments, psd=True).keys()) == {"sequences"}


def test_sampled_turns_have_a_cache_too():
    target, draw = shared("llama"), dict(do_sample=True, temperature=2.0, pad_token_id=0, max_new_tokens=9)
    first = target.generate(**P4(), **draw, return_dict_in_generate=True, psd=dict(seed=1))
    inputs = longer(first.sequences, P4()["attention_mask"])
    expected = target.generate(**inputs, **draw, psd=dict(seed=2))
    output = target.generate(**inputs, **draw, past_key_values=cache_of(first), psd=dict(seed=2))
    assert output.tolist() == expected.tolist()


def offloaded():
    cache = DynamicCache()
    cache.offloading = True
    return cache


def filled(rows: int, columns: int):
    cache = DynamicCache()
    for layer in range(2):
        cache.update(torch.zeros(rows, 2, columns, 8), torch.zeros(rows, 2, columns, 8), layer)
    return cache


REFUSED = {
    "static": (
        lambda: StaticCache(config=shared("llama").config, max_cache_len=32),
        "plain DynamicCache.*StaticCache",
    ),
    "offloaded": (offloaded, "plain DynamicCache"),
    "tuple": (lambda: ((torch.zeros(1), torch.zeros(1)),), "plain DynamicCache.*got tuple"),
    "other rows": (lambda: filled(3, 4), "holds 3 rows, but the call has 4"),
    "longer than the text": (lambda: filled(4, 7), "covers 7 columns, but input_ids has only 7; pass the whole text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_any_forward(name):
    build, pattern = REFUSED[name]
    target, seen = tiny("llama"), []
    target.register_forward_pre_hook(lambda *args: seen.append(1))
    with pytest.raises(ValueError, match=pattern):
        target.generate(**P4(), **TURN, past_key_values=build(), psd=True)
    assert not seen


def test_new_tokens_alone_are_refused():
    """Plain `generate` takes them with a mask over the whole text; drafters need the text itself."""
    target = tiny("llama")
    first = target.generate(**left_padded([[5, 9, 17]]), **TURN)
    inputs = longer(first.sequences)
    with pytest.raises(ValueError, match="pass the whole text|attention_mask"):
        target.generate(
            inputs["input_ids"][:, -2:], attention_mask=inputs["attention_mask"], **TURN,
            past_key_values=cache_of(first), psd=True,
        )  # fmt: skip


def test_turns_of_a_chat_are_equal_whoever_decodes_them():
    target = shared("llama")
    for ways in ((True, False), (False, True), (True, True)):
        cache, inputs = None, dict(input_ids=torch.tensor([[5, 9, 17, 33, 21]]))
        for psd in ways:
            given = {} if cache is None else dict(past_key_values=cache)
            output = target.generate(**inputs, **TURN, **given, psd=psd)
            inputs, cache = longer(output.sequences), cache_of(output)
        assert_plain(target, [target], **inputs, **GREEDY, max_new_tokens=5)
        text = output.sequences
    assert text.shape == (1, 5 + 14 + 2 + 14)
