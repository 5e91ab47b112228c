"""Rows as text: a line while measuring, tables of markdown at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .comparisons import AUTO_MARGIN, capped_lines, identical, losses, queue_lines, ratios
from .profiles import GAMMALESS
from .rows import Results, Row

_COLUMNS = (
    "batch",
    "decoding",
    "method",
    "tokens/s",
    "per GPU",
    "over HF eager",
    "ms/forward",
    "tokens/forward",
    "acceptance",
    "step p50/p95/p99 ms",
    "TTFT p50 ms",
    "TPOT p50/p99 ms",
    "e2e p50/p99 ms",
    "first call s",
    "memory over GiB",
    "GB/s",
    "of the floor",
    "equal texts",
)


def line(row: Row) -> str:
    """A row in one line of text."""
    head = f"{row.name:<34}"
    if row.tokens_per_second is None:
        return f"{head} {row.error}"
    text = f"{head}{row.tokens_per_second:>10.1f} tokens/s   first call {row.first_call_seconds:.1f} s"
    if row.tokens_per_forward is not None:
        text += f"   {row.ms_per_forward:.2f} ms and {row.tokens_per_forward:.2f} tokens per forward"
    if row.acceptance is not None:
        text += f", {row.acceptance:.0%} accepted"
    return text + "".join(f"   [{note}]" for note in [*row.notes, *([row.error] if row.error else [])])


def markdown(results: Results) -> str:
    """The whole report."""
    rows, facts, settings = results.ordered(), results.facts, results.settings
    parts = [
        f"# {settings.target} with {', '.join(settings.drafters)}: {settings.profile}",
        _machine(results),
        f"Prompts of up to {settings.prompt} tokens ({settings.prompts or 'random ids'}), {settings.new_tokens} new "
        f"tokens per row, medians of {settings.repeat} calls.{_facts(facts)}",
    ]
    for layout in dict.fromkeys(row.layout for row in rows):
        parts += [f"## Layout: {layout}", table(_COLUMNS, _cells([row for row in rows if row.layout == layout], rows))]
    parts += _published(results)
    parts += _two_devices(rows)
    parts += ["## Where we lose", _losses(rows)]
    parts += _plans(facts)
    failed = [row for row in rows if row.error]
    if failed:
        parts += ["## Not measured", "\n".join(f"- `{row.name}`: {row.error}" for row in failed)]
    return "\n\n".join(parts) + "\n"


def table(header: Sequence[str], cells: Sequence[Sequence[Any]]) -> str:
    """A table of markdown."""
    lines = [header, ["---"] * len(header), *[[_text(cell) for cell in each] for each in cells]]
    return "\n".join("| " + " | ".join(each) + " |" for each in lines)


def _cells(chosen: Sequence[Row], rows: Sequence[Row]) -> list[list[Any]]:
    shares = identical(rows)
    eager = {(row.batch, row.sampled): row.tokens_per_second for row in rows if row.method == "hf-eager" and row.good}
    cells = []
    for row in chosen:
        if row.tokens_per_second is None:
            continue
        base = eager.get((row.batch, row.sampled))
        cells.append(
            [
                row.batch,
                "sampled" if row.sampled else "greedy",
                _method(row),
                row.tokens_per_second,
                row.tokens_per_second_per_gpu,
                row.tokens_per_second / base if base else None,
                row.ms_per_forward,
                row.tokens_per_forward,
                row.acceptance,
                _several(row.step_ms, "p50", "p95", "p99"),
                _several(row.ttft_ms, "p50"),
                _several(row.tpot_ms, "p50", "p99"),
                _several(row.e2e_ms, "p50", "p99"),
                row.first_call_seconds,
                row.over_gib,
                row.gb_per_second,
                row.floor_share,
                shares.get(row.name),
            ]
        )
    return cells


def _method(row: Row) -> str:
    mode = f" ({row.mode})" if row.method == "auto" and row.mode else ""
    return row.method + mode + ("" if row.method in GAMMALESS else f", gamma {row.gamma}")


def _published(results: Results) -> list[str]:
    if not results.settings.published:
        return []
    gpus = ", ".join(results.environment.get("devices", []))
    cells = []
    for each in results.settings.published:
        mark = "their figure" if each.gpu in gpus else "their figure, not reproduced"
        cells.append([each.source, each.gpu, each.tokens_per_second, each.acceptance, each.step_p50_ms, mark])
    header = ["source", "GPU", "tokens/s", "acceptance", "step p50 ms", ""]
    return ["## Published elsewhere", table(header, cells)]


def _two_devices(rows: Sequence[Row]) -> list[str]:
    parts, found, capped = [], ratios(rows), capped_lines(rows)
    if found:
        header = list(asdict(found[0]))
        parts += ["## Two devices: ratios", table(header, [list(asdict(each).values()) for each in found])]
        slow = [each for each in found if each.auto_over_best is not None and each.auto_over_best < 1 - AUTO_MARGIN]
        for each in slow:
            parts.append(
                f"`auto` at batch {each.batch}, gamma {each.gamma} ({each.auto_mode}) reaches "
                f"{each.auto_over_best:.3f} of the best mode."
            )
    timed = [row for row in rows if row.overlap is not None and row.devices_used == 2]
    header = ["point", "overlap", "overlap, steady", "target idle", "target idle, steady"]
    cells = [[row.name, row.overlap, row.overlap_steady, row.target_idle, row.target_idle_steady] for row in timed]
    parts += ["## Two devices: overlap", table(header, cells)] if timed else []
    if queued := queue_lines(rows):
        parts += ["## Queue: ratios", table(list(queued[0]), [list(each.values()) for each in queued])]
    if capped:
        parts += ["## Memory cap (tokens/s)", table(list(capped[0]), [list(each.values()) for each in capped])]
    return parts


def _losses(rows: Sequence[Row]) -> str:
    found = losses(rows)
    if not found:
        return "Nowhere among the rows of this run."
    header = ["where", "ours", "against", "figure", "ours", "theirs", "times better"]
    cells = [[each.where, each.method, each.rival, each.what, each.ours, each.theirs, each.factor] for each in found]
    return table(header, cells)


def _plans(facts: dict[str, Any]) -> list[str]:
    plans = facts.get("plans") or {}
    if not plans:
        return []
    told = [f"`{name}`:\n\n```\n{plan['text']}\n```" for name, plan in plans.items()]
    return ["## What `hf_psd.explain` said", *told]


def _facts(facts: dict[str, Any]) -> str:
    agreement, bandwidth = facts.get("agreement"), facts.get("copy_bytes_per_second")
    text = f" Greedy agreement of the pair on random ids: {agreement:.3f}." if agreement is not None else ""
    return text + (f" Copy bandwidth: {bandwidth / 1e9:.0f} GB/s." if bandwidth else "")


def _machine(results: Results) -> str:
    environment, settings = results.environment, results.settings
    driver = environment.get("driver")
    versions = ", ".join(f"{name} {number}" for name, number in environment.get("versions", {}).items())
    weights = f"{settings.dtype}{', ' + settings.quantize if settings.quantize else ''}"
    told = f"; driver, power limit, clock: {driver}" if driver else ""
    devices = ", ".join(environment.get("devices", []))
    return f"{devices}; {weights}; {versions}{told}; commit {environment.get('commit')}."


def _several(values: dict[str, float] | None, *names: str) -> str | None:
    return "/".join(_text(values[name]) for name in names) if values else None


def _text(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"
