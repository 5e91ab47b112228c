"""Bad input is refused in one line that names the argument and the remedy, before any forward of the given models."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, GenerationConfig, StaticCache
from zoo import GREEDY, P4, Recorder, assert_plain, left_padded, prompts, shared, tiny

import hf_psd

ARGUMENTS = P4() | GREEDY | dict(max_new_tokens=8)


def refused(error, pattern, target=None, models=(), **arguments):
    """Asserts the error, its one line, and that neither the target nor a drafter ran."""
    target = target or tiny("llama")
    watched = [target, *(model for model in models or () if isinstance(model, torch.nn.Module))]
    recorders = [Recorder(model) for model in watched]
    with pytest.raises(error, match=pattern) as raised:
        for recorder in recorders:
            recorder.__enter__()
        target.generate(**ARGUMENTS | arguments)
    for recorder in recorders:
        recorder.__exit__()
    assert not any(recorder.forwards for recorder in recorders)
    assert "\n" not in str(raised.value)


def on_meta():
    with torch.device("meta"):
        return type(shared("llama"))(shared("llama").config)


def headless():
    return shared("llama").model


DRAFTERS = {
    "empty list": ([], ValueError, "assistant_models is empty: name at least one"),
    "a name": ("prompt_lookup", TypeError, "assistant_models must be a list.*got str; wrap it in a list"),
    "a model": (
        shared("llama"),
        TypeError,
        "assistant_models must be a list.*got LlamaForCausalLM; wrap it in a list",
    ),
    "unknown name": (["gpt2"], ValueError, r"assistant_models\[0\] is 'gpt2'.*'prompt_lookup'. Load the model first"),
    "name beside a model": ([shared("llama"), "x"], ValueError, r"assistant_models\[1\] is 'x'"),
    "None": (
        [None],
        TypeError,
        r"assistant_models\[0\] must be a causal LM, 'prompt_lookup' or a Drafter, got NoneType",
    ),
    "no model": (
        [torch.nn.Linear(2, 2)],
        TypeError,
        r"assistant_models\[0\] must be a transformers model, got Linear",
    ),
    "no head": ([headless()], TypeError, r"assistant_models\[0\] \(LlamaModel\) is not a causal LM"),
    "meta": (
        ["prompt_lookup", on_meta()],
        ValueError,
        r"assistant_models\[1\] \(LlamaForCausalLM\) is on the meta device",
    ),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters(name):
    models, error, pattern = DRAFTERS[name]
    refused(error, pattern, models=models if isinstance(models, list) else (), assistant_models=models, psd=True)


@pytest.mark.parametrize("name, value", [("assistant_models", ["prompt_lookup"]), ("psd_hooks", [hf_psd.StepHook])])
def test_companions_need_psd(name, value):
    refused(ValueError, f"{name} needs psd=True", **{name: value})


PSD = {
    "unknown field": (dict(gama=3), ValueError, "unknown field.*'gama'; known are gamma, mode"),
    "two unknown fields": (dict(foo=1, gamma=2, bar=1), ValueError, "'bar', 'foo'"),
    "gamma 0": (dict(gamma=0), ValueError, "gamma must be.*>= 1.*got 0"),
    "gamma -1": (dict(gamma=-1), ValueError, "gamma must be.*got -1"),
    "gamma 2.5": (dict(gamma=2.5), ValueError, "gamma must be.*got 2.5"),
    "gamma True": (dict(gamma=True), ValueError, "gamma must be.*got True"),
    "mode": (dict(mode="fast"), ValueError, "mode must be one of 'auto', 'ar', 'sd', 'psd'; got 'fast'"),
    "law": (dict(verification="exact"), ValueError, "verification must be one of 'rejection', 'coupled'; got 'exact'"),
    "selector": (dict(selector="best"), ValueError, "selector.*'best'"),
    "selector object": (
        dict(selector=object()),
        ValueError,
        "selector object needs the methods plan and feedback, or select and update",
    ),
    "gamma auto": (
        dict(gamma="auto", selector="ucb1"),
        ValueError,
        "gamma='auto' with a bandit needs reward='goodput'",
    ),
    "gamma text": (dict(gamma="4"), ValueError, "gamma must be an int >= 1 or \"auto\", got '4'"),
    "selector options": (dict(selector="ucb1:c"), ValueError, "selector options 'c': allowed is name=value"),
    "selector option": (dict(selector="ucb1:cc=1"), ValueError, "selector 'ucb1' has no option cc; allowed are c"),
    "options of composite": (dict(selector="composite:window=3"), ValueError, "'composite' takes no options"),
    "reward as an option": (dict(selector='ucb1:reward="goodput"'), ValueError, "given reward twice"),
    "another reward": (
        dict(selector=hf_psd.bandit.make("ucb1", 1, reward="goodput")),
        ValueError,
        "made with reward='goodput', but the call has reward='acceptance'",
    ),
    "too few tags": (dict(selector="ucb1", context=["a", "b"]), ValueError, "context must be a tag or 4 tags"),
    "tags of no kind": (dict(selector="ucb1", context=3), ValueError, "context must be a tag or 4 tags.*got 3"),
    "seed": (dict(seed=2**64), ValueError, "seed must fit 64 bits"),
    "seed type": (dict(seed="a"), ValueError, "seed must fit 64 bits, got 'a'"),
    "seed True": (dict(seed=True), ValueError, "seed must fit 64 bits, got True"),
    "request ids of no kind": (dict(request_ids=3), ValueError, "request_ids must be 4 ints.*got 3"),
    "too few request ids": (dict(request_ids=[1, 2]), ValueError, "request_ids must be 4 ints"),
    "negative request id": (dict(request_ids=[1, 2, 3, -1]), ValueError, "request_ids must be 4 ints"),
    "request id twice": (dict(request_ids=[1, 2, 3, 1]), ValueError, "request_ids must be 4 ints.*no two alike"),
    "request id 1.5": (dict(request_ids=[1, 2, 3, 1.5]), ValueError, "request_ids must be 4 ints"),
    "request id True": (dict(request_ids=[0, True, 2, 3]), ValueError, "request_ids must be 4 ints"),
    "one": (1, TypeError, "psd must be True, a PSDConfig or a dict"),
    "text": ("psd", TypeError, "psd must be True, a PSDConfig or a dict of its fields, got str"),
    "None in a dict": (dict(mode=None), ValueError, "mode must be one of"),
}


@pytest.mark.parametrize("name", PSD)
def test_psd_settings(name):
    value, error, pattern = PSD[name]
    refused(error, pattern, psd=value)


def test_hooks_must_be_hooks():
    refused(TypeError, "psd_hooks takes StepHook objects, got str", psd=True, psd_hooks=["progress"])
    refused(TypeError, "psd_hooks must be a list.*got StepHook", psd=True, psd_hooks=hf_psd.StepHook())


class Static:
    def __repr__(self):
        return "StaticCache"


GENERATE = {
    "assistant_model": (
        dict(assistant_model=shared("llama")),
        "assistant_model cannot be used with psd.*assistant_models",
    ),
    "beams": (dict(num_beams=2), "num_beams=2"),
    "inputs_embeds": (dict(inputs_embeds=torch.zeros(1, 3, 32)), "inputs_embeds.*pass input_ids"),
    "synced_gpus": (dict(synced_gpus=True), "synced_gpus"),
    "static cache": (dict(cache_implementation="static"), "cache_implementation='static'"),
    "quantized cache": (dict(cache_implementation="quantized"), "cache_implementation='quantized'"),
    "paged cache": (dict(cache_implementation="paged"), "cache_implementation='paged'"),
    "paged cache in a config": (
        dict(generation_config=GenerationConfig(cache_implementation="paged")),
        "cache_implementation='paged'",
    ),
    "cache object": (dict(past_key_values=Static()), "must be a plain DynamicCache"),
    "custom_generate": (dict(custom_generate=lambda *args, **kwargs: None), "custom_generate"),
    "contrastive": (dict(penalty_alpha=0.6, top_k=4), "penalty_alpha"),
    "guidance": (dict(guidance_scale=1.5), "guidance_scale"),
    "prompt lookup": (dict(prompt_lookup_num_tokens=3), "prompt_lookup_num_tokens.*prompt_lookup"),
    "position_ids": (dict(position_ids=torch.zeros(4, 7, dtype=torch.long)), "position_ids"),
    "misspelt": (dict(max_new_token=3), "max_new_token"),
    "hidden states": (dict(output_hidden_states=True, return_dict_in_generate=True), "output_hidden_states"),
    "attentions": (dict(output_attentions=True, return_dict_in_generate=True), "output_attentions"),
    "stop strings": (dict(stop_strings=["a"]), "stop_strings need the tokenizer: pass tokenizer="),
    "greedy sequences": (dict(num_return_sequences=2), "num_return_sequences"),
}


@pytest.mark.parametrize("name", GENERATE)
def test_arguments_of_generate(name):
    arguments, pattern = GENERATE[name]
    refused(ValueError, pattern, assistant_models=["prompt_lookup"], psd=True, **arguments)


def test_use_cache_false_is_equal():
    assert_plain(shared("llama"), [shared("llama")], **ARGUMENTS, use_cache=False)


def test_cache_implementations_in_the_models_own_config():
    """Gemma checkpoints come with "hybrid", which `generate` itself takes for the default."""
    target = tiny("gemma2")
    target.generation_config.cache_implementation = "hybrid"
    assert_plain(target, [target], **ARGUMENTS)
    target.generation_config.cache_implementation = "static"
    refused(ValueError, "cache_implementation='static'", target=target, psd=True)


def test_cache_made_by_the_user_is_refused():
    cache = StaticCache(config=shared("llama").config, max_cache_len=32)
    for name in ("past_key_values", "cache"):
        refused(ValueError, "plain DynamicCache, .*got StaticCache", psd=True, **{name: cache})


def test_encoder_decoder():
    config = AutoConfig.for_model(
        "t5", vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    refused(ValueError, "the target T5ForConditionalGeneration .*encoder-decoder", target=model, psd=True)
    pattern = r"assistant_models\[0\] T5ForConditionalGeneration .*encoder-decoder"
    refused(ValueError, pattern, models=[model], assistant_models=[model], psd=True)


INPUTS = {
    "hole": (
        left_padded([[5, 0, 7, 8], [9, 9]], pad=0) | dict(attention_mask=torch.tensor([[1, 0, 1, 1], [0, 0, 1, 1]])),
        "attention_mask must be zeros then ones.*padding_side='left'",
    ),
    "right padding": (
        dict(input_ids=torch.tensor([[5, 6, 0], [5, 6, 7]]), attention_mask=torch.tensor([[1, 1, 0], [1, 1, 1]])),
        "attention_mask must be zeros then ones",
    ),
    "empty row": (
        dict(input_ids=torch.tensor([[5, 6], [0, 0]]), attention_mask=torch.tensor([[1, 1], [0, 0]])),
        "attention_mask has a row without any token",
    ),
    "mask of another shape": (
        dict(input_ids=torch.tensor([[5, 6], [7, 8]]), attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]])),
        r"attention_mask must be \[2, 2\] like input_ids, got \[2, 3\]",
    ),
    "graded mask": (
        dict(input_ids=torch.tensor([[5, 6], [7, 8]]), attention_mask=torch.tensor([[1, 1], [1, 2]])),
        "attention_mask must hold 0 and 1 alone",
    ),
    "graded mask of floats": (
        dict(input_ids=torch.tensor([[5, 6], [7, 8]]), attention_mask=torch.tensor([[1, 1], [0.5, 1]])),
        "attention_mask must hold 0 and 1 alone",
    ),
    "id too large": (dict(input_ids=torch.tensor([[5, 64]]), attention_mask=None), r"input_ids must lie in 0 \.\. 63"),
    "negative id": (dict(input_ids=torch.tensor([[5, -1]]), attention_mask=None), r"input_ids must lie in 0 \.\. 63"),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs(name):
    arguments, pattern = INPUTS[name]
    refused(ValueError, pattern, psd=True, **arguments)


def test_ids_under_the_padding_are_not_looked_at():
    arguments = dict(
        input_ids=torch.tensor([[99, 99, 5], [6, 7, 8]]), attention_mask=torch.tensor([[0, 0, 1], [1, 1, 1]])
    )
    clean = arguments | dict(input_ids=torch.tensor([[0, 0, 5], [6, 7, 8]]))
    output = shared("llama").generate(**ARGUMENTS | arguments, assistant_models=[shared("llama")], psd=True)
    assert output[:, 3:].tolist() == shared("llama").generate(**ARGUMENTS | clean)[:, 3:].tolist()


def test_prompt_longer_than_the_window():
    target = tiny("gpt2", n_positions=16)
    inputs = prompts(2, seed=1, max_len=4) | dict(
        input_ids=torch.full((2, 17), 5), attention_mask=torch.ones(2, 17).long()
    )
    refused(
        ValueError,
        "a prompt of 17 tokens is longer than the model's 16 positions; shorten it",
        target=target,
        psd=True,
        **inputs,
    )


def test_pad_id_in_the_prompt_under_a_full_mask():
    ids = torch.tensor([[5, 0, 9, 17, 33]])
    arguments = GREEDY | dict(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4)
    assert assert_plain(shared("llama"), [shared("llama")], **arguments)[0, 5:].tolist() == [38, 48, 26, 55]


@pytest.mark.parametrize("family, field", [("phi3", "longrope"), ("llama", "dynamic")])
def test_rope_that_depends_on_the_batch(family, field):
    rope = dict(rope_type=field, rope_theta=1e4, factor=2.0)
    if field == "longrope":
        rope |= dict(short_factor=[1.0] * 4, long_factor=[2.0] * 4, original_max_position_embeddings=64)
    refused(
        ValueError, f"its {field} RoPE depends on the longest row", target=tiny(family, rope_parameters=rope), psd=True
    )


def test_out_of_memory_for_the_cache_says_what_to_lower(monkeypatch):
    def no_memory(self, shape, **kwargs):
        if len(shape) == 4:
            raise torch.OutOfMemoryError("too much")
        return original(self, shape, **kwargs)

    original = torch.Tensor.new_zeros
    tiny_target = tiny("llama")
    tiny_target.generate(**ARGUMENTS, psd=True)
    monkeypatch.setattr(torch.Tensor, "new_zeros", no_memory)
    with pytest.raises(
        torch.OutOfMemoryError,
        match=r"\d+\.\d\d GiB of KV cache, 4 rows.*Lower the batch, `max_new_tokens` or `gamma`",
    ):
        tiny_target.generate(**ARGUMENTS, psd=True)


def test_refusals_leave_nothing_behind():
    target, config = tiny("llama"), GenerationConfig(stop_strings=["a"], pad_token_id=0)
    target.generation_config = config
    kept = copy.deepcopy(config).to_dict()
    with pytest.raises(ValueError, match="tokenizer"):
        target.generate(**P4(), psd=True)
    assert target.generation_config is config and config.to_dict() == kept
