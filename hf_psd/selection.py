"""Who drafts for which row, and how much: decided from past rounds only, so the output law is untouched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Protocol

from .hooks import StepContext, StepHook
from .phases import Request
from .reviews import Reviewed


@dataclass(frozen=True)
class Arm:
    """A drafter the selector may choose.

    Attributes:
        key: its number among the call's drafters.
        name: shown in statistics.
        is_model: False for drafters whose drafts cost next to nothing, such as prompt lookup.
        reviews: it can tell how well it would have guessed committed tokens.
    """

    key: int
    name: str
    is_model: bool
    reviews: bool = False


@dataclass(frozen=True)
class Feedback:
    """How the drafts of one request fared.

    Attributes:
        request: the request.
        arm: the drafter of its drafts, None if there were none.
        drafted, accepted: tokens.
        emitted: new tokens, the target's own included.
        seconds: from the end of the group's verification before to the end of this one; None in its first round.
        reviews: what drafters thought of tokens reviewed since the feedback before; None if they were not asked.
    """

    request: Request
    arm: int | None
    drafted: int
    accepted: int
    emitted: int = 0
    seconds: float | None = None
    reviews: Reviewed | None = None


Plan = list[tuple[int, list[int]]]
"""Drafters in order of preference, each with a budget per row; a row takes the drafts of the first that has any."""

Due = Mapping[int, Sequence[bool]] | None
"""For each drafter, the rows that it shall review although others draft for them."""


def check_plan(plan: Any, rows: int, drafters: int, author: str) -> Plan:
    """The plan with plain ints.

    Args:
        plan: what a selector or hook wants done for the next draft turn; None is an empty plan.
        rows: requests in the turn.
        drafters: drafters of the call, those that failed included.
        author: who made the plan, for the message.

    Raises:
        ValueError: it is no list of (drafter, one int budget per row) pairs.
    """
    checked: Plan = []
    try:
        for key, budgets in [] if plan is None else plan:
            if not isinstance(key, Integral) or not 0 <= int(key) < drafters:
                raise ValueError(f"drafter {key!r}")
            if len(budgets) != rows:
                raise ValueError(f"{len(budgets)} budgets for drafter {key}")
            for budget in budgets:
                if not isinstance(budget, Integral):
                    raise ValueError(f"the budget {budget!r} for drafter {key}")
            checked.append((int(key), [int(budget) for budget in budgets]))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"psd: {author} made a plan that cannot be followed ({error}). A plan is a list of (drafter, budgets): a "
            f"drafter from 0 to {drafters - 1} and one int per row, here for {rows} rows; got {plan!r}."
        ) from error
    return checked


class Selector(Protocol):
    """Chooses drafters. `plan` is called before drafts are drawn and must not depend on them."""

    def plan(self, requests: Sequence[Request], arms: Sequence[Arm], gamma: int) -> Plan:
        """Budgets for the rows of one draft turn."""

    def feedback(self, results: Sequence[Feedback]) -> None:
        """Learns from one verification, a step late."""


@dataclass
class Record:
    """How one drafter has done for one request, old rounds fading out."""

    accepted: float = 0.0
    judged: float = 0.0
    rest: int = 0
    pause: int = 0

    def rate(self, prior: float) -> float:
        """Estimated chance that a draft is accepted given that those before it were."""
        return (self.accepted + 2.0 * prior) / (self.judged + 2.0)

    def learn(self, drafted: int, accepted: int) -> None:
        self.accepted = self.accepted * _FADE + accepted
        self.judged = self.judged * _FADE + min(accepted + 1, drafted)


_FADE = 0.8
_PRIOR = {True: 0.7, False: 0.8}
_WORTH = {True: 0.45, False: 0.3}
"""A draft at depth k is worth its cost when rate ** k reaches this; model drafts cost more than looked-up ones."""
_LONGEST_PAUSE = 32


@dataclass
class CompositeSelector:
    """Per row, prompt lookup where the context has a match, else a model drafter; several models take turns.

    A row whose drafts keep failing drafts less, down to nothing, and tries again after pauses that double.
    """

    records: dict[tuple[int, int], Record] = field(default_factory=dict)
    turn: int = 0

    def plan(self, requests: Sequence[Request], arms: Sequence[Arm], gamma: int) -> Plan:
        lookups = [arm for arm in arms if not arm.is_model]
        models = [arm for arm in arms if arm.is_model]
        chosen = [models[self.turn % len(models)]] if models else []
        self.turn += 1
        plan: Plan = []
        copying = [False] * len(requests)
        for arm in lookups + chosen:
            budgets = [
                0 if arm.is_model and copies else self._depth(request, arm, gamma)
                for request, copies in zip(requests, copying)
            ]
            plan.append((arm.key, budgets))
            if not arm.is_model:
                copying = [
                    copies or (budget > 0 and self._copies(request, arm))
                    for request, budget, copies in zip(requests, budgets, copying)
                ]
        return plan

    def feedback(self, results: Sequence[Feedback]) -> None:
        for result in results:
            if result.arm is not None and result.drafted > 0:
                self._record(result.request, result.arm).learn(result.drafted, result.accepted)

    def forget(self, index: int) -> None:
        """The request of this index is over; a queue would keep what is known of it for ever."""
        for key in [key for key in self.records if key[0] == index]:
            del self.records[key]

    def _depth(self, request: Request, arm: Arm, gamma: int) -> int:
        record = self._record(request, arm.key)
        if record.rest > 0:
            record.rest -= 1
            return 0
        rate, depth = record.rate(_PRIOR[arm.is_model]), 0
        while depth < gamma and rate ** (depth + 1) >= _WORTH[arm.is_model]:
            depth += 1
        if depth > 0:
            record.pause = 0
            return depth
        record.pause = min(max(1, 2 * record.pause), _LONGEST_PAUSE)
        record.rest = record.pause
        return 1

    def _copies(self, request: Request, arm: Arm) -> bool:
        """Whether the row is copying from its context by all that is known: then no model need draft for it."""
        return request.source == arm.key and request.available.get(arm.key, 0) > 0

    def _record(self, request: Request, key: int) -> Record:
        return self.records.setdefault((request.index, key), Record())


class SelectionHook(StepHook):
    """Lets a selector plan each draft turn and tells it, a step late, what came of it.

    Args:
        selector: the policy.
        arms: gives the drafters that can still be chosen.
    """

    def __init__(self, selector: Selector, arms: Callable[[], Sequence[Arm]]):
        self.selector, self.arms = selector, arms

    def before_draft(self, context: StepContext) -> None:
        plan = self.selector.plan(context.requests, self.arms(), context.gamma)
        drafters = len(context.stats.by_drafter)
        context.due = getattr(self.selector, "due", None)
        context.plan = check_plan(plan, len(context.requests), drafters, f"selector {type(self.selector).__name__}")

    def after_verify(self, context: StepContext) -> None:
        launched = getattr(self.selector, "launched", None)
        if launched is not None:
            launched(context.requests)

    def on_commit(self, context: StepContext) -> None:
        rows = zip(context.requests, context.source, context.drafted, context.accepted, map(len, context.emitted))
        self.selector.feedback(
            [Feedback(*row, context.seconds, reviews) for row, reviews in zip(rows, context.reviews)]
        )

    def on_end(self, context: StepContext) -> None:
        end = getattr(self.selector, "end", None)
        if end is not None:
            end()
        context.stats.selector = getattr(self.selector, "pull_stats", None)
