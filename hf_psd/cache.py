"""Ragged KV: every request writes at its own offset, in its slot or its blocks; rollback is not counting a token."""

from __future__ import annotations

from typing import Any

import torch
from psd_kernels import kv_write
from transformers.cache_utils import Cache, CacheLayerMixin

from .blocks import TRASH, ZERO, BlockPool


class KVAddress:
    """Where one forward reads and writes: shared by all layers of a `RaggedCache`, replaced before each forward.

    Attributes:
        slots: [R] int64, the slot of each row of the forward.
        positions: [R, T] int64, the position of each token; a token nobody reads sits at `capacity`, the trash
            position (or at -1 in a cache that is read in place).
        kv_length: how many leading positions of each slot attention may read.
        span: `(first, last + 1)` when `slots` is exactly that range, so that reading needs no copy; else None.
        blocks: [R, M] int64, the rows' block tables in a paged cache; else None.
    """

    def __init__(
        self,
        slots: torch.Tensor,
        positions: torch.Tensor,
        kv_length: int,
        span: tuple[int, int] | None = None,
        blocks: torch.Tensor | None = None,
    ):
        self.slots, self.positions, self.kv_length, self.span, self.blocks = slots, positions, kv_length, span, blocks

    @property
    def table(self) -> torch.Tensor:
        """What the attention and KV-write kernels find a row's keys by: its slot, or its blocks."""
        return self.slots if self.blocks is None else self.blocks

    def on(self, device: torch.device) -> KVAddress:
        """The same address on another device (a model split over several)."""
        if self.slots.device == device:
            return self
        blocks = None if self.blocks is None else self.blocks.to(device)
        return KVAddress(self.slots.to(device), self.positions.to(device), self.kv_length, self.span, blocks)


