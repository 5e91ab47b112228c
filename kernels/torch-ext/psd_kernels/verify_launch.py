"""`verify` in two launches."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from .common import guard, has_dependent_launch, row_unit, signed_words, split_rows
from .verify_decide import verify_decide_kernel
from .verify_scan import COUPLED, GREEDY, REJECTION, verify_scan_kernel

LAWS = {"rejection": REJECTION.value, "coupled": COUPLED.value}
SCAN_BLOCK = 2048
SCAN_SPLITS = 32
RACE_BLOCK = 2048
RACE_SPLITS = 64


def launch_verify(
    target_logits: Tensor,
    draft_ids: Tensor,
    draft_logits: Tensor | None,
    point_mass: Tensor | None,
    temperature: Tensor | None,
    seed_tensor: Tensor | None,
    seed: int,
    position: Tensor,
    request: Tensor,
    round: Tensor,
    law: str,
    *,
    scan_block: int = SCAN_BLOCK,
    race_block: int = RACE_BLOCK,
    max_splits: int = SCAN_SPLITS,
    max_race_splits: int = RACE_SPLITS,
    scan_warps: int = 4,
    race_warps: int = 4,
    scan_programs: int = 8,
    race_programs: int = 8,
    early: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments as in `naive.verify`, the counters contiguous int64 [R]; returns (ids, n_emitted, bad).

    Tile widths are powers of two, `scan_block` from 8 and `race_block` from 4 on. The `max_` arguments, powers of two,
    bound how many programs share one row; the `_programs` say how many a multiprocessor should get; `early` overlaps
    the start of the second launch with the end of the first (None: where the GPU can, from compute capability 9.0 on).
    """
    rows, length, vocab = target_logits.shape
    device = target_logits.device
    law_code = GREEDY.value if temperature is None else LAWS[law]
    soft = draft_logits if law_code == REJECTION.value and length > 1 else None
    draft_vocab = vocab if soft is None else soft.shape[-1]
    width = length if soft is None else 2 * length - 1
    splits, tiles = split_rows(rows * width, max(vocab, draft_vocab), scan_block, device, max_splits, scan_programs)
    race_splits, race_tiles = 1, 1
    if law_code == REJECTION.value:
        race_splits, race_tiles = split_rows(rows, vocab, race_block, device, max_race_splits, race_programs)

    ids = torch.empty(rows, length, dtype=torch.int64, device=device)
    count = torch.empty(rows, dtype=torch.int64, device=device)
    bad = torch.empty(rows, dtype=torch.bool, device=device)
    parts = torch.empty(rows * width, max_splits, dtype=torch.float32, device=device)
    which = torch.empty(rows * width, max_splits, dtype=torch.int32, device=device)
    scores = torch.empty(rows, max_race_splits, dtype=torch.float32, device=device)
    tokens = torch.empty(rows, max_race_splits, dtype=torch.int32, device=device)
    ticket = torch.empty(rows, dtype=torch.int32, device=device)

    unit = row_unit(target_logits, soft)
    draft = target_logits if soft is None else soft
    point = draft_ids if point_mass is None else point_mass.view(torch.uint8)
    heat = position if temperature is None else temperature
    key = position if seed_tensor is None else seed_tensor
    low, high = signed_words(seed)
    strides = [
        *(stride // unit for stride in target_logits.stride()[:2]),
        target_logits.stride(2),
        *(stride // unit for stride in draft.stride()[:2]),
        draft.stride(2),
        *draft_ids.stride(),
    ]
    flags = {"LAW": law_code, "HAS_POINT": point_mass is not None, "HAS_SEED": seed_tensor is not None, "UNIT": unit}
    early = has_dependent_launch(device) if early is None else early
    flags["EARLY"] = early
    overlapped = {"launch_pdl": True} if early else {}
    with guard(target_logits):
        verify_scan_kernel[(rows * width, splits)](
            target_logits, draft, draft_ids, point, heat, position, request, key,
            parts, which, ticket,
            low, high, length, width, vocab, draft_vocab, tiles, *strides,
            **flags, SPLITS=max_splits, BLOCK=scan_block, num_warps=scan_warps,
        )  # fmt: skip
        verify_decide_kernel[(rows, race_splits)](
            target_logits, draft, draft_ids, point, heat, position, request, round, key,
            parts, which, ticket, scores, tokens, ids, count, bad.view(torch.uint8),
            low, high, length, width, vocab, draft_vocab, splits, race_splits, race_tiles, *strides,
            **flags, HAS_DRAFT=soft is not None, LENGTH=max(16, triton.next_power_of_2(length)),
            SPLITS=max_splits, RACE_SPLITS=max_race_splits, BLOCK=race_block, num_warps=race_warps,
            **overlapped,
        )  # fmt: skip
    return ids, count, bad
