"""How much a queue holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..config import PSDConfig

SEATS, CHUNK = 32, 512
BLOCK_SIZE, BLOCK_SIZE_ON_CUDA = 32, 64  # there, a tile of keys never crosses a block
_SHARE_OF_MEMORY = {"cuda": 0.8, "cpu": 0.25}
_USUAL_LENGTH = 2048


@dataclass(frozen=True)
class Sizes:
    """What is fixed when a queue opens.

    Attributes:
        seats: requests that run at once.
        blocks: KV blocks of each model.
        block_size: tokens per block.
        chunk: most tokens of prompts that are read in per step.
    """

    seats: int
    blocks: int
    block_size: int
    chunk: int

    def check(self, limit: int) -> None:
        """Raises a `ValueError` if a request of up to `limit` tokens could not run even alone."""
        needed = -(-limit // self.block_size)
        if needed > self.blocks:
            raise ValueError(
                f"psd: a request of up to {limit} tokens needs {needed} KV blocks of {self.block_size} tokens, but "
                f"there are {self.blocks}; raise kv_memory or lower max_new_tokens."
            )


def measure(
    config: PSDConfig, models: Sequence[PreTrainedModel], device: torch.device, chunk: int, limits: Sequence[int],
    complete: bool,
) -> Sizes:  # fmt: skip
    """What `kv_memory` holds or, left out, what the seats need as far as memory allows.

    Args:
        config: settings.
        models: target and drafters; each gets the same number of blocks.
        device: the target's.
        chunk: see `Sizes`.
        limits: lengths at which the requests known so far end.
        complete: whether no others will come.

    Raises:
        ValueError: not even one block fits.
    """
    seats, block_size = config.max_batch_size or SEATS, config.block_size
    if block_size is None:
        block_size = BLOCK_SIZE_ON_CUDA if device.type == "cuda" else BLOCK_SIZE
    block_bytes = block_size * sum(map(bytes_per_token, models))
    if config.kv_memory is not None:
        blocks = config.kv_memory // block_bytes
    else:
        wanted = sorted(limits, reverse=True)[:seats]
        if not complete:
            wanted = [max([_USUAL_LENGTH, *limits])] * seats
        room = int(free_memory(device) * _SHARE_OF_MEMORY.get(device.type, 0.5)) // block_bytes
        blocks = min(room, sum(-(-limit // block_size) for limit in wanted))
    if blocks < 1:
        raise ValueError(
            f"psd: kv_memory={config.kv_memory!r} holds no KV block; one of {block_size} tokens takes {block_bytes} "
            "bytes in all models together. Raise kv_memory or lower block_size."
        )
    return Sizes(seats, blocks, block_size, chunk)


def bytes_per_token(model: PreTrainedModel) -> int:
    """KV bytes of one token by the model's configuration."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * dim * model.dtype.itemsize


def free_memory(device: torch.device) -> int:
    """Bytes that could be allocated on a device now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil  # comes with accelerate

    return psutil.virtual_memory().available
