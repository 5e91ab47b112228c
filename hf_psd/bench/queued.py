"""The continuous-batching queue as a method: more requests than seats, so that the seats stay taken until the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..hooks import StepContext, StepHook, StepHookList
from ..queue import ContinuousBatchingManager
from ..queue.metrics import QueueStats
from ..queue.sizes import BLOCK_SIZE, BLOCK_SIZE_ON_CUDA, bytes_per_token
from .clocks import TokenClock
from .decoders import Counts, arguments_of
from .lab import free
from .profiles import Settings
from .prompts import Prompts

CHUNK = 2048
"""Prompt tokens read per step."""


class Relay(StepHook):
    """Lets observers come and go while a queue stays open: each is told that a call begins when it comes, of every
    commit, and that the call is over when it goes."""

    def __init__(self) -> None:
        self.opening: StepContext | None = None
        self.watching = StepHookList()

    def come(self, hooks: Sequence[StepHook]) -> None:
        self.watching.extend(hooks)
        if self.opening is not None:
            self.watching.call("on_start", self.opening)

    def go(self) -> None:
        """All of them go."""
        leaving, self.watching = self.watching, StepHookList()
        if self.opening is not None:
            leaving.end(self.opening)

    def on_start(self, context: StepContext) -> None:
        self.opening = context
        self.watching.call("on_start", context)

    def on_commit(self, context: StepContext) -> None:
        self.watching.call("on_commit", context)


@dataclass(frozen=True)
class Tally:
    """Running totals of a queue at one moment; the difference of two is what happened between them."""

    forwards: int
    rounds: int
    emitted: int
    drafts: int
    drafted: int
    accepted: int

    @classmethod
    def of(cls, stats: QueueStats) -> Tally:
        forwards, drafts = stats.target_forwards, stats.draft_forwards
        return cls(forwards, stats.rounds, stats.emitted, drafts, stats.drafted, stats.accepted)


class QueuedDecoder:
    """This package's queue in one of its modes; every call adds all prompts at once and ends when all have ended.

    The queue stays open between calls, and with it what it has captured. Requests keep their noise from call to call.

    Args:
        method: "ar", "sd" or "psd".
        settings: of the run.
        target, drafter: the models.
        prompts: all requests of a call.
        sampled: sampled or greedy.
        seats: requests in flight.
    """

    def __init__(
        self,
        method: str,
        settings: Settings,
        target: PreTrainedModel,
        drafter: PreTrainedModel,
        prompts: Prompts,
        sampled: bool,
        seats: int,
    ):
        arguments = arguments_of(settings, prompts, target.device, sampled)
        columns = arguments.pop("attention_mask").shape[1]
        del arguments["input_ids"]
        self.method = method
        self.texts = [ids[mask.bool()].tolist() for ids, mask in zip(prompts.ids, prompts.mask)]
        psd: dict[str, Any] = {"mode": method, "gamma": settings.gamma, "seed": 0, **dict(settings.psd)}
        size = psd.setdefault("block_size", BLOCK_SIZE_ON_CUDA if target.device.type == "cuda" else BLOCK_SIZE)
        blocks = seats * -(-(columns + settings.new_tokens) // size)
        psd.setdefault("kv_memory", blocks * size * (bytes_per_token(target) + bytes_per_token(drafter)))
        self.relay = Relay()
        self.queue = ContinuousBatchingManager(
            target,
            [drafter],
            psd=psd,
            psd_hooks=[self.relay],
            max_batch_size=seats,
            prefill_chunk=CHUNK,
            **arguments,
        )
        self.captured: list[int] = []
        self._before = self._after = Tally.of(self.queue.stats)

    def __call__(self, clock: TokenClock | None = None, hooks: tuple[Any, ...] = ()) -> torch.Tensor:
        self._before = Tally.of(self.queue.stats)
        self.relay.come([*hooks, *([clock] if clock is not None else [])])
        try:
            for number, text in enumerate(self.texts):
                self.queue.add_request(text, noise_id=number)
            results = self.queue.drain()
        finally:
            self.relay.go()
        self._after = Tally.of(self.queue.stats)
        self.captured.append(self.queue.captured - sum(self.captured))
        failed = next((result for result in results if result.exception is not None), None)
        if failed is not None:
            raise RuntimeError(f"{failed.request_id} failed: {failed.error}") from failed.exception
        return torch.tensor([result.generated_tokens for result in results])

    def counts(self) -> Counts:
        stats, before, after = self.queue.stats, self._before, self._after
        forwards, rounds = after.forwards - before.forwards, after.rounds - before.rounds
        notes = list(stats.notes)
        if any(self.captured):
            notes.append(f"graphs captured by call: {', '.join(map(str, self.captured))}")
        return Counts(
            forwards,
            (after.emitted - before.emitted) / rounds,
            after.drafts - before.drafts,
            after.drafted - before.drafted,
            after.accepted - before.accepted,
            self.method,
            stats.balance if self.method == "psd" else None,
            {self.method: forwards},
            notes=notes,
            errors=list(stats.errors),
        )

    def close(self) -> None:
        self.queue.stop(hard_stop=True)
        free()
