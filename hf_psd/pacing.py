"""`mode="auto"`: measures each mode while it runs and goes on in the one that should be done first."""

from __future__ import annotations

import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from transformers import PreTrainedModel

from .graphs import bucket
from .hooks import StepContext, StepHook
from .phases import BatchManager, Request
from .planner import Row, choose, makespan

_PROBE = 3
"""Rounds of a mode that must have been timed before it is judged."""
_SETTLE = {"ar": 2, "sd": 2, "psd": 3}
"""Results after a switch that still belong to the mode before it, or to the change."""
_DWELL = 4
"""Results between two decisions."""
_PATIENCE, _LONGEST_PATIENCE = 128, 4096
"""Rounds after which a mode that is not in use is tried again; doubled each time it loses again."""
_HOPELESS = 1.5
"""A mode whose cost is this many times the best one's is not tried again."""
_SHRINK = 4.0
"""Rounds that the mean of all requests counts for in a request's own rate."""
_PRIOR = 2.0
"""Row-rounds that all earlier calls count for in a call's rate: prompts differ."""
_FORGET = 0.95
"""Weight of a request's earlier rounds at each new one."""
_CHEAP = 1.3
"""Speculation whose rounds take less than this many times a plain one's is tried at the start of every call."""
_CLEAR = 1.15
"""Losing by this factor counts twice."""
_MOST_SKIPPED = 4
"""Else it is tried in every call until it loses, then every 2nd, 4th ... up to 2 to the power of this."""
_LATE = 64
"""Results after which modes that are unlikely to win are timed, too."""
_NEAR = 4
"""Batches up to this many times larger or smaller may stand in for one that was not timed."""
_MOST_PROFILES = 32
"""Profiles kept per target."""


@dataclass
class Profile:
    """What is known of a target with its drafters; kept while the target lives.

    Attributes:
        seconds: the last rounds' seconds by mode and group-size bucket.
        tokens, rounds: emitted tokens and row-rounds under speculation, old calls fading out.
        idle: rounds since each mode was last used.
        patience: idle rounds after which a mode is tried again.
        results: rounds timed so far.
        losses: calls in a row in which speculation was tried and lost.
        skip: calls that start plainly before speculation is tried again.
    """

    seconds: dict[tuple[str, int], deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=5)))
    tokens: float = 0.0
    rounds: float = 0.0
    idle: Counter[str] = field(default_factory=Counter)
    patience: dict[str, int] = field(default_factory=lambda: defaultdict(lambda: _PATIENCE))
    results: int = 0
    losses: int = 0
    skip: int = 0

    def cost(self, mode: str, rows: int) -> float | None:
        """Median seconds of a round of `rows` requests, or of the nearest batch timed; None if there is none near."""
        wanted = bucket(rows)
        sizes = [size for known, size in self.seconds if known == mode and len(self.seconds[known, size]) >= _PROBE]
        near = [size for size in sizes if size <= wanted * _NEAR and wanted <= size * _NEAR]
        if not near:
            return None
        nearest = min(near, key=lambda size: (max(size, wanted) / min(size, wanted), -size))
        return median(self.seconds[mode, nearest])

    @property
    def rate(self) -> float:
        """Tokens per row and round under speculation."""
        return max(1.0, self.tokens / self.rounds) if self.rounds else 1.0


_profiles: weakref.WeakKeyDictionary[PreTrainedModel, dict[Hashable, Profile]] = weakref.WeakKeyDictionary()


def profile_of(target: PreTrainedModel, key: Hashable) -> Profile:
    """The profile of a target under `key`: all that its times depend on, the batch apart.

    Those used last are kept: drafters may come and go for as long as their target lives.
    """
    profiles = _profiles.setdefault(target, {})
    profile = profiles[key] = profiles.pop(key, None) or Profile()
    if len(profiles) > _MOST_PROFILES:
        del profiles[next(iter(profiles))]
    return profile


