"""Regret curves as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .simulate import CURVE_POINTS, EXPERIMENTS, is_reference


def plot_regret(results: dict[str, dict[str, Any]], path: Path) -> None:
    """One panel per experiment: mean regret by round, with a band of one standard deviation over seeds.

    Args:
        results: from `simulate.run_all`; delayed, clumped, scaled and speculation experiments are left out.

    Raises:
        ValueError: no experiment is left.
        ImportError: matplotlib is missing (`pip install hf_psd[dev]`).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    plain = [name for name, run in EXPERIMENTS.items() if run.scale is None and not run.delay and not run.clumped]
    shown = {name: part for name, part in results.items() if name in plain}
    if not shown:
        raise ValueError(f"nothing to plot in {', '.join(results)}; plotted are {', '.join(plain)}.")
    figure, panels = pyplot.subplots(1, len(shown), figsize=(6.0 * len(shown), 4.5), squeeze=False)
    labels = list(dict.fromkeys(spec for part in shown.values() for spec in part if not is_reference(spec)))
    for panel, (name, by_selector) in zip(panels[0], shown.items(), strict=True):
        every = EXPERIMENTS[name].environment.rounds // CURVE_POINTS
        for place, spec in enumerate(labels):
            part = by_selector[spec]
            steps = [every * (point + 1) for point in range(len(part["curve"]))]
            pairs = list(zip(part["curve"], part["curve_sd"], strict=True))
            colour = matplotlib.colormaps["tab10"](place % 10)
            panel.plot(steps, part["curve"], label=spec, color=colour, linewidth=1.4)
            low, high = [mean - sd for mean, sd in pairs], [mean + sd for mean, sd in pairs]
            panel.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
        panel.set_title(f"{name} ({len(next(iter(by_selector.values()))['regrets'])} seeds)")
        panel.set_xlabel("round")
        panel.set_ylabel("pseudo-regret")
        panel.set_yscale("symlog", linthresh=10.0)
        panel.set_ylim(bottom=0.0)
        panel.grid(alpha=0.3)
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
