"""The self-test passes every family it should, names why it refuses, and catches wrong masks and positions."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from zoo import FAMILIES, GREEDY, P4, assert_plain, drafters, prompts, shared, tiny

from hf_psd import support
from hf_psd.attention import MaskBuilder
from hf_psd.runner import ModelRunner
from hf_psd.support import check_supported


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(support, "_checked", {})


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family):
    state, weights = torch.get_rng_state(), copy.deepcopy(shared(family).state_dict())
    check_supported(shared(family), "the target")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(weights[name], value) for name, value in shared(family).state_dict().items())
    assert len(support._checked) == 1
    check_supported(shared(family), "the target")
    assert len(support._checked) == 1, "one test per class and configuration"


REAL = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma3",
    "gpt2",
    "gpt_neox",
    "gptj",
    "phi3",
    "cohere",
    "olmo2",
    "stablelm",
    "starcoder2",
    "gpt_oss",
    "smollm3",
    "granite",
    "falcon",
    "opt",
    "deepseek_v3",
    "glm4",
    "codegen",
    "minicpm3",
]


@pytest.mark.parametrize("family", [family for family in REAL if family in CONFIG_MAPPING])
def test_real_sizes_are_shrunk(family):
    """The default configuration of a family is that of a real model; on the meta device it costs nothing to build."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family))
    before = model.config.to_dict()
    check_supported(model, "the target")
    assert model.config.to_dict() == before


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "qwen2", "gemma3_text"])
def test_both_native_attentions(family, implementation):
    check_supported(tiny(family, attn_implementation=implementation), "the target")


WINDOWED = ["mistral", "gemma2", "gemma3_text", "qwen2", "phi3", "starcoder2", "gpt_oss", "cohere2", "olmo3"]


@pytest.mark.parametrize("family", WINDOWED)
def test_mask_without_the_window_is_caught(family, monkeypatch):
    def all_full(self, positions, kv_length, make=MaskBuilder.__call__):
        self.window = 10**6
        return make(self, positions, kv_length)

    monkeypatch.setattr(MaskBuilder, "__call__", all_full)
    with pytest.raises(ValueError, match="logits on ragged rows differ from single rows"):
        check_supported(shared(family), "the target")


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "olmo3"])
def test_one_mask_for_all_layer_types_is_caught(family, monkeypatch):
    def single(self, positions, kv_length, make=MaskBuilder.__call__):
        return make(self, positions, kv_length)["full_attention"]

    monkeypatch.setattr(MaskBuilder, "__call__", single)
    with pytest.raises(ValueError, match="logits on ragged rows differ from single rows|fails on ragged rows"):
        check_supported(shared(family), "the target")


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mistral"])
def test_bool_mask_under_eager_is_caught(family, monkeypatch):
    def boolean(self, config, additive_dtype, make=MaskBuilder.__init__):
        make(self, config, None)

    monkeypatch.setattr(MaskBuilder, "__init__", boolean)
    with pytest.raises(ValueError, match="logits on ragged rows differ from single rows"):
        check_supported(tiny(family, attn_implementation="eager"), "the target")


@pytest.mark.parametrize("family", ["llama", "gpt2", "gptj", "gpt_neox", "cohere", "opt", "deepseek_v3"])
def test_missing_position_ids_are_caught(family, monkeypatch):
    def dropping(self, *args, forward=ModelRunner.forward, **kwargs):
        handle = self.model.register_forward_pre_hook(
            lambda module, args, kwargs: (
                args,
                {name: value for name, value in kwargs.items() if name != "position_ids"},
            ),
            with_kwargs=True,
        )
        try:
            return forward(self, *args, **kwargs)
        finally:
            handle.remove()

    monkeypatch.setattr(ModelRunner, "forward", dropping)
    with pytest.raises(ValueError, match="differ from single rows|fails on ragged rows"):
        check_supported(shared(family), "the target")


def test_stale_kv_is_caught(monkeypatch):
    """A cache that keeps what was rejected."""
    from hf_psd.cache import SlotKV

    def once(self, at, keys, values, write=SlotKV.write):
        fresh = (self.keys[at.slots[:, None], at.positions] == 0).all(-1).all(-1)
        at.positions = torch.where(fresh, at.positions, self.owner.capacity)
        write(self, at, keys, values)

    monkeypatch.setattr(SlotKV, "write", once)
    with pytest.raises(ValueError, match="differ from single rows"):
        check_supported(shared("llama"), "the target")


REFUSED = {
    "bart": "takes no position_ids|encoder-decoder",
    "bloom": "takes no position_ids",
    "bert": "differ from single rows",
    "openai-gpt": "takes no KV cache",
    "gpt_neo": "differ from single rows|fails on ragged rows",
    "llama4_text": "'chunked_attention'",
    "minimax": "'linear_attention'",
    "recurrent_gemma": "recurrent state",
    "xlnet": "takes no position_ids",
}


@pytest.mark.parametrize("family", [family for family in REFUSED if family in CONFIG_MAPPING])
def test_refusals_name_the_reason(family):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family))
    with pytest.raises(ValueError, match=REFUSED[family]) as raised:
        check_supported(model, "assistant_models[3]")
    message = str(raised.value)
    assert message.startswith(
        f"psd: assistant_models[3] {type(model).__name__} (model type '{family}') is not supported: "
    )
    assert message.endswith("Use plain `generate` for it.") and message.count("plain `generate`") == 1


def test_a_class_that_cannot_be_shrunk_is_refused_with_the_reason():
    class Picky(type(shared("llama"))):
        def __init__(self, config):
            if config.vocab_size < 100:
                raise KeyError("no such vocabulary")
            super().__init__(config)

    model = Picky(tiny("llama", vocab_size=200).config)
    with pytest.raises(ValueError, match="self-test could not be set up .KeyError: 'no such vocabulary'"):
        check_supported(model, "the target")


def test_a_copy_that_would_be_large_is_not_built(monkeypatch):
    monkeypatch.setattr(support, "_LARGEST_COPY", 100)
    with pytest.raises(ValueError, match=r"the shrunken copy would have \d+ parameters"):
        check_supported(shared("llama"), "the target")


def test_half_precision_and_quantized_configs_are_tested_in_fp32():
    model = tiny("llama").to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    check_supported(model, "the target")
    assert model.config.quantization_config["load_in_4bit"] and model.config.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "gpt_oss", "qwen3_moe"])
def test_half_precision_targets_run(family, dtype):
    """Not token-identical by rule, but it must run, and a copy must be accepted nearly always."""
    target = tiny(family).to(dtype)
    output = target.generate(
        **prompts(3), **GREEDY, max_new_tokens=8, assistant_models=[copy.deepcopy(target)], psd=True
    )
    assert output.shape[1] == prompts(3)["input_ids"].shape[1] + 8


@pytest.mark.parametrize("implementation", ["flex_attention", "a_registered_one"])
def test_other_attentions_are_switched_for_the_call(implementation):
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("a_registered_one", sdpa_attention_forward)
    target = tiny("llama")
    target.config._attn_implementation = implementation
    output = target.generate(**P4(), **GREEDY, max_new_tokens=8, assistant_models=drafters("noisy", "llama"), psd=True)
    assert target.config._attn_implementation == implementation
    assert (
        output.tolist()
        == assert_plain(shared("llama"), [shared("llama")], **P4(), **GREEDY, max_new_tokens=8).tolist()
    )
