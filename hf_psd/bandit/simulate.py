"""Regret of the selectors over many seeds.

    python -m hf_psd.bandit.simulate --seeds 200 --json out.json --plot out.png

Pseudo-regret is the sum over rounds of the best arm's mean minus the chosen arm's mean. All selectors meet the same
rewards, seed by seed.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import timeit
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from .arms import enumerate_arms
from .environments import PUBLISHED, ROTATING, ROTATING_BACK, Bernoulli, Speculation
from .naive import NaiveThompson, NaiveUCB1
from .registry import make, names

SPECULATION = "speculation"
CURVE_POINTS = 100
SHARE_BIN = 50
"""Rounds over which the share of the best arm is averaged."""


@dataclass
class Run:
    """One selector on one seed.

    Attributes:
        regret: at the end; curve: after each 1/100 of the rounds.
        shares: share of the best arm by rounds since the last change, in bins of 50 rounds, over all changes.
    """

    regret: float = 0.0
    curve: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Experiment:
    """An environment and how its rewards reach the selectors.

    Attributes:
        scale: factor on the rewards, told as goodput; None tells them as acceptance.
        delay: rounds by which they come late.
        clumped: a round has 1 to 32 trials, all with the same outcome, instead of one.
    """

    name: str
    environment: Bernoulli
    scale: float | None = None
    delay: int = 0
    clumped: bool = False

    def weight(self, step: int) -> float:
        return 1.0 + step * 7919 % 32 if self.clumped else 1.0


EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Experiment("published", PUBLISHED),
        Experiment("rotating", ROTATING),
        Experiment("rotating-back", ROTATING_BACK),
        Experiment("delayed", PUBLISHED, delay=3),
        Experiment("clumped", PUBLISHED, clumped=True),
        Experiment("scaled-0.001", PUBLISHED, scale=0.001),
        Experiment("scaled-80", PUBLISHED, scale=80.0),
    )
}


def play(selector: Any, experiment: Experiment, rewards: Sequence[Sequence[float]]) -> Run:
    """Let `selector` play one table of rewards; "full information" selectors are told the whole row.

    Args:
        selector: anything with `select()` and `update(arm, reward)`.
        rewards: [rounds][n_arms], from `experiment.environment.rewards(seed)`.
    """
    environment, scale = experiment.environment, experiment.scale or 1.0
    full_information = getattr(selector, "full_information", False)
    every = max(1, len(rewards) // CURVE_POINTS)
    bins = environment.phase_length // SHARE_BIN
    hits = [0] * bins
    underway: deque[tuple[int, int]] = deque()
    run = Run()
    for step in range(len(rewards)):
        means = environment.means(step)
        arm = selector.select()
        gap = max(means) - means[arm]
        run.regret += gap
        if gap == 0.0 and step >= environment.phase_length:
            hits[step % environment.phase_length // SHARE_BIN] += 1
        if (step + 1) % every == 0:
            run.curve.append(run.regret)
        underway.append((arm, step))
        if len(underway) > experiment.delay:
            pulled, then = underway.popleft()
            told, weight = rewards[then], experiment.weight(then)
            if full_information:
                selector.update_all([scale * reward for reward in told], weight, arm=pulled)
            elif weight == 1.0:
                selector.update(pulled, scale * told[pulled])
            else:
                selector.update(pulled, scale * told[pulled], weight)
    changes = len(rewards) / environment.phase_length - 1
    run.shares = [hit / (changes * SHARE_BIN) for hit in hits] if changes > 0 else []
    return run


def build(spec: str, n_arms: int, seed: int, reward: str = "acceptance") -> Any:
    """A selector from "name" or "name:option=value,option=value"; the references are naive_ucb1 and naive_thompson."""
    if is_reference(spec):
        rng = random.Random(f"{spec} {seed}")
        return NaiveUCB1(n_arms, rng) if spec == "naive_ucb1" else NaiveThompson(n_arms, rng)
    return make(spec, n_arms, seed, reward=reward)


def is_reference(spec: str) -> bool:
    return spec.startswith("naive_")


def play_seed(experiment: Experiment, specs: Sequence[str], seed: int) -> list[Run]:
    rewards = experiment.environment.rewards(seed)
    kind = "acceptance" if experiment.scale is None else "goodput"
    return [play(build(s, experiment.environment.n_arms, seed, kind), experiment, rewards) for s in specs]


def speculate_seed(environment: Speculation, specs: Sequence[str], seed: int) -> list[Run]:
    """Share of the best arm's goodput that is lost, by the arms' expected tokens and seconds."""
    outcomes, goodputs = environment.outcomes(seed), environment.goodputs()
    every = max(1, len(outcomes) // CURVE_POINTS)
    runs = []
    for spec in specs:
        selector, run, tokens, seconds = build(spec, environment.n_arms, seed, "goodput"), Run(), 0.0, 0.0
        for step, row in enumerate(outcomes):
            arm = selector.select()
            more_tokens, more_seconds = environment.expected(environment.arms[arm])
            tokens, seconds = tokens + more_tokens, seconds + more_seconds
            selector.update(arm, row[arm].tokens / row[arm].seconds, row[arm].seconds)
            if (step + 1) % every == 0:
                run.curve.append(1.0 - tokens / seconds / max(goodputs))
        run.regret = 1.0 - tokens / seconds / max(goodputs)
        runs.append(run)
    return runs


def summarise(values: Sequence[float]) -> dict[str, float]:
    """Mean with the half-width of its 95 % confidence interval, spread and extremes."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {
        "mean": statistics.fmean(values),
        "ci95": 1.96 * deviation / len(values) ** 0.5,
        "sd": deviation,
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
    }


