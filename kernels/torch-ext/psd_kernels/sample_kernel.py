"""`sample` in two launches: race and logsumexp over slices of the vocabulary, then join the slices."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import guard, row_unit, signed_words, split_rows
from .tiles import (
    HIGHEST,
    LOWEST,
    NO_ID,
    join_logsumexp,
    load_key,
    reduce_best,
    scan_argmax,
    scan_logsumexp,
    scan_race,
)

SAMPLE_BLOCK = 1024
SAMPLE_SPLITS = 64


SCAN_VARYING = "tiles seed_low seed_high logits_r purpose".split()


@triton.jit(do_not_specialize=SCAN_VARYING)
def sample_scan_kernel(
    logits_ptr, temperature_ptr, position_ptr, request_ptr, round_ptr, seed_ptr,
    part_ptr, score_ptr, token_ptr,
    seed_low, seed_high, purpose, vocab, tiles, logits_r, logits_v,
    GREEDY: tl.constexpr, HAS_SEED: tl.constexpr, UNIT: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, splits). Leaves the winner of each slice with its score, and the slice's logsumexp."""
    row = tl.program_id(0)
    split = tl.program_id(1)
    cell = row * SPLITS + split
    first = split * tiles * BLOCK
    last = tl.minimum(first + tiles * BLOCK, vocab)
    source = logits_ptr + row.to(tl.int64) * (logits_r * UNIT)
    temperature = tl.full((), 0.0, tl.float32)
    if not GREEDY:
        temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        inverse = tl.div_rn(1.0, temperature)
        key0, key1 = load_key(seed_ptr, seed_low, seed_high, HAS_SEED)
        position = tl.load(position_ptr + row).to(tl.uint32)
        request = tl.load(request_ptr + row).to(tl.uint32)
        tag = ((tl.load(round_ptr + row) << 8) | purpose).to(tl.uint32)
        score, token, log_z = scan_race(
            source, logits_v, first, last, inverse, position, request, tag, key0, key1, BLOCK
        )
    else:
        score, token = scan_argmax(source, logits_v, first, last, BLOCK)
        log_z = scan_logsumexp(source, logits_v, first, last, 1.0, BLOCK)
    tl.store(part_ptr + cell, log_z)
    tl.store(score_ptr + cell, score)
    tl.store(token_ptr + cell, token)


JOIN_VARYING = "splits logits_r".split()


@triton.jit(do_not_specialize=JOIN_VARYING)
def sample_join_kernel(
    logits_ptr, temperature_ptr, part_ptr, score_ptr, token_ptr, out_id_ptr, out_logit_ptr, out_lse_ptr,
    splits, logits_r, logits_v,
    GREEDY: tl.constexpr, UNIT: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Grid (rows)."""
    row = tl.program_id(0)
    s = tl.arange(0, SPLITS)
    held = s < splits
    cells = row * SPLITS + s
    parts = tl.load(part_ptr + cells, mask=held, other=LOWEST)
    scores = tl.load(score_ptr + cells, mask=held, other=LOWEST)
    tokens = tl.load(token_ptr + cells, mask=held, other=NO_ID)
    _, token = reduce_best(scores, tokens)
    logsumexp = tl.sum(join_logsumexp(parts[None, :]), 0)
    token = tl.where((logsumexp > LOWEST) & (logsumexp < HIGHEST), token, 0)
    inverse = 1.0
    if not GREEDY:
        temperature = tl.load(temperature_ptr + row)
        inverse = tl.where(temperature > 0, tl.div_rn(1.0, tl.where(temperature > 0, temperature, 1.0)), 1.0)
    source = logits_ptr + row.to(tl.int64) * (logits_r * UNIT)
    tl.store(out_id_ptr + row, token.to(tl.int64))
    tl.store(out_logit_ptr + row, tl.load(source + token.to(tl.int64) * logits_v).to(tl.float32) * inverse)
    tl.store(out_lse_ptr + row, logsumexp)


def launch_sample(
    logits: Tensor,
    temperature: Tensor | None,
    seed_tensor: Tensor | None,
    seed: int,
    position: Tensor,
    request: Tensor,
    round: Tensor,
    purpose: int,
    *,
    block: int = SAMPLE_BLOCK,
    max_splits: int = SAMPLE_SPLITS,
    warps: int = 4,
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments as in `naive.sample`, the counters contiguous int64 [R]; returns (ids, logit, logsumexp)."""
    rows, vocab = logits.shape
    device = logits.device
    splits, tiles = split_rows(rows, vocab, block, device, max_splits)
    ids = torch.empty(rows, dtype=torch.int64, device=device)
    logit = torch.empty(rows, dtype=torch.float32, device=device)
    logsumexp = torch.empty_like(logit)
    parts = torch.empty(2, rows, max_splits, dtype=torch.float32, device=device)
    tokens = torch.empty(rows, max_splits, dtype=torch.int32, device=device)
    unit = row_unit(logits)
    heat = position if temperature is None else temperature
    key = position if seed_tensor is None else seed_tensor
    strides = logits.stride(0) // unit, logits.stride(1)
    with guard(logits):
        sample_scan_kernel[(rows, splits)](
            logits, heat, position, request, round, key, parts[0], parts[1], tokens,
            *signed_words(seed), purpose, vocab, tiles, *strides,
            GREEDY=temperature is None, HAS_SEED=seed_tensor is not None, UNIT=unit,
            SPLITS=max_splits, BLOCK=block, num_warps=warps,
        )  # fmt: skip
        sample_join_kernel[(rows,)](
            logits, heat, parts[0], parts[1], tokens, ids, logit, logsumexp, splits, *strides,
            GREEDY=temperature is None, UNIT=unit, SPLITS=max_splits, num_warps=1,
        )  # fmt: skip
    return ids, logit, logsumexp
