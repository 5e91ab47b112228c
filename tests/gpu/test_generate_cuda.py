"""What `generate` takes and returns, on CUDA: turns on the fast route, translated drafters, quantised models, row streams."""

from __future__ import annotations

import copy
import importlib.util
import tempfile

import pytest
import torch
from tokenizers_of_tests import characters
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from zoo import P4, Fixed, noisy, tiny

import hf_psd
from hf_psd.turns import cache_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GREEDY = dict(do_sample=False, pad_token_id=0, eos_token_id=None, max_new_tokens=30)
WIDE = dict(hidden_size=64, intermediate_size=128, head_dim=16)
SETTINGS = [
    dict(mode="sd"),
    dict(mode="psd"),
    dict(mode="sd", cuda_graphs=False),
    dict(mode="psd", attention="native"),
]


def on_gpu(seed: int = 0):
    return tiny("llama", seed, **WIDE).cuda()


def inputs():
    return {name: tensor.cuda() for name, tensor in P4().items()}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_two_turns(settings):
    """The second turn equals plain without a cache; so does one after plain's own first turn."""
    target = on_gpu()
    near = noisy(tiny("llama", **WIDE), 0.03).cuda()
    first = target.generate(
        **inputs(), **GREEDY, return_dict_in_generate=True, assistant_models=[near], psd=dict(settings)
    )
    plain = target.generate(**inputs(), **GREEDY, return_dict_in_generate=True)
    assert first.sequences.tolist() == plain.sequences.tolist()
    assert cache_of(first).get_seq_length() == cache_of(plain).get_seq_length()
    ids = torch.cat([first.sequences, torch.tensor([[44, 45]] * 4, device="cuda")], 1)
    mask = torch.cat([inputs()["attention_mask"], ids.new_ones(4, ids.shape[1] - 7)], 1)
    expected = target.generate(ids, attention_mask=mask, **GREEDY)
    for cache in (cache_of(first), cache_of(plain)):
        output = target.generate(
            ids, attention_mask=mask, **GREEDY, past_key_values=cache, assistant_models=[near], psd=dict(settings)
        )
        assert output.tolist() == expected.tolist() and not hf_psd.last_stats().errors


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_translated_drafters(do_sample, device):
    """The drafter's device is its own; the law for the same seed does not depend on it."""
    target, ours, theirs = on_gpu(), characters(64), characters(64, seed=1)
    drafter = tiny("llama", 3, **WIDE).to(device)
    ask = GREEDY | dict(do_sample=do_sample, tokenizer=ours, assistant_tokenizers=[theirs], assistant_models=[drafter])
    psd = dict(verification="coupled" if do_sample else "rejection", seed=1, selector=Fixed())
    for mode in ("sd", "psd"):
        output = target.generate(**inputs(), **ask, psd=psd | dict(mode=mode))
        plain = hf_psd.generate(target, **inputs(), **GREEDY | dict(do_sample=do_sample), psd=psd | dict(mode="ar"))
        assert output.tolist() == plain.tolist()
        assert not hf_psd.last_stats().errors


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("mode", ["ar", "sd", "psd"])
def test_bitsandbytes(mode, kind):
    """Texts part at near-ties only; nothing is moved."""
    if importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16)
    settings = nf4 if kind == "nf4" else BitsAndBytesConfig(load_in_8bit=True)
    with tempfile.TemporaryDirectory() as folder:
        tiny("llama", **WIDE).save_pretrained(folder)
        target = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=settings, device_map="cuda", dtype=torch.float16
        )
    plain = target.generate(**inputs(), **GREEDY)
    fast = target.generate(**inputs(), **GREEDY, assistant_models=[target], psd=dict(mode=mode))
    assert not hf_psd.last_stats().errors
    for row, (a, b) in enumerate(zip(plain, fast)):
        at = (a != b).long().argmax().item()
        if a[at] != b[at]:
            text = a[(inputs()["attention_mask"][row] == 0).sum() : at]
            logits = target(text[None]).logits[0, -1].float()
            assert (logits[a[at]] - logits[b[at]]).abs() <= 0.02 * logits.abs().max()


def test_rows_are_streamed():
    class Rows(hf_psd.RowStreamer):
        def put_row(self, row, ids):
            texts[row] += ids

    texts, target = [[], [], [], []], on_gpu()
    output = target.generate(**inputs(), **GREEDY, assistant_models=[copy.deepcopy(target)], psd=True, streamer=Rows())
    assert texts == output[:, 7:].tolist()
