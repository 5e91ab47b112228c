"""FlashSpec as a method, where it is installed."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from transformers import PreTrainedModel

from .clocks import TokenClock
from .decoders import Counts, forget_compiled
from .profiles import Settings
from .prompts import Prompts

KNOWN_VERSION = "0.3.1"


def installed() -> str | None:
    """FlashSpec's version, None if it is not installed."""
    try:
        return version("flashspec")
    except PackageNotFoundError:
        return None


class FlashSpecDecoder:
    """FlashSpec's engine around the same two models, at batch 1.

    "flashspec" is what it does by default (prompt lookup of 6, else 2 drafts); "flashspec-gamma" has it draft
    `settings.gamma` tokens with the model each step. Both are compiled on CUDA, as it decides itself.

    Raises:
        ImportError: it is not installed.
    """

    def __init__(
        self,
        method: str,
        settings: Settings,
        target: PreTrainedModel,
        drafter: PreTrainedModel,
        prompts: Prompts,
        sampled: bool,
    ):
        flashspec = importlib.import_module("flashspec")
        parts = importlib.import_module("flashspec.engine")
        temperature = settings.temperature if sampled else 0.0
        dtype = getattr(torch, settings.dtype)
        wrapped = parts.TargetModel("target", target.device, dtype, model=target)
        drafting = parts.HuggingFaceDrafter("drafter", drafter.device, dtype, temperature, model=drafter)
        strategy: dict[str, Any] = {}
        if method == "flashspec-gamma":
            strategy = {"drafter_strategy": "bandit", "bandit": flashspec.BanditConfig(n_arms=1)}
        config = flashspec.FlashSpecConfig(
            device=str(target.device),
            dtype=settings.dtype,
            sampling=flashspec.SamplingConfig(gamma=settings.gamma, temperature=temperature, seed=0),
            **strategy,
        )
        self.engine = flashspec.SpeculativeEngine(config, [drafting], wrapped)
        self.wrappers = (wrapped, drafting)
        self.ids = prompts.ids.to(target.device)
        self.new_tokens = settings.new_tokens
        self._result: Any = None

    def __call__(self, clock: TokenClock | None = None, hooks: tuple[Any, ...] = ()) -> torch.Tensor:
        with torch.no_grad():
            self._result = self.engine.generate(self.ids, max_new_tokens=self.new_tokens)
        return self._result.output_ids

    def counts(self) -> Counts:
        steps = self._result.arm_steps
        forwards = len(steps) or self.new_tokens
        notes = [f"FlashSpec {installed()}, {'compiled' if self.engine.compiled else 'eager'}"]
        if installed() != KNOWN_VERSION:
            notes.append(f"written for FlashSpec {KNOWN_VERSION}")
        for wrapper in self.wrappers:
            reason = getattr(getattr(wrapper, "_inc", None), "compile_fallback_reason", None)
            if reason:
                notes.append(f"FlashSpec fell back to eager: {reason}")
        return Counts(
            forwards,
            self._result.n_tokens_generated / forwards / self.ids.shape[0],
            drafted=sum(step.proposed for step in steps),
            accepted=sum(step.accepted for step in steps),
            steps_ms=[1e3 * step.seconds for step in steps],
            notes=notes,
        )

    def close(self) -> None:
        self.engine = self.wrappers = self._result = None
        forget_compiled()
