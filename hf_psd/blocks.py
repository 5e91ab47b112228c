"""KV blocks: who owns which, on the host; and the block tables that forwards read, on the device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import torch

ZERO, TRASH = 0, 1
"""Two blocks nobody owns: one that is never written, read where a row has no block, and one that is never read."""
_RESERVED = 2
_BUFFERS = 6


class BlockPool:
    """The blocks of one model's KV cache, handed out to slots and taken back.

    A block that is given back may be handed out at once: work enqueued later on the model's stream finds it free.

    Args:
        blocks: how many there are to hand out.
        block_size: tokens per block.
        slots: requests that can hold blocks.
        columns: most tokens of a request.
        device: where the model reads its table.
    """

    def __init__(self, blocks: int, block_size: int, slots: int, columns: int, device: torch.device):
        self.total, self.block_size = blocks, block_size
        self.owned: list[list[int]] = [[] for _ in range(slots)]
        self._free = list(range(blocks + _RESERVED - 1, _RESERVED - 1, -1))
        self._host = torch.full((slots, self.need(columns)), ZERO, dtype=torch.long, device="cpu")
        self._table = DeviceTable(self._host, device)

    @property
    def free(self) -> int:
        """Blocks that can be handed out."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that are handed out."""
        return self.total - len(self._free)

    @property
    def storage(self) -> int:
        """Blocks a cache must hold, the two that nobody owns included."""
        return self.total + _RESERVED

    @property
    def columns(self) -> int:
        """Tokens that a row of the table can address."""
        return self._host.shape[1] * self.block_size

    @property
    def table(self) -> torch.Tensor:
        """[slots, M] int64 on the device; `ZERO` where there is no block."""
        return self._table.tensor

    def need(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size) if tokens > 0 else 0

    def cover(self, slot: int, tokens: int) -> bool:
        """Lets a slot own blocks for its first `tokens` positions; False, and nothing changes, if they are too few."""
        owned = self.owned[slot]
        missing = self.need(tokens) - len(owned)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block = self._free.pop()
            self._host[slot, len(owned)] = block
            owned.append(block)
            self._table.dirty = True
        return True

    def trim(self, slot: int, tokens: int) -> None:
        """Takes back the blocks beyond a slot's first `tokens` positions."""
        owned = self.owned[slot]
        while len(owned) > self.need(tokens):
            self._free.append(owned.pop())
            self._host[slot, len(owned)] = ZERO
            self._table.dirty = True

    def release(self, slot: int) -> list[int]:
        """Takes back all blocks of a slot, and names them."""
        blocks = list(self.owned[slot])
        self.trim(slot, 0)
        return blocks

    def upload(self) -> None:
        """Brings the device's table up to date; call it on the stream that reads it."""
        self._table.upload(self._host)

    def widen(self, columns: int) -> None:
        """Lets rows address more tokens. Graphs captured over the old table are void."""
        more = self.need(columns) - self._host.shape[1]
        if more > 0:
            self._host = torch.nn.functional.pad(self._host, (0, more), value=ZERO)
            self._table = DeviceTable(self._host, self._table.tensor.device)

    def check(self) -> None:
        """Raises an `AssertionError` if a block is lost, owned twice or missing from the table."""
        handed = [block for owned in self.owned for block in owned]
        every = sorted([*handed, *self._free])
        assert every == list(range(_RESERVED, self.total + _RESERVED)), "a block is lost or owned twice"
        for slot, owned in enumerate(self.owned):
            row = self._host[slot].tolist()
            assert row == owned + [ZERO] * (len(row) - len(owned)), f"the table of slot {slot} is not what it owns"


class DeviceTable:
    """A small host table on its way to the device, through pinned buffers that take turns."""

    def __init__(self, host: torch.Tensor, device: torch.device):
        self.tensor = host.to(device, copy=True)
        self.dirty = False
        self._staging: Iterator[_Staging] = iter(())
        if device.type == "cuda":
            self._staging = cycle([_Staging(host) for _ in range(_BUFFERS)])

    def upload(self, host: torch.Tensor) -> None:
        """Copies the host's table if it has changed, without making the host wait for the device."""
        if not self.dirty:
            return
        self.dirty = False
        if self.tensor.device.type != "cuda":
            self.tensor.copy_(host)
            return
        next(self._staging).send(host, self.tensor)


class _Staging:
    """One pinned buffer; it is written again only after its last copy has left."""

    def __init__(self, host: torch.Tensor):
        self.buffer, self.left = host.clone().pin_memory(), torch.cuda.Event()

    def send(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        self.left.synchronize()  # a step has two uploads at most, so this one is of a step that the host has read
        self.buffer.copy_(host)
        tensor.copy_(self.buffer, non_blocking=True)
        self.left.record()
