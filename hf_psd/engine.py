"""The step loop: draft one group while the target verifies the other; the host reads one step late."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache, PreTrainedModel

from .attention import FAST
from .clock import RoundClock
from .config import PSDConfig
from .drafters.base import Drafter, Session
from .graphs import signature
from .hooks import StepContext, StepHookList
from .lanes import HostRing
from .ledger import Ledger
from .pacing import Pacer, profile_of
from .phases import BatchManager, Request
from .roster import Roster
from .runner import Rows, implementation_of, input_device, upload
from .selection import Plan, check_plan
from .stats import DrafterStats, PSDStats
from .turns import load
from .verification import Verifier
from .verify.sampler import Judgement, Sampler
from .workspace import obtain


@dataclass
class Call:
    """Everything one call needs, validated.

    Attributes:
        model: the target.
        drafters: drafters in the user's order.
        config: settings.
        prompts: [B, P] int64, left-padded, on the target's input device.
        padding: left-padding columns per row.
        sampler: the output law.
        ledger: the host's record, which also knows how the call ends.
        request_ids: noise key per row.
        keep_scores: whether processed scores and raw logits of each new token are wanted.
        cache: a checked cache of an earlier turn, which covers the prompts' first columns.
        fused: whether fused operators stand in for the models' own during the call.
    """

    model: PreTrainedModel
    drafters: list[Drafter]
    config: PSDConfig
    prompts: torch.Tensor
    padding: list[int]
    sampler: Sampler
    ledger: Ledger
    request_ids: list[int]
    keep_scores: bool = False
    cache: DynamicCache | None = None
    fused: bool = False
    stats: PSDStats = field(default_factory=PSDStats)


@dataclass
class Verification:
    """A verification on its way to the host."""

    step: int
    requests: list[Request]
    width: int
    judgement: Judgement | None


class Engine:
    """Runs one call to its end. `run` may be called once."""

    def __init__(self, call: Call, hooks: StepHookList):
        self.call, self.hooks, self.stats = call, hooks, call.stats
        rules, batch = call.ledger.rules, call.prompts.shape[0]
        self.gamma = call.config.most_drafts
        self.batch = batch
        self.graphing = self._may_graph()
        self.space = obtain(call.model, batch, rules.max_columns, self.gamma, call.ledger.pad_id, self.graphing)
        self.graphing = self.space.graphs
        self.runner, self.state, self.lane = self.space.runner, self.space.state, self.space.lane
        device = self.runner.device
        eos = torch.tensor(rules.eos_ids, dtype=torch.long, device=device) if rules.eos_ids else None
        self.ring, self.clock = HostRing(device), RoundClock()
        drafting = call.config.mode != "ar"
        self.manager = BatchManager(groups=2 if call.config.mode == "psd" else 1, drafting=drafting)
        self.roster = Roster(call.drafters if drafting else [], self.space, call.stats)
        if self.graphing:
            seeds = {each: self.space.seed_on(each) for each in (device, *self.roster.lanes)}
            for seed in seeds.values():
                seed.fill_(_signed(int(call.sampler.seed)))
            call.sampler.seed, call.sampler.seeds = seeds[device], seeds
        sampler = call.sampler
        known = signature(sampler.pipeline.processors)
        self.law = (known, sampler.do_sample, sampler.law, tuple(rules.eos_ids), call.fused)
        self.verifier = Verifier(self.runner, self.state, call.sampler, self.roster, eos)
        self.kept: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(batch)]
        call.ledger.kept = self.kept if call.keep_scores else None
        self.pacer = self._pacer() if call.config.mode == "auto" else None
        self.step = -1

    def run(self) -> None:
        """Decodes until every row has ended; the texts are in the call's ledger."""
        self.space.busy = True
        try:
            self.lane.begin()
            self.roster.begin()
            self._start()
            while self._advance():
                pass
            self.stats.emitted = sum(map(len, self.call.ledger.rows))
        except BaseException as error:
            self._close(error)
            raise
        self._close(None)

    def _close(self, failure: BaseException | None) -> None:
        """Ends the call; hooks that fail at their end do not hide what failed before."""
        try:
            self.space.busy = False
            self.lane.finish()
            self.roster.finish()
            self.hooks.end(self._context([]))
        except BaseException as error:
            if failure is None:
                raise
            warnings.warn(f"psd: {type(error).__name__} at the end of a call that had failed: {error}", stacklevel=2)

    def _start(self) -> None:
        """Reads the prompts: all but their last token, which the first verification feeds."""
        call, device = self.call, self.runner.device
        batch, columns = call.prompts.shape
        max_columns = call.ledger.rules.max_columns
        self._describe()
        requests = [
            Request(row, row, padding, columns - padding, max_columns - padding)
            for row, padding in enumerate(call.padding)
        ]
        context = self._context(requests)
        context.prompts = call.prompts
        self.hooks.call("on_start", context)
        vocab = self.runner.vocab_size
        session = Session(self.space, call.sampler, vocab, self.law, self.roster.warn_once)
        with self.lane.work("prefill"):
            padding = upload(call.padding, device)
            request_ids = upload(call.request_ids, device)
            self.state.fill(call.prompts, padding, max_columns, request_ids)
            rows = Rows(range(batch), device)
            positions = torch.arange(columns, device=device) - padding[:, None]
            known = load(call.cache, self.runner, rows, padding) if call.cache is not None else 0
            self.runner.feed(rows, call.prompts[:, known:-1], positions[:, known:-1], columns)
            self.roster.start(session, self.state.view(rows))
        self.lane.mark()
        self.manager.add(requests)

    def _may_graph(self) -> bool:
        """Whether this call's steps can be captured; says why not in the statistics where the user would expect it."""
        call = self.call
        device = input_device(call.model)
        wanted = call.config.cuda_graphs
        reasons = {
            "the target is not on CUDA": device.type != "cuda",
            "the target is split over several devices": len(set(getattr(call.model, "hf_device_map", {}).values()))
            > 1,
            "the target does not run on the fast attention route": implementation_of(call.model) != FAST,
            "a logits processor must be called one by one": call.sampler.pipeline.exact_only,
            "a logits processor's behaviour cannot be told from its attributes": (
                signature(call.sampler.pipeline.processors) is None
            ),
            "scores or logits are returned": call.keep_scores,
            "a drafter of the user's own takes part": not all(drafter.capturable for drafter in call.drafters),
        }
        reason = next((text for text, holds in reasons.items() if holds), None)
        if wanted is False or reason is None:
            return wanted is not False
        if wanted is True or device.type == "cuda":
            self.stats.notes.append(f"no CUDA graphs: {reason}")
        return False

    def _pacer(self) -> Pacer:
        """Steers a call of mode "auto": the modes that can pay on these devices, the likeliest first."""
        config, sampler, device = self.call.config, self.call.sampler, self.runner.device
        drafters = self.call.drafters
        apart = any(drafter.device not in (None, device) for drafter in drafters)
        key = (
            tuple(
                (drafter.signature, id(getattr(drafter, "model", None)), str(drafter.device)) for drafter in drafters
            ),
            config.selector if isinstance(config.selector, str) else type(config.selector),
            *(config.gamma, sampler.do_sample, sampler.law, self.call.fused, self.graphing),
            implementation_of(self.call.model),
        )
        modes = ("psd", "sd", "ar") if apart else ("sd", "ar", "psd") if device.type == "cuda" else ("sd", "ar")
        return Pacer(
            profile_of(self.call.model, key),
            modes,
            late=() if apart else ("psd",),
            captures=lambda: self.space.captured,
        )

    def _describe(self) -> None:
        call, stats = self.call, self.stats
        stats.mode = self.mode
        stats.by_drafter = [DrafterStats(drafter.name) for drafter in call.drafters]
        stats.placement = {"target": str(self.runner.device)}
        stats.placement |= {drafter.name: str(drafter.device or self.runner.device) for drafter in call.drafters}

    def _advance(self) -> bool:
        """One step: launch its work, then read what the step before it gave. False when there is nothing left."""
        if self.pacer is not None:
            self.pacer.steer(self.manager)
        step = self.manager.next_step()
        if not step.verify and not step.draft:
            left = len(self.ring) > 0
            self._absorb_before(self.step + 1)
            return left
        plan = self._plan(step.draft) if step.draft else []
        if not plan and not step.verify:
            self.manager.advance(step)  # nobody drafts: verify at once instead of spending a step on nothing
            return True
        self.step += 1
        self.roster.lane.follow(self.lane)
        self.lane.follow(self.roster.lane)
        if step.verify:
            self._verify(step.verify)
        if plan:
            context = self._context(step.draft)
            context.plan = plan
            context.drafts = self.roster.draft(self.state, step.draft, plan)
            self.hooks.call("after_draft", context)
        self.manager.advance(step)
        self._absorb_before(self.step)
        return True

    def _plan(self, requests: list[Request]) -> Plan:
        """Asks the selector for budgets and clips them to what each row can still use; [] if nobody drafts."""
        if self.pacer is not None and not self.pacer.drafting:
            return []
        context = self._context(requests)
        context.step += 1
        self.hooks.call("before_draft", context)
        plan: Plan = []
        for key, budgets in check_plan(context.plan, len(requests), len(self.roster.drafters), "a before_draft hook"):
            clipped = [max(0, min(budget, self.gamma, request.room)) for budget, request in zip(budgets, requests)]
            if key in self.roster.alive and any(clipped):
                plan.append((key, clipped))
        for row, request in enumerate(requests):
            request.proposals = [(key, budgets[row]) for key, budgets in plan if budgets[row] > 0]
        return plan

    def _verify(self, requests: list[Request]) -> None:
        pending = [request.pending() for request in requests]
        width = 1 + max(max(0, min(count, request.room)) for request, (_, count) in zip(requests, pending))
        context = self._context(requests)
        context.width = width
        slots = [request.slot for request in requests]
        graphs = self.space.verify_graphs if self.graphing else None
        with self.lane.work("verify"):
            rows = graphs.rows(slots) if graphs else Rows(slots, self.runner.device)
            context.slots = rows.slots[: len(slots)]
            context.drafts = self.state.draft_ids.index_select(0, context.slots)[:, : width - 1]
            self.hooks.call("before_verify", context)
            if graphs:
                key = (self.law, self.roster.keys, len(rows), width)
                packet, judgement = graphs.run(
                    key, rows, lambda: self.verifier(rows, width, self.space.limits.capacity)
                )
            else:
                packet, judgement = self.verifier(rows, width, max(request.most for request in requests) + width)
            kept = judgement if self.call.keep_scores else None
            self.ring.push(Verification(self.step, requests, width, kept), packet)
        self.lane.mark()
        for request, (likely_source, _) in zip(requests, pending):
            request.unread.append(width)
            request.source = likely_source
            request.proposals = []
        self.hooks.call("after_verify", context)

    def _absorb_before(self, step: int) -> None:
        """Reads every verification launched before `step`."""
        while len(self.ring) and self.ring.oldest.step < step:
            self._absorb(*self.ring.pop())

    def _absorb(self, verification: Verification, packet: list[list[int]]) -> None:
        ledger, width = self.call.ledger, verification.width
        context = self._context([])
        context.width = width
        for row, (request, numbers) in enumerate(zip(verification.requests, packet)):
            count, accepted, drafted, ended, bad, failed, source, *announced = numbers[width:]
            available = dict(zip(self.roster.announcers, announced))
            if ledger.ended[request.index]:  # an over-run step of a row that ended before it
                request.learn([], 0, available)
                continue
            if bad:
                raise RuntimeError(
                    f"psd: row {request.index} of the target's scores has NaN, +inf or no possible token at all "
                    f"(new token {len(request.tokens) + 1}). Check the model's dtype and the logits processors."
                )
            if failed >= 0:
                self.roster.retire(failed, "it gave NaN or no finite logit")
            stands = ledger.append(request.index, numbers[:count], bool(ended))
            emitted = numbers[:stands]
            request.learn(emitted, count, available)
            if verification.judgement is not None:
                scores, logits = verification.judgement.scores[row], verification.judgement.logits[row]
                self.kept[request.index] += [(scores[i].clone(), logits[i].clone()) for i in range(stands)]
            context.requests.append(request)
            context.emitted.append(emitted)
            context.drafted.append(drafted)
            context.accepted.append(accepted)
            context.source.append(source if drafted else None)
        context.seconds = self.clock.lap(verification.step, verification.requests, self.ring.landed)
        if not context.requests:
            return
        ledger.settle()
        for request in list(self.manager.requests):
            if ledger.ended[request.index]:
                self.manager.finish(request)
        self.hooks.call("on_commit", context)

    @property
    def mode(self) -> str:
        """The mode of the current step."""
        return self.pacer.mode or "sd" if self.pacer is not None else self.call.config.mode

    def _context(self, requests: list[Request]) -> StepContext:
        return StepContext(
            self.step,
            requests,
            self.gamma,
            stream=self.lane.stream,
            stats=self.stats,
            batch_size=self.batch,
            balance=self.manager.balance if self.manager.groups == 2 else None,
            mode=self.mode,
            lanes=[self.lane, *self.roster.lanes.values()],
        )


def _signed(seed: int) -> int:
    """The 64 bits of a seed as an int64 value."""
    return seed - 2**64 if seed >= 2**63 else seed
