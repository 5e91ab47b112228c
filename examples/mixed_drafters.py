"""Which drafter, on a mixed batch? Bandits against each drafter alone and the best one for each prompt in hindsight.

Trains a target on three synthetic languages and a drafter on each of them (about a minute on one core), lets them
decode a batch with prompts of all three, and prints a table. The target's trained layers are followed by layers that
add nothing, so that a forward of it costs some times one of a drafter, as with real models.

    python examples/mixed_drafters.py --json docs/benchmarks/mixed-drafters.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import domains
import torch

import hf_psd

LANGUAGES = 3
BANDITS: dict[str, dict[str, Any]] = {
    "hedge, per request": dict(selector="hedge", per_request=True),
    "hedge, per tag": dict(selector="hedge", context="tags"),
    "hedge, per group": dict(selector="hedge"),
    "thompson, per request": dict(selector="thompson", per_request=True),
}


class Alone:
    """A selector that lets one drafter draft for all rows."""

    def __init__(self, key: int):
        self.key = key

    def plan(self, requests: Sequence[Any], arms: Sequence[Any], gamma: int) -> list[tuple[int, list[int]]]:
        return [(self.key, [gamma] * len(requests))]

    def feedback(self, results: Sequence[Any]) -> None:
        """Nothing to learn."""


class Rounds(hf_psd.StepHook):
    """Counts the target's forwards of each row."""

    def __init__(self) -> None:
        self.of: Counter[int] = Counter()

    def on_commit(self, context: Any) -> None:
        self.of.update(request.index for request in context.requests)


@dataclass
class Result:
    """What one way of decoding did, over several seeds.

    Attributes:
        rounds: forwards of the target per row, over all seeds.
        seconds: CPU time of each call, which on one thread is its time on an idle machine.
        review_forwards, draft_forwards: of drafters, per call.
    """

    rounds: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    review_forwards: list[int] = field(default_factory=list)
    draft_forwards: list[int] = field(default_factory=list)


