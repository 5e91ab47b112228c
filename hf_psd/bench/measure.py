"""Measures one decoder: first call, warm-ups, timed calls, and one observed call for latencies and the timeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from ..timeline import Span, Timeline, merged, overlap, overlap_share, total
from . import costs
from .clocks import TokenClock, decode_rate, median, percentiles
from .decoders import Counts, Decoder
from .profiles import OURS
from .rows import Row, digest_rows
from .spans import draft_ms, full, steady, typical_ms

_KEPT_SPANS = 160


class Measurement:
    """What the calls of one point gave, before it is turned into a row."""

    def __init__(self) -> None:
        self.first = 0.0
        self.walls: list[tuple[float, float]] = []
        self.modes: list[dict[str, int]] = []
        self.observed = 0.0
        self.clock: TokenClock | None = None
        self.counts: Counts | None = None
        self.ids: torch.Tensor | None = None
        self.spans: list[Span] = []
        self.before: dict[str, int] = {}
        self.peaks: dict[str, int] = {}


def run_calls(
    decoder: Decoder,
    method: str,
    batch: int,
    devices: tuple[str, ...],
    warm_ups: int,
    repeat: int,
    enough: Callable[[], bool] = lambda: False,
    together: Callable[[], None] = lambda: None,
) -> Measurement:
    """Calls the decoder 1 + `warm_ups` + `repeat` + 1 times.

    Args:
        decoder: what to call.
        method: its name.
        batch: requests of a call.
        devices: where it runs; the host waits for them before and after each timed call.
        warm_ups, repeat: calls.
        enough: asked after each timed call; True ends them.
        together: called before each timed and observed call, to let several processes start at once.
    """
    found = Measurement()
    costs.reset_peaks(devices)
    found.before = costs.allocated(devices)
    began, ended = _timed(decoder, devices)
    found.first = ended - began
    for _ in range(warm_ups):
        decoder()
    for _ in range(repeat):
        together()
        found.walls.append(_timed(decoder, devices))
        if method == "auto":
            found.modes.append(decoder.counts().forwards_by_mode or {})
        if enough():
            break
    found.peaks = costs.peaks(devices)
    timeline = Timeline() if method in OURS else None
    clock = TokenClock(batch)
    together()
    costs.synchronize(devices)
    clock.start()
    found.ids = decoder(clock, (timeline,) if timeline is not None else ()).cpu()
    found.observed = time.perf_counter() - clock.began
    found.clock, found.counts = clock, decoder.counts()
    if timeline is not None:
        found.spans = timeline.spans
    return found


def fill_row(row: Row, found: Measurement, seconds: list[float]) -> None:
    """Puts the figures of one process into its row; `seconds` are those of the timed calls."""
    assert found.ids is not None and found.counts is not None and found.clock is not None
    counts, clock, typical = found.counts, found.clock, median(seconds)
    tokens = int((found.ids >= 0).sum())
    row.seconds, row.first_call_seconds, row.observed_seconds = seconds, found.first, found.observed
    row.tokens_per_second = tokens / typical
    row.tokens_per_second_per_gpu = row.tokens_per_second / row.devices_used
    row.decode_tokens_per_second = decode_rate(clock.arrivals)
    row.makespan_per_request_ms = 1e3 * typical / found.ids.shape[0]
    row.digests = digest_rows(found.ids)
    row.mode, row.balance, row.forwards_by_mode = counts.mode, counts.balance, counts.forwards_by_mode
    row.timed_modes = found.modes or None
    row.target_forwards, row.draft_forwards = counts.forwards, counts.draft_forwards
    row.ms_per_forward = 1e3 * typical / counts.forwards
    row.tokens_per_forward = counts.tokens_per_forward
    row.acceptance = counts.accepted / counts.drafted if counts.drafted and counts.accepted is not None else None
    row.step_ms = percentiles(clock.step_ms() or counts.steps_ms or [])
    latencies = clock.latencies_ms()
    row.ttft_ms, row.tpot_ms = percentiles(latencies["ttft"]), percentiles(latencies["tpot"])
    row.e2e_ms = percentiles(latencies["e2e"] or [1e3 * found.observed])
    row.notes += counts.notes
    if found.spans:
        row.spans = [
            (lane, kind, round(start, 3), round(end, 3)) for lane, kind, start, end in found.spans[:_KEPT_SPANS]
        ]
        row.draft_ms, row.verify_ms = draft_ms(found.spans), typical_ms(found.spans, "verify")
        row.draft_full_ms, row.verify_full_ms = (typical_ms(full(found.spans), kind) for kind in ("draft", "verify"))
        row.target_idle = target_idle(found.spans, found.spans)
        row.target_idle_steady = target_idle(found.spans, steady(found.spans))
        if row.draft_ms is not None:
            row.overlap, row.overlap_steady = overlap_share(found.spans), overlap_share(steady(found.spans))
    if counts.errors:
        row.error = "; ".join(counts.errors)


def fill_costs(
    row: Row,
    found: Measurement,
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    resident: list[PreTrainedModel],
    columns: float,
    bandwidth: float | None,
) -> None:
    """Memory and bandwidth of a row.

    Args:
        row: the row.
        found: its measurement.
        target, drafter: the models that decode.
        resident: every model that holds memory meanwhile.
        columns: prompt tokens per row.
        bandwidth: bytes per second, for the floor; None leaves it out.
    """
    assert found.ids is not None and found.counts is not None
    tokens = columns + found.ids.shape[1]
    speculates = bool(found.counts.draft_forwards or found.counts.drafted)
    per_token = costs.kv_bytes_per_token(target) + (costs.kv_bytes_per_token(drafter) if speculates else 0)
    if found.peaks:
        weights = sum(costs.weight_bytes(model) for model in resident)
        row.peak_gib = {device: peak / costs.GIB for device, peak in found.peaks.items()}
        row.before_gib = {device: used / costs.GIB for device, used in found.before.items()}
        row.weights_gib, row.kv_gib = weights / costs.GIB, row.batch * tokens * per_token / costs.GIB
        held = max(row.weights_gib, sum(row.before_gib.values()))  # earlier methods may have left something behind
        row.over_gib = sum(row.peak_gib.values()) - held - row.kv_gib
    counts = found.counts
    known = counts.draft_forwards is not None or not counts.drafted
    if bandwidth is None or row.step_ms is None or not known or counts.steps_ms is not None:
        return
    rows = row.batch / 2 if counts.mode == "psd" else row.batch
    drafts = (counts.draft_forwards or 0) / counts.forwards
    needed = costs.round_bytes(target, drafter, drafts, int(rows), columns + found.ids.shape[1] / 2)
    row.gb_per_second = needed / row.step_ms["p50"] / 1e6
    row.floor_share = 1e9 * row.gb_per_second / bandwidth


def target_idle(spans: Sequence[Span], window: Sequence[Span]) -> float:
    """The part of the time between the first and the last verification of `window` in which the target did nothing,
    0 to 1: reading prompts is work, too."""
    verifying = merged(window, "verify")
    if not verifying:
        return 0.0
    whole = [(verifying[0][0], verifying[-1][1])]
    lanes = {span.lane for span in spans if span.kind == "verify"}
    busy = merged([span._replace(kind="busy") for span in spans if span.lane in lanes], "busy")
    return 1.0 - overlap(whole, busy) / total(whole)


def _timed(decoder: Decoder, devices: tuple[str, ...]) -> tuple[float, float]:
    costs.synchronize(devices)
    began = time.perf_counter()
    decoder()
    costs.synchronize(devices)
    return began, time.perf_counter()
