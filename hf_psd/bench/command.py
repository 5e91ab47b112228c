"""Measure plain and speculative decoding on random models of real sizes."""

from __future__ import annotations

import argparse
from pathlib import Path

from .runs import METHODS, Settings, run_all, save


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `hf-psd bench`."""
    defaults = Settings()
    parser.add_argument("--target", default=defaults.target, help="shape of the target")
    parser.add_argument("--drafter", default=defaults.drafter, help="shape of the drafter")
    parser.add_argument("--agreement", type=float, default=defaults.agreement, help="share of equal argmax choices")
    parser.add_argument("--layers", type=int, help="build only so many layers")
    parser.add_argument("--dtype", default=defaults.dtype)
    parser.add_argument("--device", default=defaults.device)
    parser.add_argument("--batches", type=int, nargs="+", default=list(defaults.batches))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(defaults.methods))
    parser.add_argument("--gamma", type=int, default=defaults.gamma)
    parser.add_argument("--prompt", type=int, default=defaults.prompt, help="prompt tokens per row")
    parser.add_argument("--new-tokens", type=int, default=defaults.new_tokens)
    parser.add_argument("--repeat", type=int, default=defaults.repeat)
    parser.add_argument("--sample", action="store_true", help="sample instead of greedy")
    parser.add_argument("--json", type=Path, help="write settings, versions and raw rows here")


def run(parsed: argparse.Namespace) -> None:
    """Measures, prints every row and writes the JSON."""
    values = {name: value for name, value in vars(parsed).items() if name in Settings.__dataclass_fields__}
    result = run_all(Settings(**values))
    if parsed.json:
        save(result, parsed.json)
