"""Puts a bandit in charge of choosing drafters: one pull per group and draft turn, or one per request."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Sequence
from typing import Any

from . import bandit
from .config import PSDConfig
from .phases import Request
from .selection import Arm, CompositeSelector, Feedback, Plan, Selector


class BanditSelector:
    """A `Selector` whose arms are the call's drafters and whose reward is the accepted share of the drafted tokens.

    An arm is fixed before its drafts are drawn, and its reward comes a step late; with two groups, two pulls are in
    flight. A row for which the chosen drafter had nothing to offer counts as one draft that was not accepted.

    Args:
        spec: name, instance or class, see `hf_psd.bandit.resolve`.
        n_drafters: drafters of the call, each an arm.
        seed: of the bandit's own random numbers.
        per_request: let every request have a bandit context, and so a drafter, of its own.
        context: the user's tag; rounds with different tags share nothing.
    """

    def __init__(
        self, spec: Any, n_drafters: int, seed: int | None, per_request: bool = False, context: str | None = None
    ):
        self.per_request, self.context = per_request, context
        self.bandit = bandit.resolve(spec, n_drafters, seed)
        self._retired: list[int] = []
        self._flying: dict[int, deque[int]] = defaultdict(deque)

    def plan(self, requests: Sequence[Request], arms: Sequence[Arm], gamma: int) -> Plan:
        alive = {arm.key for arm in arms}
        for number in [arm for arm in self.bandit.active_arms if arm not in alive]:
            self.bandit.retire(number)
            self._retired.append(number)
        if not self.bandit.active_arms:
            return []
        contexts = dict.fromkeys(map(self._context_of, requests))
        chosen = {context: self.bandit.select(context) for context in contexts}
        budgets: dict[int, list[int]] = {}
        for row, request in enumerate(requests):
            arm = chosen[self._context_of(request)]
            self._flying[request.index].append(arm)
            budgets.setdefault(arm, [0] * len(requests))[row] = gamma
        return list(budgets.items())

    def feedback(self, results: Sequence[Feedback]) -> None:
        accepted: Counter[tuple[int, Hashable]] = Counter()
        judged: Counter[tuple[int, Hashable]] = Counter()
        for result in results:
            flying = self._flying[result.request.index]
            if flying:
                pull = flying.popleft(), self._context_of(result.request)
                accepted[pull] += result.accepted
                judged[pull] += max(result.drafted, 1)
        for pull, weight in judged.items():
            arm, context = pull
            self.bandit.update(arm, accepted[pull] / weight, weight, context)

    def end(self) -> None:
        """The call is over: drafters that failed in it may serve the next one."""
        for number in self._retired:
            self.bandit.revive(number)
        self._retired.clear()

    def _context_of(self, request: Request) -> Hashable:
        if not self.per_request:
            return self.context
        return (self.context or "", request.index)


def make_selector(config: PSDConfig, seed: int | None, n_drafters: int) -> Selector:
    """The object for the `selector` setting; a name makes a fresh one, so that no state leaks between calls."""
    spec = config.selector
    if spec == "composite":
        return CompositeSelector()
    if not isinstance(spec, (str, type)) and hasattr(spec, "plan") and hasattr(spec, "feedback"):
        return spec
    return BanditSelector(spec, n_drafters, seed, config.per_request, config.context)
