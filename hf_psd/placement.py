"""Where target and drafters live: decided from their sizes and the devices' memory, moved only when asked to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from .arguments import resolve_models
from .runner import input_device

_FOR_WEIGHTS = 0.8
"""Share of a device's free memory that weights may take; the rest is for KV caches, activations and graphs."""


@dataclass(frozen=True)
class Decision:
    """What goes where, by `decide`.

    Attributes:
        target: devices of the target, in order; several mean that its layers are spread over them. Empty: stays.
        drafters: the device of each drafter, None where it stays.
        reasons: why, in words.
    """

    target: list[str]
    drafters: list[str | None]
    reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Placement:
    """Where everything lives after `place`: device of the target (of its input, if it is spread) and of each drafter,
    and why."""

    target: str
    drafters: list[str]
    spread: bool
    reasons: list[str]

    def __str__(self) -> str:
        lines = [f"target on {self.target}{' and others' if self.spread else ''}"]
        lines += [f"drafter {number} on {device}" for number, device in enumerate(self.drafters)]
        return "\n".join(lines + [f"  {reason}" for reason in self.reasons])


def decide(
    target: int | None, drafters: Sequence[int | None], devices: Sequence[str], free: Mapping[str, int]
) -> Decision:
    """Chooses devices. A drafter gets one that the target does not need, so that both can work at the same time.

    Args:
        target: bytes of its weights, None if it must not be moved.
        drafters: the same of each drafter.
        devices: those that may be used, the best first.
        free: bytes free on each.

    Raises:
        ValueError: the weights do not fit.
    """
    room = {device: int(free[device] * _FOR_WEIGHTS) for device in devices}
    if not room:
        return Decision([], [None] * len(drafters), ["no accelerator: everything stays where it is"])
    reasons = []
    homes: list[str] = []
    if target is None:
        reasons.append("the target is quantised or already spread, and stays where it is")
    elif single := next((device for device in devices if room[device] >= target), None):
        homes = [single]
        room[single] -= target
    else:
        spread = list(devices)
        movable = [size for size in drafters if size is not None]
        spare = spread[:-1]
        if movable and spare and sum(room[device] for device in spare) >= target and room[spread[-1]] >= max(movable):
            spread = spare
        if sum(room[device] for device in spread) < target:
            raise ValueError(
                f"psd: the target's weights take {_gib(target)}, but only {_gib(sum(room.values()))} are free for "
                f"weights on {', '.join(devices)}. Quantise it, or name more devices or memory."
            )
        homes = spread
        left = target
        for device in spread:
            taken = min(left, room[device])
            room[device], left = room[device] - taken, left - taken
        reasons.append(f"the target's {_gib(target)} are spread over {len(spread)} devices")
    places: list[str | None] = []
    for number, size in enumerate(drafters):
        if size is None:
            places.append(None)
            reasons.append(f"drafter {number} is quantised or already spread, and stays where it is")
            continue
        apart = [device for device in reversed(devices) if device not in homes and room[device] >= size]
        shared = [device for device in devices if device in homes and room[device] >= size]
        if not apart and not shared:
            raise ValueError(f"psd: no device has {_gib(size)} free for drafter {number}.")
        place = (apart or shared)[0]
        room[place] -= size
        places.append(place)
        if not apart:
            why = "no other device was given" if len(devices) == 1 else "no other device has room for it"
            reasons.append(f"drafter {number} shares {place} with the target: {why}")
    return Decision(homes, places, reasons)