class SlotKV(CacheLayerMixin):
    """One layer's keys and values, [slots, capacity + 1, heads, head_dim]; nobody reads the last position."""

    is_compileable = False
    is_croppable = True
    is_sliding = False  # full-length buffers even for sliding layers: the window lives in the mask

    def __init__(self, owner: RaggedCache):
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device, self.dtype = key_states.device, key_states.dtype
        for name, states in (("keys", key_states), ("values", value_states)):
            shape = (*self.owner.shape, states.shape[1], states.shape[3])
            try:
                setattr(self, name, states.new_zeros(shape))
            except RuntimeError as error:
                size = 2 * len(self.owner.layers) * states.element_size() * torch.Size(shape).numel() / 2**30
                raise type(error)(
                    f"psd: no memory for {size:.2f} GiB of KV cache, {self.owner.describe()} ({error})"
                ) from error
        self.is_initialized = True

    def write(self, at: KVAddress, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Stores [R, heads, T, head_dim] states at their slots and positions."""
        index = (at.slots[:, None], at.positions)
        self.keys.index_put_(index, key_states.transpose(1, 2))
        self.values.index_put_(index, value_states.transpose(1, 2))

    def read(self, at: KVAddress) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the forward's rows, [R, heads, kv_length, head_dim]; a view if the rows are a range."""
        return self._rows(self.keys, at), self._rows(self.values, at)

    def _rows(self, states: torch.Tensor, at: KVAddress) -> torch.Tensor:
        states = states[:, : at.kv_length]
        rows = states[slice(*at.span)] if at.span is not None else states.index_select(0, at.slots)
        return rows.transpose(1, 2)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        at = self.owner.address_on(key_states.device)
        if self.owner.in_place:
            kv_write(
                self.keys,
                self.values,
                key_states.transpose(1, 2),
                value_states.transpose(1, 2),
                at.table,
                at.positions,
            )
            return self.keys, self.values
        self.write(at, key_states, value_states)
        return self.read(at)

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return self.owner.address.kv_length, 0

    def get_seq_length(self) -> int:
        return self.owner.address.kv_length if self.owner.address is not None else 0

    def get_max_length(self) -> int:
        return self.owner.capacity

    get_max_cache_shape = get_max_length


class PagedKV(SlotKV):
    """One layer's keys and values in blocks, [blocks, block_size, heads, head_dim]."""

    owner: PagedCache

    def write(self, at: KVAddress, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        assert at.blocks is not None
        size = self.owner.pool.block_size
        block = at.blocks.gather(1, (at.positions // size).clamp(max=at.blocks.shape[1] - 1))
        block = torch.where((at.positions >= self.owner.capacity) | (block == ZERO), TRASH, block)
        index = (block, at.positions % size)
        self.keys.index_put_(index, key_states.transpose(1, 2))
        self.values.index_put_(index, value_states.transpose(1, 2))

    def _rows(self, states: torch.Tensor, at: KVAddress) -> torch.Tensor:
        assert at.blocks is not None
        blocks = at.blocks[:, : self.owner.pool.need(at.kv_length)]
        rows = states.index_select(0, blocks.flatten()).view(blocks.shape[0], -1, *states.shape[2:])
        return rows[:, : at.kv_length].transpose(1, 2)


class RaggedCache(Cache):
    """A `transformers` cache whose rows are independent requests.

    Args:
        layers: number of attention layers.
        slots: number of requests that can be held at once.
        capacity: tokens per request.
        in_place: give attention the whole cache, [slots, capacity + 1, heads, head_dim], to read by address (the fast
            route) instead of the rows' keys and values, [R, heads, kv_length, head_dim].
    """

    layer_class: type[SlotKV] = SlotKV

    def __init__(self, layers: int, slots: int, capacity: int, in_place: bool = False):
        self.slot_count, self.capacity, self.in_place = slots, capacity, in_place
        self.address: KVAddress | None = None
        self._per_device: dict[torch.device, KVAddress] = {}
        super().__init__(layers=[self.layer_class(self) for _ in range(layers)])

    @property
    def shape(self) -> tuple[int, int]:
        """Leading dimensions of a layer's keys; the last position of each slot is trash."""
        return self.slot_count, self.capacity + 1

    def describe(self) -> str:
        """What was asked for and what lowers it, for an error message."""
        return f"{self.slot_count} rows of {self.capacity} tokens. Lower the batch, `max_new_tokens` or `gamma`."

    def point_at(self, address: KVAddress) -> None:
        """Sets where the next forward reads and writes."""
        self.address = address
        self._per_device = {address.slots.device: address}

    def address_on(self, device: torch.device) -> KVAddress:
        if device not in self._per_device:
            assert self.address is not None
            self._per_device[device] = self.address.on(device)
        return self._per_device[device]

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("psd: a ragged cache rolls back by not counting tokens; it cannot be cropped.")


class PagedCache(RaggedCache):
    """A ragged cache whose rows own blocks of a pool instead of a slot each.

    Args:
        layers, in_place: as in `RaggedCache`.
        pool: the model's blocks.
    """

    layer_class = PagedKV

    def __init__(self, layers: int, pool: BlockPool, in_place: bool = False):
        self.pool = pool
        super().__init__(layers, len(pool.owned), pool.columns, in_place)

    @property
    def shape(self) -> tuple[int, int]:
        return self.pool.storage, self.pool.block_size

    def describe(self) -> str:
        return f"{self.pool.total} blocks of {self.pool.block_size} tokens. Lower `kv_memory`."

    def point_at(self, address: KVAddress) -> None:
        address.blocks = self.pool.table.index_select(0, address.slots)
        if self.in_place:  # what has no block is not stored; on the other route it goes to the trash
            place = address.positions.clamp(min=0) // self.pool.block_size
            block = address.blocks.gather(1, place.clamp(max=address.blocks.shape[1] - 1))
            address.positions = torch.where(block == ZERO, -1, address.positions)
        super().point_at(address)

    def scrub(self, blocks: list[int]) -> None:
        """Overwrites blocks that may hold NaN: a weight of 0 does not undo one in a row that gets the block next."""
        for layer in self.layers:
            assert isinstance(layer, PagedKV)
            if blocks and layer.is_initialized:
                index = torch.tensor(blocks, device=layer.keys.device)
                layer.keys.index_fill_(0, index, 0)
                layer.values.index_fill_(0, index, 0)
