from __future__ import annotations

import pytest
import torch
from cases import DEVICE, DTYPES, INTERPRETED, attention_case
from hypothesis import given
from hypothesis import strategies as st
from psd_kernels import attention_kernel, attention_launch, kv_write, naive_attention, ragged_attention
from psd_kernels.attention_launch import launch_kv_write, launch_ragged_attention

pytestmark = pytest.mark.kernels_ci

# Triton's interpreter multiplies the bit patterns of bf16 matrices.
DOT_DTYPES = DTYPES[:2] if INTERPRETED else DTYPES
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SHAPES = {
    "number": st.integers(0, 2**32),
    "rows": st.integers(1, 3),
    "length": st.integers(1, 4),
    "dtype": st.sampled_from(DTYPES),
    "paged": st.booleans(),
    "size": st.sampled_from([8, 16, 21, 48]),
    "scattered": st.booleans(),
}


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    limit = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.float(), expected.float(), rtol=limit, atol=limit)


@given(
    heads=st.sampled_from([(2, 2), (4, 2), (6, 1)]),
    dim=st.sampled_from([16, 24, 80]),
    options=st.fixed_dictionaries(
        {
            "scaling": st.sampled_from([None, 0.3]),
            "sliding_window": st.sampled_from([None, 1, 5]),
            "softcap": st.sampled_from([None, 4.0]),
            "sinks": st.booleans(),
            "kv_length": st.sampled_from([None, 20]),
        }
    ),
    blocks=st.sampled_from([(16, 16, 1), (16, 16, 3), (16, 32, 2), (32, 16, 2)]),
    **(SHAPES | {"dtype": st.sampled_from(DOT_DTYPES)}),
)
def test_attention_equals_the_specification(heads, dim, options, blocks, **shape):
    case = attention_case(heads=heads[0], kv_heads=heads[1], dim=dim, **shape)
    sinks = torch.linspace(-1, 2, heads[0], device=DEVICE) if options["sinks"] else None
    options = options | {"sinks": sinks}
    if options["kv_length"] is not None:
        case = (*case[:4], case[4].clamp(max=options["kv_length"] - 1))
    block_m, block_n, splits = blocks
    ordered = [options[name] for name in ("scaling", "sliding_window", "softcap", "sinks", "kv_length")]
    got = launch_ragged_attention(*case, *ordered, block_m=block_m, block_n=block_n, splits=splits)
    close(got, naive_attention.ragged_attention(*case, **options))


def some_case(**changes):
    shape = {"rows": 2, "length": 3, "heads": 4, "kv_heads": 2, "dim": 16, "dtype": torch.float32, "paged": True}
    return attention_case(5, **(shape | {"size": 16, "scattered": False} | changes))


@pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel does not see the planted fault")
def test_planted_fault_in_attention_is_seen(monkeypatch):
    case = some_case()
    close(ragged_attention(*case), naive_attention.ragged_attention(*case))
    monkeypatch.setattr(attention_kernel, "LOG2_E", attention_kernel.tl.constexpr(1.0))
    with pytest.raises(AssertionError):
        close(ragged_attention(*case), naive_attention.ragged_attention(*case))


def test_specification_equals_torch_attention():
    query, keys, values, slots, positions = some_case(paged=False, size=30)
    positions = torch.tensor([[9, 10, 11], [4, 5, 6]], device=DEVICE)
    keys, values = keys.nan_to_num(0.5), values.nan_to_num(0.5)
    mask = torch.arange(30, device=DEVICE) <= positions[:, None, :, None]
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        *(x[slots].transpose(1, 2).repeat_interleave(2, 1) for x in (keys, values)),
        attn_mask=mask,
    ).transpose(1, 2)
    close(naive_attention.ragged_attention(query, keys, values, slots, positions), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_public_operator(dtype):
    case = some_case(dtype=dtype)
    close(ragged_attention(*case), naive_attention.ragged_attention(*case))


def test_padding_queries_are_zero_and_cost_no_one_else():
    query, keys, values, blocks, _ = some_case()
    keys, values = keys.nan_to_num(0.5), values.nan_to_num(0.5)
    positions = torch.tensor([[-2, -1, 0], [46, 47, 48]], device=DEVICE)
    for attend in (ragged_attention, naive_attention.ragged_attention):
        out = attend(query, keys, values, blocks, positions)
        assert out.isfinite().all()
        assert not out[0, :2].any() and not out[1, 2].any() and out[0, 2].any() and out[1, 1].any()


@given(heads=st.sampled_from([1, 3]), dim=st.sampled_from([8, 24]), block=st.sampled_from([8, 32]), **SHAPES)
def test_kv_write_equals_the_specification(heads, dim, block, **shape):
    query, keys, values, blocks, positions = attention_case(heads=heads, kv_heads=heads, dim=dim, **shape)
    if shape["number"] % 4 == 0:
        blocks = torch.where(torch.arange(blocks.numel(), device=DEVICE).view(blocks.shape) == 0, -1, blocks)
    new_keys, new_values = query, query.flip(0)
    expected = keys.clone(), values.clone()
    naive_attention.kv_write(*expected, new_keys, new_values, blocks, positions)
    launch_kv_write(keys, values, new_keys, new_values, blocks, positions, block=block)
    for got, wanted in zip((keys, values), expected, strict=True):
        assert torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0))


def test_kv_write_stores_what_is_read():
    _, keys, values, slots, _ = some_case(paged=False, size=12)
    positions = torch.tensor([[-1, 0, 1], [10, 11, 12]], device=DEVICE)
    new = torch.randn(2, 2, 3, 2, 16, device=DEVICE)
    before = keys.clone(), values.clone()
    kv_write(keys, values, new[0], new[1], slots, positions)
    for cache, states, old in zip((keys, values), new, before, strict=True):
        assert torch.equal(cache[slots[0], :2], states[0, 1:]) and torch.equal(cache[slots[1], 10:], states[1, :2])
        cache[slots[0], :2], cache[slots[1], 10:] = old[slots[0], :2], old[slots[1], 10:]
        assert torch.equal(cache.nan_to_num(7.0), old.nan_to_num(7.0))


def test_planted_fault_in_kv_write_is_seen(monkeypatch):
    """A kernel that clamps padding to position 0 instead of skipping it."""

    class Clamped:
        def __getitem__(self, grid):
            return lambda *a, **k: attention_kernel.kv_write_kernel[grid](*a[:5], a[5].clamp(min=0), *a[6:], **k)

    query, keys, values, slots, _ = some_case(paged=False, heads=2)
    positions = torch.tensor([[-1, 2, 3], [4, 5, 6]], device=DEVICE)
    expected = keys.clone(), values.clone()
    naive_attention.kv_write(*expected, query, query, slots, positions)
    monkeypatch.setattr(attention_launch, "kv_write_kernel", Clamped())
    launch_kv_write(keys, values, query, query, slots, positions)
    assert not torch.equal(keys.nan_to_num(7.0), expected[0].nan_to_num(7.0))