def place(
    target: PreTrainedModel,
    drafters: Sequence[Any] = (),
    devices: str | Sequence[str | int | torch.device] = "auto",
    max_memory: Mapping[str | int, int | str] | None = None,
) -> Placement:
    """Moves a target and its drafters to devices, each drafter to one of its own where there is one.

    `generate` itself moves nothing. Quantised models and models that were loaded with a `device_map` over several
    devices stay where they are.

    Args:
        target: a causal LM, wrapped in LoRA or `torch.compile` or not.
        drafters: entries of `assistant_models`; those that hold no model have no device of their own, and what serves
            twice counts once.
        devices: "auto" (every CUDA device), or devices, the best first.
        max_memory: bytes, or strings such as "20GiB", usable per device; default: what is free.

    Raises:
        ValueError: weights that do not fit, unknown devices.
        TypeError: what is no model or drafter.
        ImportError: accelerate is needed to spread a target over devices, and is not installed.
    """
    target, models = resolve_models(target, drafters)
    names = _names(devices)
    limits = _limits(names, max_memory)
    free = {name: limits[name] if name in limits else _free(name) for name in names}
    decision = decide(_size(target), [_size(model) for model in models], names, free)
    if len(decision.target) > 1:
        _spread(target, {name: int(free[name] * _FOR_WEIGHTS) for name in decision.target})
    elif decision.target:
        torch.nn.Module.to(target, decision.target[0])
    for model, device in zip(models, decision.drafters):
        if device is not None:
            torch.nn.Module.to(model, device)
    homes = [str(input_device(model)) for model in models]
    return Placement(str(input_device(target)), homes, len(decision.target) > 1, decision.reasons)


def _size(model: PreTrainedModel) -> int | None:
    """Bytes of the weights; None for a model that must not be moved."""
    spread = len(set(getattr(model, "hf_device_map", {}).values())) > 1
    if spread or getattr(model, "is_quantized", False) or getattr(model, "quantization_method", None) is not None:
        return None
    return sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])


def _names(devices: Any) -> list[str]:
    if isinstance(devices, str) and devices == "auto":
        return [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if isinstance(devices, (str, int, torch.device)):
        devices = [devices]
    if not isinstance(devices, Sequence):
        raise TypeError(f'psd: devices must be "auto" or a list of devices, got {type(devices).__name__}.')
    return list(dict.fromkeys(map(_name, devices)))


def _name(device: Any) -> str:
    try:
        place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"psd: {device!r} is no device, such as 'cuda:1', 1 or 'cpu'.") from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"psd: there is no device {place}; this machine has {torch.cuda.device_count()} GPUs.")
    if place.type == "meta":
        raise ValueError("psd: weights on the meta device would be lost; name devices that can compute.")
    return f"cuda:{place.index or 0}" if place.type == "cuda" else str(place)


def _limits(names: Sequence[str], max_memory: Any) -> dict[str, int]:
    """Bytes by name of device, of those that are given. As accelerate takes "cpu" and "disk" for what is left over,
    they may be named although nothing goes there."""
    if not isinstance(max_memory, (Mapping, type(None))):
        raise TypeError(f"psd: max_memory must map devices to bytes, got {type(max_memory).__name__}.")
    limits = {}
    for key, size in (max_memory or {}).items() if names else ():
        name = key if key in ("cpu", "disk") else _name(key)
        if name not in (*names, "cpu", "disk"):
            raise ValueError(f"psd: max_memory names {name}, but devices are {', '.join(names)}.")
        limits[name] = _bytes(name, size)
    return limits


def _bytes(name: str, size: Any) -> int:
    if isinstance(size, str):
        from accelerate.utils import convert_file_size_to_int

        return int(convert_file_size_to_int(size))
    if isinstance(size, bool) or not isinstance(size, (int, float)) or not 0 <= size < float("inf"):
        raise ValueError(f"psd: max_memory[{name!r}] must be bytes or a string such as '20GiB', got {size!r}.")
    return int(size)


def _free(name: str) -> int:
    device = torch.device(name)
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 2**62


def _spread(target: PreTrainedModel, room: Mapping[str, int]) -> None:
    try:
        from accelerate import dispatch_model, infer_auto_device_map
    except ImportError as error:
        raise ImportError("psd: spreading a target over several devices needs accelerate.") from error
    memory = {torch.device(name).index: size for name, size in room.items()}
    whole = list(getattr(target, "_no_split_modules", None) or [])
    layout = infer_auto_device_map(target, max_memory=memory, no_split_module_classes=whole)
    dispatch_model(target, layout)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
