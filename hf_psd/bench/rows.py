"""Raw rows and the file that holds them, written after every point."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from .points import Point
from .profiles import METHODS, Settings

_FREE = (
    "repeat",
    "warm_ups",
    "auto_warm_ups",
    "batches",
    "two_batches",
    "gammas",
    "gamma_batch",
    "capped_batches",
    "methods",
    "sampling",
)
"""Settings that may differ between a stopped run and the one that resumes it; so may `grid` and `static_batches`."""


@dataclass
class Row:
    """One point as measured. Units are in the names; docs/benchmarks/README.md says what each field means.

    A field is None where it cannot be told for that method. `error` is what stopped the point; the other fields are
    then empty.
    """

    name: str
    layout: str
    method: str
    batch: int
    sampled: bool
    gamma: int
    drafter: str
    devices_used: int
    tokens_per_second: float | None = None
    tokens_per_second_per_gpu: float | None = None
    decode_tokens_per_second: float | None = None
    seconds: list[float] = field(default_factory=list)
    first_call_seconds: float | None = None
    observed_seconds: float | None = None
    makespan_per_request_ms: float | None = None
    mode: str | None = None
    forwards_by_mode: dict[str, int] | None = None
    timed_modes: list[dict[str, int]] | None = None
    target_forwards: int | None = None
    draft_forwards: int | None = None
    ms_per_forward: float | None = None
    tokens_per_forward: float | None = None
    acceptance: float | None = None
    balance: float | None = None
    step_ms: dict[str, float] | None = None
    ttft_ms: dict[str, float] | None = None
    tpot_ms: dict[str, float] | None = None
    e2e_ms: dict[str, float] | None = None
    peak_gib: dict[str, float] | None = None
    before_gib: dict[str, float] | None = None
    weights_gib: float | None = None
    kv_gib: float | None = None
    over_gib: float | None = None
    gb_per_second: float | None = None
    floor_share: float | None = None
    draft_ms: float | None = None
    verify_ms: float | None = None
    draft_full_ms: float | None = None
    verify_full_ms: float | None = None
    overlap: float | None = None
    overlap_steady: float | None = None
    target_idle: float | None = None
    target_idle_steady: float | None = None
    spans: list[Any] | None = None
    digests: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def good(self) -> bool:
        return self.error is None and self.tokens_per_second is not None


def row_for(point: Point, settings: Settings) -> Row:
    """An empty row of a point."""
    return Row(
        point.name,
        point.layout,
        point.method,
        point.batch,
        point.sampled,
        point.gamma,
        settings.drafters[point.drafter],
        point.devices_used,
    )


def digest_rows(ids: torch.Tensor) -> list[str]:
    """A short digest of every row's tokens, to compare methods by."""
    return [hashlib.sha1(repr(row).encode()).hexdigest()[:12] for row in ids.tolist()]


class Results:
    """Everything a run has found so far.

    Args:
        path: the JSON file; its parent is made if need be.
        settings: of the run.

    Attributes:
        commit: recorded instead of what git says, where it is given.
    """

    def __init__(self, path: Path, settings: Settings):
        self.path, self.settings = path, settings
        self.commit: str | None = None
        self.environment: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        self.rows: dict[str, Row] = {}

    def resume(self) -> None:
        """Takes over what the file holds, if it exists.

        Raises:
            ValueError: it was measured with other settings.
        """
        if not self.path.exists():
            return
        stored = json.loads(self.path.read_text())
        ours = json.loads(json.dumps(asdict(self.settings)))
        loose = {*_FREE, "grid", "static_batches"}
        differing = sorted(
            name for name, value in ours.items() if name not in loose and stored["settings"].get(name, value) != value
        )
        if differing:
            raise ValueError(
                f"{self.path} was measured with another {', '.join(differing)}; resume with the same options, or name "
                "another file."
            )
        known = {field.name for field in fields(Row)}
        self.environment, self.facts = stored["environment"], stored["facts"]
        for raw in stored["rows"]:
            row = Row(**{name: value for name, value in raw.items() if name in known})
            self.rows[row.name] = row

    def set_aside(self) -> Path | None:
        """Renames an older file of that name, which this run would overwrite; its new name, None without one."""
        if not self.path.exists():
            return None
        old = self.path.with_name(self.path.name + ".old")
        os.replace(self.path, old)
        return old

    def note_environment(self, found: dict[str, Any]) -> None:
        """Keeps the environment of the run; that of one that resumes it is kept beside it where it differs.

        Raises:
            ValueError: the stored rows are from other devices.
        """
        found = found | {"commit": self.commit or found["commit"]}
        stored = {name: value for name, value in self.environment.items() if name != "resumed"}
        if not stored:
            self.environment = found
        elif stored["devices"] != found["devices"]:
            raise ValueError(
                f"{self.path} was measured on {', '.join(stored['devices'])}, this is "
                f"{', '.join(found['devices'])}; name another file."
            )
        elif stored != found:
            self.environment.setdefault("resumed", []).append(found)

    def done(self, point: Point) -> bool:
        """Whether the point needs no measuring: it has a figure, or memory was too small for it."""
        row = self.rows.get(point.name)
        return row is not None and (row.good or "out of memory" in (row.error or ""))

    def add(self, row: Row) -> None:
        """Keeps a row and writes the file."""
        self.rows[row.name] = row
        self.save()

    def ordered(self) -> list[Row]:
        """The rows by layout, batch, sampling, method and gamma, whatever the order they came in."""
        layouts = list(dict.fromkeys(row.layout for row in self.rows.values()))
        return sorted(
            self.rows.values(),
            key=lambda row: (
                layouts.index(row.layout),
                row.batch,
                row.sampled,
                METHODS.index(row.method),
                row.gamma,
            ),
        )

    def save(self) -> None:
        """Writes the file in one go: a reader or a crash never sees half of it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "settings": asdict(self.settings),
            "environment": self.environment,
            "facts": self.facts,
            "rows": [asdict(row) for row in self.ordered()],
        }
        partial = self.path.with_name(self.path.name + ".part")
        partial.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(partial, self.path)


def load(path: Path) -> dict[str, Any]:
    """The raw content of a results file."""
    return json.loads(path.read_text())
