"""`ragged_attention` in two launches and `kv_write` in one."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from .attention_kernel import attention_join_kernel, attention_split_kernel, kv_write_kernel
from .common import guard, processors, shared_memory

QUERY_BLOCK = 64
MAX_KEY_SPLITS = 64
PROGRAMS_PER_PROCESSOR = 2
WRITE_BLOCK = 1024


def key_block(head_dim: int, dtype: torch.dtype) -> int:
    return 64 if head_dim <= 128 and dtype != torch.float32 else 32


def fitting_stages(block_m: int, block_n: int, dim: int, element_size: int, device: torch.device) -> int:
    """How many key tiles may be in flight: each takes shared memory, as do up to three copies of the query tile."""
    tile, queries = 2 * block_n * dim * element_size, 3 * block_m * dim * element_size
    return max(1, (shared_memory(device) - queries) // tile + 1)


def dot_precision(query: Tensor) -> str:
    """fp32 products keep fp32 accuracy, on tensor cores where they can."""
    if query.dtype != torch.float32:
        return "tf32"
    modern = query.is_cuda and torch.cuda.get_device_capability(query.device)[0] >= 8
    return "tf32x3" if modern else "ieee"


def launch_ragged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    blocks: Tensor,
    positions: Tensor,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    kv_length: int | None,
    *,
    block_m: int | None = None,
    block_n: int | None = None,
    splits: int | None = None,
    warps: int = 4,
    stages: int | None = None,
) -> Tensor:
    """Arguments as in `naive_attention.ragged_attention`; the head dimension of all three tensors has stride 1.

    `stages` counts the key tiles in flight; a block table is looked up ahead of them, which takes as many again. Fewer
    are in flight where the GPU's shared memory is too small for them.
    """
    rows, length, heads, dim = query.shape
    size, kv_heads = key_cache.shape[1:3]
    group = heads // kv_heads
    table = blocks[:, None] if blocks.dim() == 1 else blocks
    capacity = table.shape[1] * size
    limit = capacity if kv_length is None else min(kv_length, capacity)
    block_n = block_n or key_block(dim, query.dtype)
    block_m = block_m or min(QUERY_BLOCK, max(16, triton.next_power_of_2(length * group)))
    query_tiles = triton.cdiv(length * group, block_m)
    dim_block = triton.next_power_of_2(dim)
    ahead = table.shape[1] > 1 and size % block_n == 0
    stages = stages or (3 if dim <= 128 and query.dtype != torch.float32 else 2)
    stages = min(stages, fitting_stages(block_m, block_n, dim_block, query.element_size(), query.device))
    stages = 2 * stages - 1 if ahead else stages
    if splits is None:
        programs = rows * kv_heads * query_tiles
        wanted = PROGRAMS_PER_PROCESSOR * processors(query.device) // programs
        splits = max(1, min(MAX_KEY_SPLITS, wanted, -(-limit // (2 * block_n))))

    out = torch.empty(rows, length, heads, dim, dtype=query.dtype, device=query.device)
    acc = torch.empty(rows, length, heads, splits, dim, dtype=torch.float32, device=query.device)
    peak, total = torch.empty(2, rows, length, heads, splits, dtype=torch.float32, device=query.device).unbind()
    cache_strides = (*key_cache.stride()[:3], *value_cache.stride()[:3])
    unit = 16 if all(stride % 16 == 0 for stride in cache_strides) else 1
    with guard(query):
        attention_split_kernel[(rows * kv_heads, splits, query_tiles)](
            query, key_cache, value_cache, table, positions, acc, peak, total,
            dim**-0.5 if scaling is None else scaling,
            length, limit, splits, table.shape[1], size, kv_heads,
            *query.stride()[:3], *(stride // unit for stride in cache_strides), *table.stride(), *positions.stride(),
            GROUP=group, DIM=dim, DIM_BLOCK=dim_block, PAGED=table.shape[1] > 1, WHOLE=size % block_n == 0,
            WINDOW=sliding_window or 0, SOFTCAP=softcap or 0.0,
            PRECISION=dot_precision(query), UNIT=unit, BLOCK_M=block_m, BLOCK_N=block_n,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        attention_join_kernel[(rows * length * heads,)](
            acc, peak, total, peak if sinks is None else sinks, out, splits, heads,
            DIM=dim, DIM_BLOCK=dim_block, HAS_SINK=sinks is not None,
            SPLITS=max(4, triton.next_power_of_2(splits)), num_warps=2,
        )  # fmt: skip
    return out


def launch_kv_write(
    key_cache: Tensor,
    value_cache: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor,
    positions: Tensor,
    *,
    block: int = WRITE_BLOCK,
) -> None:
    """Arguments as in `naive_attention.kv_write`; the head dimension of all four tensors has stride 1."""
    rows, length, kv_heads, dim = keys.shape
    table = blocks[:, None] if blocks.dim() == 1 else blocks
    width = kv_heads * dim
    block = min(block, triton.next_power_of_2(width))
    with guard(key_cache):
        kv_write_kernel[(rows * length, triton.cdiv(width, block))](
            key_cache, value_cache, keys, values, table, positions,
            length, table.shape[1], key_cache.shape[1], width,
            *key_cache.stride()[:3], *value_cache.stride()[:3], *keys.stride()[:3], *values.stride()[:3],
            *table.stride(), *positions.stride(),
            DIM=dim, BLOCK=block, num_warps=4,
        )  # fmt: skip
