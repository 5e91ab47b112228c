"""What the rows say against each other: equal texts, ratios, and where we lose."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..planner import psd_gain
from .points import CAPPED_ONE, CAPPED_TWO, ONE, QUEUE, REPLICAS, TWO
from .profiles import OURS
from .rows import Row

AUTO_MARGIN = 0.03


@dataclass(frozen=True)
class Loss:
    """A figure in which a method of ours is worse than another method of the same run.

    Attributes:
        where: batch, sampling and layout.
        method: ours.
        rival: who is better.
        what: the figure.
        ours, theirs: its values.
        factor: how many times better the other is.
    """

    where: str
    method: str
    rival: str
    what: str
    ours: float
    theirs: float
    factor: float


@dataclass(frozen=True)
class Ratio:
    """One line of the two-device comparison; a ratio is None where one of its rows is missing."""

    batch: int
    gamma: int
    psd_over_sd: float | None
    predicted_psd_over_sd: float | None
    psd_twice_over_sd: float | None
    makespan_over_sd: float | None
    psd_over_ar_replicas: float | None
    psd_over_sd_replicas: float | None
    auto_over_best: float | None
    auto_mode: str | None
    tpot_p50_over_sd: float | None
    e2e_p99_over_sd: float | None


def identical(rows: Sequence[Row]) -> dict[str, float]:
    """For each greedy row, the share of its texts that equal the reference's: "hf-eager" at that batch, else "ar"."""
    shares = {}
    for row in rows:
        if row.sampled or not row.digests:
            continue
        peers = [
            peer
            for peer in rows
            if peer.batch == row.batch and not peer.sampled and len(peer.digests) == len(row.digests)
        ]
        reference = next((peer for name in ("hf-eager", "ar") for peer in peers if peer.method == name), peers[0])
        equal = sum(one == two for one, two in zip(row.digests, reference.digests))
        shares[row.name] = equal / len(row.digests)
    return shares


def losses(rows: Sequence[Row]) -> list[Loss]:
    """Where another method beats one of ours in throughput, first call, time to the first token or memory.

    A method of ours is compared with all others at the same batch, sampling and layout, in throughput with our own
    too; `replicas` rows stand against the two-device rows of the same batch. Figures within 1 % of each other count
    as equal. Of several that beat it in the same figure the best is named.
    """
    found: dict[tuple[str, str, str], Loss] = {}
    for row in rows:
        if row.method not in OURS or not row.good or row.layout not in (ONE, TWO, QUEUE):
            continue
        for other in rows:
            same = other.batch == row.batch and other.sampled == row.sampled and other is not row and other.good
            place = other.layout == row.layout or (row.layout == TWO and other.layout == REPLICAS)
            if not same or not place or (other.gamma != row.gamma and other.method != "ar"):
                continue
            for loss in _worse(row, other):
                key = (row.name, row.method, loss.what)
                if key not in found or loss.factor > found[key].factor:
                    found[key] = loss
    return sorted(found.values(), key=lambda loss: (loss.what != "tokens/s", -loss.factor))


def ratios(rows: Sequence[Row]) -> list[Ratio]:
    """The two-device comparison, one line per batch and gamma."""
    speed = {(row.layout, row.method, row.batch, row.gamma): row for row in rows if row.good}
    lines = []
    for batch, gamma in sorted({(row.batch, row.gamma) for row in rows if row.layout == TWO}):
        ar_gamma = next((row.gamma for row in rows if row.layout == TWO and row.method == "ar"), gamma)
        ar = speed.get((TWO, "ar", batch, ar_gamma))
        sd, psd, auto = (speed.get((TWO, mode, batch, gamma)) for mode in ("sd", "psd", "auto"))
        twice = speed.get((TWO, "psd", 2 * batch, gamma))
        best = max((row for row in (ar, sd, psd) if row), key=lambda row: row.tokens_per_second or 0.0, default=None)
        lines.append(
            Ratio(
                batch,
                gamma,
                _over(psd, sd),
                predicted_gain(rows, batch, gamma),
                _over(twice, sd),
                _quotient(_makespan(twice), _makespan(sd)),
                _over(psd, speed.get((REPLICAS, "ar", batch, ar_gamma))),
                _over(psd, speed.get((REPLICAS, "sd", batch, gamma))),
                _over(auto, best),
                auto.mode if auto else None,
                _quotient(_share(psd, "tpot_ms", "p50"), _share(sd, "tpot_ms", "p50")),
                _quotient(_share(psd, "e2e_ms", "p99"), _share(sd, "e2e_ms", "p99")),
            )
        )
    return lines


