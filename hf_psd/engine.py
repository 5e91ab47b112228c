"""One call of `generate`: seats the whole batch, runs the step loop to its end."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache, PreTrainedModel

from .attention import FAST
from .config import PSDConfig
from .drafters.base import Drafter, Session
from .graphs import captures, signature
from .hooks import StepContext, StepHookList
from .ledger import Ledger
from .loop import StepLoop, signed
from .pacing import Pacer, profile_of
from .phases import Request
from .reviews import ReviewBoard
from .runner import Rows, implementation_of, input_device, upload
from .stats import PSDStats
from .turns import load
from .verify.sampler import Judgement, Sampler
from .workspace import Workspace, obtain


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
        full_information: whether the selector wants to know what every drafter thinks of committed tokens.
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
    full_information: bool = False
    cache: DynamicCache | None = None
    fused: bool = False
    stats: PSDStats = field(default_factory=PSDStats)


class Engine(StepLoop):
    """Runs one call to its end. `run` may be called once."""

    def __init__(self, call: Call, hooks: StepHookList):
        self.call, rules, batch = call, call.ledger.rules, call.prompts.shape[0]
        gamma, sampler, stats = call.config.most_drafts, call.sampler, call.stats
        graphing = may_graph(call.model, call.config.cuda_graphs, call.drafters, stats, obstacles(call))
        space = obtain(call.model, batch, rules.max_columns, gamma, call.ledger.pad_id, graphing)
        device = space.runner.device
        eos = torch.tensor(rules.eos_ids, dtype=torch.long, device=device) if rules.eos_ids else None
        if space.graphs:
            seeds = {each: space.seed_on(each) for each in (device, *(d.device for d in call.drafters if d.device))}
            for seed in seeds.values():
                seed.fill_(signed(int(sampler.seed)))
            sampler.seed, sampler.seeds = seeds[device], seeds
        apart = any(drafter.device not in (None, device) for drafter in call.drafters)
        mode = call.config.mode if call.config.mode != "auto" else "psd" if apart else "sd"
        board = review_board(call, space) if mode != "ar" and call.full_information else None
        super().__init__(space, sampler, call.drafters, mode, gamma, hooks, stats, eos, board)
        self.batch_size = batch
        known = signature(sampler.pipeline.processors)
        told = None if board is None else board.key
        self.law = (known, sampler.do_sample, sampler.law, tuple(rules.eos_ids), call.fused, call.config.compile, told)
        self.kept: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(batch)]
        self.keep_scores = call.keep_scores
        call.ledger.kept = self.kept if call.keep_scores else None
        # Modes chosen by their times would break a seed's promise, as rejection sampling depends on what was drafted.
        repeatable = sampler.needs_scores and call.config.seed is not None
        if call.config.mode == "auto" and not repeatable:
            self.pacer = self._pacer(apart)

    def run(self) -> None:
        """Decodes until every row has ended; the texts are in the call's ledger."""
        self.space.busy = True
        try:
            self.lane.begin()
            self.roster.begin()
            self._start()
            while self.advance():
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
            self.hooks.end(self.context([]))
        except BaseException as error:
            if failure is None:
                raise
            warnings.warn(f"psd: {type(error).__name__} at the end of a call that had failed: {error}", stacklevel=2)

    def _start(self) -> None:
        """Reads the prompts: all but their last token, which the first verification feeds.

        Drafters wait for the prompts alone, not for the target to have read them.
        """
        call, device = self.call, self.runner.device
        batch, columns = call.prompts.shape
        max_columns = call.ledger.rules.max_columns
        requests = [
            Request(row, row, padding, columns - padding, max_columns - padding)
            for row, padding in enumerate(call.padding)
        ]
        context = self.context(requests)
        context.prompts = call.prompts
        self.tell("on_start", context)
        vocab = self.runner.vocab_size
        reviewing = self.roster.board is not None
        session = Session(self.space, call.sampler, vocab, self.law, self.roster.warn_once, reviewing)
        with self.lane.work():
            padding = upload(call.padding, device)
            request_ids = upload(call.request_ids, device)
            self.state.fill(call.prompts, padding, max_columns, request_ids)
            rows = Rows(range(batch), device)
            self.roster.start(session, self.state.view(rows))
        self.lane.mark()
        with self.lane.work("prefill"):
            positions = torch.arange(columns, device=device) - padding[:, None]
            known = load(call.cache, self.runner, rows, padding) if call.cache is not None else 0
            prompts, positions = call.prompts[:, known:-1], positions[:, known:-1]
            if self.space.verify_graphs is not None:
                self.space.verify_graphs.feed("target", self.runner, rows.numbers, prompts, positions)
            else:
                self.runner.feed(rows, prompts, positions, columns)
        self.manager.add(requests)

    def _pacer(self, apart: bool) -> Pacer:
        """Steers a call of mode "auto": the modes that can pay on these devices, the likeliest first."""
        config, sampler, device = self.call.config, self.call.sampler, self.runner.device
        key = (
            tuple((each.signature, _identity(each), str(each.device)) for each in self.call.drafters),
            config.selector if isinstance(config.selector, str) else type(config.selector),
            *(config.gamma, sampler.do_sample, sampler.law, self.call.fused, self.space.graphs, config.compile),
            implementation_of(self.call.model),
        )
        modes = ("psd", "sd", "ar") if apart else ("sd", "ar", "psd") if device.type == "cuda" else ("sd", "ar")
        return Pacer(
            profile_of(self.call.model, key),
            modes,
            late=() if apart else ("psd",),
            captures=lambda: self.space.captured,
        )

    def capture_key(self, requests: Sequence[Request]) -> Hashable | None:
        return self.law

    def over(self, request: Request) -> bool:
        return self.call.ledger.ended[request.index]

    def record(self, request: Request, ids: list[int], ended: bool, extra: list[int]) -> int:
        return self.call.ledger.append(request.index, ids, ended)

    def keep(self, request: Request, row: int, stands: int, judgement: Judgement) -> None:
        scores, logits = judgement.scores[row], judgement.logits[row]
        self.kept[request.index] += [(scores[i].clone(), logits[i].clone()) for i in range(stands)]

    def settle(self, context: StepContext) -> None:
        ledger = self.call.ledger
        ledger.settle()
        for request in list(self.manager.requests):
            if ledger.ended[request.index]:
                self.manager.finish(request)


