"""Tokens per second of `generate_batch` against `generate` over static batches of the same size, on mixed lengths.

    python examples/queue_bench.py --json docs/benchmarks/queue-cpu.json

Static batches are cut from the requests in order of arrival; a row that has its tokens rests until its batch is over.
Both sides run the same models, mode and settings, in turns, and every text is compared.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, StoppingCriteria

import hf_psd
from hf_psd.testing.pairs import synthetic_pair


@dataclass
class Workload:
    """Prompts, and how many new tokens each of them gets."""

    prompts: list[list[int]]
    lengths: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


class Enough(StoppingCriteria):
    """Ends each row of a left-padded batch after its own number of new tokens."""

    def __init__(self, columns: int, lengths: Sequence[int]):
        self.ends = torch.tensor([columns + length for length in lengths])

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return ids.shape[1] >= self.ends


def workload(count: int, vocab: int, mean: float, most: int, seed: int) -> Workload:
    """Random prompts of 4 to 48 tokens; geometric numbers of new tokens with about that mean, at least 4."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(5, vocab) for _ in range(draw.randint(4, 48))] for _ in range(count)]
    lengths = [min(most, 4 + int(draw.expovariate(1 / (mean - 4)))) for _ in range(count)]
    return Workload(prompts, lengths)


def static(
    model: PreTrainedModel, drafters: list[Any], work: Workload, size: int, psd: dict[str, Any]
) -> list[list[int]]:
    texts = []
    for start in range(0, len(work.prompts), size):
        prompts, lengths = work.prompts[start : start + size], work.lengths[start : start + size]
        columns = max(map(len, prompts))
        ids = torch.tensor([[0] * (columns - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (columns - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        out = model.generate(
            ids, attention_mask=mask, assistant_models=drafters, psd=psd, do_sample=False, pad_token_id=0,
            eos_token_id=model.config.get_text_config().vocab_size + 1, max_new_tokens=max(lengths),
            stopping_criteria=[Enough(columns, lengths)],
        )  # fmt: skip
        texts += [row[columns : columns + length] for row, length in zip(out.tolist(), lengths)]
    return texts


def queued(
    model: PreTrainedModel, drafters: list[Any], work: Workload, size: int, psd: dict[str, Any]
) -> list[list[int]]:
    requests = [{"max_new_tokens": length} for length in work.lengths]
    out = hf_psd.generate_batch(
        model, work.prompts, drafters, psd=psd, max_batch_size=size, requests=requests, do_sample=False,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return [result.generated_tokens for result in out.values()]


def compare(
    name: str, model: PreTrainedModel, drafters: list[Any], work: Workload, size: int, runs: int
) -> list[dict]:
    rows = []
    for mode in ("ar", "sd", "psd"):
        psd = {"mode": mode, "gamma": 4}
        sides: dict[str, Callable[..., list[list[int]]]] = {"static": static, "queue": queued}
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        texts = {}
        for _ in range(runs):
            for side, run in sides.items():
                began = time.process_time()
                texts[side] = run(model, drafters, work, size, psd)
                seconds[side].append(time.process_time() - began)
        stats = hf_psd.last_stats()
        speed = {side: work.tokens / statistics.median(times) for side, times in seconds.items()}
        rows.append(
            {
                "pair": name, "mode": mode, "batch_size": size, "requests": len(work.prompts), "tokens": work.tokens,
                "tokens_per_second": speed, "ratio": speed["queue"] / speed["static"], "seconds": seconds,
                "identical": texts["static"] == texts["queue"], "overlap": stats.overlap,
                "lookahead_share": stats.lookahead_share, "acceptance": stats.acceptance,
                "lookahead_share_at_launch": (
                    stats.lookahead_peak.mean / stats.lookahead_eager_peak.mean
                    if stats.lookahead_eager_peak.mean else None
                ),
            }
        )  # fmt: skip
        row = rows[-1]
        print(
            f"{name} {mode}: static {speed['static']:.1f}, queue {speed['queue']:.1f} tokens/s, {row['ratio']:.2f}x, "
            f"{'identical' if row['identical'] else 'DIFFERENT'}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", default=["tiny", "smollm2"], choices=["tiny", "smollm2"])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--mean", type=float, default=40, help="mean number of new tokens")
    parser.add_argument("--most", type=int, default=192, help="most new tokens of a request")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json")
    asked = parser.parse_args()
    torch.set_num_threads(torch.get_num_threads())
    rows = []
    for pair in asked.pairs:
        if pair == "tiny":
            model, drafters = synthetic_pair("tiny", ("tiny-drafter",), dtype=torch.float32)
        else:
            from smollm2 import load_drafter, load_target

            _, model = load_target()
            drafters = [load_drafter(model)]
        work = workload(asked.requests, model.config.vocab_size, asked.mean, asked.most, seed=0)
        rows += compare(pair, model, ["prompt_lookup", *drafters], work, asked.size, asked.runs)
    result = {
        "machine": platform.processor() or platform.machine(), "threads": torch.get_num_threads(),
        "torch": torch.__version__, "transformers": transformers.__version__, "arguments": vars(asked), "rows": rows,
    }  # fmt: skip
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump(result, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
