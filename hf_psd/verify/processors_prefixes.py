"""The true prefixes that R ragged rows see at T consecutive positions, without building them one by one."""

from __future__ import annotations

import torch
from torch import Tensor


class Prefixes:
    """Views on the prefixes `ids[r, : base[r] + i]` for every row r and position i.

    A "line" is one (row, position) pair, numbered `r * T + i`. Nothing here reads a device value on the host.

    Args:
        ids: `[R, W]` int64; per row left pads, prompt, committed tokens and drafts, contiguous.
        base: `[R]` int64; number of columns, left pads included, before the first of the T positions.
        rows: `[R]` int64; index of each row in the original batch.
        positions: T.
    """

    def __init__(self, ids: Tensor, base: Tensor, rows: Tensor, positions: int) -> None:
        self.ids = ids
        self.rows = rows
        self.positions = positions
        self.lengths = base[:, None] + torch.arange(positions, device=base.device)
        self._tails: dict[int, Tensor] = {}

    @property
    def line_lengths(self) -> Tensor:
        """`[R*T, 1]` int64: the length of each line's prefix."""
        return self.lengths.reshape(-1, 1)

    @property
    def width(self) -> int:
        """W, an upper bound of every prefix length."""
        return self.ids.shape[1]

    def columns(self) -> Tensor:
        """`[W]` int64 column numbers."""
        return torch.arange(self.width, device=self.ids.device)

    def visible(self) -> Tensor:
        """`[R, T, W]` bool: which columns each line sees."""
        return self.columns() < self.lengths[..., None]

    def spread(self, per_row: Tensor) -> Tensor:
        """`[R, ...]` -> `[R*T, ...]`, repeating each row for its T lines."""
        return per_row[:, None].expand(-1, self.positions, *per_row.shape[1:]).flatten(0, 1)

    def tail(self, count: int) -> Tensor:
        """`[R, T, count]` int64: the last `count` ids of each prefix, -1 where the prefix is shorter."""
        if count not in self._tails:
            index = self.lengths[..., None] - count + torch.arange(count, device=self.ids.device)
            found = self.ids.gather(1, index.clamp(0, self.width - 1).flatten(1))
            self._tails[count] = torch.where(index >= 0, found.view_as(index), -1)
        return self._tails[count]