def _identity(drafter: Drafter) -> Hashable:
    """Equal for drafters with the same model, which it does not keep alive; a later one never equals it."""
    model = getattr(drafter, "model", None)
    return weakref.ref(model) if isinstance(model, torch.nn.Module) else None


def review_board(call: Call, space: Workspace) -> ReviewBoard:
    """Where drafters' reviews come together; kept with the workspace, so that captured graphs find it."""
    drafters, keep_log_prob = len(call.drafters), call.sampler.needs_scores
    name = ("reviews", drafters, keep_log_prob)
    if name not in space.scratch:
        space.scratch[name] = ReviewBoard(space.limits, drafters, space.runner.device, keep_log_prob)
    board: ReviewBoard = space.scratch[name]
    return board


def obstacles(call: Call) -> dict[str, bool]:
    """Why the steps of a call may have to run without CUDA graphs, beyond what models and drafters say."""
    pipeline = call.sampler.pipeline
    return {
        "a logits processor must be called one by one": pipeline.exact_only,
        "a logits processor's behaviour cannot be told from its attributes": signature(pipeline.processors) is None,
        "scores or logits are returned": call.keep_scores,
    }


def may_graph(
    model: PreTrainedModel,
    wanted: str | bool,
    drafters: Sequence[Drafter],
    stats: PSDStats,
    further: Mapping[str, bool],
) -> bool:
    """Whether steps can be captured; says why not in the statistics where the user would expect it."""
    device = input_device(model)
    reasons = {
        "the target is not on CUDA": device.type != "cuda",
        "the target is split over several devices": len(set(getattr(model, "hf_device_map", {}).values())) > 1,
        "the target does not run on the fast attention route": implementation_of(model) != FAST,
        "the target has 8-bit layers, for which the host waits": not captures(model),
        **further,
        "a drafter takes part whose work cannot be captured": not all(drafter.capturable for drafter in drafters),
    }
    reason = next((text for text, holds in reasons.items() if holds), None)
    if wanted is False or reason is None:
        return wanted is not False
    if wanted is True or device.type == "cuda":
        stats.notes.append(f"no CUDA graphs: {reason}")
    return False
