"""A run: points one after the other, each written down before the next begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from . import costs
from .capped import CapExperiment
from .decoders import Decoder, make_decoder
from .environment import environment
from .flashspec import installed
from .lab import Lab, free
from .measure import fill_costs, fill_row, run_calls
from .plans import explain_plan
from .points import QUEUE, REPLICAS, Point
from .profiles import RIVALS, Settings
from .prompts import Prompts
from .queued import QueuedDecoder
from .replicas import ReplicaPool
from .report import line
from .rows import Results, Row, row_for

_LONG = {"flashspec": 200.0, "flashspec-gamma": 200.0, "hf-static": 60.0}
"""Seconds that a point of these methods can take on CUDA, where it compiles."""


class Session:
    """Measures points and keeps their rows.

    Args:
        results: where rows go; it knows the settings.
        points: what to measure; points that `results` has already are skipped.
        time_limit: seconds from now after which no further point begins; None is no limit.
        say: prints a line.
        bar: whether to show a progress bar.
        plans: whether to ask `hf_psd.explain` after "auto" was measured.
    """

    def __init__(
        self,
        results: Results,
        points: Sequence[Point],
        time_limit: float | None = None,
        say: Callable[[str], None] = print,
        bar: bool = True,
        plans: bool = False,
    ):
        self.results, self.settings = results, results.settings
        self.points = [point for point in points if not results.done(point)]
        self.began, self.time_limit = time.perf_counter(), time_limit
        self.say, self.bar, self.plans = say, bar, plans
        most = max((point.requests(self.settings) for point in self.points), default=1)
        self.lab = Lab(self.settings, most, any(point.drafter for point in self.points))
        self.cap = CapExperiment(self.settings, self.lab)
        self.replicas: ReplicaPool | None = None

    def run(self) -> None:
        """Measures until all points are done or the time is up; an interrupt ends it too, with every row kept."""
        self.results.note_environment(environment(self.settings.devices))
        progress = tqdm(self.points, disable=not self.bar, unit="point")
        try:
            for point in progress:
                progress.set_description(point.name)
                if self.left() < self._least(point):
                    continue
                row = self._attempt(point)
                self.results.add(row)
                self._tell(progress, line(row))
            left = sum(not self.results.done(point) and point.name not in self.results.rows for point in self.points)
            if left:
                self._tell(progress, f"{left} points are left for want of time; --resume goes on.")
        except KeyboardInterrupt:
            self._tell(progress, "Interrupted; --resume goes on.")
        finally:
            progress.close()
            self.close()

    def close(self) -> None:
        """Ends the replicas and frees the models."""
        self._end_replicas()
        self.cap.lift()
        self.lab.close()

    def left(self) -> float:
        """Seconds until the time limit."""
        if self.time_limit is None:
            return float("inf")
        return self.time_limit - (time.perf_counter() - self.began)

    def _least(self, point: Point) -> float:
        return _LONG.get(point.method, 0.0) if self.settings.devices[0].startswith("cuda") else 0.0

    def _tell(self, progress: Any, text: str) -> None:
        if self.bar:
            progress.write(text)
        else:
            self.say(text)

    def _attempt(self, point: Point) -> Row:
        """The row of a point; what goes wrong is noted in it and ends nothing else, but for models that cannot be
        built and prompts that cannot be read."""
        row = row_for(point, self.settings)
        if point.method in RIVALS and installed() is None:
            row.error = "flashspec is not installed"
            return row
        if point.layout != REPLICAS:
            self._end_replicas()
            self.lab.build()
            self.lab.prompts(1)
        try:
            if point.layout == REPLICAS:
                return self._pool().measure(row, self._settings(point))
            self._measure(point, row)
        except Exception as error:
            row.error = out_of_memory(error) or f"{type(error).__name__}: {error}"[:600]
        free()
        return row

    def _settings(self, point: Point) -> Settings:
        return replace(self.settings, gamma=point.gamma)

    def _measure(self, point: Point, row: Row) -> None:
        lab, settings = self.lab, self._settings(point)
        target = lab.target
        self._note_facts()
        with self.cap.around(point):
            drafter = lab.drafter(point.drafter)
            prompts = lab.prompts(point.requests(settings))
            devices = (str(target.device),) if point.devices_used == 1 else settings.devices
            decoder = self._decoder(point, settings, target, drafter, prompts)
            try:
                found = run_calls(
                    decoder,
                    point.method,
                    point.requests(settings),
                    devices,
                    settings.auto_warm_ups if point.method == "auto" else settings.warm_ups,
                    settings.repeat,
                    enough=lambda: self.left() < 0,
                )
            finally:
                decoder.close()
            fill_row(row, found, [ended - began for began, ended in found.walls])
            columns = float(prompts.mask.sum(1).float().mean())
            bandwidth = self.results.facts["copy_bytes_per_second"] if point.devices_used == 1 else None
            fill_costs(row, found, target, drafter, self._resident(devices), columns, bandwidth)
        if self.plans and point.method == "auto" and not point.sampled and point.gamma == self.settings.gamma:
            self._note_plan(point, target, drafter)

    def _decoder(
        self, point: Point, settings: Settings, target: PreTrainedModel, drafter: PreTrainedModel, prompts: Prompts
    ) -> Decoder:
        if point.layout == QUEUE:
            return QueuedDecoder(point.method, settings, target, drafter, prompts, point.sampled, point.batch)
        return make_decoder(point.method, settings, target, drafter, prompts, point.sampled)

    def _resident(self, devices: tuple[str, ...]) -> list[PreTrainedModel]:
        return [model for model in self.lab.models if str(model.device) in devices]

    def _note_facts(self) -> None:
        facts = self.results.facts
        facts.setdefault("agreement", self.lab.agreement)
        if "copy_bytes_per_second" not in facts:
            facts["copy_bytes_per_second"] = costs.copy_bandwidth(self.settings.devices[0])
            free()

    def _note_plan(self, point: Point, target: PreTrainedModel, drafter: PreTrainedModel) -> None:
        plan = explain_plan(target, drafter, self.lab.prompts(point.batch), self._settings(point))
        self.results.facts.setdefault("plans", {})[point.name] = plan

    def _end_replicas(self) -> None:
        if self.replicas is not None:
            self.replicas.close()
            self.replicas = None

    def _pool(self) -> ReplicaPool:
        if self.replicas is None:
            prompts = self.lab.prompts(self.lab.most)
            self.lab.close()
            self.replicas = ReplicaPool(self.settings, prompts)
        return self.replicas


def out_of_memory(error: BaseException) -> str | None:
    """A short text if the error says that memory was too small."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:  # a failed graph capture can hide what made it fail
        chain.append(current)
        current = current.__cause__ or current.__context__
    for each in chain:
        if isinstance(each, torch.OutOfMemoryError) or "out of memory" in str(each).lower():
            return f"out of memory: {str(each)[:200]}"
    return None