def predicted_gain(rows: Sequence[Row], batch: int, gamma: int) -> float | None:
    """PSD over SD by the planner's rule, from times while all requests ran; None where one is missing.

    The times for n requests are those of turns at batch n, or of two groups at batch 2 n.
    """
    draft: dict[int, float] = {}
    verify: dict[int, float] = {}
    for mode, share in (("psd", 2), ("sd", 1)):
        for row in rows:
            asked = row.layout == TWO and row.method == mode and row.gamma == gamma and row.good
            if asked and row.draft_full_ms is not None and row.verify_full_ms is not None:
                draft[row.batch // share], verify[row.batch // share] = row.draft_full_ms, row.verify_full_ms
    if not {batch, math.ceil(batch / 2)} <= draft.keys():
        return None
    return psd_gain(draft.__getitem__, verify.__getitem__, batch)


def capped_lines(rows: Sequence[Row]) -> list[dict[str, object]]:
    """The memory-cap experiment by batch: what one card does, what two do, and two over the best of one."""
    lines: list[dict[str, object]] = []
    for batch in sorted({row.batch for row in rows if row.layout in (CAPPED_TWO, CAPPED_ONE)}):
        named = {(row.layout, row.method): row for row in rows if row.batch == batch}
        one_sd, one_ar = named.get((CAPPED_ONE, "sd")), named.get((CAPPED_TWO, "ar"))
        single = [row for row in (one_sd, one_ar) if row is not None and row.good]
        best = max(single, key=lambda row: row.tokens_per_second or 0.0, default=None)
        line: dict[str, object] = {"batch": batch, "sd, one card": _told(one_sd), "ar, one card": _told(one_ar)}
        for mode in ("sd", "psd"):
            two = named.get((CAPPED_TWO, mode))
            line[f"{mode}, two cards"] = _told(two)
            line[f"{mode} over the best of one card"] = _over(two, best)
        lines.append(line)
    return lines


def queue_lines(rows: Sequence[Row]) -> list[dict[str, object]]:
    """The queue on two devices by seats and gamma; "decode" ratios leave out the time to the first tokens."""
    named = {(row.method, row.batch, row.gamma): row for row in rows if row.layout == QUEUE and row.good}
    plain = {batch: row for (method, batch, _), row in named.items() if method == "ar"}
    lines: list[dict[str, object]] = []
    for batch, gamma in sorted({(batch, gamma) for method, batch, gamma in named if method != "ar"}):
        sd, psd, twice = (
            named.get(("sd", batch, gamma)),
            named.get(("psd", batch, gamma)),
            named.get(("psd", 2 * batch, gamma)),
        )
        lines.append(
            {
                "seats": batch,
                "gamma": gamma,
                "psd over sd": _over(psd, sd),
                "psd over sd, decode": _quotient(_decode(psd), _decode(sd)),
                "psd with twice the seats over sd": _over(twice, sd),
                "psd with twice the seats over sd, decode": _quotient(_decode(twice), _decode(sd)),
                "psd over ar": _over(psd, plain.get(batch)),
                "overlap, steady": psd.overlap_steady if psd else None,
                "target idle, steady": psd.target_idle_steady if psd else None,
            }
        )
    return lines


def _worse(row: Row, other: Row) -> Iterable[Loss]:
    kind = "sampled" if row.sampled else "greedy"
    where = f"batch {row.batch}, {kind}, gamma {row.gamma}, {row.layout}"
    rival = other.method if other.layout == row.layout else f"{other.method} ({other.layout})"
    figures = [
        ("tokens/s", row.tokens_per_second, other.tokens_per_second, True),
        ("first call, s", row.first_call_seconds, other.first_call_seconds, False),
        ("TTFT p50, ms", _share(row, "ttft_ms", "p50"), _share(other, "ttft_ms", "p50"), False),
        ("memory over weights and KV, GiB", row.over_gib, other.over_gib, False),
    ]
    own = other.method in OURS
    for what, ours, theirs, more in figures:
        if ours is None or theirs is None or min(ours, theirs) <= 0 or (own and what != "tokens/s"):
            continue
        factor = theirs / ours if more else ours / theirs
        if factor > 1.01:
            yield Loss(where, row.method, rival, what, ours, theirs, factor)


def _over(one: Row | None, two: Row | None) -> float | None:
    return _quotient(one.tokens_per_second if one else None, two.tokens_per_second if two else None)


def _decode(row: Row | None) -> float | None:
    return row.decode_tokens_per_second if row else None


def _makespan(row: Row | None) -> float | None:
    return row.makespan_per_request_ms if row else None


def _quotient(one: float | None, two: float | None) -> float | None:
    return one / two if one is not None and two else None


def _share(row: Row | None, field: str, name: str) -> float | None:
    values = getattr(row, field, None)
    return values[name] if values else None


def _told(row: Row | None) -> float | str | None:
    if row is None:
        return None
    if not row.good:
        return "out of memory" if "out of memory" in (row.error or "") else (row.error or "failed")[:60]
    return row.tokens_per_second
