"""The batch manager: who drafts and who verifies. It alone owns the phase of every request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum


class Phase(Enum):
    WAITING = "waiting"
    NEEDS_DRAFT = "needs draft"
    HAS_DRAFT = "has draft"
    DONE = "done"


@dataclass(eq=False)
class Request:
    """One sequence, as the host knows it: one step behind the device.

    Attributes:
        index: row of the output.
        slot: index into every device-side state array.
        padding: left-padding columns before the prompt.
        length: committed tokens known to the host, padding not counted.
        limit: length at which the request must end.
        phase: where it stands in the draft/verify cycle.
        group: 0 or 1, the group it verifies with.
        tokens: new tokens known to the host.
        unread: widths T of verifications whose result the host has not read.
        proposals: `(drafter, budget)` pairs asked to draft for it this round, in order of preference.
        available: drafts each drafter announced to have for its next turn (only drafters that announce).
        covered: for each drafter, committed tokens its KV surely holds.
        source: the drafter whose drafts were verified last, None if there were none.
    """

    index: int
    slot: int
    padding: int
    length: int
    limit: int
    phase: Phase = Phase.WAITING
    group: int = 0
    tokens: list[int] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)
    proposals: list[tuple[int, int]] = field(default_factory=list)
    available: dict[int, int] = field(default_factory=dict)
    covered: dict[int, int] = field(default_factory=dict)
    source: int | None = None

    def pending(self) -> tuple[int | None, int]:
        """The drafter whose drafts probably wait for verification and an upper bound of their number.

        The first that has any counts. One that has not announced may turn out to have none, and then a later one
        counts.
        """
        source, most = None, 0
        for drafter, budget in self.proposals:
            count = min(budget, self.available.get(drafter, budget))
            if count > 0:
                source = drafter if source is None else source
                most = max(most, count)
                if drafter in self.available:
                    break
        return source, most

    def learn(self, emitted: list[int], committed: int, available: Mapping[int, int]) -> None:
        """Takes in the oldest unread verification: its tokens, the length it added on the device, what drafters
        announce.

        Drafters that have been asked since then fed themselves everything up to that length.
        """
        self.unread.pop(0)
        self.tokens += emitted
        self.length += committed
        self.available = dict(available)
        for drafter, _ in self.proposals:
            self.covered[drafter] = self.length

    @property
    def most(self) -> int:
        """Upper bound of the committed length on the device."""
        most = self.length + sum(self.unread)
        return most if most < self.limit else self.limit

    @property
    def room(self) -> int:
        """Drafts that can still be used: each verification emits at least one token, and the last one needs none."""
        return self.limit - self.length - len(self.unread) - 1

    @property
    def surely_ended(self) -> bool:
        """Whether the request reaches its limit by verifications that are already under way."""
        return self.length + len(self.unread) >= self.limit


@dataclass(frozen=True)
class Step:
    """The work of one step; no request is in both lists."""

    verify: list[Request]
    draft: list[Request]


class BatchManager:
    """Keeps one group (plain speculative decoding) or two groups that alternate (batch-parallel), and balances them.

    Args:
        groups: 1 or 2.
        drafting: False in plain autoregressive mode, where every request is verified at each step without a draft.
    """

    def __init__(self, groups: int = 1, drafting: bool = True):
        self.requests: list[Request] = []
        self._ready = Phase.NEEDS_DRAFT if drafting else Phase.HAS_DRAFT
        self.drafting = drafting
        self.groups = groups

    @property
    def groups(self) -> int:
        """1 or 2; may be set between any two steps.

        Drafts that exist are verified either way. From 2 to 1, those without a draft wait for the rest, so all draft
        together after one more step; from 1 to 2, the groups are balanced within two rounds.
        """
        return self._groups

    @groups.setter
    def groups(self, groups: int) -> None:
        if groups not in (1, 2):
            raise ValueError(f"psd: there are 1 or 2 groups, not {groups!r}.")
        self._groups = groups
        if groups == 1:
            for request in self.requests:
                request.group = 0

    def add(self, requests: Iterable[Request]) -> None:
        """Admits requests; each joins the smaller group, of equal ones that with less text to attend to."""
        loads = [self._load(group) for group in range(self.groups)]
        for request in requests:
            request.group = loads.index(min(loads))
            request.phase = self._ready
            self.requests.append(request)
            if not request.surely_ended:
                count, tokens = loads[request.group]
                loads[request.group] = count + 1, tokens + request.most

    def finish(self, request: Request) -> None:
        """Takes a request out; its group shrinks."""
        request.phase = Phase.DONE
        request.proposals = []
        self.requests.remove(request)

    def sizes(self) -> list[int]:
        """Requests per group."""
        return [sum(request.group == group for request in self.requests) for group in range(self.groups)]

    @property
    def balance(self) -> float:
        """Size of the smaller group over that of the larger: 1.0 is balanced, 0.0 is one group alone."""
        second = sum(request.group for request in self.requests)
        smaller, larger = sorted((len(self.requests) - second, second))
        return smaller / larger if larger else 1.0

    def next_step(self) -> Step:
        """Chooses the work of the next step: requests with a draft verify, one group of those without drafts.

        A request that would overfill its group sits out this draft turn, which moves it to the other group; one that
        has not drafted with the group being verified is drafted for at once where that evens the groups.
        """
        running = [request for request in self.requests if not request.surely_ended]
        verify = [request for request in running if request.phase is Phase.HAS_DRAFT]
        waiting = [request for request in running if request.phase is Phase.NEEDS_DRAFT]
        if not self.drafting:
            return Step(running, [])
        if self.groups == 1:
            return Step(verify, [] if verify else waiting)
        turn = 1 - verify[0].group if verify else waiting[0].group if waiting else 0
        lead = sum(request.group == turn for request in running) * 2 - len(running)
        leaving = turn if lead > 0 else 1 - turn
        movable = [request for request in waiting if request.group == leaving]
        moves = min(abs(lead) // 2, len(movable))
        for request in movable[len(movable) - moves :]:
            request.group = 1 - leaving
        return Step(verify, [request for request in waiting if request.group == turn])

    def advance(self, step: Step) -> None:
        """Moves the requests of a launched step to their next phase."""
        for request in step.draft:
            request.phase = Phase.HAS_DRAFT
        for request in step.verify:
            request.phase = self._ready

    def _load(self, group: int) -> tuple[int, int]:
        """Running requests of a group, and the tokens they attend to."""
        running = [each for each in self.requests if each.group == group and not each.surely_ended]
        return len(running), sum(request.most for request in running)
