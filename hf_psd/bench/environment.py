"""Versions, hardware and commit of a run."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("hf_psd", "torch", "transformers", "triton", "liger-kernel", "bitsandbytes", "flashspec")


def environment(devices: tuple[str, ...]) -> dict[str, Any]:
    """What a reader needs to judge the figures."""
    return {
        "devices": [device_name(device) for device in dict.fromkeys(devices)],
        "driver": _output(
            "nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"
        ),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
        "commit": _output("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"),
    }


def device_name(device: str) -> str:
    """The name of a torch device, for people."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
