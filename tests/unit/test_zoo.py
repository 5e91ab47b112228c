"""The tiny models are worth testing with: quick to build, deterministic, and varied in what they write."""

from __future__ import annotations

import pytest
import torch
from zoo import FAMILIES, GREEDY, P4, WINDOW, Recorder, noisy, prompts, tiny

REQUIRED = """llama mistral qwen2 qwen3 qwen3_moe mixtral gemma gemma2 gemma3_text gpt2 gpt_neox gptj phi3 phi cohere
cohere2 olmo2 stablelm starcoder2 gpt_oss smollm3 granite""".split()
SLIDING = "mistral qwen2 gemma2 gemma3_text phi3 cohere2 olmo3 starcoder2 gpt_oss smollm3 exaone4".split()


def continuation(family: str, seed: int, length: int = 40) -> torch.Tensor:
    inputs = P4()
    return tiny(family, seed).generate(**inputs, **GREEDY, max_new_tokens=length)[:, inputs["input_ids"].shape[1] :]


def test_required_families_are_there():
    assert set(REQUIRED) <= set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_varied_and_repeatable(family):
    texts = [continuation(family, seed) for seed in (0, 0, 1)]
    assert texts[0].tolist() == texts[1].tolist()
    for text in texts:
        assert min(len(set(row)) for row in text[:, 10:].tolist()) > 2
    assert texts[0].tolist() != texts[2].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_models_are_small_float32_and_long_enough(family):
    model = tiny(family)
    assert not model.training
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert sum(weight.numel() for weight in model.parameters()) < 100_000
    assert model.config.vocab_size == 64
    assert model.config.max_position_embeddings >= 128


@pytest.mark.parametrize("family", FAMILIES)
def test_text_depends_on_tokens_far_back(family):
    """Without this a wrong mask or a wrong position would leave the text as it is."""
    model, rows = tiny(family), torch.randint(3, 64, (16, 12), generator=torch.Generator().manual_seed(0))
    changed = rows.clone()
    changed[:, 7] = (changed[:, 7] - 3 + 30) % 61 + 3
    with torch.no_grad():
        moved = (model(rows).logits[:, -1] - model(changed).logits[:, -1]).abs().amax(-1)
    assert moved.median() > 0.1


@pytest.mark.parametrize("family", SLIDING)
def test_sliding_windows_are_in_use(family):
    """A longer window must give other logits, or the window of the tiny model is not in force."""
    rows = torch.randint(3, 64, (4, 3 * WINDOW), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        short, long = tiny(family)(rows).logits, tiny(family, sliding_window=64)(rows).logits
    assert (short[:, -1] - long[:, -1]).abs().max() > 0.01
    assert torch.allclose(short[:, : WINDOW - 1], long[:, : WINDOW - 1], atol=1e-4)


def test_building_leaves_the_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    tiny("llama")
    assert torch.rand(1) == expected


def test_noisy_is_a_copy_that_differs():
    model = tiny("llama")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    other = noisy(model, 0.03)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert not torch.equal(other.lm_head.weight, model.lm_head.weight)
    assert all(weight.isfinite().all() for weight in noisy(tiny("gpt_oss"), 0.03).parameters())


def test_prompts_are_ragged_and_left_padded():
    inputs = prompts(16, seed=1, max_len=9)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    assert ids.shape == mask.shape == (16, mask.sum(-1).max())
    assert len(set(mask.sum(-1).tolist())) > 3
    assert (mask.diff(dim=-1) >= 0).all()
    assert (ids[mask == 0] == 0).all()
    assert (ids[mask == 1] > 2).all()


def test_recorder_counts_forwards_and_rows():
    model = tiny("llama")
    with Recorder(model) as recorder:
        model.generate(**P4(), **GREEDY, max_new_tokens=3)
    assert recorder.shapes == [(4, 7), (4, 1), (4, 1)]
    assert (recorder.forwards, recorder.rows) == (3, [4, 4, 4])
    model(torch.tensor([[5]]))
    assert recorder.forwards == 3
