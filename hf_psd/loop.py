"""The step loop: draft one group while the target verifies the other; the host reads one step late."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from .clock import RoundClock
from .drafters.base import Drafter
from .hooks import StepContext, StepHookList
from .lanes import HostRing
from .pacing import Pacer
from .phases import BatchManager, Request, Step
from .reviews import ReviewBoard
from .roster import Roster
from .runner import Rows
from .selection import Due, Plan, check_plan
from .stats import DrafterStats, PSDStats
from .verification import Packet, Verifier
from .verify.sampler import Judgement, Sampler
from .workspace import Workspace


@dataclass
class Verification:
    """A verification on its way to the host."""

    step: int
    requests: list[Request]
    width: int
    judgement: Judgement | None


class StepLoop:
    """One step after the other over whatever requests the batch manager holds; subclasses seat and dismiss them.

    Args:
        space: device buffers and lanes.
        sampler: the output law.
        drafters: in the user's order; none of them is used in mode "ar".
        mode: "ar", "sd" or "psd"; under "auto" the `pacer` that a subclass sets decides at each step.
        gamma: most drafts per row and round.
        hooks: told of every event.
        stats: where counts go.
        eos: end tokens on the device, see `Verifier`.
        board: where reviews of committed tokens come together; None if drafters are not asked for them.
    """

    def __init__(
        self,
        space: Workspace,
        sampler: Sampler,
        drafters: Sequence[Drafter],
        mode: str,
        gamma: int,
        hooks: StepHookList,
        stats: PSDStats,
        eos: torch.Tensor | None,
        board: ReviewBoard | None = None,
    ):
        self.space, self.sampler, self.gamma, self.hooks, self.stats = space, sampler, gamma, hooks, stats
        self.runner, self.state, self.lane = space.runner, space.state, space.lane
        self.ring = HostRing(self.runner.device)
        drafting = mode != "ar"
        self.manager = BatchManager(groups=2 if mode == "psd" else 1, drafting=drafting)
        self.roster = Roster(drafters if drafting else [], space, stats, board)
        self.verifier = Verifier(self.runner, self.state, sampler, self.roster, eos)
        self.batch_size = space.limits.slots
        stats.mode = mode
        stats.by_drafter = [DrafterStats(drafter.name) for drafter in drafters]
        stats.placement = {"target": str(self.runner.device)}
        stats.placement |= {drafter.name: str(drafter.device or self.runner.device) for drafter in drafters}
        self.keep_scores = False
        self.clock = RoundClock()
        self.pacer: Pacer | None = None
        self._mode = mode
        self.step = -1
        self.newest = Step([], [])
        """What the newest step launched."""

    def advance(self) -> bool:
        """One step: launch its work, then read what the step before it gave. False when there is nothing left."""
        if self.pacer is not None:
            self.pacer.steer(self.manager)
        step = self.make_room(self.manager.next_step())
        if not step.verify and not step.draft:
            left = len(self.ring) > 0
            self.absorb_before(self.step + 1)
            return left
        plan, due = self._plan(step.draft) if step.draft else ([], None)
        if not plan and not step.verify:
            self.manager.advance(step)  # nobody drafts: verify at once instead of spending a step on nothing
            return True
        self.step += 1
        self.roster.lane.follow(self.lane)
        self.lane.follow(self.roster.lane)
        if step.verify:
            self.launch(step.verify)
        if plan:
            context = self.context(step.draft)
            context.plan = plan
            self.roster.law = self.capture_key(step.draft)
            context.drafts = self.roster.draft(self.state, step.draft, plan, due)
            self.tell("after_draft", context)
        self.manager.advance(step)
        self.newest = Step(step.verify, step.draft if plan else [])
        self.absorb_before(self.step)
        return True

    def make_room(self, step: Step) -> Step:
        """Makes sure that the step's work has the memory it needs; may take requests out of it."""
        return step

    def capture_key(self, requests: Sequence[Request]) -> Hashable | None:
        """What a captured verification of these requests depends on beside its shape; None if it must run eagerly."""
        return None

    def over(self, request: Request) -> bool:
        """Whether the host knows that the request has ended."""
        raise NotImplementedError

    def record(self, request: Request, ids: list[int], ended: bool, extra: list[int]) -> int:
        """Takes in newly committed ids; returns how many stand. `extra` is what the packet ends with."""
        raise NotImplementedError

    def fail(self, request: Request, error: Exception) -> None:
        """A request cannot go on."""
        raise error

    def settle(self, context: StepContext) -> None:
        """All requests of a verification have been recorded; those that ended leave the batch manager."""
        raise NotImplementedError

    def tell(self, event: str, context: StepContext) -> None:
        """Calls the hooks."""
        self.hooks.call(event, context)

    def _plan(self, requests: list[Request]) -> tuple[Plan, Due]:
        """Asks the selector for budgets and clips them to what each row can still use; [] if nobody drafts.

        Also gives the rows to be reviewed by drafters that do not draft for them.
        """
        if self.pacer is not None and not self.pacer.drafting:
            return [], None
        context = self.context(requests)
        context.step += 1
        self.tell("before_draft", context)
        plan: Plan = []
        for key, budgets in check_plan(context.plan, len(requests), len(self.roster.drafters), "a before_draft hook"):
            clipped = [max(0, min(budget, self.gamma, request.room)) for budget, request in zip(budgets, requests)]
            clipped = self.afford(key, requests, clipped)
            if key in self.roster.alive and any(clipped):
                plan.append((key, clipped))
        for row, request in enumerate(requests):
            request.proposals = [(key, budgets[row]) for key, budgets in plan if budgets[row] > 0]
        return plan, context.due

    def afford(self, key: int, requests: Sequence[Request], budgets: list[int]) -> list[int]:
        """The budgets that drafter `key` has memory for."""
        return budgets

    def launch(self, requests: list[Request]) -> None:
        """Enqueues the verification of requests that have been drafted for."""
        pending = [request.pending() for request in requests]
        width = 1 + max(max(0, min(count, request.room)) for request, (_, count) in zip(requests, pending))
        context = self.context(requests)
        context.width = width
        slots = [request.slot for request in requests]
        law = self.capture_key(requests) if self.space.graphs else None
        graphs = self.space.verify_graphs if law is not None else None
        with self.lane.work("verify"):
            rows = graphs.rows(slots) if graphs else Rows(slots, self.runner.device)
            context.slots = rows.slots[: len(slots)]
            context.drafts = self.state.draft_ids.index_select(0, context.slots)[:, : width - 1]
            self.tell("before_verify", context)
            if graphs:
                scored = self.sampler.needs_scores and self.state.draft_scores is not None
                key = (law, self.roster.keys, len(rows), width, scored)
                # What a graph keeps must not keep the target alive, as this object may.
                verifier, capacity = self.verifier, self.space.limits.capacity
                packet, kept = graphs.run(key, rows, lambda: verifier(rows, width, capacity)[0]), None
            else:
                packet, judgement = self.verifier(rows, width, max(request.most for request in requests) + width)
                kept = judgement if self.keep_scores else None
            self.ring.push(Verification(self.step, requests, width, kept), packet)
        self.lane.mark()
        for request, (likely_source, _) in zip(requests, pending):
            request.unread.append(width)
            request.source = likely_source
            request.proposals = []
        self.tell("after_verify", context)

    def absorb_before(self, step: int) -> None:
        """Reads every verification launched before `step`."""
        while len(self.ring) and self.ring.oldest.step < step:
            self._absorb(*self.ring.pop())

    def keep(self, request: Request, row: int, stands: int, judgement: Judgement) -> None:
        """Keeps scores and logits of a row's newest tokens; called only if `keep_scores`."""

    def _absorb(self, verification: Verification, rows: list[list[int]]) -> None:
        context = self.context([])
        context.width = verification.width
        for row, (request, numbers) in enumerate(zip(verification.requests, rows)):
            packet = Packet.read(numbers, verification.width, self.roster)
            if self.over(request):  # an over-run step of a row that ended before it
                request.learn([], 0, packet.announced)
                continue
            if packet.bad:
                self.fail(request, _bad_scores(request))
                continue
            if packet.failed >= 0:
                self.roster.retire(packet.failed, "it gave NaN or no finite logit")
            stands = self.record(request, packet.ids, packet.ended, packet.extra)
            emitted = packet.ids[:stands]
            request.learn(emitted, len(packet.ids), packet.announced)
            if verification.judgement is not None:
                self.keep(request, row, stands, verification.judgement)
            context.requests.append(request)
            context.emitted.append(emitted)
            context.drafted.append(packet.drafted)
            context.accepted.append(packet.accepted)
            context.source.append(packet.source if packet.drafted else None)
            context.reviews.append(packet.reviews)
        context.seconds = self.clock.lap(verification.step, verification.requests, self.ring.landed)
        self.roster.count()
        if context.requests:
            self.settle(context)
            self.tell("on_commit", context)

    @property
    def mode(self) -> str:
        """The mode of the current step."""
        return self._mode if self.pacer is None else self.pacer.mode or "sd"

    def context(self, requests: list[Request]) -> StepContext:
        """What hooks are told of a step."""
        return StepContext(
            self.step,
            requests,
            self.gamma,
            stream=self.lane.stream,
            stats=self.stats,
            batch_size=self.batch_size,
            balance=self.manager.balance if self.manager.groups == 2 else None,
            mode=self.mode,
            lanes=[self.lane, *self.roster.lanes.values()],
        )


def _bad_scores(request: Request) -> RuntimeError:
    return RuntimeError(
        f"psd: row {request.index} of the target's scores has NaN, +inf or no possible token at all "
        f"(new token {len(request.tokens) + 1}). Check the model's dtype and the logits processors."
    )


def signed(seed: int) -> int:
    """The 64 bits of a seed as an int64 value."""
    return seed - 2**64 if seed >= 2**63 else seed
