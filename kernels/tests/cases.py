"""Random inputs for the kernels, drawn from one integer so that a failing example can be repeated."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("dense", "sliced", "transposed", "strided")
INTERPRETED = not torch.cuda.is_available()
"""Without a GPU the kernels run in Triton's interpreter, which is chosen when a kernel is defined."""

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def lay_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values behind other strides; what lies between them is NaN."""
    if layout == "sliced":
        wide = values.new_full((*values.shape[:-1], values.shape[-1] + 3), math.nan)
        wide[..., 1:-2] = values
        return wide[..., 1:-2]
    if layout == "transposed":
        return values.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "strided":
        wide = values.new_full((*values.shape[:-1], 2 * values.shape[-1]), math.nan)
        wide[..., ::2] = values
        return wide[..., ::2]
    return values


def counters(rows: int, generator: torch.Generator) -> dict:
    highest = {"position": 2**20, "request": 2**31, "round": 2**20}
    return {name: torch.randint(high, (rows,), generator=generator).to(DEVICE) for name, high in highest.items()}


@dataclass
class VerifyCase:
    target: torch.Tensor
    drafts: torch.Tensor
    arguments: dict

    @classmethod
    def draw(cls, number, *, rows, length, vocab, dtype, layout, law, heat, source, faults, tensor_seed):
        """`heat`: none, greedy, mixed or hot; `source`: soft, point, both, or narrow (a smaller draft vocabulary)."""
        g = torch.Generator().manual_seed(number)
        count = length - 1
        target = torch.randn(rows, length, vocab, generator=g) * 2
        draft_vocab = max(1, vocab - 3) if source == "narrow" else vocab
        draft = target[:, :count, :draft_vocab] + torch.randn(rows, count, draft_vocab, generator=g) * 0.7
        drafts = draft.softmax(-1).flatten(0, 1)
        drafts = (
            torch.multinomial(drafts, 1, generator=g).view(rows, count) if count else drafts.new_empty(rows, 0).long()
        )
        if torch.rand((), generator=g) < 0.5 and count:
            drafts = torch.where(torch.rand(rows, 1, generator=g) < 0.5, target[:, :count].argmax(-1), drafts)
        if "ragged" in faults and count:
            n_draft = torch.randint(0, length, (rows, 1), generator=g)
            drafts = torch.where(torch.arange(count) < n_draft, drafts, -1)
        if "masked" in faults:
            target[torch.rand(target.shape, generator=g) < 0.4] = -math.inf
            target[..., 0] = 0.0
            draft[torch.rand(draft.shape, generator=g) < 0.4] = -math.inf
        if "equal" in faults:
            draft = target[:, :count, :draft_vocab].clone()
        if "bad" in faults:
            row, place = (int(torch.randint(n, (), generator=g)) for n in (rows, length))
            target[row, place, 0] = (math.nan, math.inf)[number % 2]
            if number % 3 == 0:
                target[row, place] = -math.inf
        if "bad draft" in faults and count:
            draft[0, 0, int(torch.randint(draft_vocab, (), generator=g))] = (math.nan, math.inf)[number % 2]
        temperature = {
            "none": None,
            "greedy": torch.zeros(rows),
            "mixed": (torch.rand(rows, generator=g) - 0.4).clamp(min=0),
            "hot": torch.rand(rows, generator=g) + 0.3,
        }[heat]
        point = torch.rand(rows, generator=g) < 0.5 if source == "both" else None
        seed = int(torch.randint(-(2**62), 2**62, (), generator=g))
        arguments = counters(rows, g) | {
            "draft_logits": None if source == "point" else lay_out(draft.to(DEVICE, dtype), layout),
            "point_mass": None if point is None else point.to(DEVICE),
            "temperature": None if temperature is None else temperature.to(DEVICE),
            "law": law,
            "seed": torch.tensor(seed, device=DEVICE) if tensor_seed else seed,
        }
        return cls(lay_out(target.to(DEVICE, dtype), layout), drafts.to(DEVICE), arguments)


def attention_case(number, *, rows, length, heads, kv_heads, dim, dtype, paged, size, scattered):
    """query, key_cache, value_cache, blocks, positions; unwritten cache is NaN, some queries are padding."""
    g = torch.Generator().manual_seed(number)
    blocks_per_row = 3 if paged else 1
    count = rows * blocks_per_row + 2
    blocks = torch.randperm(count, generator=g)[: rows * blocks_per_row].view(rows, blocks_per_row)
    capacity = size * blocks_per_row
    start = torch.randint(-2, capacity - length + 3, (rows, 1), generator=g)
    positions = start + torch.arange(length)
    keys = torch.full((count, size, kv_heads, dim), math.nan)
    values = torch.full((count, size, kv_heads, dim), math.nan)
    for row in range(rows):
        for p in range(min(int(positions[row, -1]) + 1, capacity)):
            block = blocks[row, p // size]
            keys[block, p % size] = torch.randn(kv_heads, dim, generator=g)
            values[block, p % size] = torch.randn(kv_heads, dim, generator=g)
    query = torch.randn(rows, length, heads, dim, generator=g)
    query, keys, values = (x.to(DEVICE, dtype) for x in (query, keys, values))
    if scattered:
        query, keys, values = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, keys, values))
    return query, keys, values, (blocks if paged else blocks[:, 0]).to(DEVICE), positions.to(DEVICE)
