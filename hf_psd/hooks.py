"""Step hooks: observers and deciders of the step loop, in the manner of transformers' logits processors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .lanes import Lane
from .phases import Request

if TYPE_CHECKING:
    from .reviews import Reviewed
    from .selection import Due, Plan


@dataclass
class StepContext:
    """What a hook is told. Device tensors must not be waited for; what a hook needs on the host comes in `on_commit`.

    Attributes:
        step: number of the step, from 0; -1 before the first.
        requests: the requests concerned.
        slots: [R] int64 on the target's device, their slots; None where no tensor work is due.
        gamma: the most drafts a row can have.
        plan: who drafts how much; `before_draft` hooks may set it.
        due: rows to be reviewed by drafters that do not draft for them; `before_draft` hooks may set it.
        drafts: [R, T - 1] int64 on the device in `after_draft` and `before_verify`, -1 where there is none. Later
            steps may write there.
        width: T, the tokens per row that the verification feeds.
        emitted: in `on_commit`, the new tokens of each request.
        drafted: in `on_commit`, how many drafts each request had.
        accepted: in `on_commit`, how many of them were accepted, before the end of the text cut any.
        source: in `on_commit`, the drafter each request's drafts came from, None if there were none.
        reviews: in `on_commit`, what drafters thought of each request's newly reviewed tokens; None where nobody asks.
        seconds: in `on_commit`, from the end of these requests' previous verification to the end of this one; None
            where there was none.
        stream: the CUDA stream the work runs on, None on CPU.
        stats: the call's statistics so far.
        batch_size: rows of the call.
        prompts: [B, P] int64, in `on_start`.
        balance: size of the smaller group over the larger while two groups alternate, else None.
        mode: "ar", "sd" or "psd", the mode of the current step.
        lanes: in `on_start` and `on_end`, the target's lane and the drafters'.
    """

    step: int
    requests: list[Request]
    gamma: int
    slots: torch.Tensor | None = None
    plan: Plan | None = None
    due: Due = None
    drafts: torch.Tensor | None = None
    width: int = 0
    emitted: list[list[int]] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    source: list[int | None] = field(default_factory=list)
    reviews: list[Reviewed | None] = field(default_factory=list)
    seconds: float | None = None
    stream: Any = None
    stats: Any = None
    batch_size: int = 0
    prompts: torch.Tensor | None = None
    balance: float | None = None
    mode: str = "sd"
    lanes: Sequence[Lane] = ()


class StepHook:
    """Override what you need; an exception in a hook ends the call with that exception."""

    def on_start(self, context: StepContext) -> None:
        """The call begins; no forward has run."""

    def before_draft(self, context: StepContext) -> None:
        """Drafts are about to be made; `context.plan` may be set or changed. Past rounds only are known."""

    def after_draft(self, context: StepContext) -> None:
        """Drafting has been launched; `context.drafts` may not be ready."""

    def before_verify(self, context: StepContext) -> None:
        """Verification is about to be launched."""

    def after_verify(self, context: StepContext) -> None:
        """Verification has been launched; its result is not known to the host."""

    def on_commit(self, context: StepContext) -> None:
        """A verification's result has reached the host, one step late."""

    def on_end(self, context: StepContext) -> None:
        """The call is over, also after an error."""


class StepHookList(list[StepHook]):
    """Calls every hook in order."""

    def __init__(self, hooks: Iterable[StepHook] = ()):
        if isinstance(hooks, StepHook) or not isinstance(hooks, Iterable):
            raise TypeError(f"psd_hooks must be a list of StepHook objects, got {type(hooks).__name__}.")
        super().__init__(hooks)
        for hook in self:
            if not isinstance(hook, StepHook):
                raise TypeError(f"psd_hooks takes StepHook objects, got {type(hook).__name__}.")

    def call(self, event: str, context: StepContext) -> None:
        for hook in self:
            getattr(hook, event)(context)

    def end(self, context: StepContext) -> None:
        """Calls `on_end` of every hook, also after one has raised; the first error is raised at the end."""
        errors: list[BaseException] = []
        for hook in self:
            try:
                hook.on_end(context)
            except BaseException as error:  # an interrupt, too, must not keep the other hooks from their end
                errors.append(error)
        if errors:
            raise errors[0]
