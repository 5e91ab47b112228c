"""Prompts with images: the target reads them as in plain `generate`, and the text that follows is the same."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from zoo import GREEDY, P4, Fixed, Recorder, shared, tiny

import hf_psd
from hf_psd.turns import cache_of

MODES = ("ar", "sd", "psd")
IMAGE = 63
_VISION = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8
)
_TEXT = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=512, initializer_range=0.5, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
)  # fmt: skip
_WINDOWED = dict(
    head_dim=8, query_pre_attn_scalar=1, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
)
SETTINGS = {
    "llava": dict(
        vision_config=dict(model_type="clip_vision_model", **_VISION),
        text_config=dict(model_type="llama", **_TEXT),
        image_token_index=IMAGE,
    ),
    "gemma3": dict(
        vision_config=dict(model_type="siglip_vision_model", **_VISION),
        text_config=dict(model_type="gemma3_text", **_TEXT, **_WINDOWED),
        image_token_id=IMAGE,
        mm_tokens_per_image=4,
    ),
}


@functools.cache
def seeing(family: str):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, **SETTINGS[family])).eval()


def prompt(family: str) -> dict[str, torch.Tensor]:
    """Two rows with an image each, the second left-padded."""
    ids = torch.tensor([[5, *[IMAGE] * 4, 7, 8], [0, 9, *[IMAGE] * 4, 6]])
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    kinds = dict(token_type_ids=(ids == IMAGE).long()) if family == "gemma3" else {}
    return dict(input_ids=ids, attention_mask=(ids != 0).long(), pixel_values=pixels, **kinds)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", SETTINGS)
def test_text_after_an_image_is_plain(family, mode):
    target, ask = seeing(family), GREEDY | dict(max_new_tokens=20)
    expected = target.generate(**prompt(family), **ask).tolist()
    blind = {name: value for name, value in prompt(family).items() if name in ("input_ids", "attention_mask")}
    assert expected != target.generate(**blind, **ask).tolist(), "the image matters"
    for models in ([target], [shared("llama", 11), "prompt_lookup"]):
        with Recorder(models[0]) as recorder:
            output = target.generate(
                **prompt(family), **ask, assistant_models=models, psd=dict(mode=mode, selector=Fixed())
            )
        assert output.tolist() == expected and not hf_psd.last_stats().errors
        assert mode == "ar" or (recorder.forwards and hf_psd.last_stats().drafted)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", SETTINGS)
def test_text_alone(family, mode):
    target, ask = seeing(family), P4() | GREEDY | dict(max_new_tokens=20)
    output = target.generate(**ask, assistant_models=[target], psd=dict(mode=mode))
    assert output.tolist() == target.generate(**ask).tolist()
    if family == "gemma3":  # its processor names the kind of each token even where all are text
        ask["token_type_ids"] = torch.zeros_like(ask["input_ids"])
        assert target.generate(**ask, psd=dict(mode=mode)).tolist() == output.tolist()


@pytest.mark.parametrize("family", SETTINGS)
def test_the_next_turn(family):
    target, ask = seeing(family), GREEDY | dict(max_new_tokens=8, return_dict_in_generate=True)
    plain = target.generate(**prompt(family), **ask)
    fast = target.generate(**prompt(family), **ask, assistant_models=[target], psd=True)
    assert cache_of(fast).get_seq_length() == cache_of(plain).get_seq_length() == 14
    ids = torch.cat([plain.sequences, torch.tensor([[44, 45]] * 2)], 1)
    mask = torch.cat([prompt(family)["attention_mask"], torch.ones(2, 10, dtype=torch.long)], 1)
    with pytest.raises(ValueError, match="beside a cache of an earlier turn"):
        more = prompt(family) | dict(input_ids=ids, attention_mask=mask)
        more.pop("token_type_ids", None)
        target.generate(**more, **GREEDY, past_key_values=cache_of(fast), psd=True)
    turns = [
        target.generate(ids, attention_mask=mask, **GREEDY, max_new_tokens=8, past_key_values=cache, **psd)
        for cache, psd in ((cache_of(plain), {}), (cache_of(fast), dict(psd=True, assistant_models=[target])))
    ]
    assert turns[0].tolist() == turns[1].tolist()


@pytest.mark.parametrize("family", SETTINGS)
def test_sequences_and_scores(family):
    target = seeing(family)
    draw = dict(do_sample=True, num_return_sequences=3, max_new_tokens=6, pad_token_id=0)
    first = target.generate(**prompt(family), **draw, psd=dict(seed=1, verification="coupled", mode="ar"))
    assert first.shape == (6, 13)
    second = target.generate(
        **prompt(family), **draw, assistant_models=[target], psd=dict(seed=1, verification="coupled", mode="psd")
    )
    assert first.tolist() == second.tolist()
    returned = GREEDY | dict(return_dict_in_generate=True, output_logits=True, max_new_tokens=6)
    plain, fast = (target.generate(**prompt(family), **returned, **psd) for psd in ({}, dict(psd=True)))
    for ours, theirs in zip(fast.logits, plain.logits):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


QWEN = dict(
    vision_config=dict(depth=1, embed_dim=32, hidden_size=32, num_heads=4, patch_size=8, in_channels=3),
    text_config=dict(rope_parameters=dict(rope_type="default", mrope_section=[1, 1, 2], rope_theta=1e4), **_TEXT),
    image_token_id=IMAGE, video_token_id=62, vision_start_token_id=61, vision_end_token_id=60,
)  # fmt: skip


def test_positions_in_three_directions_are_refused():
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model("qwen2_vl", **QWEN)).eval()
    inputs = dict(pixel_values=torch.randn(4, 3 * 2 * 64), image_grid_thw=torch.tensor([[1, 2, 2]]))
    with Recorder(model) as forwards, pytest.raises(ValueError, match="in three directions; use plain"):
        model.generate(torch.tensor([[5, 61, IMAGE, 60, 7]]), **inputs, **GREEDY, max_new_tokens=4, psd=True)
    assert forwards.forwards == 0


@pytest.mark.parametrize("name", ["token_type_ids", "labels"])
def test_inputs_that_a_text_model_reads_at_each_step_are_refused(name):
    target = tiny("gpt2")
    with Recorder(target) as forwards, pytest.raises(ValueError, match=rf"model input\(s\) {name} cannot be used"):
        target.generate(**P4(), **GREEDY, psd=True, **{name: torch.zeros_like(P4()["input_ids"])})
    assert forwards.forwards == 0
