"""Writes a benchmark's JSON into a page as tables: `python render.py kernels.json docs/kernels.md`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def table(head: list[str], rows: list[list]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def verify_table(rows: list[dict]) -> str:
    body = [
        [r["dtype"], r["B"], r["G"], f"{r['V']:,}", f"{r['MB']:.1f}", us(r, "us"), us(r, "cold_us"),
         us(r, "torch_graph_us"), f"{r['speedup']:.1f}x", f"{100 * r['of_copy']:.0f} %"]
        for r in rows
    ]  # fmt: skip
    head = ["dtype", "B", "G", "V", "MB read", "us", "us, L2 flushed", "PyTorch us", "speed-up", "of copy bandwidth"]
    return table(head, body)


def us(row: dict, name: str) -> str:
    return f"{row[name]:.1f}" if name in row else ""


def fastest_sdpa(row: dict) -> str:
    times = [value for name, value in row.items() if name.startswith("sdpa")]
    return f"{min(times):.1f}" if times else ""


def other_tables(report: dict) -> str:
    laws = [[r["law"], r["B"], us(r, "us"), us(r, "torch_graph_us")] for r in report["other_laws"]]
    small = report["sample"] + [r for r in report["accept"] if "us" in r]
    small = [[r["op"], r["B"], f"{r['V']:,}", us(r, "us"), us(r, "torch_graph_us")] for r in small]
    attention = [
        [r["block"], r["B"], r["T"], r["kv"], us(r, "us"), us(r, "cold_us"), f"{100 * r['of_copy']:.0f} %",
         fastest_sdpa(r), us(r, "kv_write_us")]
        for r in report["attention"]
    ]  # fmt: skip
    head = ["block", "B", "T", "KV", "us", "us, L2 flushed", "of copy bandwidth", "sdpa us", "`kv_write` us"]
    return "\n".join(
        [
            "`verify`, other laws (bf16, G = 4, V = 128,256), against the specification; greedy against argmax:\n",
            table(["law", "B", "us", "PyTorch us"], laws),
            "`sample`, `accept`, and the warpers in torch:\n",
            table(["operation", "B", "V", "us", "PyTorch us"], small),
            "`ragged_attention` (bf16, 32 heads, 8 KV heads of 128), against the fastest sdpa over gathered KV:\n",
            table(head, attention),
        ]
    )


def main() -> None:
    report = json.loads(Path(sys.argv[1]).read_text())
    page = Path(sys.argv[2])
    checks = report["checks"]
    made = "\n".join(
        [
            BEGIN,
            f"{report['gpu']}, driver {report['driver']}, CUDA {report['cuda']}, torch {report['torch']}, Triton "
            f"{report['triton']}, commit {report['commit']}; copy bandwidth "
            f"{report['copy_bytes_per_second'] / 1e12:.2f} TB/s, read and written bytes counted.\n",
            f"Checks of the same run: logsumexp within {checks['logsumexp_error']:.1e} max(1, |x|) of float64; "
            f"{checks['draws']:,} residual draws, chi-square z = {checks['residual_chi_square_z']:.2f}, and "
            f"of first tokens, z = {checks['first_token_chi_square_z']:.2f}; {checks['verify_rows_different']} of "
            f"{checks['verify_rows_compared']} verified rows differ from the specification.\n",
            "`verify`, rejection:\n",
            verify_table(report["verify"]),
            other_tables(report),
            END,
        ]
    )
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(before + made + rest.partition(END)[2])


if __name__ == "__main__":
    main()
