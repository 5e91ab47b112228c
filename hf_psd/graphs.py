"""CUDA graphs of device-only step functions, captured on first use and replayed after."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from .lanes import Lane
from .runner import PIECE_TOKENS, ModelRunner, Rows, upload

_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_WIDTHS = (16, 64, 128, 256, 512)
_WARM_UPS = 2
_MOST_GRAPHS = 512
"""A lane keeps no more graphs than that: every new temperature, say, needs some."""

Look = Callable[[Rows, torch.Tensor, torch.Tensor], None]
"""Takes the rows of a forward, its logits [R, T, V] and the positions [R, T] that it fed, negative for no token."""


def captures(model: torch.nn.Module) -> bool:
    """Whether a model's forwards can be captured: 8-bit layers of bitsandbytes look for outliers on the host."""
    return not any(type(module).__name__ == "Linear8bitLt" for module in model.modules())


def bucket(rows: int) -> int:
    """The group size a graph is captured for: the smallest bucket that holds `rows`."""
    return next((size for size in _BUCKETS if size >= rows), rows)


def piece_width(rows: int, columns: int) -> int:
    """How many of `columns` tokens a row are read at once: few shapes, and never many tokens in all."""
    fitting = [width for width in _WIDTHS if rows * width <= PIECE_TOKENS] or [_WIDTHS[0]]
    return next((width for width in fitting if width >= columns), fitting[-1])


def looked_at_width(rows: int) -> int:
    """The same where all logits are wanted: they take as much memory as those of a verification, or little."""
    return _WIDTHS[0] if rows <= 32 else _WIDTHS[0] // 2


class StepGraphs:
    """The graphs of one lane. A graph reads and writes buffers that stay where they are; only slot numbers change.

    Args:
        lane: where the graphs are captured and replayed. Graphs that run at the same time need lanes of their own:
            those captured on one stream share a cuBLAS workspace.
        idle_slot: a slot no request owns; it fills groups up to their bucket, and all of a warm-up's rows.

    Attributes:
        captured: number of graphs captured so far.
    """

    def __init__(self, lane: Lane, idle_slot: int):
        self.lane, self.idle_slot = lane, idle_slot
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Callable[[], Any], Any]] = {}
        """Least recently replayed first."""
        self.captured = 0
        self._rows: dict[tuple[str, int], Rows] = {}
        self._fed: dict[tuple[int, int], torch.Tensor] = {}
        self._numbers: dict[Hashable, torch.Tensor] = {}
        self._held: dict[Hashable, torch.Tensor] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def rows(self, slots: Sequence[int], purpose: str = "") -> Rows:
        """The slots in a buffer that graphs read, filled up with the idle slot; valid until the next call for the same
        purpose."""
        size = bucket(len(slots))
        if (purpose, size) not in self._rows:
            self._rows[purpose, size] = Rows([self.idle_slot] * size, self.lane.device)
            self._rows[purpose, size].span = None
        rows = self._rows[purpose, size]
        rows.slots.copy_(upload([*slots, *[self.idle_slot] * (size - len(slots))], self.lane.device))
        return rows

    def numbers(self, name: Hashable, values: Sequence[int], size: int) -> torch.Tensor:
        """Other small ints per row, [size] int64, in a buffer of that name that graphs read; missing ones are 0."""
        key = (name, size)
        if key not in self._numbers:
            self._numbers[key] = torch.zeros(size, dtype=torch.long, device=self.lane.device)
        self._numbers[key].copy_(upload([*values, *[0] * (size - len(values))], self.lane.device))
        return self._numbers[key]

    def held(self, name: Hashable, values: torch.Tensor) -> torch.Tensor:
        """[R, C] values in a buffer of that name that graphs use, [size, C]; rows past R keep what they held."""
        key = (name, bucket(values.shape[0]), values.shape[1], values.dtype)
        if key not in self._held:
            self._held[key] = values.new_zeros(key[1:3])
        self._held[key][: values.shape[0]] = values
        return self._held[key]

    def feed(
        self,
        name: Hashable,
        runner: ModelRunner,
        slots: Sequence[int],
        ids: torch.Tensor,
        positions: torch.Tensor,
        look: Look | None = None,
    ) -> None:
        """`runner.feed` of [R, T] tokens by replayed forwards of few shapes; `name` tells runners, and looks, apart.

        `look` sees the logits of each piece; it is captured with the forward.
        """
        rows = self.rows(slots, "feed")
        size, start, columns = len(rows), 0, ids.shape[1]
        while start < columns:
            width = piece_width(size, columns - start) if look is None else looked_at_width(size)
            if (size, width) not in self._fed:
                self._fed[size, width] = torch.zeros(2, size, width, dtype=torch.long, device=self.lane.device)
            fed, piece = self._fed[size, width], slice(start, start + width)
            fed[1].fill_(-1)
            count = min(width, columns - start)
            fed[0, : len(slots), :count] = ids[:, piece]
            fed[1, : len(slots), :count] = positions[:, piece]

            def forward(fed: torch.Tensor = fed) -> None:
                kept = 1 if look is None else 0
                logits = runner.forward(rows, fed[0], fed[1], runner.cache.capacity, logits_to_keep=kept).logits
                if look is not None:
                    look(rows, logits, fed[1])

            self.run(("feed", name, size, width), rows, forward)
            start += width

    def run(self, key: Hashable, rows: Rows, function: Callable[[], Any]) -> Any:
        """Replays the graph of `function` for `key`, capturing it on first use; returns its output buffers.

        Call it inside the lane's `work()`. The outputs lie in memory that any graph of this lane may overwrite: use
        them on this lane and before its next replay, or let `function` copy them to `held` buffers. Later captures
        find no place in that memory, so `function` should return no more than is needed.
        """
        found = self._captured.pop(key, None)
        if found is None:
            while len(self._captured) >= _MOST_GRAPHS:
                del self._captured[next(iter(self._captured))]
            found = self._capture(rows, function)
            self.captured += 1
        self._captured[key] = found
        graph, _, outputs = found
        graph.replay()
        return outputs

    def _capture(self, rows: Rows, function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Callable[[], Any], Any]:
        wanted = rows.slots.clone()
        rows.slots.fill_(self.idle_slot)  # what a warm-up commits must belong to nobody
        try:
            for _ in range(_WARM_UPS):
                function()
            graph = torch.cuda.CUDAGraph()
            # Other threads may meanwhile do what a capture forbids: requests are added to a queue from anywhere.
            with torch.cuda.graph(graph, pool=self._pool, stream=self.lane.stream, capture_error_mode="thread_local"):
                outputs = function()
        finally:
            rows.slots.copy_(wanted)
        return graph, function, outputs


def signature(objects: Sequence[Any]) -> Hashable | None:
    """What the behaviour of logits processors depends on, as a key; None if that cannot be told."""
    try:
        return tuple(
            (type(each), tuple((name, _freeze(value)) for name, value in sorted(vars(each).items())))
            for each in objects
        )
    except TypeError:
        return None


def _freeze(value: Any) -> Hashable:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor) and value.numel() <= 4096:
        return (tuple(value.shape), tuple(value.flatten().tolist()))
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(each) for each in value)
    raise TypeError(f"cannot tell what a {type(value).__name__} does")
