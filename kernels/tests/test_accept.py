from __future__ import annotations

import math

import pytest
import torch
from cases import DEVICE, DTYPES, INTERPRETED, LAYOUTS, counters, lay_out
from hypothesis import given
from hypothesis import strategies as st
from psd_kernels import accept, accept_kernel, common, naive
from psd_kernels.accept_kernel import launch_accept

pytestmark = pytest.mark.kernels_ci


def case(number, rows, count, dtype=torch.float32, layout="dense"):
    g = torch.Generator().manual_seed(number)
    log_q, log_p = torch.rand(2, rows, count, generator=g).log().unbind()
    log_p = torch.where(torch.rand(rows, count, generator=g) < 0.2, -math.inf, log_p)
    log_q = torch.where(torch.rand(rows, count, generator=g) < 0.1, -math.inf, log_q)
    log_q, log_p = (lay_out(x.to(DEVICE, dtype), layout) for x in (log_q, log_p))
    return log_q, log_p, torch.rand(rows, count, generator=g).clamp(min=1e-9).to(DEVICE), counters(rows, g)


@given(
    number=st.integers(0, 2**32),
    rows=st.integers(1, 9),
    count=st.integers(1, 17),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    given_uniforms=st.booleans(),
    block_rows=st.sampled_from([1, 4, 8]),
)
def test_kernel_equals_the_specification(number, rows, count, dtype, layout, given_uniforms, block_rows):
    log_q, log_p, uniforms, numbers = case(number, rows, count, dtype, layout)
    if given_uniforms:
        got = launch_accept(log_q, log_p, uniforms, None, 0, None, None, None, block_rows=block_rows)
        expected = naive.accept(log_q, log_p, uniforms=uniforms)
    else:
        seed = common.seed_words(torch.tensor(number) if number % 2 else number, DEVICE)
        got = launch_accept(log_q, log_p, None, *seed, *numbers.values(), block_rows=block_rows)
        expected = naive.accept(log_q, log_p, seed=number, **numbers)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


@pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel does not see the planted fault")
def test_planted_fault_is_seen(monkeypatch):
    log_q, log_p, _, numbers = case(0, 8, 8)
    assert torch.equal(accept(log_q, log_p, seed=1, **numbers)[0], naive.accept(log_q, log_p, seed=1, **numbers)[0])
    monkeypatch.setattr(accept_kernel, "ACCEPT_TAG", accept_kernel.tl.constexpr(1))
    assert not torch.equal(
        accept(log_q, log_p, seed=1, **numbers)[0], naive.accept(log_q, log_p, seed=1, **numbers)[0]
    )


def test_columns_of_a_wide_tensor_are_read_in_place():
    """The candidates' log-probabilities as views into [R, G, V]: no copy, whatever the vocabulary."""
    log_q, log_p, uniforms, _ = case(3, 4, 5)
    wide_q, wide_p = (torch.full((4, 5, 300), math.nan, device=DEVICE) for _ in range(2))
    wide_q[..., 123], wide_p[..., 123] = log_q, log_p
    got = accept(wide_q[..., 123], wide_p[..., 123], uniforms=uniforms)
    assert torch.equal(got.accepted, naive.accept(log_q, log_p, uniforms=uniforms).accepted)
