from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from cases import DEVICE, DTYPES, INTERPRETED, LAYOUTS, counters, lay_out
from hypothesis import given
from hypothesis import strategies as st
from psd_kernels import DRAFT, common, naive, philox, sample, tiles
from psd_kernels.sample_kernel import launch_sample

pytestmark = pytest.mark.kernels_ci


def words_kernel():
    @triton.jit(do_not_specialize=["position", "request", "tag", "key0", "key1"])
    def kernel(out_ptr, noise_ptr, position, request, tag, key0, key1, BLOCK: tl.constexpr):
        lane = tl.arange(0, BLOCK)
        c1, c2, c3 = position.to(tl.uint32), request.to(tl.uint32), tag.to(tl.uint32)
        k0, k1 = key0.to(tl.uint32), key1.to(tl.uint32)
        r0, r1, r2, r3 = tiles.philox(lane.to(tl.uint32), c1, c2, c3, k0, k1)
        tl.store(out_ptr + lane * 4, r0.to(tl.int64))
        tl.store(out_ptr + lane * 4 + 1, r1.to(tl.int64))
        tl.store(out_ptr + lane * 4 + 2, r2.to(tl.int64))
        tl.store(out_ptr + lane * 4 + 3, r3.to(tl.int64))
        token = tl.arange(0, 4 * BLOCK)
        tl.store(noise_ptr + token, tiles.to_exponential(tiles.uniforms(0, c1, c2, c3, k0, k1, 4 * BLOCK)))

    return kernel


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, 0x0123456789ABCDEF])
def test_kernel_noise_has_the_specified_bits(seed):
    position, request, tag = 2**31 - 3, 77, 3 | 5 << 8
    words = torch.empty(64, 4, dtype=torch.int64, device=DEVICE)
    noise = torch.empty(256, device=DEVICE)
    words_kernel()[(1,)](words, noise, position, request, tag, *common.signed_words(seed), BLOCK=64)
    full = [torch.full((64,), value, device=DEVICE) for value in (position, request, tag)]
    key = seed & philox.WORD, (seed >> 32) & philox.WORD
    expected = torch.stack(philox.philox4x32(torch.arange(64, device=DEVICE), *full, *key), 1)
    assert torch.equal(words, expected)
    expected_noise = philox.log_exponential(seed, full[0][:1], full[1][:1], 5, 3, 256)[0]
    torch.testing.assert_close(noise.log(), expected_noise, rtol=1e-6, atol=1e-6)


def run(logits, temperature, seed, numbers, block, splits):
    return naive.Sample(
        *launch_sample(
            logits,
            temperature,
            *common.seed_words(seed, DEVICE),
            *numbers.values(),
            DRAFT,
            block=block,
            max_splits=splits,
        )
    )


def assert_same_sample(got: naive.Sample, logits, temperature, seed, numbers) -> None:
    expected = naive.sample(logits, temperature=temperature, seed=seed, purpose=DRAFT, **numbers)
    fine = ~naive.bad_rows(logits)
    assert torch.equal(got.ids, expected.ids)
    torch.testing.assert_close(got.logit[fine], expected.logit[fine])
    torch.testing.assert_close(got.logsumexp[fine], expected.logsumexp[fine], rtol=1e-6, atol=1e-6)


@given(
    number=st.integers(0, 2**32),
    rows=st.integers(1, 3),
    vocab=st.integers(1, 60),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    heat=st.sampled_from([None, 0.0, 1.0]),
    fault=st.sampled_from(["", "", "masked", "bad"]),
    block=st.sampled_from([8, 16, 64]),
    splits=st.sampled_from([1, 2, 4]),
)
def test_kernel_equals_the_specification(number, rows, vocab, dtype, layout, heat, fault, block, splits):
    g = torch.Generator().manual_seed(number)
    logits = torch.randn(rows, vocab, generator=g) * 3
    if fault == "masked":
        logits[torch.rand(logits.shape, generator=g) < 0.7] = -math.inf
    if fault == "bad":
        logits[0, int(torch.randint(vocab, (), generator=g))] = (math.nan, math.inf)[number % 2]
    logits = lay_out(logits.to(DEVICE, dtype), layout)
    temperature = None
    if heat is not None:
        temperature = ((torch.rand(rows, generator=g) + 0.3) * heat).to(DEVICE)
        if heat and number % 2:
            temperature[0] = 0
    numbers = counters(rows, g)
    seed = torch.tensor(number, device=DEVICE) if number % 3 == 0 else number
    assert_same_sample(run(logits, temperature, seed, numbers, block, splits), logits, temperature, seed, numbers)


@pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel does not see the planted fault")
def test_planted_fault_is_seen(monkeypatch):
    @triton.jit
    def lanes_swapped(start, position, request, tag, key0, key1, BLOCK: tl.constexpr):
        quads = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
        r0, r1, r2, r3 = tiles.philox(quads, position, request, tag, key0, key1)
        return tiles.to_uniform(tl.interleave(tl.interleave(r0, r1), tl.interleave(r2, r3)))

    numbers = counters(4, torch.Generator().manual_seed(0))
    logits, temperature = torch.randn(4, 40), torch.ones(4)
    arguments = logits, temperature, 5, numbers
    assert_same_sample(run(*arguments, 16, 2), *arguments)
    monkeypatch.setattr(tiles, "uniforms", lanes_swapped)
    with pytest.raises(AssertionError):
        assert_same_sample(run(*arguments, 16, 2), *arguments)


def test_public_operator():
    numbers = counters(2, torch.Generator().manual_seed(1))
    logits, temperature = torch.randn(2, 70, device=DEVICE), torch.ones(2, device=DEVICE)
    got = sample(logits, temperature=temperature, seed=3, purpose=DRAFT, **numbers)
    assert isinstance(got, naive.Sample)
    assert_same_sample(got, logits, temperature, 3, numbers)
