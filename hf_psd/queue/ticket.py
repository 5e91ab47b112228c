"""A request of the queue from its arrival to its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..ledger import Ledger
from ..phases import Request
from .results import RequestCancelled, RequestStatus, Result, copy_of
from .settings import Settings


@dataclass(eq=False)
class Ticket:
    """One request.

    Attributes:
        number: order of arrival.
        result: what its owner sees; brought up to date as tokens come.
        settings: how it samples and ends.
        noise: key of its noise.
        ledger: its text, cut where plain `generate` would stop.
        deliver: takes snapshots of `result`: each new token's if `streaming`, and the last.
        streaming: whether snapshots are delivered while it runs.
        streamer: a transformers streamer of its own.
        request: its place in the step loop while it is seated.
        fed: tokens of its text whose KV the target holds, while it is read in.
        round: verifications so far, which no later seat may repeat.
        preemptions: how often it had to leave its seat.
    """

    number: int
    result: Result
    settings: Settings
    noise: int
    ledger: Ledger
    deliver: Callable[[Result], None]
    streaming: bool = False
    streamer: Any = None
    request: Request | None = None
    fed: int = 0
    round: int = 0
    preemptions: int = 0
    _last: float = field(default=0.0)

    @property
    def text(self) -> list[int]:
        """Prompt and tokens so far."""
        return self.result.prompt_ids + self.ledger.rows[0]

    @property
    def length(self) -> int:
        return len(self.result.prompt_ids) + len(self.ledger.rows[0])

    @property
    def limit(self) -> int:
        """Length at which it ends at the latest."""
        return self.settings.rules.max_columns

    @property
    def ended(self) -> bool:
        return self.result.is_finished()

    def begin(self) -> None:
        """It leaves the waiting line, for the first time or again."""
        if self.result.status is RequestStatus.PENDING:
            self.result.lifespan = (time.perf_counter(), -1)
            if self.streamer is not None:
                self.streamer.put(torch.tensor([self.result.prompt_ids]))
        self.result.status = RequestStatus.PREFILLING

    def commit(self, ids: list[int], ended: bool, logprobs: list[float]) -> tuple[int, list[float]]:
        """Takes in new tokens; returns how many stand, and the seconds that each of them took since the last."""
        ledger, result = self.ledger, self.result
        before = len(ledger.rows[0])
        ledger.append(0, ids, ended)
        ledger.settle()
        new = ledger.rows[0][before:]
        now = time.perf_counter()
        gaps = [(now - self._last) / len(new)] * len(new) if self._last and new else []
        if new:
            self._last = now
            result.first_token_time = result.first_token_time or now
        result.status = RequestStatus.DECODING
        result.generated_tokens += new
        result.logprobs += logprobs[: len(new)]
        if result.timestamps is not None:
            result.timestamps += [now] * len(new)
        if self.streamer is not None:
            for token in new:
                self.streamer.put(torch.tensor([token]))
        if self.streaming and new and not ledger.ended[0]:
            self.deliver(copy_of(result))
        return len(new), gaps

    def end(self, error: BaseException | None = None) -> None:
        """It is over; may be called once."""
        result = self.result
        assert not self.ended, f"{result.request_id} ended twice"
        if self.streamer is not None and result.lifespan[0] >= 0:
            try:
                self.streamer.end()
            except Exception as raised:
                error = error or raised
        result.exception = error
        result.error = None if error is None else describe(error)
        result.lifespan = (result.lifespan[0], time.perf_counter())
        result.status = RequestStatus.FINISHED if error is None else RequestStatus.FAILED
        self.deliver(copy_of(result))


def describe(error: BaseException) -> str:
    """One line for `Result.error`."""
    return str(error) if isinstance(error, RequestCancelled) else f"{type(error).__name__}: {error}"
