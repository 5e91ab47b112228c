"""Finds work on two lanes that touches the same memory in no order: on a GPU, with streams, its outcome is luck.

The step loop runs on the CPU, one operator after the other, while each lane keeps a vector clock: `mark`, `follow`,
`begin`, `finish` and the host's reads are all that orders lanes. Two accesses to the same bytes, one of them a write,
of which neither clock has seen the other, are a race. Rows of one array may belong to different groups, so accesses by
index count for the rows they name.

What a capture allocates lies in memory that every other graph of its lane may overwrite whenever it is replayed, so no
other lane may touch it, in whatever order.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from typing import Any

import numpy
import torch
from tapes import capturing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_psd.lanes import HostRing, Lane

_BY_ROW = {"aten.index_select": 2, "aten.index_copy_": 2, "aten.index_fill_": 2, "aten.index_add_": 2}
"""Operators that touch only the rows of their first argument that an index names, and where that index stands."""
_TOUCH_NOTHING = ("aten.empty", "aten.new_empty", "aten.view", "aten.detach", "aten.alias", "aten._unsafe_view")


class _History:
    """Who touched each byte of a storage last."""

    def __init__(self, size: int):
        self.written_by = numpy.full(size, -1, numpy.int16)
        self.written_at = numpy.zeros(size, numpy.int32)
        self.written_where = numpy.zeros(size, numpy.int32)
        self.read: dict[int, tuple[Any, Any]] = {}

    def reads(self, lane: int) -> tuple[Any, Any]:
        if lane not in self.read:
            size = self.written_by.size
            self.read[lane] = numpy.zeros(size, numpy.int32), numpy.zeros(size, numpy.int32)
        return self.read[lane]


class Races(TorchDispatchMode):
    """Watches every operator while it is entered; `found` counts races by the two places in the code.

    Args:
        patch: pytest's monkeypatch, which puts `Lane` and `HostRing` back.
        ignore: tensors that are never written, such as weights.
        idle_row: the last row of an array belongs to nobody, and what is there may be anything.
    """

    def __init__(self, patch: Any, ignore: Any = (), idle_row: bool = False):
        super().__init__()
        self.idle_row = idle_row
        self.found: Counter[str] = Counter()
        self._ignored = {tensor.untyped_storage().data_ptr() for tensor in ignore}
        self._histories: dict[int, _History] = {}
        self._lanes: dict[int, int] = {0: 0}
        self._kept: list[Lane] = []
        """Every lane seen, so that none gets the id of another."""
        self._names = ["caller"]
        self._clocks = [numpy.zeros(64, numpy.int32)]
        self._marks: dict[int, Any] = {}
        self._stack = [0]
        self._where: dict[str, int] = {"": 0}
        self._alive: dict[int, torch.UntypedStorage] = {}
        """Every storage seen, so that none gets the address of another."""
        self._pooled: dict[int, int] = {}
        self._patch(patch)

    def _number(self, lane: Lane) -> int:
        if id(lane) not in self._lanes:
            self._lanes[id(lane)] = len(self._clocks)
            self._names.append(f"{lane.name} {lane.device}")
            self._clocks.append(numpy.zeros(64, numpy.int32))
            self._kept.append(lane)
        return self._lanes[id(lane)]

    def _join(self, into: int, clock: Any) -> None:
        numpy.maximum(self._clocks[into], clock, out=self._clocks[into])

    def _patch(self, patch: Any) -> None:
        races, work, push, pop = self, Lane.work, HostRing.push, HostRing.pop

        @contextlib.contextmanager
        def working(lane, kind=""):
            races._stack.append(races._number(lane))
            try:
                with work(lane, kind):
                    yield
            finally:
                races._stack.pop()

        def mark(lane):
            races._marks[races._number(lane)] = races._clocks[races._number(lane)].copy()

        def follow(lane, other):
            seen = races._marks.get(races._number(other))
            if other is not lane and seen is not None:
                races._join(races._number(lane), seen)

        def begin(lane):
            races._join(races._number(lane), races._clocks[0])

        def finish(lane):
            races._join(0, races._clocks[races._number(lane)])

        def wait(lane):
            for number in range(len(races._clocks)):
                races._join(number, races._clocks[races._number(lane)])

        def pushing(ring, label, packet):
            push(ring, (label, races._clocks[races._stack[-1]].copy()), packet.clone())

        def popping(ring):
            (label, clock), rows = pop(ring)
            for number in range(len(races._clocks)):  # what the host launches from now on comes after
                races._join(number, clock)
            return label, rows

        patch.setattr(Lane, "work", working)
        for function in (mark, follow, begin, finish, wait):
            patch.setattr(Lane, function.__name__, function)
        patch.setattr(Lane, "receive", lambda lane, tensor: tensor.clone())
        patch.setattr(HostRing, "push", pushing)
        patch.setattr(HostRing, "pop", popping)
        patch.setattr(HostRing, "oldest", property(lambda ring: ring._flying[0][0][0]))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        lane = self._stack[-1]
        self._clocks[lane][lane] += 1
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        name = str(func).rsplit(".", 1)[0]
        if not name.startswith(_TOUCH_NOTHING):
            self._inputs(func, name, args, kwargs, lane)
        out = func(*args, **kwargs)
        storages = {leaf.untyped_storage().data_ptr() for leaf in given}
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                pointer = leaf.untyped_storage().data_ptr()
                if pointer not in storages and leaf.untyped_storage().nbytes():
                    self._alive[pointer] = leaf.untyped_storage()
                    if capturing:
                        self._pooled[pointer] = lane
                    self._histories[pointer] = history = _History(leaf.untyped_storage().nbytes())
                    history.written_by[:], history.written_at[:] = lane, self._clocks[lane][lane]
                    history.written_where[:] = self._place(name)
        return out

    def _inputs(self, func, name, args, kwargs, lane) -> None:
        written = set()
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                written |= {id(leaf) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)}
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        if is_view:
            return
        for place, leaf in enumerate(tree_leaves((args, kwargs))):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.numel():
                rows = None
                if place == 0 and name in _BY_ROW and args[1] == 0:
                    rows = args[_BY_ROW[name]]
                elif place == 0 and name in ("aten.index_put_", "aten.index", "aten._index_put_impl_"):
                    first = args[1][0]
                    rows = first.flatten() if first is not None and first.dtype == torch.long else None
                self._access(leaf, rows, id(leaf) in written, lane, name)

    def _access(self, tensor, rows, writes, lane, name) -> None:
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        if pointer in self._ignored:
            return
        self._alive.setdefault(pointer, storage)
        if self._pooled.get(pointer, lane) != lane:
            owner = self._names[self._pooled[pointer]]
            self.found[f"{name} on {self._names[lane]} touches memory of graphs on {owner}"] += 1
        history = self._histories.get(pointer)
        if history is None or history.written_by.size != storage.nbytes():
            history = self._histories[pointer] = _History(storage.nbytes())
        if rows is not None and self.idle_row:
            rows = rows[rows != tensor.shape[0] - 1]
        for at in _bytes(tensor, rows):
            self._check(history, at, writes, lane, name)

    def _check(self, history, at, writes, lane, name) -> None:
        clock, place = self._clocks[lane], self._place(name)
        by, when = history.written_by[at], history.written_at[at]
        late = (by >= 0) & (by != lane) & (when > clock[numpy.maximum(by, 0)])
        if late.any():
            first = int(numpy.flatnonzero(late)[0])
            self._report(
                "read" if not writes else "write",
                place,
                lane,
                "write",
                int(history.written_where[at].ravel()[first]),
                int(by.ravel()[first]),
            )
        if writes:
            for other, (moments, places) in history.read.items():
                if other != lane:
                    late = moments[at] > clock[other]
                    if late.any():
                        first = int(numpy.flatnonzero(late)[0])
                        self._report("write", place, lane, "read", int(places[at].ravel()[first]), other)
            history.written_by[at], history.written_at[at], history.written_where[at] = lane, clock[lane], place
        else:
            moments, places = history.reads(lane)
            moments[at], places[at] = clock[lane], place

    def _report(self, what, place, lane, earlier, earlier_place, earlier_lane) -> None:
        names = list(self._where)
        self.found[
            f"{what} on {self._names[lane]} at {names[place]} after {earlier} on {self._names[earlier_lane]} at "
            f"{names[earlier_place]}"
        ] += 1

    def _place(self, name: str) -> int:
        frame, lines = sys._getframe(2), []
        while frame is not None and len(lines) < 4:
            path = frame.f_code.co_filename
            if "hf_psd" in path or "psd_kernels" in path:
                lines.append(f"{path.rsplit('/', 1)[1]}:{frame.f_lineno}")
            frame = frame.f_back
        text = f"{name.removeprefix('aten.')} ({' < '.join(lines)})"
        return self._where.setdefault(text, len(self._where))


def _bytes(tensor: torch.Tensor, rows: torch.Tensor | None) -> list[Any]:
    """The bytes of a tensor's storage that an access touches, as slices or index arrays."""
    size = tensor.element_size()
    if rows is not None:
        return [piece for row in sorted(set(rows.tolist())) for piece in _bytes(tensor.detach()[row], None)]
    start = tensor.storage_offset() * size
    if tensor.is_contiguous():
        return [slice(start, start + tensor.numel() * size)]
    at = numpy.zeros(1, numpy.int64) + start
    for length, stride in zip(tensor.shape, tensor.stride()):
        if stride:
            at = (at[:, None] + numpy.arange(length) * stride * size).ravel()
    return [(at[:, None] + numpy.arange(size)).ravel()]
