"""The device buffers of a call: built for it, or kept with the target so that captured graphs stay valid."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch
from transformers import PreTrainedModel

from .graphs import StepGraphs, bucket
from .lanes import Lane
from .runner import ModelRunner, input_device
from .state import Limits, SequenceState

_COLUMN_GRANULE = 256
_kept: weakref.WeakKeyDictionary[PreTrainedModel, Workspace] = weakref.WeakKeyDictionary()


class Workspace:
    """KV caches, sequence state, lanes and graphs of one target with its drafters.

    Args:
        model: the target.
        limits: sizes; with graphs, the last slot is the idle one.
        pad_id: fills rows past their end.
        graphs: whether steps may be captured.
    """

    def __init__(self, model: PreTrainedModel, limits: Limits, pad_id: int, graphs: bool):
        device = input_device(model)
        self.limits, self.graphs = limits, graphs
        self.runner = self._make_runner(model, None)
        self.state = SequenceState(limits, device, pad_id)
        self.lane, self.draft_lane = Lane(device, "target"), Lane(device, "draft")
        self._lanes = {device: self.draft_lane}
        self._seeds: dict[torch.device, torch.Tensor] = {}
        self._graphs_away: dict[torch.device, StepGraphs] = {}
        self.scratch: dict[Any, Any] = {}
        self.busy = False
        self.fingerprint = fingerprint(model)
        self.verify_graphs = StepGraphs(self.lane, limits.slots - 1) if graphs else None
        self.draft_graphs = StepGraphs(self.draft_lane, limits.slots - 1) if graphs else None
        self._drafter_runners: dict[int, tuple[weakref.ref[PreTrainedModel], ModelRunner, Hashable]] = {}

    def lane_on(self, device: torch.device) -> Lane:
        """The lane drafters on `device` work on."""
        if device not in self._lanes:
            self._lanes[device] = Lane(device, "draft")
        return self._lanes[device]

    def seed_on(self, device: torch.device) -> torch.Tensor:
        """The call's seed on `device`, an int64 scalar that graphs read."""
        if device not in self._seeds:
            self._seeds[device] = torch.zeros((), dtype=torch.long, device=device)
        return self._seeds[device]

    def draft_graphs_on(self, device: torch.device) -> StepGraphs | None:
        """The graphs of drafters on a device, None where drafters run without."""
        if self.draft_graphs is None or device.type != "cuda":
            return None
        return self.draft_graphs if device == self.runner.device else self.graphs_on(device)

    def graphs_on(self, device: torch.device) -> StepGraphs:
        """The graphs of draft turns on another CUDA device than the target's."""
        if device not in self._graphs_away:
            self._graphs_away[device] = StepGraphs(self.lane_on(device), self.limits.slots - 1)
        return self._graphs_away[device]

    @property
    def captured(self) -> int:
        """Number of graphs captured so far."""
        graphs = [self.verify_graphs, self.draft_graphs, *self._graphs_away.values()]
        return sum(each.captured for each in graphs if each is not None)

    def runner_for(self, model: PreTrainedModel, key: int) -> ModelRunner:
        """The runner of drafter number `key`, kept while that number means the same model."""
        known = self._drafter_runners.get(key)
        mark = fingerprint(model)
        if known is not None and known[0]() is model and known[2] == mark:
            return known[1]
        if known is not None and self.draft_graphs is not None:
            self.draft_graphs = StepGraphs(self.draft_lane, self.limits.slots - 1)
            self._graphs_away.clear()
        runner = self._make_runner(model, key)
        self._drafter_runners[key] = (weakref.ref(model), runner, mark)
        return runner

    def _make_runner(self, model: PreTrainedModel, key: int | None) -> ModelRunner:
        """The runner of the target (`key` None) or of drafter number `key`."""
        return ModelRunner(model, self.limits.slots, self.limits.capacity)

    def serves(self, model: PreTrainedModel, batch: int, columns: int, gamma: int) -> bool:
        """Whether a call of this size on this model, as its weights are now, can use these buffers and graphs."""
        limits = self.limits
        fits = limits.slots - 1 >= batch and limits.columns >= columns and limits.gamma == gamma
        return fits and self.fingerprint == fingerprint(model)


def fingerprint(model: PreTrainedModel) -> Hashable:
    """Where the model's weights lie and which adapters are active: what captured graphs have built in."""
    weights = tuple((parameter.data_ptr(), parameter.dtype) for parameter in model.parameters())
    layers = [module for module in model.modules() if hasattr(module, "active_adapters")]
    adapters = tuple(str((layer.active_adapters, getattr(layer, "disable_adapters", None))) for layer in layers)
    return hash((weights, adapters))


def obtain(model: PreTrainedModel, batch: int, columns: int, gamma: int, pad_id: int, graphs: bool) -> Workspace:
    """A workspace for `batch` rows of at most `columns` ids; with graphs it is kept while the target lives."""
    known = _kept.get(model)
    if not graphs or (known is not None and known.busy):  # a call inside a call must not touch the outer one's state
        return Workspace(model, Limits(batch, columns, gamma), pad_id, graphs=False)
    if known is None or not known.serves(model, batch, columns, gamma):
        _kept.pop(model, None)
        known = None
        limits = Limits(bucket(batch) + 1, -(-columns // _COLUMN_GRANULE) * _COLUMN_GRANULE, gamma)
        _kept[model] = Workspace(model, limits, pad_id, graphs=True)
    return _kept[model]


def release(model: PreTrainedModel | None = None) -> None:
    """Frees the KV caches and graphs kept with `model`, or with every model."""
    if model is None:
        _kept.clear()
    else:
        _kept.pop(model, None)
