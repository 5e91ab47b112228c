"""First launch of `verify`: one pass over the vocabulary of every position that may matter."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from . import philox as spec
from .tiles import HIGHEST, load_key, scan_argmax, scan_logsumexp, scan_race

GREEDY = tl.constexpr(0)
REJECTION = tl.constexpr(1)
COUPLED = tl.constexpr(2)
COUPLED_TAG = tl.constexpr(spec.COUPLED)


VARYING = "length width tiles seed_low seed_high target_r target_t draft_r draft_t ids_r ids_t".split()


@triton.jit(do_not_specialize=VARYING)
def verify_scan_kernel(
    target_ptr, draft_ptr, ids_ptr, point_ptr, temperature_ptr, position_ptr, request_ptr, seed_ptr,
    part_ptr, which_ptr, ticket_ptr,
    seed_low, seed_high, length, width, vocab, draft_vocab, tiles,
    target_r, target_t, target_v, draft_r, draft_t, draft_v, ids_r, ids_t,
    LAW: tl.constexpr, HAS_POINT: tl.constexpr, HAS_SEED: tl.constexpr, UNIT: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (rows * width, splits); a row has its T target positions first, then, if they are read, its T - 1 drafts.

    Each program reduces one slice of one position to its logsumexp, or to its best score and that one's id. EARLY lets
    the second launch start its programs as soon as all of these run; it waits for their results by itself.
    """
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0) // width
    place = tl.program_id(0) % width
    split = tl.program_id(1)
    if (place == 0) & (split == 0):
        tl.store(ticket_ptr + row, 0)
    temperature = tl.full((), 0.0, tl.float32)
    if LAW != GREEDY:
        temperature = tl.load(temperature_ptr + row)
    is_draft = place >= length
    # A target position is judged only if the draft before it exists, a draft only if it is one.
    before = tl.where(is_draft, place - length, place - 1)
    draft_id = tl.load(ids_ptr + row * ids_r + before * ids_t, mask=before >= 0, other=0)
    needed = draft_id >= 0
    if is_draft:
        needed = needed & (temperature > 0)
        if HAS_POINT:
            needed = needed & (tl.load(point_ptr + row) == 0)
    if not needed:
        return

    cell = tl.program_id(0) * SPLITS + split
    first = split * tiles * BLOCK
    wide = row.to(tl.int64)
    if is_draft:
        inverse = tl.div_rn(1.0, temperature)
        # A name of its own: drafts may have another dtype, and a name cannot have two.
        draft = draft_ptr + wide * (draft_r * UNIT) + before.to(tl.int64) * (draft_t * UNIT)
        last = tl.minimum(first + tiles * BLOCK, draft_vocab)
        tl.store(part_ptr + cell, scan_logsumexp(draft, draft_v, first, last, inverse, BLOCK))
    else:
        source = target_ptr + wide * (target_r * UNIT) + place.to(tl.int64) * (target_t * UNIT)
        last = tl.minimum(first + tiles * BLOCK, vocab)
        if temperature > 0:
            inverse = tl.div_rn(1.0, temperature)
            if LAW == REJECTION:
                tl.store(part_ptr + cell, scan_logsumexp(source, target_v, first, last, inverse, BLOCK))
            if LAW == COUPLED:
                key0, key1 = load_key(seed_ptr, seed_low, seed_high, HAS_SEED)
                position = (tl.load(position_ptr + row) + place).to(tl.uint32)
                request = tl.load(request_ptr + row).to(tl.uint32)
                tag = tl.full((), COUPLED_TAG, tl.uint32)
                score, token, log_z = scan_race(
                    source, target_v, first, last, inverse, position, request, tag, key0, key1, BLOCK
                )
                # A bad slice scores +inf, as it does in an argmax.
                tl.store(part_ptr + cell, tl.where(log_z < HIGHEST, score, HIGHEST))
                tl.store(which_ptr + cell, token)
        else:
            score, token = scan_argmax(source, target_v, first, last, BLOCK)
            tl.store(part_ptr + cell, score)
            tl.store(which_ptr + cell, token)