class Pacer(StepHook):
    """Times the rounds of a call and steers it: which mode runs is decided from past rounds alone.

    A round's time is the time between two results on the host, so it is the step's longest side and nothing is waited
    for. In a call whose modes were timed before, the fastest runs from the start.

    Args:
        profile: what earlier calls have measured.
        modes: those that can run, in the order in which they are tried first.
        late: those of them that are unlikely to win and not tried before the others have run for a while.
        captures: number of graphs captured so far; rounds in which it grows are not timed.
        clock: seconds.

    Attributes:
        mode: the one that runs; None before the first step.
        reason: why, in words.
    """

    def __init__(
        self,
        profile: Profile,
        modes: Sequence[str],
        late: Sequence[str] = (),
        captures: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.profile, self.modes, self.late, self.captures, self.clock = profile, modes, late, captures, clock
        self.mode: str | None = None
        self.reason = ""
        self._hold, self._settling, self._captured = 0, 0, 0
        self._last: float | None = None
        self._running: list[Request] = []
        self._own: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._on_trial: str | None = None
        for mode in modes:
            if mode != "ar":
                profile.idle[mode] = 0  # a call's start has a rule of its own
        weight = _PRIOR / max(profile.rounds, _PRIOR)
        profile.tokens, profile.rounds = profile.tokens * weight, profile.rounds * weight

    @property
    def drafting(self) -> bool:
        """Whether requests are drafted for."""
        return self.mode != "ar"

    def steer(self, manager: BatchManager) -> None:
        """Chooses the mode of the next step."""
        self._running = [request for request in manager.requests if not request.surely_ended]
        if self._hold > 0 or not self._running:
            return
        mode, self.reason, rounds = self._decide()
        if mode != self.mode:
            self.mode, self._settling = mode, _SETTLE[mode]
        self._hold = self._settling + rounds
        manager.groups = 2 if mode == "psd" else 1

    def on_commit(self, context: StepContext) -> None:
        now, before, captured = self.clock(), self._last, self._captured
        self._last, self._captured = now, self.captures()
        self._hold -= 1
        if self._settling > 0 or before is None or self.mode is None:
            self._settling -= 1
            return
        profile, mode, rows = self.profile, self.mode, len(self._running)
        profile.results += 1
        for other in self.modes:
            profile.idle[other] = 0 if other == mode else profile.idle[other] + 1
        if self.drafting:
            for request, emitted in zip(context.requests, context.emitted):
                own = self._own[request.index]
                own[:] = own[0] * _FORGET + len(emitted), own[1] * _FORGET + 1
                profile.tokens += len(emitted)
                profile.rounds += 1
        if rows and captured == self._captured and not (mode == "psd" and rows < 2):
            steps = 2 if mode == "psd" else 1
            profile.seconds[mode, bucket(rows)].append((now - before) * steps)

    def _decide(self) -> tuple[str, str, int]:
        """The mode, the reason for it, and for how many results it is kept."""
        rows, profile = len(self._running), self.profile
        modes = [mode for mode in self.modes if mode != "psd" or rows > 1]
        unknown = [mode for mode in modes if profile.cost(mode, rows) is None]
        early = [mode for mode in unknown if mode not in self.late or profile.results >= _LATE]
        if early:
            return early[0], f"not timed yet at {rows} requests", _PROBE
        costs = {mode: self._makespan(mode) for mode in modes if mode not in unknown}
        best = choose(costs, self.mode)
        if self.mode is None and best == "ar" and (trial := self._trial(costs)):
            self._on_trial = trial
            return trial, "tried with these prompts", _PROBE
        if self._on_trial in costs:
            clear = costs[self._on_trial] > costs["ar"] * _CLEAR
            self._on_trial = None
            profile.losses = min(profile.losses + 1 + clear, _MOST_SKIPPED) if best == "ar" else 0
        for mode, cost in costs.items():
            if mode == best or cost > costs[best] * _HOPELESS:
                continue
            if profile.idle[mode] >= profile.patience[mode]:
                profile.idle[mode] = 0
                profile.patience[mode] = min(2 * profile.patience[mode], _LONGEST_PATIENCE)
                return mode, "tried again", _PROBE
        profile.patience[best] = _PATIENCE
        predicted = ", ".join(f"{mode} {cost:.3g} s" for mode, cost in costs.items())
        return best, f"least predicted time: {predicted}", _DWELL

    def _trial(self, costs: Mapping[str, float]) -> str | None:
        """The speculating mode to begin with although plain decoding did better so far; None for none."""
        rows, profile = len(self._running), self.profile
        mode = min((mode for mode in costs if mode != "ar"), key=lambda mode: costs[mode], default=None)
        if mode is None:
            return None
        plain, other = profile.cost("ar", rows), profile.cost(mode, rows)
        assert plain is not None and other is not None
        if other > plain * _CHEAP and profile.skip > 0:
            profile.skip -= 1
            return None
        profile.skip = 2**profile.losses - 1
        return mode

    def _makespan(self, mode: str) -> float:
        rows = [Row(max(1, request.limit - request.length), self._rate(request, mode)) for request in self._running]
        all_rows = self.profile.cost(mode, len(rows))
        assert all_rows is not None
        return makespan(rows, lambda count: self.profile.cost(mode, count) or all_rows)

    def _rate(self, request: Request, mode: str) -> float:
        if mode == "ar":
            return 1.0
        tokens, rounds = self._own[request.index]
        return max(1.0, (_SHRINK * self.profile.rate + tokens) / (_SHRINK + rounds))
