"""What the launchers share: when a kernel may run, how work is split, how operators are registered. No Triton here."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor

from .philox import WORD

try:  # written by the Hub's builder: a namespace that no other build of this kernel shares
    from ._ops import add_op_namespace_prefix  # type: ignore[import-not-found]
except ImportError:

    def add_op_namespace_prefix(name: str) -> str:
        return f"psd_kernels::{name}"


LONGEST_SLICE = 16


def register(
    name: str, schema: str, implementation: Callable, fake: Callable, mutates: tuple[str, ...] = ()
) -> Callable:
    """Registers a torch operator whose `fake` gives shapes and dtypes; returns its overload.

    A second copy of this package in one process finds the operator there and uses it.
    """
    namespace, short = add_op_namespace_prefix(name).split("::")
    space = getattr(torch.ops, namespace)
    if not hasattr(space, short):
        operator = torch.library.custom_op(
            f"{namespace}::{short}", implementation, mutates_args=mutates, schema=schema
        )
        operator.register_fake(fake)
    return getattr(space, short).default


@lru_cache(maxsize=1)
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def uses_kernels(tensor: Tensor) -> bool:
    """Whether a kernel serves this tensor: Triton is there, and a GPU or Triton's interpreter."""
    return (tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1") and has_triton()


def guard(tensor: Tensor) -> AbstractContextManager:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@lru_cache
def processors(device: torch.device) -> int:
    """Number of multiprocessors; off the GPU a fixed small number, so that the interpreter meets split rows too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Most bytes of shared memory a program may use; off the GPU those of a T4."""
    if device.type != "cuda":
        return 64 * 1024
    from triton.runtime import driver

    return driver.active.utils.get_device_properties(device.index)["max_shared_mem"]


@lru_cache
def has_dependent_launch(device: torch.device) -> bool:
    """Whether a launch can start before the one it depends on has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def split_rows(
    rows: int, vocab: int, block: int, device: torch.device, most: int, programs: int = 4
) -> tuple[int, int]:
    """(splits, tiles in each) of `rows` rows of `vocab` columns, for about `programs` programs a multiprocessor."""
    tiles = -(-vocab // block)
    wanted = min(most, tiles, max(1, programs * processors(device) // rows, -(-tiles // LONGEST_SLICE)))
    each = -(-tiles // wanted)
    return -(-tiles // each), each


def seed_words(seed: Tensor | int, device: torch.device) -> tuple[Tensor | None, int]:
    """A seed as (tensor on the device or None, int)."""
    if isinstance(seed, Tensor):
        return seed.to(device=device, dtype=torch.int64), 0
    seed &= (1 << 64) - 1
    return None, seed - (1 << 64) if seed >> 63 else seed


def signed_words(seed: int) -> tuple[int, int]:
    """Low and high word of a seed as int32 values, so that every seed has the same argument type."""
    words = seed & WORD, (seed >> 32) & WORD
    low, high = (word - (1 << 32) if word >> 31 else word for word in words)
    return low, high


def per_row(value: Tensor | int, rows: int, device: torch.device) -> Tensor:
    """A counter as contiguous int64 [rows]."""
    if not isinstance(value, Tensor):
        return torch.full((rows,), value, dtype=torch.int64, device=device)
    return value.to(torch.int64).expand(rows).contiguous()


def row_unit(*tensors: Tensor | None) -> int:
    """16 if every row of these tensors starts at a multiple of 16 elements (so that loads can be wide), else 1."""
    aligned = all(
        tensor.stride(-1) == 1 and all(stride % 16 == 0 for stride in tensor.stride()[:-1])
        for tensor in tensors
        if tensor is not None
    )
    return 16 if aligned else 1
