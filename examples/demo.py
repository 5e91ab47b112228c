"""Plain and speculative `generate` side by side on a real model, on the CPU.

Run it with ``make demo``, or ``python examples/demo.py --help`` for its options. Target: SmolLM2-135M-Instruct;
drafters: prompt lookup and a two-layer model. Half of the prompts ask for text to be copied with small edits, half do
not.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import prompts
import smollm2
import torch
import transformers
from transformers.generation.streamers import BaseStreamer

import hf_psd
from hf_psd.streaming import ProgressHook


class PlainProgress(BaseStreamer):
    """Shows the progress of plain `generate` through the same bar."""

    def __init__(self, bar: ProgressHook):
        self.bar, self.prompt_seen = bar, False

    def put(self, value: torch.Tensor) -> None:
        if self.prompt_seen:
            self.bar.add(len(value))
        self.prompt_seen = True

    def end(self) -> None:
        self.bar.close()


class Pair:
    """The demo's target and drafters, and how a batch of prompts is run with and without speculation."""

    def __init__(self, new_tokens: int):
        self.tokenizer, self.target = smollm2.load_target()
        self.drafters: list[Any] = ["prompt_lookup", smollm2.load_drafter(self.target)]
        self.settings = {"do_sample": False, "max_new_tokens": new_tokens}

    def run(self, texts: Sequence[str], speculate: bool, label: str = "") -> tuple[torch.Tensor, float]:
        """New tokens [B, N] and the seconds they took; a progress bar if there is a label."""
        inputs = prompts.batch(self.tokenizer, texts)
        bar = ProgressHook(len(texts) * self.settings["max_new_tokens"], f"{label:<12}") if label else None
        extra: dict[str, Any] = {}
        if speculate:
            extra = {"assistant_models": self.drafters, "psd": True, "psd_hooks": [bar] if bar else []}
        elif bar:
            extra = {"streamer": PlainProgress(bar)}
        began = time.perf_counter()
        sequences = self.target.generate(**inputs, **self.settings, **extra)
        return sequences[:, inputs["input_ids"].shape[1] :], time.perf_counter() - began

    def count(self, new_tokens: torch.Tensor) -> int:
        """Tokens that are not padding; the end token of each row counts."""
        pad = self.tokenizer.pad_token_id
        return int(sum(min(row.tolist().index(pad) + 1, len(row)) if pad in row else len(row) for row in new_tokens))


def show(pair: Pair) -> None:
    """One run over all eight prompts with texts and a table, then each half as a batch of its own."""
    texts = prompts.copying() + prompts.other()
    print("Two texts of eight prompts each, then halves of four: one to three minutes on an idle machine.", flush=True)
    pair.run(texts[:1], True)
    plain, plain_seconds = pair.run(texts, False, "plain")
    ours, our_seconds = pair.run(texts, True, "psd=True")
    stats = hf_psd.last_stats()
    for text, new in zip(texts, ours):
        print(f"\n> {text.splitlines()[0]}\n{pair.tokenizer.decode(new, skip_special_tokens=True).strip()}")
    tokens = pair.count(plain)
    print(f"\n{'':<10}{'tokens/s':>10}{'seconds':>10}{'ratio':>8}{'tokens per target forward and row':>36}")
    print(f"{'plain':<10}{tokens / plain_seconds:>10.1f}{plain_seconds:>10.1f}{1:>8.2f}{1:>36.2f}")
    ratio = plain_seconds / our_seconds
    print(
        f"{'psd=True':<10}{tokens / our_seconds:>10.1f}{our_seconds:>10.1f}{ratio:>8.2f}"
        f"{stats.tokens_per_forward:>36.2f}"
    )
    for drafter in stats.by_drafter:
        print(f"accepted of {drafter.name}: {drafter.acceptance:.0%} of {drafter.drafted} drafts")
    print()
    for name, half in (("copying", prompts.copying()), ("other", prompts.other())):
        print(f"ratio ({name}): {measure(pair, half)['ratio']:.2f}")
    same = sum(torch.equal(a, b) for a, b in zip(plain, ours)) if plain.shape == ours.shape else 0
    print(f"identical: {same}/{len(texts)}")
    print("A ratio is plain seconds over speculative ones. The first call of a batch size also tries plain decoding.")


def measure(pair: Pair, texts: Sequence[str]) -> dict[str, Any]:
    """Plain against speculative on one batch: seconds of both, their ratio, whether the tokens are the same."""
    plain, plain_seconds = pair.run(texts, False)
    ours, our_seconds = pair.run(texts, True)
    stats = hf_psd.last_stats()
    return {
        "plain_seconds": plain_seconds,
        "psd_seconds": our_seconds,
        "ratio": plain_seconds / our_seconds,
        "identical": torch.equal(plain, ours),
        "tokens_per_forward": stats.tokens_per_forward,
        "acceptance": {drafter.name: drafter.acceptance for drafter in stats.by_drafter},
    }


def bench(pair: Pair, repeat: int) -> dict[str, Any]:
    """Medians over `repeat` interleaved runs, each half as its own batch."""
    halves = {"copying": prompts.copying(), "other": prompts.other()}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in halves}
    for half in halves.values():
        pair.run(half[:1], True)
    for turn in range(repeat):
        for name, half in halves.items():
            rows[name].append(measure(pair, half))
            print(f"run {turn + 1} {name}: ratio {rows[name][-1]['ratio']:.2f}", flush=True)
    for name, runs in rows.items():
        print(f"ratio ({name}): {statistics.median(run['ratio'] for run in runs):.2f}")
    runs = [run for half in rows.values() for run in half]
    print(f"identical: {sum(run['identical'] for run in runs)}/{len(runs)} runs")
    return {
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "hf_psd": hf_psd.__version__,
        },
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "settings": pair.settings,
        "runs": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=96, help="new tokens per prompt, at most")
    parser.add_argument("--bench", type=int, metavar="N", help="repeat N times and print medians instead of the texts")
    parser.add_argument("--json", type=Path, help="write the raw rows of --bench here")
    arguments = parser.parse_args()
    pair = Pair(arguments.tokens)
    if arguments.bench is None:
        show(pair)
        return
    result = bench(pair, arguments.bench)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
