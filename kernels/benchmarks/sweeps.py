"""Which tile sizes and warp counts are fastest, one group of settings after the other."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log

import checks
import torch
from psd_kernels.attention_launch import launch_ragged_attention
from psd_kernels.sample_kernel import launch_sample
from psd_kernels.verify_launch import launch_verify
from timing import by_kernel, warm_us

VERIFY_GROUPS = (
    [{"early": early} for early in (True, False)],
    [{"scan_block": b, "scan_warps": w} for b, w in ((2048, 8), (1024, 4), (2048, 4), (4096, 8), (8192, 8))],
    [{"scan_programs": n} for n in (4, 2, 6, 8, 16)],
    [{"race_block": b, "race_warps": w} for b, w in ((1024, 4), (512, 4), (2048, 8), (1024, 8), (2048, 4))],
    [{"race_programs": n} for n in (4, 1, 2, 3, 8)],
    [{"max_splits": n} for n in (32, 16)],
)
SAMPLE_GROUPS = ([{"block": b, "warps": w} for b, w in ((1024, 4), (512, 4), (2048, 8), (2048, 4), (1024, 8))],)
ATTENTION_GROUPS = (
    [{"block_n": b, "stages": s} for b, s in ((64, 3), (64, 4), (64, 2), (128, 2), (32, 4))],
    [{"warps": w} for w in (4, 8)],
)


def _times(launch: Callable, cases: list[tuple], options: dict) -> list[float]:
    try:
        return [warm_us(lambda: launch(*case, **options), repeats=8, samples=7) for case in cases]  # noqa: B023
    except Exception as error:  # a tile that this GPU cannot hold is a finding, not a failure
        print(type(error).__name__, str(error)[:80])
        return [float("inf")] * len(cases)


def tune(name: str, launch: Callable, cases: list[tuple], groups: tuple) -> dict:
    """Coordinate descent over `groups` by the geometric mean over `cases`."""
    chosen: dict = {}
    seen = []
    for group in groups:
        means = []
        for option in group:
            times = _times(launch, cases, chosen | option)
            means.append(exp(sum(log(time) for time in times) / len(times)))
            seen.append({**option, "us": [round(time, 2) for time in times]})
            print(name, seen[-1], flush=True)
        chosen |= group[means.index(min(means))]
    print(name, "chosen", chosen, flush=True)
    return {"chosen": chosen, "seen": seen}


def verify_cases() -> list[tuple]:
    seed = torch.tensor(9, device="cuda")
    cases = []
    for rows, gamma, vocab in ((1, 4, 128_256), (8, 4, 128_256), (32, 4, 32_000), (128, 8, 151_936)):
        target, draft, ids = checks.verify_inputs(rows, gamma, vocab, torch.bfloat16)
        numbers = checks.numbers(rows).values()
        cases.append((target, ids, draft, None, torch.ones(rows, device="cuda"), seed, 0, *numbers, "rejection"))
    return cases


def sample_cases() -> list[tuple]:
    seed = torch.tensor(9, device="cuda")
    cases = []
    for rows in (1, 8, 32):
        logits = torch.randn(rows, 128_256, device="cuda").bfloat16()
        cases.append((logits, torch.ones(rows, device="cuda"), seed, 0, *checks.numbers(rows).values(), 1))
    return cases


def attention_cases() -> list[tuple]:
    return [
        (*checks.attention_inputs(rows, length, 4096, 32, 8, 128, torch.bfloat16, block), None, None, None, None, None)
        for rows, length, block in ((1, 5, 0), (16, 1, 0), (16, 5, 0), (16, 5, 256))
    ]


def run_all() -> dict:
    cases = verify_cases()
    found = {"verify": tune("verify", launch_verify, cases, VERIFY_GROUPS)}
    for case in cases:
        kernels = by_kernel(lambda: launch_verify(*case))  # noqa: B023
        print(case[0].shape[0], "rows:", kernels, flush=True)
        found[f"kernels at {case[0].shape[0]} rows"] = kernels
    found["sample"] = tune("sample", launch_sample, sample_cases(), SAMPLE_GROUPS)
    found["attention"] = tune("attention", launch_ragged_attention, attention_cases(), ATTENTION_GROUPS)
    return found
