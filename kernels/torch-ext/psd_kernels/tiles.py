"""Triton building blocks: Philox noise and passes over one row's slice of the vocabulary, tile by tile.

No `tl.dot` here: these compile for every GPU from sm_75 on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import philox as spec

LOWEST = tl.constexpr(float("-inf"))
LEAST = tl.constexpr(-3.0e38)
HIGHEST = tl.constexpr(float("inf"))
LOG2_E = tl.constexpr(1.4426950408889634)
FEW_TILES = tl.constexpr(2)
"""A race over more tiles than this looks, tile by tile, whether there can be a winner at all."""
NO_ID = tl.constexpr(2**31 - 1)
LARGEST_WORD = tl.constexpr(2.0**32 * spec.BELOW_ONE)
WORD_STEP = tl.constexpr(2.0**-32)
MULTIPLIER_0 = tl.constexpr(spec.MULTIPLIER_0)
MULTIPLIER_1 = tl.constexpr(spec.MULTIPLIER_1)
WEYL_0 = tl.constexpr(spec.WEYL_0)
WEYL_1 = tl.constexpr(spec.WEYL_1)


@triton.jit
def philox(c0, c1, c2, c3, key0, key1):
    """Ten rounds on uint32 counters; the same bits as `psd_kernels.philox.philox4x32`."""
    m0 = tl.full((), MULTIPLIER_0, tl.uint32)
    m1 = tl.full((), MULTIPLIER_1, tl.uint32)
    w0 = tl.full((), WEYL_0, tl.uint32)
    w1 = tl.full((), WEYL_1, tl.uint32)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, m0)
        high1 = tl.umulhi(c2, m1)
        low0 = c0 * m0
        low1 = c2 * m1
        c0 = high1 ^ c1 ^ key0
        c1 = low1
        c2 = high0 ^ c3 ^ key1
        c3 = low0
        key0 = key0 + w0
        key1 = key1 + w1
    return c0, c1, c2, c3


@triton.jit
def load_key(seed_ptr, seed_low, seed_high, HAS_SEED: tl.constexpr):
    """The 64-bit seed as two uint32 words, from the device or from two int32 arguments."""
    if HAS_SEED:
        seed = tl.load(seed_ptr)
        key0 = (seed & 0xFFFFFFFF).to(tl.uint32)
        key1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    else:
        key0 = seed_low.to(tl.uint32)
        key1 = seed_high.to(tl.uint32)
    return key0, key1


@triton.jit
def to_uniform(words):
    """uint32 -> fp32 within [2^-32, 1 - 2^-24]."""
    return tl.minimum(tl.maximum(words.to(tl.float32), 1.0), LARGEST_WORD) * WORD_STEP


@triton.jit
def to_exponential(u):
    """E = -log(1 - u) >= u: its series where 1 - u would lose digits, which is where the winners of a race sit."""
    tail = u * (0.5 + u * (1.0 / 3.0 + u * (0.25 + u * (0.2 + u * (1.0 / 6.0)))))
    return tl.where(u < 0.0625, u + u * tail, -tl.log(1.0 - u))


@triton.jit
def uniforms(start, position, request, tag, key0, key1, BLOCK: tl.constexpr):
    """u for tokens start .. start + BLOCK; `start` and BLOCK are multiples of 4."""
    quads = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    r0, r1, r2, r3 = philox(quads, position, request, tag, key0, key1)
    return to_uniform(tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3)))


@triton.jit
def load_raw(row_ptr, cols, stride, bound):
    return tl.load(row_ptr + cols.to(tl.int64) * stride, mask=cols < bound, other=LOWEST)


@triton.jit
def reduce_best(score, which):
    """(max, smallest id that attains it) of per-lane winners."""
    best = tl.max(score, 0)
    return best, tl.min(tl.where(score == best, which, NO_ID), 0)


@triton.jit
def scan_argmax(row_ptr, stride, first, last, BLOCK: tl.constexpr):
    """(max, smallest id that attains it) of columns first .. last; NaN counts as +inf, so the max tells a bad row."""
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), LOWEST, tl.float32)
    which = tl.full((BLOCK,), NO_ID, tl.int32)
    ahead = load_raw(row_ptr, first + lane, stride, last)
    for start in range(first, last, BLOCK):
        x = ahead.to(tl.float32)
        ahead = load_raw(row_ptr, start + BLOCK + lane, stride, last)
        x = tl.where(x == x, x, HIGHEST)
        better = x > best
        best = tl.where(better, x, best)
        which = tl.where(better, start + lane, which)
    return reduce_best(best, which)


@triton.jit
def grow_logsumexp(peaks, totals, x, scale, BLOCK: tl.constexpr):
    """A tile joins BLOCK / 8 running sums, each (peak of x, sum of 2 ** (scale (x - peak))) over 8 neighbours, which
    one thread holds. NaN and +inf turn the sum into NaN; one exp2 an element."""
    eights = tl.reshape(x, (BLOCK // 8, 8))
    new = tl.maximum(peaks, tl.max(eights, 1))
    base = tl.where(new == LOWEST, 0.0, new) * scale
    return new, totals * tl.exp2(peaks * scale - base) + tl.sum(tl.exp2(eights * scale - base[:, None]), 1)


@triton.jit
def fold_logsumexp(peaks, totals, inverse, scale):
    """Running sums as one logsumexp of inverse * x: -inf if nothing is finite, NaN if something was NaN or +inf."""
    peak = tl.max(peaks, 0)
    base = tl.where(peak == LOWEST, 0.0, peak)
    return base * inverse + tl.log(tl.sum(totals * tl.exp2((peaks - base) * scale), 0))


@triton.jit
def scan_logsumexp(row_ptr, stride, first, last, inverse, BLOCK: tl.constexpr):
    """logsumexp of inverse * logits over columns first .. last, as `fold_logsumexp` gives it."""
    lane = tl.arange(0, BLOCK)
    scale = inverse * LOG2_E
    peaks = tl.full((BLOCK // 8,), LOWEST, tl.float32)
    totals = tl.zeros((BLOCK // 8,), tl.float32)
    ahead = load_raw(row_ptr, first + lane, stride, last)
    for start in range(first, last, BLOCK):
        x = ahead.to(tl.float32)
        ahead = load_raw(row_ptr, start + BLOCK + lane, stride, last)
        peaks, totals = grow_logsumexp(peaks, totals, x, scale, BLOCK)
    return fold_logsumexp(peaks, totals, inverse, scale)


@triton.jit
def scan_race(row_ptr, stride, first, last, inverse, position, request, tag, key0, key1, BLOCK: tl.constexpr):
    """argmax(inverse * logits - log E) over columns first .. last: (score, id, logsumexp).

    Scores are sums of two numbers that depend on the token alone, so the winner does not depend on the tiling.
    """
    lane = tl.arange(0, BLOCK)
    scale = inverse * LOG2_E
    peaks = tl.full((BLOCK // 8,), LOWEST, tl.float32)
    totals = tl.zeros((BLOCK // 8,), tl.float32)
    if last - first > FEW_TILES * BLOCK:
        best = tl.full((), LEAST, tl.float32)
        which = tl.full((), NO_ID, tl.int32)
        for start in range(first, last, BLOCK):
            x = load_raw(row_ptr, start + lane, stride, last).to(tl.float32)
            peaks, totals = grow_logsumexp(peaks, totals, x, scale, BLOCK)
            x = x * inverse
            u = uniforms(start, position, request, tag, key0, key1, BLOCK)
            # As E >= u, a tile where u exceeds exp(x - best) everywhere has no winner and needs no logarithm.
            if tl.max(tl.exp(x - best) * 1.0001 - u, 0) > 0:
                top, token = reduce_best(x - tl.log(to_exponential(u)), start + lane)
                which = tl.where(top > best, token, which)
                best = tl.maximum(best, top)
        best = tl.where(which == NO_ID, LOWEST, best)
    else:
        scores = tl.full((BLOCK,), LOWEST, tl.float32)
        tokens = tl.full((BLOCK,), NO_ID, tl.int32)
        for start in range(first, last, BLOCK):
            x = load_raw(row_ptr, start + lane, stride, last).to(tl.float32)
            peaks, totals = grow_logsumexp(peaks, totals, x, scale, BLOCK)
            u = uniforms(start, position, request, tag, key0, key1, BLOCK)
            score = x * inverse - tl.log(to_exponential(u))
            better = score > scores
            scores = tl.where(better, score, scores)
            tokens = tl.where(better, start + lane, tokens)
        best, which = reduce_best(scores, tokens)
    return best, which, fold_logsumexp(peaks, totals, inverse, scale)


@triton.jit
def join_logsumexp(parts):
    """logsumexp along dimension 1."""
    top = tl.max(parts, 1)
    base = tl.where(top == LOWEST, 0.0, top)
    return base + tl.log(tl.sum(tl.exp(parts - base[:, None]), 1))
