"""Streaming and progress as step hooks."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import torch
from transformers.generation.streamers import BaseStreamer

from .hooks import StepContext, StepHook
from .ledger import Ledger


class OnceEnded(BaseStreamer):
    """A user's streamer whose `end` takes effect at most once, and only after a `put` that went well."""

    def __init__(self, streamer: Any):
        self.streamer, self.open = streamer, False

    def put(self, value: torch.Tensor) -> None:
        self.streamer.put(value)
        self.open = True

    def end(self) -> None:
        if self.open:
            self.open = False
            self.streamer.end()


@contextmanager
def ending_streamer(streamer: Any) -> Iterator[OnceEnded | None]:
    """Ends the streamer also when the call fails before its step loop; whoever waits for the text must not hang."""
    once = None if streamer is None else OnceEnded(streamer)
    try:
        yield once
    except BaseException:
        if once is not None:
            with suppress(Exception):  # what failed first is what the caller must hear of
                once.end()
        raise
    if once is not None:
        once.end()


class StreamHook(StepHook):
    """Feeds a transformers streamer exactly as plain `generate` does: one `put` of [B] ids per column, then `end`.

    Column c is put once every row has it or has ended; several columns can come at once.
    """

    def __init__(self, streamer: Any, ledger: Ledger):
        self.streamer, self.ledger = streamer, ledger

    def on_commit(self, context: StepContext) -> None:
        columns, self.ledger.new_columns = self.ledger.new_columns, []
        for column in columns:
            self.streamer.put(torch.tensor(column))

    def on_end(self, context: StepContext) -> None:
        self.streamer.end()


class ProgressHook(StepHook):
    """A progress bar on a terminal line: tokens so far, rows that ended, tokens per second.

    Args:
        total: new tokens expected at most.
        label: text before the bar.
        out: where to write; default stderr.
    """

    def __init__(self, total: int, label: str = "", out: TextIO | None = None):
        self.total, self.label, self.out = total, label, out or sys.stderr
        self._emitted, self._began, self._drawn = 0, 0.0, 0.0

    def add(self, count: int) -> None:
        """Counts new tokens and redraws, at most ten times a second."""
        self._began = self._began or time.perf_counter()
        self._emitted += count
        if time.perf_counter() - self._drawn > 0.1:
            self._draw()

    def close(self) -> None:
        """Draws the final state and ends the line."""
        self._draw()
        self.out.write("\n")

    def on_start(self, context: StepContext) -> None:
        self._emitted, self._began = 0, time.perf_counter()

    def on_commit(self, context: StepContext) -> None:
        self.add(sum(len(ids) for ids in context.emitted))

    def on_end(self, context: StepContext) -> None:
        self.close()

    def _draw(self) -> None:
        self._drawn = time.perf_counter()
        rate = self._emitted / max(self._drawn - self._began, 1e-9)
        filled = min(30, 30 * self._emitted // max(self.total, 1))
        self.out.write(
            f"\r{self.label}[{'#' * filled}{'.' * (30 - filled)}] {self._emitted} tokens, {rate:.1f} tokens/s "
        )
        self.out.flush()
