"""Why `mode="auto"` chooses what it chooses: one call measured in every mode, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from .api import check_tags, generate, last_stats, plain_generate
from .arguments import resolve_drafters, resolve_target
from .config import PSDConfig
from .planner import MODES, Row, choose, makespan
from .runner import input_device
from .timeline import Span, Timeline, merged, overlap_share, total

_TOKENS = 24
"""New tokens per row that are measured in each mode."""

_REFUSED = {
    "psd_hooks": "it measures with hooks of its own",
    "streamer": "it decodes the prompts several times",
    "past_key_values": "it decodes the prompts several times, and each call would extend the cache",
    "num_return_sequences": "name the rows to measure in batch_sizes",
}


@dataclass(frozen=True)
class Figures:
    """What was measured for one batch size; times in milliseconds.

    Attributes:
        rows: requests.
        draft: to draft once for all of them, D.
        verify: to verify those drafts, V.
        plain: a forward without drafts.
        rounds: a round of each mode that was run.
        rate: tokens per row and round under speculation.
        overlap: share of the shorter of drafting and verifying that ran beside the other in mode "psd", if it was run.
        predicted: tokens per second of each mode until the slowest row has its last token.
        choice: the mode with the most.
        reason: why, in words.
    """

    rows: int
    draft: float
    verify: float
    plain: float
    rounds: Mapping[str, float]
    rate: float
    overlap: float | None
    predicted: Mapping[str, float]
    choice: str
    reason: str


@dataclass(frozen=True)
class Explanation:
    """What `explain` found: `figures` per batch size, where the models live, and remarks. Prints as a table."""

    figures: list[Figures]
    placement: Mapping[str, str]
    notes: list[str]

    def __str__(self) -> str:
        header = f"{'rows':>5} {'D':>8} {'V':>8} {'plain':>8} {'tokens':>7}"
        header += "".join(f"{mode:>9}" for mode in MODES) + f" {'overlap':>8}  choice"
        units = f"{'':>5} {'ms':>8} {'ms':>8} {'ms':>8} {'a round':>7}" + f"{'tok/s':>9}" * len(MODES)
        legend = "D: drafting for all rows, V: verifying the drafts, plain: a forward without; tokens a round: per row"
        lines = [*(f"{name}: {place}" for name, place in self.placement.items()), legend, header, units]
        for each in self.figures:
            rates = "".join(
                f"{each.predicted[mode]:9.1f}" if mode in each.predicted else f"{'-':>9}" for mode in MODES
            )
            share = "-" if each.overlap is None else f"{each.overlap:.0%}"
            lines.append(
                f"{each.rows:5d} {each.draft:8.2f} {each.verify:8.2f} {each.plain:8.2f} {each.rate:7.2f}{rates} "
                f"{share:>8}  {each.choice}: {each.reason}"
            )
        return "\n".join([*lines, *self.notes])


def explain(
    model: PreTrainedModel,
    assistant_models: Sequence[Any] | None = None,
    *,
    psd: PSDConfig | Mapping[str, Any] | bool = True,
    batch_sizes: Sequence[int] | None = None,
    **generate_kwargs: Any,
) -> Explanation:
    """Runs a short call in each mode that these devices can run, and tells which is fastest and why.

    Args:
        model, assistant_models, psd: as for `generate`.
        batch_sizes: batches to measure, made from the given rows, repeated where there are fewer; default: the batch.
        **generate_kwargs: arguments of `generate`; `input_ids` [B, P] int64 (and `attention_mask`), from which the
            acceptance is measured, is needed. `max_new_tokens` (default 128) is what the prediction is for.

    Raises:
        ValueError, TypeError: as `generate`.
    """
    config = PSDConfig.resolve(psd)
    arguments = dict(generate_kwargs)
    defaults = getattr(model, "generation_config", None)
    pad_id, ends = (arguments.get(name, getattr(defaults, name, None)) for name in ("pad_token_id", "eos_token_id"))
    ids, mask = _prompts(arguments, pad_id, ends)
    batches = _batches(batch_sizes, ids.shape[0])
    given = arguments.pop("max_new_tokens", None)
    wanted = 128 if given is None else _positive("max_new_tokens", given)
    for name, advice in _REFUSED.items():
        if arguments.get(name) is not None:
            raise ValueError(f"psd: explain takes no {name}: {advice}.")
    picks = [[row % ids.shape[0] for row in range(rows)] for rows in batches]
    configs = [_for_rows(config, pick, ids.shape[0]) for pick in picks]
    target = resolve_target(model, plain_generate(), arguments)
    drafters = resolve_drafters(target, assistant_models, {})
    homes = {drafter.device or input_device(target) for drafter in drafters} | {input_device(target)}
    parallel = any(home.type == "cuda" for home in homes)
    figures = []
    for rows, pick, each in zip(batches, picks, configs):
        batch = {"input_ids": ids[pick], "attention_mask": mask[pick], **arguments}
        modes = [mode for mode in MODES if mode != "psd" or (parallel and rows > 1)]
        runs = {mode: _run(model, assistant_models, replace(each, mode=mode), batch) for mode in modes}
        figures.append(_figures(rows, runs, wanted))
    stats = last_stats()
    assert stats is not None
    notes = [] if parallel else ["psd: two groups cannot overlap on the CPU alone, so that mode was not run"]
    if any(each.plain > 1.5 * each.verify for each in figures):
        notes.append(
            "a plain forward took longer than a verification: these times are noise; repeat on an idle machine"
        )
    return Explanation(figures, stats.placement, [*notes, *stats.notes, *stats.errors])


def _prompts(
    arguments: dict[str, Any], pad_token_id: int | None, eos_token_id: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes [B, P] ids and mask out of the arguments."""
    given = [arguments.pop(name, None) for name in ("input_ids", "inputs")]
    ids = next((each for each in given if each is not None), None)
    if ids is None:
        raise ValueError("psd: explain needs input_ids: the acceptance of drafts depends on the text.")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not ids.numel():
        raise ValueError(f"psd: input_ids must be a tensor [B, P] of ids, got {_shape(ids)}.")
    mask = arguments.pop("attention_mask", None)
    if mask is None:
        pad, ends = pad_token_id, eos_token_id if isinstance(eos_token_id, (list, tuple)) else [eos_token_id]
        known = pad is not None and pad not in ends  # as in `generate`: an end token used as padding cannot be told
        mask = ids.ne(pad).long() if known else torch.ones_like(ids)
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        raise ValueError(f"psd: attention_mask must be {list(ids.shape)} like input_ids, got {_shape(mask)}.")
    return ids, mask


