"""`hf-psd`: the command line."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import bench


def main(arguments: list[str] | None = None) -> None:
    """Parses the command line and runs it."""
    parser = argparse.ArgumentParser(prog="hf-psd", description="Speculative decoding for whole batches.")
    commands = parser.add_subparsers(required=True)
    measure = commands.add_parser(
        "bench", help="measure plain and speculative decoding on random models of real sizes"
    )
    defaults = bench.Settings()
    measure.add_argument("--target", default=defaults.target, help="shape of the target")
    measure.add_argument("--drafter", default=defaults.drafter, help="shape of the drafter")
    measure.add_argument("--agreement", type=float, default=defaults.agreement, help="share of equal argmax choices")
    measure.add_argument("--layers", type=int, help="build only so many layers")
    measure.add_argument("--dtype", default=defaults.dtype)
    measure.add_argument("--device", default=defaults.device)
    measure.add_argument("--batches", type=int, nargs="+", default=list(defaults.batches))
    measure.add_argument("--methods", nargs="+", choices=bench.METHODS, default=list(defaults.methods))
    measure.add_argument("--gamma", type=int, default=defaults.gamma)
    measure.add_argument("--prompt", type=int, default=defaults.prompt, help="prompt tokens per row")
    measure.add_argument("--new-tokens", type=int, default=defaults.new_tokens)
    measure.add_argument("--repeat", type=int, default=defaults.repeat)
    measure.add_argument("--sample", action="store_true", help="sample instead of greedy")
    measure.add_argument("--json", type=Path, help="write settings, versions and raw rows here")
    measure.set_defaults(run=_bench)
    parsed = parser.parse_args(arguments)
    parsed.run(parsed)


def _bench(parsed: argparse.Namespace) -> None:
    values = {name: value for name, value in vars(parsed).items() if name not in ("run", "json")}
    result = bench.run(bench.Settings(**values))
    if parsed.json:
        bench.save(result, parsed.json)


if __name__ == "__main__":
    main()
