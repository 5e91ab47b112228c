"""Puts a bandit in charge of choosing drafters: one pull per group and draft turn, or one per request."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from . import bandit
from .config import AUTO_GAMMAS, PSDConfig
from .hindsight import Hindsight
from .phases import Request
from .pulls import Pull, PullsInFlight
from .selection import Arm, CompositeSelector, Feedback, Plan, Selector


class BanditSelector:
    """A `Selector` that lets a bandit choose among the call's drafters, or among pairs of drafter and gamma.

    An arm is fixed before its drafts are drawn, and its reward comes a step late; with two groups, two pulls are in
    flight. The reward is the accepted share of the drafted tokens, where a row for which the chosen drafter had
    nothing to offer counts as one draft that was not accepted; or tokens per second of the round. A pull whose
    verification never comes is taken back. Rows that can use no draft any more are no part of a pull.

    Rounds share statistics if they agree in `context`, in greedy or sampled decoding and, under goodput, in the size
    of the group (rounded up to a power of two), on which the time of a round depends and acceptance does not.

    Args:
        spec: name, instance or class, see `hf_psd.bandit.resolve`.
        config: settings of the call.
        n_drafters: drafters of the call.
        seed: of the bandit's own random numbers.
        sampled: whether the call samples.
    """

    def __init__(self, spec: Any, config: PSDConfig, n_drafters: int, seed: int | None, sampled: bool):
        self.config, self.sampled = config, sampled
        drafters = range(n_drafters)
        if config.gamma == "auto":
            self.arms = bandit.enumerate_arms(n_drafters, AUTO_GAMMAS)
        else:
            self.arms = [bandit.Arm(drafter, int(config.gamma)) for drafter in drafters]
        self.bandit = _bandit(spec, len(self.arms), seed, config.reward)
        self.full_information = self.bandit.full_information and config.reward == "acceptance"
        self.due: dict[int, list[bool]] | None = None
        self.pull_stats: dict[str, Any] | None = None
        self._hindsight = Hindsight(self.bandit, getattr(self.bandit, "review_every", REVIEW_EVERY))
        self._retired: list[int] = []
        self._flying = PullsInFlight()

    def plan(self, requests: Sequence[Request], arms: Sequence[Arm], gamma: int) -> Plan:
        self._retire_all_but({arm.key for arm in arms})
        self._cancel(self._flying.take_lost())
        self.due = None
        if not self.bandit.active_arms:
            return []
        pulls: dict[Hashable, Pull] = {}
        seated: dict[Hashable, list[int]] = {}
        budgets: dict[int, list[int]] = {}
        for row, request in enumerate(requests):
            if request.room <= 0:
                continue
            context = self._context_of(request, len(requests))
            if context not in pulls:
                pulls[context] = Pull(self.bandit.select(context), context)
            self._flying.plan(request, pulls[context])
            seated.setdefault(context, []).append(row)
            arm = self.arms[pulls[context].arm]
            if arm.drafter is not None:
                budgets.setdefault(arm.drafter, [0] * len(requests))[row] = arm.gamma
        if self.full_information:
            self.due = self._reviews(seated, requests, arms)
        return list(budgets.items())

    def launched(self, requests: Sequence[Request]) -> None:
        """Verification of the requests has begun."""
        self._flying.launch(requests)

    def feedback(self, results: Sequence[Feedback]) -> None:
        landed: dict[Pull, list[Feedback]] = {}
        for result in results:
            pull = self._flying.land(result.request)
            if pull is not None:
                landed.setdefault(pull, []).append(result)
        for pull, rows in landed.items():
            if self.full_information and any(row.reviews is not None for row in rows):
                self._hindsight.land(pull.arm, pull.context, rows)
            else:
                self.bandit.update(pull.arm, *self._reward(rows), pull.context)
            self._flying.close(pull)

    def interrupt(self, index: int) -> None:
        """The drafts of this index's request were dropped unjudged; its next verification is of a later pull."""
        self._flying.forget(index)

    def forget(self, index: int) -> None:
        """The request of this index is over; a queue would keep what is known of it for ever."""
        self._flying.forget(index)
        self._cancel(self._flying.take_lost())
        if self.config.per_request:
            for context in [key for key in self.bandit.contexts if isinstance(key, tuple) and key[1:2] == (index,)]:
                self.bandit.forget(context)
                self._hindsight.forget(context)

    def end(self) -> None:
        """The call is over: pulls without a verdict do not count, drafters that failed may serve the next call."""
        self._hindsight.end()
        self._cancel(self._flying.take_all())
        self.pull_stats = self.bandit.stats() | {"arms": [str(arm) for arm in self.arms]}
        for number in self._retired:
            self.bandit.revive(number)
        if self.config.per_request:  # requests of the next call are others, whatever their numbers
            for context in [key for key in self.bandit.contexts if isinstance(key, tuple) and key[0] == _REQUEST]:
                self.bandit.forget(context)
        self._retired.clear()

    def _reviews(
        self, seated: Mapping[Hashable, Sequence[int]], requests: Sequence[Request], arms: Sequence[Arm]
    ) -> dict[int, list[bool]]:
        """For each drafter that is not heard anyway, the rows it shall review in this turn."""
        group = requests[0].group
        asked = {row for context, rows in seated.items() if self._hindsight.due(context, group) for row in rows}
        rows = [row in asked for row in range(len(requests))]
        self._hindsight.able = {arm.key for arm in arms if arm.reviews}
        return {arm.key: rows for arm in arms if arm.is_model and arm.reviews} if asked else {}

    def _reward(self, rows: Sequence[Feedback]) -> tuple[float, float]:
        if self.config.reward == "goodput":
            seconds = rows[0].seconds
            return bandit.goodput(sum(row.emitted for row in rows), seconds) if seconds else (0.0, 0.0)
        drafted = sum(max(row.drafted, 1) for row in rows)
        return sum(row.accepted for row in rows) / drafted, float(drafted)

    def _context_of(self, request: Request, group_size: int) -> Hashable:
        tag = self.config.context
        if tag is not None and not isinstance(tag, str):
            tag = tag[request.index]
        size = group_size if self.config.reward == "goodput" else 1
        shared = bandit.context_key(size, self.sampled, tag)
        return (_REQUEST, request.index, *shared) if self.config.per_request else shared

    def _cancel(self, pulls: Sequence[Pull]) -> None:
        known = set(self.bandit.contexts) if pulls else set()
        for pull in pulls:
            if pull.context in known:  # else it was forgotten with its request
                self.bandit.cancel(pull.arm, pull.context)

    def _retire_all_but(self, alive: set[int]) -> None:
        for number in self.bandit.active_arms:
            drafter = self.arms[number].drafter
            if drafter is not None and drafter not in alive:
                self.bandit.retire(number)
                self._retired.append(number)


_REQUEST = "request"
REVIEW_EVERY = 8
"""Turns after which all drafters review what was committed, unless the bandit has a `review_every` of its own."""


def _bandit(spec: Any, n_arms: int, seed: int | None, reward: str) -> bandit.BaseSelector[Any]:
    if not isinstance(spec, bandit.BaseSelector):
        return bandit.resolve(spec, n_arms, seed, reward=reward)
    if spec.reward != reward:
        raise ValueError(
            f"psd: the selector was made with reward={spec.reward!r}, but the call has reward={reward!r}."
        )
    return bandit.resolve(spec, n_arms, seed)


def make_selector(config: PSDConfig, seed: int | None, n_drafters: int, sampled: bool) -> Selector:
    """The object for the `selector` setting; a name or class makes a fresh one, without state."""
    spec = config.selector
    if spec == "composite":
        return CompositeSelector()
    if not isinstance(spec, str) and hasattr(spec, "plan") and hasattr(spec, "feedback"):
        return spec() if isinstance(spec, type) else spec
    return BanditSelector(spec, config, n_drafters, seed, sampled)
