"""Second launch of `verify`: find each row's first rejection, then race the vocabulary at that one position."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from . import philox as spec
from .tiles import (
    HIGHEST,
    LOWEST,
    NO_ID,
    join_logsumexp,
    load_key,
    load_raw,
    philox,
    reduce_best,
    to_exponential,
    to_uniform,
    uniforms,
)
from .verify_scan import REJECTION

ACCEPT_TAG = tl.constexpr(spec.ACCEPT)
RESIDUAL_TAG = tl.constexpr(spec.RESIDUAL)


@triton.jit
def write_verdict(out_ids_ptr, out_count_ptr, out_bad_ptr, row, length, t, ids, stop, token):
    """A token of -1 says that the stop position is bad; the places before it were accepted, so they are not."""
    emitted = tl.where(t < stop, ids, tl.where(t == stop, tl.maximum(token, 0), -1).to(tl.int64))
    tl.store(out_ids_ptr + row * length + t, emitted, mask=t < length)
    tl.store(out_count_ptr + row, (stop + 1).to(tl.int64))
    tl.store(out_bad_ptr + row, (token < 0).to(tl.uint8))


@triton.jit
def at(values, t, stop):
    """values[stop] of a short vector."""
    return tl.sum(tl.where(t == stop, values, tl.zeros_like(values)), 0)


@triton.jit
def gather(source, stride_t, stride_v, t, ids, drafted, vocab):
    """Logit of each drafted id, -inf where there is none or the vocabulary has no such id."""
    offset = t.to(tl.int64) * stride_t + ids * stride_v
    return tl.load(source + offset, mask=drafted & (ids < vocab), other=LOWEST).to(tl.float32)


@triton.jit
def race(
    target, target_v, draft, draft_v, first, last, draft_last, inverse, log_z, draft_log_z, barred,
    position, request, tag, key0, key1, HAS_DRAFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """argmax(w / E) over columns first .. last as (score, id); the score is 0 if no weight w = p - q is positive.

    q is taken from the draft's logits below `draft_last`, and is 1 at the id `barred` (-1 for none).
    """
    lane = tl.arange(0, BLOCK)
    best = tl.full((), 0.0, tl.float32)
    which = tl.full((), NO_ID, tl.int32)
    for start in range(first, last, BLOCK):
        cols = start + lane
        weight = tl.exp(load_raw(target, cols, target_v, last).to(tl.float32) * inverse - log_z)
        if HAS_DRAFT:
            weight -= tl.exp(load_raw(draft, cols, draft_v, draft_last).to(tl.float32) * inverse - draft_log_z)
        weight = tl.where(cols == barred, 0.0, weight)
        u = uniforms(start, position, request, tag, key0, key1, BLOCK)
        # As E >= u, a tile where no weight exceeds best * u has no winner and needs no logarithm.
        if tl.max(weight - best * u, 0) > 0:
            top, token = reduce_best(weight / to_exponential(u), cols)
            which = tl.where(top > best, token, which)
            best = tl.maximum(best, top)
    return best, which


VARYING = (
    "length width splits race_splits tiles seed_low seed_high target_r target_t draft_r draft_t ids_r ids_t".split()
)


@triton.jit(do_not_specialize=VARYING)
def verify_decide_kernel(
    target_ptr, draft_ptr, ids_ptr, point_ptr, temperature_ptr, position_ptr, request_ptr, round_ptr, seed_ptr,
    part_ptr, which_ptr, ticket_ptr, score_ptr, token_ptr, out_ids_ptr, out_count_ptr, out_bad_ptr,
    seed_low, seed_high, length, width, vocab, draft_vocab, splits, race_splits, tiles,
    target_r, target_t, target_v, draft_r, draft_t, draft_v, ids_r, ids_t,
    LAW: tl.constexpr, HAS_DRAFT: tl.constexpr, HAS_POINT: tl.constexpr, HAS_SEED: tl.constexpr, UNIT: tl.constexpr,
    LENGTH: tl.constexpr, SPLITS: tl.constexpr, RACE_SPLITS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (rows, race_splits). Every program of a row repeats the same small scan for the first rejection, then races
    its slice of the vocabulary at that one position; the last one to arrive joins the slices and writes the row."""
    row = tl.program_id(0)
    split = tl.program_id(1)
    t = tl.arange(0, LENGTH)
    s = tl.arange(0, SPLITS)
    count = length - 1
    ids = tl.load(ids_ptr + row * ids_r + t * ids_t, mask=t < count, other=-1)
    cells = (row * width + t[:, None]) * SPLITS + s[None, :]
    drafted = ids >= 0
    wide = row.to(tl.int64)
    target = target_ptr + wide * (target_r * UNIT)
    draft = draft_ptr + wide * (draft_r * UNIT)
    temperature = tl.full((), 0.0, tl.float32)
    target_x = tl.full((LENGTH,), 0.0, tl.float32)
    draft_x = tl.full((LENGTH,), 0.0, tl.float32)
    soft = row < 0
    if LAW == REJECTION:
        temperature = tl.load(temperature_ptr + row)
        target_x = gather(target, target_t * UNIT, target_v, t, ids, drafted, vocab)
        if HAS_DRAFT:
            soft = row >= 0
            if HAS_POINT:
                soft = tl.load(point_ptr + row) == 0
            draft_x = gather(draft, draft_t * UNIT, draft_v, t, ids, drafted, tl.where(soft, draft_vocab, 0))
    if EARLY:
        gdc_wait()  # what follows reads what the first launch wrote
    # Places after a missing draft were not scanned and hold anything; a row stops before it would use them.
    written = (t < length)[:, None] & (s < splits)[None, :]
    parts = tl.load(part_ptr + cells, mask=written, other=LOWEST)

    if temperature <= 0:
        if split == 0:
            which = tl.load(which_ptr + cells, mask=written, other=NO_ID)
            top = tl.max(parts, 1)
            picks = tl.min(tl.where(parts == top[:, None], which, NO_ID), 1)
            fine = (top > LOWEST) & (top < HIGHEST)
            stop = tl.min(tl.where((t < count) & (((ids == picks) & fine) == 0), t, count), 0)
            token = at(tl.where(fine, picks, -1), t, stop)
            write_verdict(out_ids_ptr, out_count_ptr, out_bad_ptr, row, length, t, ids, stop, token)
    else:
        inverse = tl.div_rn(1.0, temperature)
        key0, key1 = load_key(seed_ptr, seed_low, seed_high, HAS_SEED)
        position = tl.load(position_ptr + row)
        request = tl.load(request_ptr + row).to(tl.uint32)
        rounds = tl.load(round_ptr + row) << 8
        if HAS_DRAFT:
            drawn = (t < count)[:, None] & (s < splits)[None, :]
            draft_parts = tl.load(part_ptr + cells + length * SPLITS, mask=drawn, other=LOWEST)
            # A row whose drafts are point masses has no parts.
            held = drafted[:, None] & (s[None, :] < tl.where(soft, splits, 0))
            draft_parts = tl.where(held, draft_parts, LOWEST)

        log_z = join_logsumexp(parts)
        fine = (log_z > LOWEST) & (log_z < HIGHEST)
        log_p = target_x * inverse - log_z
        log_q = tl.zeros((LENGTH,), tl.float32)
        draft_log_z = tl.zeros((LENGTH,), tl.float32)
        if HAS_DRAFT:
            draft_log_z = join_logsumexp(draft_parts)
            log_q = tl.where(soft, draft_x * inverse - draft_log_z, log_q)
        lawful = drafted & (log_q > LOWEST) & (log_q < HIGHEST)
        word, _w1, _w2, _w3 = philox(
            tl.full((), 0, tl.uint32), (position + t).to(tl.uint32), request, (rounds | ACCEPT_TAG).to(tl.uint32),
            key0, key1,
        )  # fmt: skip
        stands = (tl.log(to_uniform(word)) < log_p - log_q) & lawful & fine
        stop = tl.min(tl.where((t < count) & (stands == 0), t, count), 0)

        stop_z = at(log_z, t, stop)
        stop_draft_z = at(draft_log_z, t, stop)
        # -1 where nothing was rejected: the row was accepted in full, had no draft here, or one that q cannot give.
        barred = at(tl.where(lawful, ids, -1), t, stop).to(tl.int32)
        tag = (rounds | RESIDUAL_TAG).to(tl.uint32)
        place = (position + stop).to(tl.uint32)
        here = target + stop.to(tl.int64) * (target_t * UNIT)
        draft_here = draft + stop.to(tl.int64) * (draft_t * UNIT)
        first = split * tiles * BLOCK
        last = tl.minimum(first + tiles * BLOCK, vocab)
        residual = (barred >= 0) & soft
        draft_last = tl.where(residual, tl.minimum(last, draft_vocab), 0)
        stop_draft_z = tl.where(residual, stop_draft_z, 0.0)
        score, token = race(
            here, target_v, draft_here, draft_v, first, last, draft_last, inverse, stop_z, stop_draft_z,
            tl.where(residual, -1, barred), place, request, tag, key0, key1, HAS_DRAFT, BLOCK,
        )  # fmt: skip

        slot = row * RACE_SPLITS + split
        tl.store(score_ptr + slot, score)
        tl.store(token_ptr + slot, token)
        tl.debug_barrier()
        arrived = tl.atomic_add(ticket_ptr + row, 1, sem="acq_rel")
        if arrived == race_splits - 1:
            k = tl.arange(0, RACE_SPLITS)
            slots = row * RACE_SPLITS + k
            raced = k < race_splits
            scores = tl.load(score_ptr + slots, mask=raced, other=0.0, cache_modifier=".cg")
            tokens = tl.load(token_ptr + slots, mask=raced, other=NO_ID, cache_modifier=".cg")
            best, winner = reduce_best(scores, tokens)
            if (best <= 0) & (barred >= 0):
                # Where p and q differ by rounding alone nothing may be left over, and p itself is the law.
                best, winner = race(
                    here, target_v, draft_here, draft_v, 0, vocab, 0, inverse, stop_z, stop_draft_z, -1,
                    place, request, tag, key0, key1, False, BLOCK,
                )  # fmt: skip
            winner = tl.where((stop_z > LOWEST) & (stop_z < HIGHEST), winner, -1)
            write_verdict(out_ids_ptr, out_count_ptr, out_bad_ptr, row, length, t, ids, stop, winner)
