"""Equal-GPU baselines: a target and a drafter on each of two devices, in a process each, half of the requests each."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.multiprocessing

from . import costs
from .clocks import decode_rate, median, percentiles
from .decoders import Counts, make_decoder
from .lab import Lab
from .measure import run_calls
from .profiles import Settings
from .prompts import Prompts
from .rows import Row, digest_rows

_PATIENCE = 600.0  # seconds to build models and measure a point


@dataclass
class Part:
    """What one replica found for its share of a point; times are seconds of the machine's monotonic clock."""

    walls: list[tuple[float, float]]
    first: float
    observed: float
    tokens: int
    digests: list[str]
    counts: Counts
    steps_ms: list[float]
    arrivals: list[tuple[float, int]]
    latencies_ms: dict[str, list[float]]
    peaks: dict[str, int]
    weights: int
    kv: int


class ReplicaPool:
    """Two processes that measure the same point at the same time.

    Args:
        settings: of the run; `devices` are those of the replicas.
        prompts: all prompts, of which a point's first half goes to the first replica.
    """

    def __init__(self, settings: Settings, prompts: Prompts):
        context = torch.multiprocessing.get_context("spawn")
        self.barrier = context.Barrier(2)
        self.pipes, self.processes = [], []
        content = (prompts.ids.tolist(), prompts.mask.tolist())
        for device in settings.devices:
            ours, theirs = context.Pipe()
            alone = replace(settings, devices=(device, device))
            process = context.Process(target=serve, args=(theirs, self.barrier, alone, content), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def measure(self, row: Row, settings: Settings) -> Row:
        """Fills the row with what both replicas did together.

        Raises:
            RuntimeError: a replica failed or died; the message is the replica's.
        """
        half = row.batch // 2
        for number, pipe in enumerate(self.pipes):
            pipe.send((row.method, number * half, (number + 1) * half, row.sampled, settings.gamma))
        replies = [self._reply(pipe, process) for pipe, process in zip(self.pipes, self.processes)]
        self.barrier.reset()
        failed = next((reply for reply in replies if isinstance(reply, str)), None)
        if failed is not None:
            raise RuntimeError(f"a replica failed: {failed}")
        return merge(row, replies)

    def close(self) -> None:
        """Ends both processes."""
        for pipe, process in zip(self.pipes, self.processes):
            if process.is_alive():
                pipe.send(None)
        for process in self.processes:
            process.join(timeout=30)
            if process.is_alive():
                process.terminate()
        self.pipes, self.processes = [], []

    def _reply(self, pipe: Any, process: Any) -> Any:
        waited = 0.0
        while not pipe.poll(1.0):
            waited += 1.0
            if not all(each.is_alive() for each in self.processes):
                self.barrier.abort()  # who waits there for a dead one would wait in vain
            if not process.is_alive():
                return f"it ended with exit code {process.exitcode}"
            if waited > _PATIENCE:
                return f"no answer within {_PATIENCE:.0f} s"
        return pipe.recv()


def serve(pipe: Any, barrier: Any, settings: Settings, content: tuple[list[Any], list[Any]]) -> None:
    """A replica: builds its models at the first task and answers tasks until it is sent None.

    A task is `(method, first row, last row, sampled, gamma)`; the answer is a `Part`, or a text that says what went
    wrong.
    """
    if settings.devices[0].startswith("cuda"):
        torch.cuda.set_device(settings.devices[0])
    prompts = Prompts(*map(torch.tensor, content))
    lab = Lab(settings, prompts.ids.shape[0])
    while (task := pipe.recv()) is not None:
        try:
            pipe.send(_answer(lab, barrier, prompts, *task))
        except Exception as error:
            barrier.abort()  # the other replica must not wait for this one
            pipe.send(f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}")
    lab.close()


def merge(row: Row, parts: list[Part]) -> Row:
    """One row of what several replicas did side by side: the time is from the first start to the last end."""
    spans = list(zip(*(part.walls for part in parts)))
    row.seconds = [max(end for _, end in calls) - min(begin for begin, _ in calls) for calls in spans]
    typical, tokens = median(row.seconds), sum(part.tokens for part in parts)
    row.tokens_per_second = tokens / typical
    row.tokens_per_second_per_gpu = row.tokens_per_second / row.devices_used
    row.makespan_per_request_ms = 1e3 * typical / row.batch
    row.first_call_seconds = max(part.first for part in parts)
    row.observed_seconds = max(part.observed for part in parts)
    row.digests = [digest for part in parts for digest in part.digests]
    counts = [part.counts for part in parts]
    row.mode = counts[0].mode
    row.target_forwards = sum(each.forwards for each in counts)
    row.draft_forwards = sum(each.draft_forwards or 0 for each in counts)
    row.ms_per_forward = 1e3 * typical / max(each.forwards for each in counts)
    row.tokens_per_forward = sum(each.tokens_per_forward or 0 for each in counts) / len(counts)
    drafted = sum(each.drafted or 0 for each in counts)
    row.acceptance = sum(each.accepted or 0 for each in counts) / drafted if drafted else None
    row.step_ms = percentiles([value for part in parts for value in part.steps_ms])
    row.decode_tokens_per_second = decode_rate([arrival for part in parts for arrival in part.arrivals])
    for name in ("ttft", "tpot", "e2e"):
        setattr(row, f"{name}_ms", percentiles([value for part in parts for value in part.latencies_ms[name]]))
    peaks = [(device, peak / costs.GIB) for part in parts for device, peak in part.peaks.items()]
    if peaks:
        row.peak_gib = dict(peaks)
        row.weights_gib = sum(part.weights for part in parts) / costs.GIB
        row.kv_gib = sum(part.kv for part in parts) / costs.GIB
        row.over_gib = sum(peak for _, peak in peaks) - row.weights_gib - row.kv_gib
    row.notes = list(dict.fromkeys(note for each in counts for note in each.notes))
    row.error = "; ".join(error for each in counts for error in each.errors) or None
    return row


def _answer(
    lab: Lab, barrier: Any, prompts: Prompts, method: str, first: int, last: int, sampled: bool, gamma: int
) -> Part:
    settings = replace(lab.settings, gamma=gamma)
    target, drafter, share = lab.target, lab.drafter(), prompts.rows(first, last)
    decoder = make_decoder(method, settings, target, drafter, share, sampled)
    try:
        found = run_calls(
            decoder,
            method,
            last - first,
            (settings.devices[0],),
            settings.warm_ups,
            settings.repeat,
            together=lambda: _meet(barrier),
        )
    finally:
        decoder.close()
    assert found.ids is not None and found.clock is not None and found.counts is not None
    tokens = float(share.mask.sum(1).float().mean()) + found.ids.shape[1]
    per_token = costs.kv_bytes_per_token(target) + (costs.kv_bytes_per_token(drafter) if method != "ar" else 0)
    return Part(
        found.walls,
        found.first,
        found.observed,
        found.ids.numel(),
        digest_rows(found.ids),
        found.counts,
        found.clock.step_ms(),
        found.clock.arrivals,
        found.clock.latencies_ms(),
        found.peaks,
        sum(costs.weight_bytes(model) for model in lab.models),
        int((last - first) * tokens * per_token),
    )


def _meet(barrier: Any) -> None:
    barrier.wait(timeout=_PATIENCE)
