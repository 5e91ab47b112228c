"""What a forward must read, and how fast this device reads: weights, KV, copy bandwidth, the floor they make."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import PreTrainedModel

GIB = 2**30


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of all parameters and buffers, shared storages counted once."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def read_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that one forward reads: all but the input embedding, of which it reads a few rows."""
    table: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    tied = head.weight.data_ptr() == table.weight.data_ptr()
    return weight_bytes(model) - (0 if tied else table.weight.untyped_storage().nbytes())


def kv_bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of keys and values that one token adds over all layers, in the model's dtype."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize


def copy_bandwidth(device: str, gib: float | None = None) -> float:
    """Bytes read and written per second by a large copy on the device, the best of five."""
    on_gpu = device.startswith("cuda")
    size = int((gib or (2.0 if on_gpu else 0.03)) * GIB)
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    goal = torch.empty_like(source)
    best = float("inf")
    for _ in range(6):
        synchronize((device,))
        began = time.perf_counter()
        goal.copy_(source)
        synchronize((device,))
        best = min(best, time.perf_counter() - began)
    return 2 * size / best


def synchronize(devices: tuple[str, ...]) -> None:
    """Waits for the CUDA devices among `devices`."""
    for device in dict.fromkeys(devices):
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)


def reset_peaks(devices: tuple[str, ...]) -> None:
    """Forgets the highest memory use of the CUDA devices so far."""
    for device in dict.fromkeys(devices):
        if device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats(device)


def peaks(devices: tuple[str, ...]) -> dict[str, int]:
    """Highest bytes allocated by tensors on each CUDA device since the reset."""
    return {
        device: torch.cuda.max_memory_allocated(device)
        for device in dict.fromkeys(devices)
        if device.startswith("cuda")
    }


def allocated(devices: tuple[str, ...]) -> dict[str, int]:
    """Bytes allocated by tensors on each CUDA device now."""
    return {
        device: torch.cuda.memory_allocated(device) for device in dict.fromkeys(devices) if device.startswith("cuda")
    }


def round_bytes(
    target: PreTrainedModel, drafter: PreTrainedModel | None, drafts: float, batch: int, context: float
) -> float:
    """Bytes one round must read at least: a verification, and `drafts` one-token forwards of the drafter.

    Args:
        drafts: drafter forwards per target forward.
        batch: rows.
        context: mean tokens of KV per row.
    """
    total = read_bytes(target) + batch * context * kv_bytes_per_token(target)
    if drafter is not None and drafts:
        total += drafts * (read_bytes(drafter) + batch * context * kv_bytes_per_token(drafter))
    return total
