"""Ragged attention over slots or blocks: slices of a row's keys in parallel (flash-decoding), then a join.

Lengths and block tables are read on the device. All query heads that share a KV head sit in one tile, so keys and
values are read once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import LOWEST

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def soften(scores, SOFTCAP: tl.constexpr):
    """softcap * tanh(scores / softcap)."""
    return SOFTCAP * (1.0 - 2.0 / (tl.exp(scores * (2.0 / SOFTCAP)) + 1.0))


SPLIT_VARYING = (
    "length limit splits table_width query_r query_t query_h table_r table_m positions_r positions_t".split()
)


@triton.jit(do_not_specialize=SPLIT_VARYING)
def attention_split_kernel(
    query_ptr, key_ptr, value_ptr, table_ptr, positions_ptr, acc_ptr, peak_ptr, total_ptr,
    scaling, length, limit, splits, table_width, block_size, kv_heads,
    query_r, query_t, query_h, key_n, key_b, key_h, value_n, value_b, value_h,
    table_r, table_m, positions_r, positions_t,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, PAGED: tl.constexpr, WHOLE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (rows * kv_heads, splits, query tiles). Row m of a tile is query m // GROUP, head m % GROUP of the group.

    PAGED: the row has a block table. WHOLE: a key tile never crosses a block, so one lookup serves it.
    """
    row = tl.program_id(0) // kv_heads
    kv_head = tl.program_id(0) % kv_heads
    split = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    t = m // GROUP
    head = kv_head * GROUP + m % GROUP
    live = t < length
    position = tl.load(positions_ptr + row * positions_r + t * positions_t, mask=live, other=-1).to(tl.int32)
    position = tl.where(position < limit, position, -1)
    last = tl.max(position, 0) + 1
    first = tl.full((), 0, tl.int32)
    if WINDOW > 0:
        reach = tl.where(position >= 0, position - (WINDOW - 1), limit)
        first = tl.maximum(tl.min(reach, 0), 0) // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(tl.maximum(last - first, 0), splits), BLOCK_N) * BLOCK_N
    start = first + split * share
    stop = tl.minimum(start + share, last)
    # partial results: [R, T, H, splits]
    cell = ((row * length + t) * (kv_heads * GROUP) + head) * splits + split
    peak = tl.full((BLOCK_M,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if start < stop:
        d = tl.arange(0, DIM_BLOCK)
        inside = d < DIM
        wide = row.to(tl.int64)
        source = query_ptr + wide * query_r + t[:, None] * query_t + head[:, None] * query_h + d[None, :]
        query = tl.load(source, mask=live[:, None] & inside[None, :], other=0.0)
        acc = tl.zeros((BLOCK_M, DIM_BLOCK), tl.float32)
        block = tl.load(table_ptr + row * table_r).to(tl.int64)
        for n0 in range(start, stop, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            there = n < stop
            if PAGED:
                if WHOLE:
                    block = tl.load(table_ptr + row * table_r + n0 // block_size * table_m).to(tl.int64)
                    offset = n0 % block_size + tl.arange(0, BLOCK_N)
                    base_k = block * (key_n * UNIT) + offset * (key_b * UNIT)
                    base_v = block * (value_n * UNIT) + offset * (value_b * UNIT)
                else:
                    many = tl.load(table_ptr + row * table_r + n // block_size * table_m, mask=there, other=0)
                    base_k = many.to(tl.int64) * (key_n * UNIT) + n % block_size * (key_b * UNIT)
                    base_v = many.to(tl.int64) * (value_n * UNIT) + n % block_size * (value_b * UNIT)
            else:
                base_k = block * (key_n * UNIT) + n * (key_b * UNIT)
                base_v = block * (value_n * UNIT) + n * (value_b * UNIT)
            base_k += kv_head * (key_h * UNIT)
            base_v += kv_head * (value_h * UNIT)
            keys = tl.load(key_ptr + base_k[None, :] + d[:, None], mask=there[None, :] & inside[:, None], other=0.0)
            scores = tl.dot(query, keys, input_precision=PRECISION) * scaling
            if SOFTCAP > 0:
                scores = soften(scores, SOFTCAP)
            seen = (n[None, :] <= position[:, None]) & there[None, :]
            if WINDOW > 0:
                seen = seen & (n[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores * LOG2_E, LOWEST)
            new = tl.maximum(peak, tl.max(scores, 1))
            base = tl.where(new == LOWEST, 0.0, new)
            weights = tl.exp2(scores - base[:, None])
            fade = tl.exp2(peak - base)
            total = total * fade + tl.sum(weights, 1)
            values = tl.load(
                value_ptr + base_v[:, None] + d[None, :], mask=there[:, None] & inside[None, :], other=0.0
            )
            acc = tl.dot(weights.to(values.dtype), values, acc * fade[:, None], input_precision=PRECISION)
            peak = new
        target = acc_ptr + cell.to(tl.int64)[:, None] * DIM + d[None, :]
        tl.store(target, acc, mask=live[:, None] & inside[None, :])
    tl.store(peak_ptr + cell, peak, mask=live)
    tl.store(total_ptr + cell, total, mask=live)


JOIN_VARYING = "splits".split()


@triton.jit(do_not_specialize=JOIN_VARYING)
def attention_join_kernel(
    acc_ptr, peak_ptr, total_ptr, sink_ptr, out_ptr, splits, heads,
    DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, HAS_SINK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Grid (R * T * H). A slice without keys has peak -inf and left no accumulator to read."""
    cell = tl.program_id(0)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, DIM_BLOCK)
    peaks = tl.load(peak_ptr + cell * splits + s, mask=s < splits, other=LOWEST)
    totals = tl.load(total_ptr + cell * splits + s, mask=s < splits, other=0.0)
    top = tl.max(peaks, 0)
    extra = tl.full((), 0.0, tl.float32)
    if HAS_SINK:
        sink = tl.load(sink_ptr + cell % heads).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
        extra = tl.exp2(sink - top)
    base = tl.where(top == LOWEST, 0.0, top)
    fade = tl.exp2(peaks - base)
    whole = tl.sum(totals * fade, 0) + extra
    filled = (peaks > LOWEST)[:, None] & (d < DIM)[None, :]
    source = acc_ptr + (cell.to(tl.int64) * splits + s[:, None]) * DIM + d[None, :]
    acc = tl.sum(tl.load(source, mask=filled, other=0.0) * fade[:, None], 0)
    out = acc / tl.where(whole > 0, whole, 1.0)
    tl.store(out_ptr + cell.to(tl.int64) * DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < DIM)


WRITE_VARYING = (
    "length table_width table_r table_m positions_r positions_t new_key_r new_key_t new_key_h new_value_r "
    "new_value_t new_value_h"
).split()


@triton.jit(do_not_specialize=WRITE_VARYING)
def kv_write_kernel(
    key_ptr, value_ptr, new_key_ptr, new_value_ptr, table_ptr, positions_ptr,
    length, table_width, block_size, width,
    key_n, key_b, key_h, value_n, value_b, value_h,
    new_key_r, new_key_t, new_key_h, new_value_r, new_value_t, new_value_h,
    table_r, table_m, positions_r, positions_t,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (R * T, slices of the Hkv * D numbers of one token)."""
    row = tl.program_id(0) // length
    t = tl.program_id(0) % length
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head = e // DIM
    d = e % DIM
    position = tl.load(positions_ptr + row * positions_r + t * positions_t).to(tl.int32)
    inside = (position >= 0) & (position < table_width * block_size)
    place = tl.where(inside, position, 0)
    block = tl.load(table_ptr + row * table_r + place // block_size * table_m).to(tl.int64)
    offset = place % block_size
    kept = e < tl.where(inside & (block >= 0), width, 0)
    wide = row.to(tl.int64)
    keys = tl.load(new_key_ptr + wide * new_key_r + t * new_key_t + head * new_key_h + d, mask=kept)
    values = tl.load(new_value_ptr + wide * new_value_r + t * new_value_t + head * new_value_h + d, mask=kept)
    tl.store(key_ptr + block * key_n + offset * key_b + head * key_h + d, keys, mask=kept)
    tl.store(value_ptr + block * value_n + offset * value_b + head * value_h + d, values, mask=kept)
