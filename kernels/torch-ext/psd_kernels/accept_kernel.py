"""`accept`: two scalars read for each candidate, whatever the vocabulary."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import philox as spec
from .common import guard, signed_words
from .tiles import HIGHEST, LOWEST, load_key, philox, to_uniform

ACCEPT_TAG = tl.constexpr(spec.ACCEPT)
ACCEPT_ROWS = 8


VARYING = "rows count seed_low seed_high draft_r draft_g target_r target_g uniform_r uniform_g".split()


@triton.jit(do_not_specialize=VARYING)
def accept_kernel(
    draft_ptr, target_ptr, uniform_ptr, position_ptr, request_ptr, round_ptr, seed_ptr, accepted_ptr, first_ptr,
    rows, count, seed_low, seed_high, draft_r, draft_g, target_r, target_g, uniform_r, uniform_g,
    HAS_UNIFORM: tl.constexpr, HAS_SEED: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Grid (rows / ROWS)."""
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    g = tl.arange(0, COUNT)[None, :]
    there = (r < rows) & (g < count)
    wide = r.to(tl.int64)
    log_q = tl.load(draft_ptr + wide * draft_r + g * draft_g, mask=there, other=LOWEST).to(tl.float32)
    log_p = tl.load(target_ptr + wide * target_r + g * target_g, mask=there, other=LOWEST).to(tl.float32)
    if HAS_UNIFORM:
        u = tl.load(uniform_ptr + wide * uniform_r + g * uniform_g, mask=there, other=1.0)
    else:
        key0, key1 = load_key(seed_ptr, seed_low, seed_high, HAS_SEED)
        position = (tl.load(position_ptr + r, mask=r < rows, other=0) + g).to(tl.uint32)
        request = tl.load(request_ptr + r, mask=r < rows, other=0).to(tl.uint32)
        tag = ((tl.load(round_ptr + r, mask=r < rows, other=0) << 8) | ACCEPT_TAG).to(tl.uint32)
        u = to_uniform(philox(tl.full((), 0, tl.uint32), position, request, tag, key0, key1)[0])
    accepted = (tl.log(u) < log_p - log_q) & (log_q > LOWEST) & (log_q < HIGHEST) & there
    tl.store(accepted_ptr + r * count + g, accepted.to(tl.uint8), mask=there)
    first = tl.min(tl.where((g < count) & (accepted == 0), g, count), 1)
    rows_of = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(first_ptr + rows_of, first.to(tl.int64), mask=rows_of < rows)


def launch_accept(
    draft_logprob: Tensor,
    target_logprob: Tensor,
    uniforms: Tensor | None,
    seed_tensor: Tensor | None,
    seed: int,
    position: Tensor | None,
    request: Tensor | None,
    round: Tensor | None,
    *,
    block_rows: int = ACCEPT_ROWS,
) -> tuple[Tensor, Tensor]:
    """Arguments as in `naive.accept`; returns (accepted, first_rejection)."""
    rows, count = draft_logprob.shape
    device = draft_logprob.device
    accepted = torch.empty(rows, count, dtype=torch.bool, device=device)
    first = torch.empty(rows, dtype=torch.int64, device=device)
    numbers = draft_logprob if uniforms is None else uniforms
    counters = [first if counter is None else counter for counter in (position, request, round)]
    with guard(draft_logprob):
        accept_kernel[(triton.cdiv(rows, block_rows),)](
            draft_logprob, target_logprob, numbers, *counters, first if seed_tensor is None else seed_tensor,
            accepted.view(torch.uint8), first,
            rows, count, *signed_words(seed), *draft_logprob.stride(), *target_logprob.stride(), *numbers.stride(),
            HAS_UNIFORM=uniforms is not None, HAS_SEED=seed_tensor is not None,
            ROWS=block_rows, COUNT=max(16, triton.next_power_of_2(count)), num_warps=1,
        )  # fmt: skip
    return accepted, first