def _shape(value: Any) -> str:
    return f"one of {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _batches(sizes: Any, rows: int) -> list[int]:
    if sizes is None:
        return [rows]
    if isinstance(sizes, str) or not isinstance(sizes, Sequence) or not sizes:
        raise ValueError(f"psd: batch_sizes must be a list of ints >= 1, got {sizes!r}.")
    return [_positive("batch_sizes", size) for size in sizes]


def _positive(name: str, number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"psd: {name} takes ints >= 1, got {number!r}.")
    return number


def _for_rows(config: PSDConfig, pick: Sequence[int], rows: int) -> PSDConfig:
    """The settings for rows picked, possibly repeatedly, from the given ones."""
    tags = config.context
    if tags is not None and not isinstance(tags, str):
        check_tags(tags, rows)
        tags = [tags[row] for row in pick]
    return replace(config, context=tags, request_ids=None)


@dataclass(frozen=True)
class _Run:
    """One call's spans, without those of its prefill, and its tokens per row and round."""

    spans: list[Span]
    rate: float


def _run(model: PreTrainedModel, drafters: Any, config: PSDConfig, batch: Mapping[str, Any]) -> _Run:
    """A call to warm up and capture, then one that counts."""
    timeline = Timeline()
    arguments: dict[str, Any] = {**batch, "max_new_tokens": _TOKENS, "min_new_tokens": _TOKENS}
    for hooks in ((), (timeline,)):
        generate(model, assistant_models=drafters, psd=config, psd_hooks=hooks, **arguments)
    stats = last_stats()
    assert stats is not None
    return _Run([span for span in timeline.spans if span.kind != "prefill"], max(1.0, stats.tokens_per_forward))


def _figures(rows: int, runs: Mapping[str, _Run], tokens: int) -> Figures:
    verified = {mode: [span for span in run.spans if span.kind == "verify"] for mode, run in runs.items()}
    rounds = {mode: _between(spans) * (2 if mode == "psd" else 1) for mode, spans in verified.items()}
    rate = runs["sd"].rate
    predicted = {}
    for mode, seconds in rounds.items():
        row = Row(tokens, 1.0 if mode == "ar" else rate)
        predicted[mode] = rows * tokens / (makespan([row] * rows, lambda _: seconds * 1e-3))  # noqa: B023
    choice = choose({mode: 1 / rate for mode, rate in predicted.items()})
    return Figures(
        rows,
        draft=total(merged(runs["sd"].spans, "draft")) / max(1, len(verified["sd"])),
        verify=median(span.end - span.start for span in verified["sd"]),
        plain=median(span.end - span.start for span in verified["ar"]),
        rounds=rounds,
        rate=rate,
        overlap=overlap_share(runs["psd"].spans) if "psd" in runs else None,
        predicted=predicted,
        choice=choice,
        reason=_reason(choice, rounds, rate),
    )


def _between(spans: Sequence[Span]) -> float:
    """Median milliseconds from one verification's end to the next one's; the first is still finding its pace."""
    ends = [span.end for span in spans]
    return (
        median(later - sooner for sooner, later in zip(ends[1:], ends[2:] or ends[1:])) if len(ends) > 2 else ends[-1]
    )


def _reason(choice: str, rounds: Mapping[str, float], rate: float) -> str:
    if choice == "ar":
        return f"{rate:.2f} tokens a round do not repay rounds {rounds['sd'] / rounds['ar']:.2f} times as long"
    gain = f"{rate:.2f} tokens a round for rounds {rounds[choice] / rounds['ar']:.2f} times as long"
    if choice == "psd":
        return f"{gain}, {rounds['sd'] / rounds['psd']:.2f} times shorter than in turns"
    if "psd" in rounds:
        return f"{gain}; alternating rounds take {rounds['psd'] / rounds['sd']:.2f} times as long"
    return gain
