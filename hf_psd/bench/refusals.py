"""Settings that could only fail, or measure something else than their points say: refused before anything is built."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from ..config import PSDConfig
from ..testing.pairs import SHAPES
from .profiles import Settings

_COUNTS = ("layers", "gamma", "gamma_batch", "queue_factor", "prompt", "new_tokens", "repeat")
_LISTS = ("batches", "two_batches", "gammas", "capped_batches", "static_batches")
_DTYPES = ("float32", "bfloat16", "float16")


def refuse(settings: Settings) -> None:
    """Raises a `ValueError` that names the option."""
    numbers = {name: [getattr(settings, name)] for name in _COUNTS}
    numbers |= {name: getattr(settings, name) for name in _LISTS}
    for name, values in numbers.items():
        for value in values:
            if value is not None and value < 1:
                raise ValueError(f"{_option(name)} takes numbers from 1, got {value}.")
    if settings.warm_ups < 0:
        raise ValueError(f"--warm-ups takes numbers from 0, got {settings.warm_ups}.")
    for name in ("temperature", "memory_cap"):
        value = getattr(settings, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{_option(name)} takes numbers above 0, got {value}.")
    if not 0 <= settings.agreement <= 1:
        raise ValueError(f"--agreement takes a share from 0 to 1, got {settings.agreement}.")
    if settings.dtype not in _DTYPES:
        raise ValueError(f"--dtype takes {', '.join(_DTYPES)}, got {settings.dtype}.")
    for model in (settings.target, *settings.drafters):
        if model not in SHAPES and not Path(model).is_dir():
            raise ValueError(f"{model} is neither a folder nor one of the shapes {', '.join(SHAPES)}.")
    if settings.prompts is not None and settings.tokenizer is not None and not Path(settings.prompts).is_file():
        raise ValueError(f"--prompts {settings.prompts}: there is no such file.")
    for device in settings.devices:
        try:
            torch.device(device)
        except RuntimeError:
            raise ValueError(f"--device {device} is no device, such as cpu or cuda:1.") from None
    _refuse_fields(dict(settings.psd))


def _refuse_fields(psd: dict[str, object]) -> None:
    for name in ("mode", "gamma"):
        if name in psd:
            raise ValueError(f"--psd {name}=...: each point has a {name} of its own, by --methods and --gamma.")
    try:
        PSDConfig.resolve(psd)
    except ValueError as error:
        raise ValueError(f"--psd: {error}") from error


def _option(name: str) -> str:
    return "--" + name.removeprefix("two_").replace("_", "-")
