"""Measure plain and speculative decoding: one run, the same models and prompts for every method.

A run is a list of points (--list shows them); the JSON is written after every point, so a stopped run goes on with
--resume. Beside FILE.json come FILE.md with all tables, FILE.png with bars and FILE-timeline.png.
docs/benchmarks/README.md says what is measured and what each column means.

  hf-psd bench                                     the default profile: llama-8b on CUDA, tiny on a CPU
  hf-psd bench --quick                             within five minutes on a GPU
  hf-psd bench --profile t4-nf4 --json t4.json
  hf-psd bench --devices 2 --only 'two/*/b64/*' --json two.json --time-limit 500
  hf-psd bench --devices 2 --only 'replicas/*' --json two.json --time-limit 300 --resume
"""

from __future__ import annotations

import argparse
from ast import literal_eval
from pathlib import Path
from typing import Any

import torch

from .points import all_points, choose
from .profiles import METHODS, PROFILES, Settings, override, quick
from .refusals import refuse
from .report import markdown
from .rows import Results
from .session import Session

QUICK_SECONDS = 240.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `hf-psd bench`."""
    what = parser.add_argument_group("what is measured")
    what.add_argument("--profile", choices=PROFILES, help="a set of settings; the options below override it")
    what.add_argument("--quick", action="store_true", help="greedy, small batches, few calls; --time-limit is 240")
    what.add_argument(
        "--devices", type=int, choices=(1, 2), default=1, help="2: target and drafters on cards of their own"
    )
    what.add_argument("--methods", nargs="+", choices=METHODS)
    what.add_argument("--batches", type=int, nargs="+", help="requests in flight")
    what.add_argument("--sampling", choices=("greedy", "sampled", "both"))
    what.add_argument("--temperature", type=float, help="of sampled runs; top-k and top-p are off")
    what.add_argument("--gamma", type=int, help="drafts per round")
    what.add_argument("--gammas", type=int, nargs="+", help="the sweep of --devices 2, at --gamma-batch")
    what.add_argument("--gamma-batch", type=int)
    what.add_argument("--grid", action="store_true", default=None, help="with --devices 2: every gamma at every batch")
    what.add_argument("--queue-factor", type=int, metavar="N", help="requests per seat of the queue layout [4]")
    what.add_argument("--capped-batches", type=int, nargs="+", help="batches of the memory-cap experiment")
    what.add_argument("--memory-cap", type=float, metavar="GIB", help="of each card in that experiment")
    what.add_argument("--static-batches", type=int, nargs="+", help="batches for hf-static, which compiles at each")
    models = parser.add_argument_group("models and prompts")
    models.add_argument("--target", help="a shape (hf_psd.testing.pairs.SHAPES), or the folder of a saved model")
    models.add_argument(
        "--drafters", nargs="+", help="likewise; the first drafts, the last is the memory cap's big one"
    )
    models.add_argument("--agreement", type=float, help="share of equal argmax choices of random models")
    models.add_argument("--layers", type=int, help="build only so many layers")
    models.add_argument("--dtype", help="float32, bfloat16 or float16")
    models.add_argument("--quantize", choices=("nf4",), help="the target, by bitsandbytes")
    models.add_argument("--device", nargs="+", help="devices to use instead of cuda:0 and cuda:1")
    models.add_argument("--prompt", type=int, help="prompt tokens per row, at most")
    models.add_argument("--new-tokens", type=int, help="new tokens per row; end tokens are ignored")
    models.add_argument("--prompts", help="file: ShareGPT, Spec-Bench, Arena, JSONL with `prompt`, or text lines")
    models.add_argument("--tokenizer", help="folder of the tokenizer that reads --prompts")
    how = parser.add_argument_group("how")
    how.add_argument("--repeat", type=int, help="timed calls; their median counts")
    how.add_argument("--warm-ups", type=int, help="calls between the first and the timed ones")
    how.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help="points by name, such as 'one/sd/*'")
    how.add_argument("--points", nargs="+", default=[], metavar="N-M", help="points by their number in --list")
    how.add_argument("--list", action="store_true", help="print the points and measure nothing")
    how.add_argument("--time-limit", type=float, metavar="S", help="begin no point after so many seconds")
    how.add_argument("--resume", action="store_true", help="keep the points that --json has and measure the others")
    how.add_argument("--json", type=Path, default=Path("hf-psd-bench.json"), help="results file [%(default)s]")
    how.add_argument("--psd", nargs="+", default=[], metavar="NAME=VALUE", help="more PSDConfig fields for our modes")
    how.add_argument("--plans", action="store_true", help="add what hf_psd.explain says of each auto point (slow)")
    how.add_argument("--commit", help="recorded instead of what git says")
    how.add_argument("--no-plots", action="store_true", help="write no pictures")
    how.add_argument("--no-bar", action="store_true", help="show no progress bar")


def run(parsed: argparse.Namespace) -> None:
    """Measures, prints every row, writes JSON, report and pictures."""
    try:
        settings = resolve(parsed)
        points = choose(all_points(settings), parsed.only, parsed.points)
    except ValueError as error:
        raise SystemExit(f"hf-psd bench: {error}") from None
    if parsed.list:
        numbers = {point: number for number, point in enumerate(all_points(settings), 1)}
        print("\n".join(f"{numbers[point]:>4}  {point.name}" for point in points))
        return
    _refuse_missing(settings.devices)
    results = Results(parsed.json, settings)
    results.commit = parsed.commit
    limit = parsed.time_limit or (QUICK_SECONDS if parsed.quick else None)
    try:
        if parsed.resume:
            results.resume()
        elif (old := results.set_aside()) is not None:
            print(f"The results that were in {parsed.json} are in {old} now.")
        Session(results, points, limit, bar=not parsed.no_bar, plans=parsed.plans).run()
    except ValueError as error:
        raise SystemExit(f"hf-psd bench: {error}") from None
    results.save()
    parsed.json.with_suffix(".md").write_text(markdown(results))
    print(f"Wrote {parsed.json} and {parsed.json.with_suffix('.md')}.")
    if not parsed.no_plots:
        draw(results)


def resolve(parsed: argparse.Namespace) -> Settings:
    """The settings that the options ask for.

    Raises:
        ValueError: a setting that cannot be measured.
    """
    profile = parsed.profile or ("llama-8b" if torch.cuda.is_available() else "tiny")
    settings = PROFILES[profile]
    if parsed.quick:
        settings = quick(settings)
    values = vars(parsed) | {"two": parsed.devices == 2, "devices": _devices(parsed, settings)}
    if parsed.batches and parsed.devices == 2:
        values["two_batches"] = parsed.batches
    if parsed.sampling:
        values["sampling"] = [kind == "sampled" for kind in ("greedy", "sampled") if parsed.sampling in (kind, "both")]
    values |= {"profile": None, "psd": [_setting(text) for text in parsed.psd] or None}
    settings = override(settings, **values)
    refuse(settings)
    return settings


def draw(results: Results) -> None:
    """Writes the pictures next to the results; says so where matplotlib is missing."""
    from .plots import plot_bars, plot_timeline

    rows, path = results.ordered(), results.path
    try:
        plot_bars(rows, path.with_suffix(".png"))
        plot_timeline(rows, path.with_name(path.stem + "-timeline.png"))
    except ImportError:
        print("No pictures: matplotlib is not installed.")


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def _devices(parsed: argparse.Namespace, settings: Settings) -> list[str]:
    given = [f"{device}:0" if device == "cuda" else device for device in parsed.device or ()]
    if len(given) > 1 and parsed.devices == 2:
        return given[:2]
    first = given[0] if given else settings.devices[0]
    return [first, "cuda:1" if parsed.devices == 2 and first == "cuda:0" else first]


def _refuse_missing(devices: tuple[str, ...]) -> None:
    count = torch.cuda.device_count()
    for device in devices:
        if device.startswith("cuda") and int(device.partition(":")[2] or 0) >= count:
            raise SystemExit(
                f"hf-psd bench: {device} is asked for and {count} CUDA devices are there. Use --device to name "
                "others, or --profile tiny --device cpu."
            )
