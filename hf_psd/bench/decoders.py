"""What is compared: transformers' own ways to decode, and ours, behind one small interface."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from ..api import generate, last_stats, plain_generate
from ..workspace import release
from .clocks import TokenClock
from .lab import free
from .profiles import METHODS, OURS, RIVALS, Settings
from .prompts import Prompts

LOOKUP_TOKENS = 10


@dataclass
class Counts:
    """What one call did; None where it cannot be told, and `steps_ms` also where the clock measures it."""

    forwards: int
    tokens_per_forward: float | None = None
    draft_forwards: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    mode: str | None = None
    balance: float | None = None
    forwards_by_mode: dict[str, int] | None = None
    steps_ms: list[float] | None = None
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Decoder(Protocol):
    """Decodes the same prompts again and again."""

    def __call__(self, clock: TokenClock | None = None, hooks: tuple[Any, ...] = ()) -> torch.Tensor:
        """New tokens [B, N] int64, on any device."""

    def counts(self) -> Counts:
        """Of the newest call that had a clock."""

    def close(self) -> None:
        """Frees what was kept between calls."""


def make_decoder(
    method: str, settings: Settings, target: PreTrainedModel, drafter: PreTrainedModel, prompts: Prompts, sampled: bool
) -> Decoder:
    """The decoder of a method; `settings.gamma` is its draft length.

    Raises:
        ValueError: there is no such method.
        ImportError: FlashSpec is asked for and not installed.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}.")
    if method in OURS:
        return OurDecoder(method, settings, target, drafter, prompts, sampled)
    if method in RIVALS:
        from .flashspec import FlashSpecDecoder

        return FlashSpecDecoder(method, settings, target, drafter, prompts, sampled)
    return PlainDecoder(method, settings, target, drafter, prompts, sampled)


def arguments_of(settings: Settings, prompts: Prompts, device: torch.device, sampled: bool) -> dict[str, Any]:
    """Arguments of `generate` that all methods share: a fixed number of new tokens, pure temperature sampling."""
    sampling = dict(do_sample=True, temperature=settings.temperature, top_k=0, top_p=1.0)
    return {
        "input_ids": prompts.ids.to(device),
        "attention_mask": prompts.mask.to(device),
        "max_new_tokens": settings.new_tokens,
        "pad_token_id": 0,
        "eos_token_id": None,
        **(sampling if sampled else {"do_sample": False}),
    }


class PlainDecoder:
    """transformers' `generate`: eager, with a static cache (compiled on CUDA), assisted, or by prompt lookup."""

    def __init__(
        self,
        method: str,
        settings: Settings,
        target: PreTrainedModel,
        drafter: PreTrainedModel,
        prompts: Prompts,
        sampled: bool,
    ):
        self.method, self.gamma = method, settings.gamma
        self.target, self.drafter = target, drafter
        self.arguments = arguments_of(settings, prompts, target.device, sampled)
        self.columns = prompts.ids.shape[1]
        if method == "hf-static":
            self.arguments["cache_implementation"] = "static"
        elif method == "hf-lookup":
            self.arguments["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
        elif method.startswith("hf-assisted"):
            self.arguments["assistant_model"] = drafter
        self._forwards = {"target": 0, "drafter": 0}
        self._emitted = 0

    def __call__(self, clock: TokenClock | None = None, hooks: tuple[Any, ...] = ()) -> torch.Tensor:
        torch.manual_seed(0)
        counted = clock is not None and self.speculates
        with ExitStack() as stack:
            stack.enter_context(self._draft_length())
            if counted:
                stack.enter_context(self._counted())
            ids = plain_generate()(self.target, **self.arguments, streamer=clock)
        self._emitted = ids.shape[1] - self.columns
        return ids[:, self.columns :]

    @property
    def speculates(self) -> bool:
        return self.method == "hf-lookup" or self.method.startswith("hf-assisted")

    def counts(self) -> Counts:
        if not self.speculates:
            return Counts(self._emitted, 1.0)
        forwards, drafts = self._forwards["target"], self._forwards["drafter"]
        if self.method == "hf-lookup":
            return Counts(forwards, self._emitted / forwards, draft_forwards=0)
        accepted = max(0, self._emitted - forwards)  # a verification emits what it accepts and one token more
        return Counts(forwards, self._emitted / forwards, drafts, drafts, accepted)

    def close(self) -> None:
        if self.method == "hf-static":
            for name in ("_compiled_call", "_last_compile_config"):
                vars(self.target).pop(name, None)
            forget_compiled()

    @contextmanager
    def _draft_length(self) -> Any:
        """As many drafts as every other method has; "hf-assisted-default" keeps what transformers ships."""
        config = self.drafter.generation_config
        before = dict(vars(config))
        try:
            if self.method == "hf-assisted":
                config.num_assistant_tokens = self.gamma
                config.num_assistant_tokens_schedule = "constant"
                config.assistant_confidence_threshold = 0.0
            yield
        finally:
            vars(config).clear()
            vars(config).update(before)

    @contextmanager
    def _counted(self) -> Any:
        self._forwards = dict.fromkeys(self._forwards, 0)

        def counting(name: str) -> Any:
            def count(*_: Any) -> None:
                self._forwards[name] += 1

            return count

        handles = [
            model.register_forward_hook(counting(name))
            for name, model in (("target", self.target), ("drafter", self.drafter))
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class OurDecoder:
    """This package, in one of its modes."""

    def __init__(
        self,
        method: str,
        settings: Settings,
        target: PreTrainedModel,
        drafter: PreTrainedModel,
        prompts: Prompts,
        sampled: bool,
    ):
        self.target, self.drafter = target, drafter
        self.arguments = arguments_of(settings, prompts, target.device, sampled)
        self.columns = prompts.ids.shape[1]
        self.psd = {"mode": method, "gamma": settings.gamma, **dict(settings.psd)}

    def __call__(self, clock: TokenClock | None = None, hooks: tuple[Any, ...] = ()) -> torch.Tensor:
        torch.manual_seed(0)
        watching = [*hooks, *([clock] if clock is not None else [])]
        ids = generate(
            self.target, **self.arguments, assistant_models=[self.drafter], psd=self.psd, psd_hooks=watching
        )
        return ids[:, self.columns :]

    def counts(self) -> Counts:
        stats = last_stats()
        assert stats is not None
        return Counts(
            stats.target_forwards,
            stats.tokens_per_forward,
            stats.draft_forwards,
            stats.drafted,
            stats.accepted,
            stats.mode,
            stats.balance if stats.mode == "psd" else None,
            dict(stats.forwards_by_mode),
            notes=list(stats.notes),
            errors=list(stats.errors),
        )

    def close(self) -> None:
        release(self.target)
        free()


def forget_compiled() -> None:
    """Drops what torch.compile has kept, CUDA graphs and their memory included."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    free()
