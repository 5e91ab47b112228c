"""The memory-cap experiment: a target and a big drafter that one device of a given size does not hold together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from . import costs
from .lab import Lab, free
from .points import CAPPED_ONE, CAPPED_TWO, Point
from .profiles import Settings

_WORKING_GIB = 4.0  # activations, logits and graphs of the largest batch


class CapExperiment:
    """Runs points as if every CUDA device were small.

    Args:
        settings: of the run.
        lab: whose models are used.
    """

    def __init__(self, settings: Settings, lab: Lab):
        self.settings, self.lab = settings, lab
        self._capped = False

    @contextmanager
    def around(self, point: Point) -> Iterator[None]:
        """Inside, a capped point's device limit holds and its drafter is where the point wants it."""
        if point.layout not in (CAPPED_TWO, CAPPED_ONE):
            yield
            return
        drafter = self.lab.drafter(point.drafter)
        home = drafter.device
        try:
            self._put_cap()
            if point.layout == CAPPED_ONE:
                move(drafter, self.settings.devices[0])
            yield
        finally:
            self.lift()
            move(drafter, home)

    def lift(self) -> None:
        """Ends the limit."""
        if self._capped:
            for device in dict.fromkeys(self.settings.devices):
                if device.startswith("cuda"):
                    torch.cuda.set_per_process_memory_fraction(1.0, device)
            self._capped = False

    def cap_bytes(self) -> int:
        """The limit per device: the settings', or what the target needs with its KV at the largest batch."""
        if self.settings.memory_cap is not None:
            return int(self.settings.memory_cap * costs.GIB)
        target, settings = self.lab.target, self.settings
        tokens = settings.prompt + settings.new_tokens + settings.gamma
        room = max(settings.capped_batches) * tokens * costs.kv_bytes_per_token(target) + _WORKING_GIB * costs.GIB
        return int(costs.weight_bytes(target) + room)

    def _put_cap(self) -> None:
        free()
        self._capped = True
        for device in dict.fromkeys(self.settings.devices):
            if device.startswith("cuda"):
                total = torch.cuda.get_device_properties(device).total_memory
                fraction = min(1.0, self.cap_bytes() / total)
                torch.cuda.set_per_process_memory_fraction(fraction, device)


def move(model: PreTrainedModel, device: torch.device | str) -> None:
    """Moves a model; what fails half-way leaves it split, and moving it back mends that."""
    if any(parameter.device != torch.device(device) for parameter in model.parameters()):
        torch.nn.Module.to(model, device)
        free()
