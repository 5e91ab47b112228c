"""Lanes: a device with a stream of its own. Tensors cross from lane to lane in `Lane.receive` and nowhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


class Lane:
    """Work on one device in order. On CUDA it is a stream of its own, on CPU nothing but the device.

    Args:
        device: where the lane's work runs.
        name: shown in timelines.

    Attributes:
        watchers: each is called with the lane and the kind of work where a piece of work begins; what it returns is
            called where it ends.
    """

    def __init__(self, device: torch.device, name: str = ""):
        self.device, self.name = device, name
        self.watchers: list[Callable[[Lane, str], Callable[[], None]]] = []
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._done: torch.cuda.Event | None = None

    @contextmanager
    def work(self, kind: str = "") -> Iterator[None]:
        """Enqueues what runs inside on this lane. Work that has a kind shows in timelines."""
        with ExitStack() as entered:
            if self.stream is not None:
                entered.enter_context(torch.cuda.device(self.device))
                entered.enter_context(torch.cuda.stream(self.stream))
            ends = [watch(self, kind) for watch in self.watchers] if kind else []
            yield
            for end in ends:
                end()

    def mark(self) -> None:
        """Marks the end of the work enqueued so far; `follow` on another lane waits for the newest mark."""
        if self.stream is not None:
            self._done = torch.cuda.Event()
            self._done.record(self.stream)

    def follow(self, other: Lane) -> None:
        """Lets later work on this lane start only after the other lane's newest mark. The host does not wait."""
        if other is self or other._done is None:
            return
        if self.stream is not None:
            self.stream.wait_event(other._done)
        else:
            other._done.synchronize()

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on this lane's device, kept alive until this lane's work with it is done.

        Call it inside `work()`, after `follow`-ing the lane that made the tensor.
        """
        # On the CPU nothing could tell later work to wait for a copy that is still under way.
        moved = tensor.to(self.device, non_blocking=self.stream is not None)
        if self.stream is not None and tensor.device.type == "cuda":
            tensor.record_stream(
                self.stream if tensor.device == self.device else torch.cuda.current_stream(tensor.device)
            )
        return moved

    def begin(self) -> None:
        """Starts after everything the caller has enqueued on the device."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def wait(self) -> None:
        """Lets the host wait until the lane's device has done all it was given."""
        if self.stream is not None:
            torch.cuda.synchronize(self.device)

    def finish(self) -> None:
        """Makes the caller's stream wait for the lane."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)


class HostRing:
    """Small int64 results on their way to the host, read one step late.

    Attributes:
        landed: when the packet read last was there: an event with timing, on the CPU `time.perf_counter()`.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._flying: list[tuple[Any, torch.Tensor, torch.cuda.Event | float]] = []
        self.landed: torch.cuda.Event | float = 0.0

    def push(self, label: Any, packet: torch.Tensor) -> None:
        """Starts copying `packet` (int64, on the device) to the host; call it on the lane that made it."""
        if self._device.type != "cuda":
            self._flying.append((label, packet, time.perf_counter()))
            return
        pinned = torch.empty(packet.shape, dtype=packet.dtype, pin_memory=True)
        pinned.copy_(packet, non_blocking=True)
        landed = torch.cuda.Event(enable_timing=True)
        landed.record()
        packet.record_stream(torch.cuda.current_stream())
        self._flying.append((label, pinned, landed))

    def __len__(self) -> int:
        return len(self._flying)

    @property
    def oldest(self) -> Any:
        """Label of the packet that `pop` will give."""
        return self._flying[0][0]

    def pop(self) -> tuple[Any, list[list[int]]]:
        """The oldest packet, as rows of ints. This is the one place where the host waits for the device."""
        label, packet, self.landed = self._flying.pop(0)
        if isinstance(self.landed, torch.cuda.Event):
            self.landed.synchronize()
        return label, packet.tolist()
