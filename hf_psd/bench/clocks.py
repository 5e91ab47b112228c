"""When tokens reach the host: one observer that is a step hook for our own modes and a streamer for transformers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from transformers.generation.streamers import BaseStreamer

from ..hooks import StepContext, StepHook

PERCENTILES = (50, 95, 99)


class TokenClock(BaseStreamer, StepHook):
    """Notes the arrival of every request's tokens.

    Our step loop hands over the tokens of a step after it has launched the next one, so their arrival includes that
    launch; transformers hands a step's tokens over when it has waited for them (on some versions one step later).

    Args:
        batch: requests.
    """

    def __init__(self, batch: int):
        self.batch = batch
        self.began = 0.0
        self.arrivals: list[tuple[float, int]] = []
        """When tokens came, and how many."""
        self.first: dict[int, float] = {}
        self.last: dict[int, float] = {}
        self.count: dict[int, int] = {}
        self._saw_prompt = False

    def start(self) -> None:
        """Call when the request is made, with all devices idle."""
        self.began = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        """The streamer's side: first the prompt, then [B] ids, or [1, n] of assisted decoding."""
        if not self._saw_prompt:
            self._saw_prompt = True
            return
        now = self._arrived(value.numel())
        for request in range(self.batch):
            self._note(request, value.numel() // self.batch, now)

    def end(self) -> None:
        """Nothing is kept open."""

    def on_commit(self, context: StepContext) -> None:
        """The hook's side."""
        now = self._arrived(sum(map(len, context.emitted)))
        for request, ids in zip(context.requests, context.emitted):
            self._note(request.index, len(ids), now)

    def _arrived(self, tokens: int) -> float:
        now = time.perf_counter()
        self.arrivals.append((now, tokens))
        return now

    def _note(self, request: int, count: int, now: float) -> None:
        if count:
            self.first.setdefault(request, now)
            self.last[request] = now
            self.count[request] = self.count.get(request, 0) + count

    def step_ms(self) -> list[float]:
        """Time between arrivals."""
        return [1e3 * (later - sooner) for (sooner, _), (later, _) in zip(self.arrivals, self.arrivals[1:])]

    def latencies_ms(self) -> dict[str, list[float]]:
        """Per request: `ttft` to the first token, `e2e` to the last, `tpot` per token between the two."""
        requests = sorted(self.first)
        return {
            "ttft": [1e3 * (self.first[request] - self.began) for request in requests],
            "e2e": [1e3 * (self.last[request] - self.began) for request in requests],
            "tpot": [
                1e3 * (self.last[request] - self.first[request]) / (self.count[request] - 1)
                for request in requests
                if self.count[request] > 1
            ],
        }


def decode_rate(arrivals: Sequence[tuple[float, int]]) -> float | None:
    """Tokens per second from the first arrival on, whose own tokens do not count: without the prefill before it.

    Args:
        arrivals: seconds and tokens; None is returned for fewer than two moments.
    """
    if not arrivals:
        return None
    ordered = sorted(arrivals)
    began, ended = ordered[0][0], ordered[-1][0]
    return sum(tokens for _, tokens in ordered[1:]) / (ended - began) if ended > began else None


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """`{"p50": ..., "p95": ..., "p99": ...}`, None without values."""
    if not values:
        return None
    found: Any = numpy.percentile(list(values), PERCENTILES)
    return {f"p{share}": float(value) for share, value in zip(PERCENTILES, found)}


def median(values: Sequence[float]) -> float:
    """The middle value; of an even number, the mean of the two in the middle."""
    return float(numpy.median(list(values)))