def recovery(shares: Sequence[float], level: float = 0.9) -> int | None:
    """Rounds after a change by whose end a bin's share of the best arm has reached `level`, None if never."""
    return next((SHARE_BIN * (place + 1) for place, share in enumerate(shares) if share >= level), None)


def report(specs: Sequence[str], runs: Sequence[Sequence[Run]]) -> dict[str, Any]:
    """Per selector: statistics of the regret, every seed's regret, mean curve with its band, shares after a change."""
    by_selector: dict[str, Any] = {}
    for place, spec in enumerate(specs):
        own = [seed_runs[place] for seed_runs in runs]
        points = [summarise(values) for values in zip(*(run.curve for run in own), strict=True)]
        part: dict[str, Any] = {**summarise([run.regret for run in own]), "regrets": [run.regret for run in own]}
        part["curve"] = [point["mean"] for point in points]
        part["curve_sd"] = [point["sd"] for point in points]
        if own[0].shares:
            part["shares"] = [statistics.fmean(share) for share in zip(*(run.shares for run in own), strict=True)]
            part["recovery"] = recovery(part["shares"])
        by_selector[spec] = part
    add_differences(by_selector)
    return by_selector


def add_differences(by_selector: dict[str, Any]) -> None:
    """For selectors with a plain reference, statistics of the regret minus the reference's on the same rewards."""
    for spec, part in by_selector.items():
        reference = by_selector.get(f"naive_{spec}")
        if reference is not None:
            pairs = zip(part["regrets"], reference["regrets"], strict=True)
            part["minus_reference"] = summarise([own - plain for own, plain in pairs])


def step_microseconds(spec: str, n_arms: int, steps: int = 5_000) -> float:
    """Microseconds of one select and one update, the best of five series."""
    selector, rng = build(spec, n_arms, 0), random.Random("step")

    def step() -> None:
        selector.update(selector.select(), rng.random())

    return 1e6 * min(timeit.repeat(step, number=steps, repeat=5)) / steps


def run_all(
    experiments: Sequence[str], specs: Sequence[str], seeds: Iterable[int], workers: int = 1
) -> dict[str, dict[str, Any]]:
    """Results by experiment, then selector (see `report`)."""
    seeds, results = list(seeds), {}
    for name in experiments:
        job: Callable[[int], list[Run]]
        if name == SPECULATION:
            own = [spec for spec in specs if not is_reference(spec) and not build(spec, 1, 0).full_information]
            job = partial(speculate_seed, Speculation(tuple(enumerate_arms(2, (0, 2, 4, 8)))), own)
        else:
            plain = EXPERIMENTS[name].scale is None and not EXPERIMENTS[name].clumped
            own = [spec for spec in specs if plain or not is_reference(spec)]
            job = partial(play_seed, EXPERIMENTS[name], own)
        if workers > 1:
            with ProcessPoolExecutor(workers) as pool:
                results[name] = report(own, list(pool.map(job, seeds)))
        else:
            results[name] = report(own, list(map(job, seeds)))
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m hf_psd.bandit.simulate", description="Regret of the selectors.")
    parser.add_argument("--seeds", type=int, default=200, help="number of seeds (default 200)")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them (default 0)")
    parser.add_argument(
        "--experiments",
        nargs="+",
        default=["published", "rotating"],
        metavar="NAME",
        choices=[*EXPERIMENTS, SPECULATION],
        help=f"of {', '.join(EXPERIMENTS)}, {SPECULATION}",
    )
    parser.add_argument(
        "--selectors",
        nargs="+",
        default=["naive_ucb1", "naive_thompson", *names()],
        metavar="SPEC",
        help="names, or name:option=value,option=value",
    )
    parser.add_argument("--workers", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--json", type=Path, help="write all results here")
    parser.add_argument("--plot", type=Path, help="write the regret curves here (needs matplotlib)")
    options = parser.parse_args(arguments)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    results = run_all(options.experiments, options.selectors, seeds, options.workers)
    for name, by_selector in results.items():
        print(f"{name}, seeds {seeds.start}..{seeds.stop - 1}")
        for spec, part in by_selector.items():
            tail = "" if "shares" not in part else f"  90 % of best arm after {part['recovery']}"
            print(f"  {spec:34s} {part['mean']:9.3f} +- {part['ci95']:6.3f}  max {part['max']:9.3f}{tail}")
    if options.json:
        shipped = [spec for spec in options.selectors if not is_reference(spec)]
        content = {
            "seeds": [seeds.start, seeds.stop - 1],
            "python": platform.python_version(),
            "machine": platform.processor() or platform.machine(),
            "step_microseconds": {s: {str(n): step_microseconds(s, n) for n in (3, 13)} for s in shipped},
            "experiments": {name: without_bands(by_selector) for name, by_selector in results.items()},
        }
        options.json.write_text(json.dumps(rounded(content)) + "\n")
    if options.plot:
        from .plots import plot_regret

        plot_regret(results, options.plot)


def without_bands(by_selector: dict[str, Any]) -> dict[str, Any]:
    return {
        spec: {key: value for key, value in part.items() if key != "curve_sd"} for spec, part in by_selector.items()
    }


def rounded(value: Any) -> Any:
    """Floats to six significant digits, throughout."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