class Experiment:
    """Models, prompts and settings.

    Args:
        rows: prompts, a third in each language.
        new_tokens: of each row.
        gamma: of every way of decoding.
        idle_layers: layers of the target that add nothing.
    """

    def __init__(self, rows: int = 24, new_tokens: int = 128, gamma: int = 4, idle_layers: int = 6, steps: int = 200):
        self.new_tokens, self.gamma = new_tokens, gamma
        languages = [domains.Language(seed) for seed in range(1, LANGUAGES + 1)]
        self.target = domains.build(3, 128, seed=0)
        domains.train(self.target, languages, steps, seed=5)
        domains.lengthen(self.target, idle_layers)
        self.drafters = [domains.build(1, 32, seed=10 + number) for number in range(LANGUAGES)]
        for drafter, language in zip(self.drafters, languages):
            domains.train(drafter, [language], steps // 2, seed=5)
        draw = torch.Generator().manual_seed(7)
        texts = torch.stack([language.texts(rows // LANGUAGES, 16, draw) for language in languages], 1)
        self.prompts = texts.flatten(0, 1)
        self.tags = [f"language {row % LANGUAGES}" for row in range(len(self.prompts))]

    def costs(self) -> dict[str, float]:
        """Milliseconds of one forward over all rows: the target's verification, a drafter's token."""
        return {
            "target": domains.milliseconds(self.target, len(self.prompts), self.gamma + 1),
            "drafter": domains.milliseconds(self.drafters[0], len(self.prompts), 1),
        }

    def decode(self, result: Result, seed: int, sampled: bool, settings: dict[str, Any]) -> None:
        """One call."""
        psd = dict(mode="sd", gamma=self.gamma, seed=seed, **settings)
        if psd.get("context") == "tags":
            psd["context"] = self.tags
        counted = Rounds()
        began = time.process_time()
        self.target.generate(
            self.prompts,
            attention_mask=torch.ones_like(self.prompts),
            do_sample=sampled,
            **({"top_k": 0} if sampled else {}),
            eos_token_id=None,
            pad_token_id=0,
            max_new_tokens=self.new_tokens,
            assistant_models=self.drafters,
            psd=psd,
            psd_hooks=[counted],
        )
        result.seconds.append(time.process_time() - began)
        result.rounds += [counted.of[row] for row in range(len(self.prompts))]
        stats = hf_psd.last_stats()
        assert stats is not None
        result.draft_forwards.append(stats.draft_forwards)
        result.review_forwards.append(sum(by.review_forwards for by in stats.by_drafter))

    def run(self, sampled: bool, seeds: Sequence[int], report: Callable[[str], None]) -> dict[str, Any]:
        """All ways of decoding, in turn for each seed, after one call that is not counted."""
        ways = {f"drafter {key} alone": dict(selector=Alone(key)) for key in range(LANGUAGES)} | BANDITS
        results = {name: Result() for name in ways}
        self.decode(Result(), 0, sampled, BANDITS["hedge, per request"])
        for seed in seeds:
            for name, settings in ways.items():
                self.decode(results[name], seed, sampled, settings)
        return self._judge(results, report)

    def _judge(self, results: dict[str, Result], report: Callable[[str], None]) -> dict[str, Any]:
        alone = [result for name, result in results.items() if name.endswith("alone")]
        calls = len(alone[0].seconds)
        tokens = self.new_tokens * len(self.prompts) * calls
        best_rounds = sum(map(min, zip(*(result.rounds for result in alone))))
        single = max(alone, key=lambda result: tokens / sum(result.rounds))
        rate, speed = tokens / sum(single.rounds), _speed(single, self.new_tokens * len(self.prompts))
        report(f"{'':24s}{'tokens per':>12s}{'of best per':>13s}{'of best':>10s}{'tokens':>10s}{'of best':>10s}")
        report(f"{'':24s}{'forward':>12s}{'prompt':>13s}{'single':>10s}{'per s':>10s}{'single':>10s}")
        report(f"{'best per prompt':24s}{tokens / best_rounds:12.2f}{1:13.3f}{tokens / best_rounds / rate:10.3f}")
        table: dict[str, Any] = {"best per prompt": {"tokens_per_forward": tokens / best_rounds}}
        for name, result in results.items():
            per_forward, per_second = (
                tokens / sum(result.rounds),
                _speed(result, self.new_tokens * len(self.prompts)),
            )
            row = {
                "tokens_per_forward": per_forward,
                "of_best_per_prompt": per_forward * best_rounds / tokens,
                "of_best_single": per_forward / rate,
                "tokens_per_second": per_second,
                "speed_of_best_single": per_second / speed,
                "draft_forwards": statistics.mean(result.draft_forwards),
                "review_forwards": statistics.mean(result.review_forwards),
                "seconds": result.seconds,
            }
            table[name] = row
            report(
                f"{name:24s}{per_forward:12.2f}{row['of_best_per_prompt']:13.3f}{row['of_best_single']:10.3f}"
                f"{per_second:10.0f}{row['speed_of_best_single']:10.3f}"
            )
        return table


def _speed(result: Result, tokens: int) -> float:
    """Tokens per CPU second of the median call."""
    return tokens / statistics.median(result.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=24, help="prompts (default 24)")
    parser.add_argument("--seeds", type=int, default=5, help="calls of each way of decoding (default 5)")
    parser.add_argument("--json", type=Path, help="write all results here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    experiment = Experiment(rows=options.rows)
    content: dict[str, Any] = {
        "rows": options.rows,
        "new_tokens": experiment.new_tokens,
        "gamma": experiment.gamma,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "forward_milliseconds": experiment.costs(),
    }
    for kind in ("sampled", "greedy"):
        print(f"\n{kind}, {options.rows} prompts of {LANGUAGES} languages, {experiment.new_tokens} new tokens each")
        content[kind] = experiment.run(kind == "sampled", range(options.seeds), print)
    if options.json:
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
