"""Statistics of a queue: latencies, depth, KV use, balance; and the same as Prometheus text."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..stats import PSDStats
from .pressure import reach
from .results import RequestCancelled

if TYPE_CHECKING:
    from .engine import QueueEngine
    from .ticket import Ticket

_KEPT = 65_536
"""Latencies kept, newest first to stay; older ones are forgotten so that memory stays flat."""
PERCENTILES = (50, 90, 95, 99)


@dataclass
class Mean:
    """Running mean and maximum of a figure, over steps."""

    total: float = 0.0
    count: int = 0
    peak: float = 0.0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1
        self.peak = max(self.peak, value)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass
class QueueStats(PSDStats):
    """`PSDStats` of all requests together, and what only a queue has.

    Attributes:
        steps: steps that launched a verification or a draft turn.
        overlapped: those of them that launched both, for two groups.
        by_flight: requests in flight -> [steps, overlapped steps].
        chunks, prompt_tokens: forwards that read prompts in, and tokens read by them (again after a preemption).
        preemptions: seats lost under KV pressure.
        finished, failed, cancelled: requests, by how they ended.
        first_token: seconds from a request's arrival to its first token; the newest 65 536 requests.
        gaps: seconds per token after the first: the time since the last commit, shared by the tokens of a commit.
        depth: waiting requests, after each step.
        kv_used: blocks of the target's pool that are handed out, after each step.
        kv_blocks: blocks of the target's pool.
        lookahead, lookahead_eager: blocks that running requests hold beyond their committed tokens, after each step;
            and what they would hold if every request kept room for gamma drafts beyond the longest it can be by then.
        lookahead_peak, lookahead_eager_peak: the same when a verification has just been given its blocks, before the
            one ahead of it has been read.
    """

    steps: int = 0
    overlapped: int = 0
    by_flight: dict[int, list[int]] = field(default_factory=dict)
    chunks: int = 0
    prompt_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    first_token: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT), repr=False)
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT), repr=False)
    depth: Mean = field(default_factory=Mean)
    kv_used: Mean = field(default_factory=Mean)
    kv_blocks: int = 0
    lookahead: Mean = field(default_factory=Mean)
    lookahead_eager: Mean = field(default_factory=Mean)
    lookahead_peak: Mean = field(default_factory=Mean)
    lookahead_eager_peak: Mean = field(default_factory=Mean)
    _counted: int = -1

    @property
    def overlap(self) -> float:
        """Share of the steps in which one group was verified while the other was drafted for."""
        return self.overlapped / self.steps if self.steps else 0.0

    @property
    def lookahead_share(self) -> float:
        """Lookahead blocks under deferred allocation over those under eager allocation, means over the steps."""
        eager = self.lookahead_eager.mean
        return self.lookahead.mean / eager if eager else 0.0

    def overlap_at(self, least: int, most: int | None = None) -> float:
        """`overlap` of the steps with `least` to `most` requests in flight."""
        chosen = [pair for count, pair in self.by_flight.items() if least <= count <= (most or count)]
        steps = sum(pair[0] for pair in chosen)
        return sum(pair[1] for pair in chosen) / steps if steps else 0.0

    def note_once(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def count_step(self, engine: QueueEngine) -> None:
        self.depth.add(len(engine.waiting))
        self.kv_blocks = engine.space.pool.total
        self.kv_used.add(engine.space.pool.used)
        self.count_lookahead(engine, at_launch=False)
        if engine.step == self._counted:
            return
        self._counted = engine.step
        both = bool(engine.newest.verify and engine.newest.draft)
        self.steps += 1
        self.overlapped += both
        pair = self.by_flight.setdefault(len(engine.manager.requests), [0, 0])
        pair[0] += 1
        pair[1] += both

    def count_lookahead(self, engine: QueueEngine, at_launch: bool) -> None:
        pool, requests = engine.space.pool, engine.manager.requests
        gamma = engine.gamma if engine.manager.drafting else 0
        committed = sum(pool.need(request.length - 1) for request in requests)
        held = sum(len(pool.owned[request.slot]) for request in requests) - committed
        eager = sum(pool.need(reach(request, gamma)) for request in requests) - committed
        (self.lookahead_peak if at_launch else self.lookahead).add(held)
        (self.lookahead_eager_peak if at_launch else self.lookahead_eager).add(eager)

    def count_tokens(self, ticket: Ticket, count: int, gaps: list[float]) -> None:
        self.gaps.extend(gaps)
        if count and len(ticket.result.generated_tokens) == count:
            self.first_token.append(ticket.result.time_to_first_token or 0.0)

    def count_end(self, ticket: Ticket) -> None:
        if ticket.result.exception is None:
            self.finished += 1
        elif isinstance(ticket.result.exception, RequestCancelled):
            self.cancelled += 1
        else:
            self.failed += 1


def percentiles(values: Iterable[float], wanted: Iterable[int] = PERCENTILES) -> dict[int, float]:
    """Nearest-rank percentiles of `values`; empty without any."""
    ranked = sorted(values)
    return {each: ranked[max(0, -(-each * len(ranked) // 100) - 1)] for each in wanted} if ranked else {}


def prometheus(stats: QueueStats, prefix: str = "hf_psd") -> str:
    """The statistics in Prometheus' text format, one metric after the other."""
    counters = {
        "steps_total": stats.steps,
        "overlapped_steps_total": stats.overlapped,
        "target_forwards_total": stats.target_forwards,
        "draft_forwards_total": stats.draft_forwards,
        "prefill_chunks_total": stats.chunks,
        "prompt_tokens_total": stats.prompt_tokens,
        "generated_tokens_total": stats.emitted,
        "drafted_tokens_total": stats.drafted,
        "accepted_tokens_total": stats.accepted,
        "preemptions_total": stats.preemptions,
    }
    gauges = {
        "queue_depth": stats.depth.mean,
        "queue_depth_peak": stats.depth.peak,
        "kv_blocks": stats.kv_blocks,
        "kv_blocks_used": stats.kv_used.mean,
        "kv_blocks_used_peak": stats.kv_used.peak,
        "kv_lookahead_blocks": stats.lookahead.mean,
        "kv_lookahead_blocks_eager": stats.lookahead_eager.mean,
        "balance": stats.balance,
        "overlap": stats.overlap,
    }
    lines = []
    for kind, table in (("counter", counters), ("gauge", gauges)):
        for name, value in table.items():
            lines += [f"# TYPE {prefix}_{name} {kind}", f"{prefix}_{name} {value:g}"]
    lines.append(f"# TYPE {prefix}_requests_total counter")
    for end, value in (("finished", stats.finished), ("failed", stats.failed), ("cancelled", stats.cancelled)):
        lines.append(f'{prefix}_requests_total{{end="{end}"}} {value}')
    for name, values in (("first_token_seconds", stats.first_token), ("token_gap_seconds", stats.gaps)):
        lines.append(f"# TYPE {prefix}_{name} summary")
        lines += [f'{prefix}_{name}{{quantile="{p / 100:g}"}} {value:.6g}' for p, value in percentiles(values).items()]
        lines += [f"{prefix}_{name}_sum {sum(values):.6g}", f"{prefix}_{name}_count {len(values)}"]
    return "\n".join(lines) + "\n"
