"""Drafters that are bad, limited or broken never hurt; a broken target is a clear error."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from zoo import GREEDY, P4, Fixed, Recorder, assert_plain, shared, tiny

import hf_psd

MODES = ("sd", "psd")
ARGUMENTS = GREEDY | dict(max_new_tokens=28)
SAMPLED = dict(do_sample=True, temperature=2.0, top_k=20, pad_token_id=0, eos_token_id=None, max_new_tokens=28)


def head_of(value: float, rows: slice = slice(None), family: str = "llama"):
    """A copy of the drafter whose head gives `value` as weight to some ids."""
    model = tiny(family, 3)
    with torch.no_grad():
        model.lm_head.weight[rows] = value
    return model


def always(token: int):
    model = tiny("llama", 3)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    model.lm_head.bias = torch.nn.Parameter(torch.nn.functional.one_hot(torch.tensor(token), 64).float() * 50)
    return model


def raising(after: int = 0):
    model, calls = tiny("llama"), []

    def fail(module, args, kwargs):
        calls.append(1)
        if len(calls) > after:
            raise RuntimeError("drafter exploded")

    model.register_forward_pre_hook(fail, with_kwargs=True)
    return model


def quiet(target, models, psd, expected: list[str], **arguments):
    """Decodes twice, expecting exactly the given warnings (parts of them) in each call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = target.generate(**arguments, assistant_models=models, psd=psd)
    messages = [str(entry.message) for entry in caught if str(entry.message).startswith("psd")]
    assert len(messages) == len(expected) and all(part in text for part, text in zip(expected, messages)), messages
    return output


@pytest.mark.parametrize("mode", MODES)
def test_drafter_out_of_positions(mode):
    small = tiny("gpt2", n_positions=16)
    target = shared("llama")
    expected = target.generate(**P4(), **ARGUMENTS)
    assert expected.shape[1] == 35
    output = quiet(target, [small], dict(mode=mode), ["GPT2LMHeadModel#0 knows 16 positions"], **P4(), **ARGUMENTS)
    assert output.tolist() == expected.tolist()
    assert not hf_psd.last_stats().errors and hf_psd.last_stats().drafted


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [slice(None), slice(5, 6)], ids=["all", "one id"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_drafter_with_bad_logits_is_retired(value, rows, mode):
    target, bad = shared("llama"), head_of(value, rows)
    expected = target.generate(**P4(), **ARGUMENTS)
    for others in ([], [shared("llama", noise=0.03)]):
        warned = ["LlamaForCausalLM#0 is retired for this call: it gave NaN"]
        output = quiet(target, [bad, *others], dict(mode=mode), warned, **P4(), **ARGUMENTS)
        assert output.tolist() == expected.tolist()
        assert hf_psd.last_stats().errors == [
            message for message in hf_psd.last_stats().errors if warned[0] in message
        ]
        output = quiet(target, [bad, *others], dict(mode=mode), warned, **P4(), **SAMPLED)
        assert output.shape == (4, 35) and output.min() >= 0 and output.max() < 64


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_drafter_in_half_precision(family, dtype, mode):
    target = shared(family)
    small = copy.deepcopy(target).to(dtype)
    assert_plain(target, [small], dict(mode=mode, selector=Fixed()), **P4(), **ARGUMENTS)
    stats = hf_psd.last_stats()
    assert not stats.errors and stats.acceptance > 0.5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("token", [2, 0, 63])
def test_drafter_with_one_idea(token, mode):
    for arguments in (ARGUMENTS | dict(max_new_tokens=12), ARGUMENTS | dict(eos_token_id=2, max_new_tokens=12)):
        psd = dict(mode=mode, selector=Fixed())
        assert_plain(shared("llama"), [always(token)], psd, **P4(), **arguments)
    output = shared("llama").generate(**P4(), **SAMPLED, assistant_models=[always(token)], psd=dict(mode=mode))
    assert output.shape == (4, 35) and not hf_psd.last_stats().errors


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("after", [0, 1, 7])
def test_raising_drafter_is_retired(after, mode):
    target = shared("llama")
    expected = target.generate(**P4(), **ARGUMENTS)
    warned = ["LlamaForCausalLM#0 is retired for this call: RuntimeError: drafter exploded"]
    for others in ([], ["prompt_lookup"], [shared("llama", noise=0.03)]):
        psd = dict(mode=mode, selector="composite")
        output = quiet(target, [raising(after), *others], psd, warned, **P4(), **ARGUMENTS)
        assert output.tolist() == expected.tolist()
        assert len(hf_psd.last_stats().errors) == 1
        assert not others or hf_psd.last_stats().by_drafter[1].drafted


@pytest.mark.parametrize("mode", ["ar", *MODES])
@pytest.mark.parametrize("do_sample", [False, True])
def test_target_with_nan_is_a_clear_error(do_sample, mode):
    target = tiny("llama")
    with torch.no_grad():
        target.model.embed_tokens.weight[8] = float("nan")  # only row 1 contains it
    arguments = SAMPLED if do_sample else ARGUMENTS
    with pytest.raises(RuntimeError, match=r"row 1 of the target's scores has NaN.*new token 1\b"):
        target.generate(**P4(), **arguments, assistant_models=[shared("llama")], psd=dict(mode=mode))
    keep = torch.tensor([0, 2, 3])
    rest = {name: tensor[keep] for name, tensor in P4().items()}
    target.generate(**rest, **arguments, suppress_tokens=[8], assistant_models=[shared("llama")], psd=dict(mode=mode))


def test_processor_that_leaves_no_token_is_a_clear_error():
    banned = list(range(64))
    with pytest.raises(RuntimeError, match="no possible token"):
        shared("llama").generate(**P4(), **SAMPLED, suppress_tokens=banned, psd=True)


STATEFUL = {
    "mamba": dict(hidden_size=32, num_hidden_layers=2, state_size=8, vocab_size=64),
    "mamba2": dict(
        hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=8, n_groups=1, vocab_size=64
    ),
    "rwkv": dict(hidden_size=32, num_hidden_layers=2, vocab_size=64, attention_hidden_size=32),
    "qwen3_next": dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=64, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"],
    ),
    "lfm2": dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, layer_types=["conv", "full_attention"],
    ),
    "bloom": dict(hidden_size=32, n_layer=2, n_head=4, vocab_size=64),
}  # fmt: skip
REASONS = {"bloom": "position_ids", "lfm2": "'conv'"}


@pytest.mark.parametrize("family", STATEFUL)
def test_models_that_cannot_roll_back_are_refused(family):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **STATEFUL[family])).eval()
    reason = REASONS.get(family, "recurrent state")
    with Recorder(model) as forwards, Recorder(shared("llama")) as others:
        with pytest.raises(ValueError, match=f"the target {type(model).__name__} .*{reason}"):
            model.generate(**P4(), **GREEDY, assistant_models=[shared("llama")], psd=True)
        with pytest.raises(ValueError, match=rf"assistant_models\[1\] {type(model).__name__} .*{reason}"):
            shared("llama").generate(**P4(), **GREEDY, assistant_models=["prompt_lookup", model], psd=True)
    assert forwards.forwards == others.forwards == 0
