"""Statistics of one call. The terms are defined in docs/architecture.md."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .hooks import StepContext, StepHook


@dataclass
class DrafterStats:
    """Counts of one drafter: `rounds` in which a row used its drafts, `drafted` and `accepted` tokens, `forwards`, and
    those of them in which it caught up on what it had missed (`catch_up_forwards`, the price of switching to it) or
    only told a selector what it thinks of committed tokens (`review_forwards`)."""

    name: str
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    forwards: int = 0
    catch_up_forwards: int = 0
    review_forwards: int = 0
    seconds: float = 0.0

    @property
    def acceptance(self) -> float:
        """Accepted share of the drafted tokens; 0.0 if there were none."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass
class PSDStats:
    """What one call did.

    Attributes:
        mode: "ar", "sd" or "psd"; under `mode="auto"` the one most of the target's forwards ran in.
        forwards_by_mode: the target's decode forwards in each mode.
        rounds: row-rounds, that is verifications of one request each.
        target_forwards: decode forwards of the target (its prefill is not counted).
        draft_forwards: forwards of drafter models.
        drafted: draft tokens that were verified.
        accepted: draft tokens accepted.
        emitted: new tokens returned, the end token included, padding not.
        by_drafter: the same per drafter.
        by_position: accepted share of the drafts at depth 1, 2, ... (of those drafted there).
        seconds_draft, seconds_verify, seconds: host time spent in each part and in all; launches only, on CUDA.
        balance: mean size of the smaller group over the larger, over the steps; 1.0 in one group's modes.
        placement: device of the target and of each drafter.
        selector: pulls, means, switches and regret against the best fixed arm (`hf_psd.bandit` selectors' `stats()`),
            with the `arms`' names; None for other selectors.
        errors: what went wrong without ending the call.
        notes: what was decided on the user's behalf.
    """

    mode: str = "sd"
    forwards_by_mode: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    target_forwards: int = 0
    draft_forwards: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    by_drafter: list[DrafterStats] = field(default_factory=list)
    seconds_draft: float = 0.0
    seconds_verify: float = 0.0
    seconds: float = 0.0
    balance: float = 1.0
    placement: dict[str, str] = field(default_factory=dict)
    selector: dict[str, Any] | None = None
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    @property
    def acceptance(self) -> float:
        """Accepted share of the drafted tokens; 0.0 if there were none."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def by_position(self) -> list[float]:
        return [hit / tried if tried else 0.0 for hit, tried in zip(self.accepted_at, self.drafted_at)]

    @property
    def tokens_per_forward(self) -> float:
        """New tokens per verification of one row: 1.0 without speculation, at most gamma + 1."""
        return self.emitted / self.rounds if self.rounds else 0.0


class StatsHook(StepHook):
    """Counts what the step loop does."""

    def __init__(self, stats: PSDStats):
        self.stats = stats
        self._clock = self._began = 0.0
        self._balance, self._balanced = 0.0, 0

    def on_start(self, context: StepContext) -> None:
        self._began = time.perf_counter()
        self.stats.drafted_at = [0] * context.gamma
        self.stats.accepted_at = [0] * context.gamma

    def before_draft(self, context: StepContext) -> None:
        self._clock = time.perf_counter()

    def after_draft(self, context: StepContext) -> None:
        self.stats.seconds_draft += time.perf_counter() - self._clock

    def before_verify(self, context: StepContext) -> None:
        self._clock = time.perf_counter()

    def after_verify(self, context: StepContext) -> None:
        self.stats.seconds_verify += time.perf_counter() - self._clock
        self.stats.target_forwards += 1
        self.stats.forwards_by_mode[context.mode] += 1
        if context.balance is not None:
            self._balance += context.balance
            self._balanced += 1
            self.stats.balance = self._balance / self._balanced

    def on_commit(self, context: StepContext) -> None:
        for emitted, drafted, accepted, source in zip(
            context.emitted, context.drafted, context.accepted, context.source
        ):
            self._count(len(emitted), drafted, accepted, source)

    def on_end(self, context: StepContext) -> None:
        self.stats.seconds = time.perf_counter() - self._began
        if self.stats.forwards_by_mode:
            self.stats.mode = self.stats.forwards_by_mode.most_common(1)[0][0]

    def _count(self, emitted: int, drafted: int, accepted: int, source: int | None) -> None:
        stats = self.stats
        stats.rounds += 1
        stats.emitted += emitted
        stats.drafted += drafted
        stats.accepted += accepted
        for depth in range(drafted):
            stats.drafted_at[depth] += 1
            stats.accepted_at[depth] += depth < accepted
        if source is not None:
            by = stats.by_drafter[source]
            by.rounds += 1
            by.drafted += drafted
            by.accepted += accepted


def summary(stats: PSDStats) -> str:
    """The statistics as a few lines of text."""
    lines = [
        f"mode {stats.mode}, {stats.emitted} tokens in {stats.target_forwards} target forwards, "
        f"{stats.tokens_per_forward:.2f} tokens per row and forward, "
        f"{stats.acceptance:.0%} of {stats.drafted} drafts accepted"
    ]
    lines += [
        f"  {by.name}: {by.acceptance:.0%} of {by.drafted} drafts in {by.rounds} rounds"
        for by in _used(stats.by_drafter)
    ]
    if stats.selector is not None:
        lines += _pulls(stats.selector)
    return "\n".join(lines + [f"  error: {error}" for error in stats.errors])


def _used(drafters: Sequence[DrafterStats]) -> list[DrafterStats]:
    return [drafter for drafter in drafters if drafter.rounds]


def _pulls(selector: dict[str, Any]) -> list[str]:
    """A bandit's choices: its regret, and pulls and mean reward of each arm that was tried."""
    regret = "unknown" if selector["regret"] is None else f"{selector['regret']:.1f} tokens"
    lines = [f"  {selector['selector']}: {selector['switches']} switches, regret {regret}"]
    rows = zip(selector["arms"], selector["pulls"], selector["means"])
    return lines + [f"    {arm}: {pulls} pulls, mean {mean:.3g}" for arm, pulls, mean in rows if mean is not None]
