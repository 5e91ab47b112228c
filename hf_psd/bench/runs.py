"""One run, the same prompts and models for plain transformers, its assisted decoding, and this package's modes."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from ..api import generate, last_stats
from ..testing.pairs import measure_agreement, synthetic_pair
from ..workspace import release

METHODS = ("hf-eager", "hf-static", "hf-assisted", "ar", "sd", "psd")


@dataclass
class Settings:
    """What to measure. Names of models are those of `hf_psd.testing.synthetic_pair`."""

    target: str = "llama-3.1-8b"
    drafter: str = "llama-3.2-1b"
    agreement: float = 0.75
    layers: int | None = None
    dtype: str = "bfloat16"
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    batches: Sequence[int] = (1, 8, 32)
    methods: Sequence[str] = METHODS
    gamma: int = 4
    prompt: int = 128
    new_tokens: int = 96
    repeat: int = 3
    sample: bool = False
    psd: dict[str, Any] = field(default_factory=dict)


@dataclass
class Row:
    """One method at one batch size; medians over the repeats after one warm-up call."""

    method: str
    batch: int
    tokens_per_second: float
    first_call_seconds: float
    seconds: list[float]
    ms_per_forward: float | None = None
    tokens_per_forward: float | None = None
    acceptance: float | None = None
    peak_gib: float | None = None
    notes: list[str] = field(default_factory=list)


def run_all(settings: Settings, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Measures every method at every batch size; returns settings, versions and rows, ready for JSON."""
    target, (drafter,) = synthetic_pair(
        settings.target,
        (settings.drafter,),
        settings.agreement,
        settings.layers,
        getattr(torch, settings.dtype),
        settings.device,
    )
    agreement = measure_agreement(target, drafter)
    say(
        f"{settings.target} with {settings.drafter}, agreement {agreement:.2f}, {settings.dtype} on "
        f"{device_name(settings.device)}"
    )
    rows: list[Row] = []
    for batch in settings.batches:
        for method in settings.methods:
            if batch > 1 and method in ("hf-assisted", "hf-static"):
                continue
            row = measure(settings, target, drafter, method, batch)
            rows.append(row)
            say(line(row))
        release()
    return {
        "settings": asdict(settings),
        "agreement": agreement,
        "environment": environment(settings.device),
        "rows": [asdict(row) for row in rows],
    }


def measure(settings: Settings, target: Any, drafter: Any, method: str, batch: int) -> Row:
    """One method at one batch size."""
    ids = torch.randint(
        3, target.config.vocab_size, (batch, settings.prompt), generator=torch.Generator().manual_seed(batch)
    )
    inputs: dict[str, Any] = {
        "input_ids": ids.to(settings.device),
        "attention_mask": torch.ones_like(ids).to(settings.device),
    }
    common: dict[str, Any] = dict(
        max_new_tokens=settings.new_tokens, do_sample=settings.sample, eos_token_id=None, pad_token_id=0
    )
    ours = method in ("ar", "sd", "psd")

    def call() -> float:
        began = _now(settings.device)
        if ours:
            psd = {"mode": method, "gamma": settings.gamma, **settings.psd}
            generate(target, **inputs, **common, assistant_models=[drafter], psd=psd)
        elif method == "hf-assisted":
            target.generate(**inputs, **common, assistant_model=drafter)
        else:
            static = {"cache_implementation": "static"} if method == "hf-static" else {}
            target.generate(**inputs, **common, **static)
        return _now(settings.device) - began

    if settings.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    first = call()
    call()
    seconds = sorted(call() for _ in range(settings.repeat))
    median = seconds[len(seconds) // 2]
    row = Row(method, batch, batch * settings.new_tokens / median, first, seconds)
    if settings.device.startswith("cuda"):
        row.peak_gib = torch.cuda.max_memory_allocated() / 2**30
    if ours:
        stats = last_stats()
        assert stats is not None
        row.ms_per_forward = 1e3 * median / stats.target_forwards
        row.tokens_per_forward, row.acceptance = stats.tokens_per_forward, stats.acceptance
        row.notes = stats.notes + stats.errors
    return row


def line(row: Row) -> str:
    """A row as text."""
    text = f"batch {row.batch:>3} {row.method:<12}{row.tokens_per_second:>10.1f} tokens/s"
    text += f"   first call {row.first_call_seconds:.1f} s"
    if row.tokens_per_forward is not None:
        text += f"   {row.ms_per_forward:.2f} ms and {row.tokens_per_forward:.2f} tokens per forward"
        text += f", {row.acceptance:.0%} accepted"
    return text + "".join(f"   [{note}]" for note in row.notes)


def environment(device: str) -> dict[str, Any]:
    """Versions, hardware and commit of this run."""
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": commit,
    }


def device_name(device: str) -> str:
    return (
        torch.cuda.get_device_name(device) if device.startswith("cuda") else f"CPU, {torch.get_num_threads()} threads"
    )


def save(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def _now(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()
