"""Checks the kernels on a GPU, then measures them: `python kernels/benchmarks/bench_kernels.py --out kernels.json`."""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path

import baselines
import checks
import sweeps
import torch
from psd_kernels import DRAFT, accept, accept_kernel, kv_write, naive, ragged_attention, sample, verify
from timing import cold_us, copy_bandwidth, eager_us, environment, warm_us

SHAPES = tuple(itertools.product((1, 8, 32, 128), (4, 8), (32_000, 128_256, 151_936)))
ATTENTION_SHAPES = (
    *itertools.product((0,), (1, 8, 16, 32), (1, 5, 9), (512, 4096)),
    *itertools.product((256, 16), (1, 16), (5,), (512, 4096)),
)


def few(size: int) -> dict:
    return {"repeats": 20, "samples": 15} if size < 100e6 else {"repeats": 3, "samples": 7}


def bench_verify(bandwidth: float) -> list[dict]:
    rows_out = []
    for dtype, shapes in (
        (torch.bfloat16, SHAPES),
        (torch.float32, [shape for shape in SHAPES if shape[0] == 8]),
    ):
        for rows, gamma, vocab in shapes:
            target, draft, ids = checks.verify_inputs(rows, gamma, vocab, dtype)
            temperature = torch.ones(rows, device="cuda")
            seed = torch.tensor(9, device="cuda")
            call = {"draft_logits": draft, "temperature": temperature, "seed": seed, **checks.numbers(rows)}
            kernel = lambda: verify(target, ids, **call)  # noqa: B023, E731
            plain = lambda: baselines.eager_verify(target, draft, ids, temperature)  # noqa: B023, E731
            size = target.nbytes + draft.nbytes
            row = {
                "op": "verify", "law": "rejection", "dtype": str(dtype)[6:], "B": rows, "G": gamma, "V": vocab,
                "MB": size / 1e6, "us": warm_us(kernel, **few(size)), "torch_graph_us": warm_us(plain, **few(size)),
                "cold_us": cold_us(kernel, 7), "eager_us": eager_us(kernel, 7), "torch_eager_us": eager_us(plain, 7),
                "emitted": naive_mean(kernel()),
            }  # fmt: skip
            row["speedup"] = row["torch_graph_us"] / row["us"]
            row["of_copy"] = size / (row["cold_us"] * 1e-6) / bandwidth
            rows_out.append(row)
            show(row)
    return rows_out


def naive_mean(verdict: naive.Verdict) -> float:
    return verdict.n_emitted.float().mean().item()


def bench_other_laws() -> list[dict]:
    rows_out = []
    for rows, law in itertools.product((1, 8, 32), ("coupled", "greedy", "point mass")):
        target, _, ids = checks.verify_inputs(rows, 4, 128_256, torch.bfloat16)
        temperature = None if law == "greedy" else torch.ones(rows, device="cuda")
        call = {
            "temperature": temperature, "law": "coupled" if law == "coupled" else "rejection",
            "seed": torch.tensor(9, device="cuda"), **checks.numbers(rows),
        }  # fmt: skip
        kernel = lambda: verify(target, ids, **call)  # noqa: B023, E731
        if law == "greedy":
            plain = lambda: baselines.eager_greedy_verify(target, ids)  # noqa: B023, E731
        else:
            plain = lambda: naive.verify(target, ids, **call)  # noqa: B023, E731
        row = {"op": "verify", "law": law, "B": rows, "G": 4, "V": 128_256, "us": warm_us(kernel)}
        row["torch_graph_us"] = warm_us(plain, 3, 7)
        row["speedup"] = row["torch_graph_us"] / row["us"]
        rows_out.append(row)
        show(row)
    return rows_out


def bench_sample() -> list[dict]:
    rows_out = []
    for rows, vocab in itertools.product((1, 8, 32, 128), (32_000, 128_256)):
        logits = torch.randn(rows, vocab, device="cuda").bfloat16()
        temperature = torch.ones(rows, device="cuda")
        call = {"temperature": temperature, "seed": torch.tensor(9, device="cuda"), **checks.numbers(rows)}
        row = {"op": "sample", "B": rows, "V": vocab}
        row["us"] = warm_us(lambda: sample(logits, purpose=DRAFT, **call))  # noqa: B023
        row["torch_graph_us"] = warm_us(lambda: baselines.eager_sample(logits, temperature))  # noqa: B023
        row["speedup"] = row["torch_graph_us"] / row["us"]
        rows_out.append(row)
        show(row)
    for rows in (1, 8, 32):
        scores = torch.randn(rows * 5, 128_256, device="cuda")
        row = {"op": "top-k 50, top-p 0.9 (torch)", "B": rows, "G": 4, "V": 128_256}
        row["us"] = warm_us(lambda: baselines.warp(scores, 50, 0.9), 3, 7)  # noqa: B023
        rows_out.append(row)
        show(row)
    return rows_out


