"""Pictures of a run: bars of throughput, and the timeline of both lanes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .points import ONE, REPLICAS, TWO
from .rows import Row

_COLOURS = {"verify": "tab:blue", "draft": "tab:orange", "prefill": "tab:grey"}


def plot_bars(rows: Sequence[Row], path: Path) -> bool:
    """Tokens per second by batch and method, one panel for greedy and one for sampled; False without anything to draw.

    Raises:
        ImportError: matplotlib is missing (`pip install matplotlib`).
    """
    shown = [row for row in rows if row.good and row.layout in (ONE, TWO, REPLICAS)]
    if not shown:
        return False
    pyplot = _pyplot()
    kinds = sorted({row.sampled for row in shown})
    labels = list(dict.fromkeys(_label(row) for row in shown))
    figure, panels = pyplot.subplots(1, len(kinds), figsize=(8.0 * len(kinds), 4.5), squeeze=False)
    for panel, sampled in zip(panels[0], kinds):
        part = [row for row in shown if row.sampled == sampled]
        batches = sorted({row.batch for row in part})
        width = 0.85 / len(labels)
        for place, label in enumerate(labels):
            heights = [
                max(
                    (row.tokens_per_second or 0.0 for row in part if _label(row) == label and row.batch == batch),
                    default=0.0,
                )
                for batch in batches
            ]
            at = [group + (place - (len(labels) - 1) / 2) * width for group in range(len(batches))]
            bars = panel.bar(at, heights, width, label=label)
            panel.bar_label(bars, [f"{height:.0f}" if height else "" for height in heights], fontsize=6, rotation=90)
        panel.set_xticks(range(len(batches)), [f"{batch}" for batch in batches])
        panel.set_xlabel("requests in flight")
        panel.set_ylabel("tokens per second")
        panel.set_yscale("log")
        panel.set_title("sampled" if sampled else "greedy")
        panel.grid(axis="y", alpha=0.3)
    panels[0][0].legend(fontsize=7, ncol=2)
    _finish(pyplot, figure, path)
    return True


def plot_timeline(rows: Sequence[Row], path: Path, most: int = 4) -> bool:
    """When each lane was busy, for up to `most` rows that have spans, two-group rows first; False if none has any.

    Raises:
        ImportError: matplotlib is missing (`pip install matplotlib`).
    """
    timed = sorted((row for row in rows if row.spans), key=lambda row: (row.mode != "psd", -row.batch))[:most]
    if not timed:
        return False
    pyplot = _pyplot()
    figure, panels = pyplot.subplots(len(timed), 1, figsize=(11.0, 1.2 + 1.6 * len(timed)), squeeze=False)
    for (panel,), row in zip(panels, timed):
        spans = row.spans or []
        lanes = list(dict.fromkeys(span[0] for span in spans))
        for lane, kind, start, end in spans:
            panel.broken_barh(
                [(start - spans[0][2], end - start)],
                (lanes.index(lane) - 0.4, 0.8),
                facecolors=_COLOURS.get(kind, "tab:grey"),
                edgecolor="white",
                linewidth=0.3,
            )
        panel.set_yticks(range(len(lanes)), lanes)
        shared = f", overlap {row.overlap_steady:.0%}" if row.overlap_steady is not None else ""
        panel.set_title(f"{row.name} ({row.mode}{shared})", fontsize=9)
    patches = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in _COLOURS.values()]
    panels[0][0].legend(patches, list(_COLOURS), fontsize=7, ncol=len(_COLOURS))
    panels[-1][0].set_xlabel("ms")
    _finish(pyplot, figure, path)
    return True


def _label(row: Row) -> str:
    return row.method if row.layout == ONE else f"{row.method}, {row.layout}"


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _finish(pyplot: Any, figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