def bench_accept() -> list[dict]:
    rows_out = []
    for rows, gamma, vocab in itertools.product((1, 8, 128), (4,), (32_000, 151_936)):
        log_q, log_p = (torch.randn(rows, gamma, vocab, device="cuda").log_softmax(-1)[..., 17] for _ in range(2))
        uniforms = torch.rand(rows, gamma, device="cuda")
        row = {"op": "accept", "B": rows, "G": gamma, "V": vocab}
        row["us"] = warm_us(lambda: accept(log_q, log_p, uniforms=uniforms), 100, 31)  # noqa: B023
        row["torch_graph_us"] = warm_us(lambda: baselines.eager_accept(log_q, log_p, uniforms), 20, 15)  # noqa: B023
        row["speedup"] = row["torch_graph_us"] / row["us"]
        rows_out.append(row)
        show(row)
    compiled = accept_kernel.accept_kernel.device_caches[torch.cuda.current_device()][0]
    rows_out.append(
        {"op": "accept", "variants": len(compiled), "shared": [k.metadata.shared for k in compiled.values()]}
    )
    show(rows_out[-1])
    return rows_out


def bench_attention(bandwidth: float) -> list[dict]:
    """32 query heads, 8 KV heads of 128, bf16; `block` 0 is one slot a row."""
    rows_out = []
    for block, rows, length, context in ATTENTION_SHAPES:
        case = checks.attention_inputs(rows, length, context, 32, 8, 128, torch.bfloat16, block)
        query, keys, values, blocks, positions = case
        size = keys.nbytes + values.nbytes
        row = {
            "op": "ragged_attention",
            "block": block or "slot",
            "B": rows,
            "T": length,
            "kv": context,
            "MB": size / 1e6,
        }
        row["us"] = warm_us(lambda: ragged_attention(*case), **few(size))  # noqa: B023
        row["cold_us"] = cold_us(lambda: ragged_attention(*case), 7)  # noqa: B023
        row["of_copy"] = size / (row["cold_us"] * 1e-6) / bandwidth
        if not block:
            rows_kv = [baselines.gathered(cache, blocks, context) for cache in (keys, values)]
            for name, call in baselines.sdpa_variants(query, *rows_kv, positions).items():
                row[f"sdpa {name}"] = warm_us(call, **few(size))
            row["speedup"] = min(value for name, value in row.items() if name.startswith("sdpa")) / row["us"]
            new = torch.randn(2, rows, length, 8, 128, device="cuda").bfloat16()
            row["kv_write_us"] = warm_us(lambda: kv_write(keys, values, new[0], new[1], blocks, positions))  # noqa: B023
        rows_out.append(row)
        show(row)
    return rows_out


def show(row: dict) -> None:
    print("  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    parser.add_argument("--tune", action="store_true", help="only measure other tile sizes and warp counts")
    parser.add_argument("--commit", help="what the working tree is at, where git cannot tell")
    options = parser.parse_args()
    started = time.time()
    report = environment()
    report["commit"] = options.commit or report["commit"]
    show(report)
    report["copy_bytes_per_second"] = bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e12:.3f} TB/s", flush=True)

    def save() -> None:
        report["seconds"] = time.time() - started
        if options.out:
            options.out.write_text(json.dumps(report, indent=1))

    if options.tune:
        report["tuning"] = sweeps.run_all()
        save()
        return
    report["checks"] = checks.run_all()
    show(report["checks"])
    save()
    print(f"checks done after {time.time() - started:.0f} s", flush=True)
    steps = {
        "verify": lambda: bench_verify(bandwidth),
        "other_laws": bench_other_laws,
        "sample": bench_sample,
        "accept": bench_accept,
        "attention": lambda: bench_attention(bandwidth),
    }
    for name, step in steps.items():
        report[name] = step()
        save()
        print(f"{name} done after {time.time() - started:.0f} s", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
