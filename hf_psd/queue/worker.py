"""Holds a queue's models while there is work, opens and closes its engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import torch
from transformers import PreTrainedModel

from ..compiled import compiled
from ..config import PSDConfig
from ..drafters.base import Drafter
from ..drafters.model import ModelDrafter
from ..fused import fused, models_to_fuse
from ..hooks import StepHook, StepHookList
from ..learning import make_selector
from ..runner import inference_state, one_call_at_a_time
from ..selection import SelectionHook
from ..stats import StatsHook
from ..support import choose_attention
from .engine import QueueEngine
from .invariants import InvariantChecker
from .metrics import QueueStats
from .sizes import Sizes


class Worker:
    """One target, its drafters and the engine over them; used by one thread at a time.

    Args:
        model, drafters, config: as for `QueueEngine`.
        hooks: the user's.
        stats: where counts go.
        sizes: gives the sizes when the engine opens.
        logprobs: whether results carry log-probabilities.
        seed: of bandits.
        check: whether invariants are checked after each step.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafters: Sequence[Drafter],
        config: PSDConfig,
        hooks: Sequence[StepHook],
        stats: QueueStats,
        sizes: Callable[[], Sizes],
        logprobs: bool,
        seed: int,
        check: bool,
    ):
        self.model, self.drafters, self.config, self.hooks = model, drafters, config, list(hooks)
        self.stats, self.sizes, self.logprobs, self.seed, self.check = stats, sizes, logprobs, seed, check
        self.engine: QueueEngine | None = None

    @property
    def models(self) -> list[PreTrainedModel]:
        """Target and drafters."""
        drafting = [each.model for each in self.drafters if isinstance(each, ModelDrafter)]
        return [self.model, *(model for model in drafting if model is not None)]

    @contextmanager
    def work(self) -> Iterator[QueueEngine]:
        """Holds the models: what a call of `generate` would change of theirs for its time is changed."""
        models = self.models
        with ExitStack() as stack:
            stack.enter_context(one_call_at_a_time(models))
            attention = {each: choose_attention(each, self.config.attention) for each in models}
            fusing = models_to_fuse(models, self.config.fused_ops)
            stack.enter_context(torch.no_grad())
            stack.enter_context(inference_state(attention))
            stack.enter_context(fused(fusing))
            stack.enter_context(compiled(models if self.config.compile else []))
            if self.engine is None:
                self.engine = self._open(bool(fusing))
            yield self.engine

    def close(self, error: BaseException | None = None) -> None:
        """Ends the session; after an `error` whatever else goes wrong is of no interest."""
        engine, self.engine = self.engine, None
        if engine is not None:
            with suppress(Exception) if error is not None else ExitStack():
                engine.close(error)

    def _open(self, fusing: bool) -> QueueEngine:
        hooks, sizes = StepHookList(), self.sizes()
        engine = QueueEngine(self.model, self.drafters, self.config, sizes, hooks, self.stats, self.logprobs, fusing)
        engine.selector = make_selector(self.config, self.seed, len(self.drafters), sampled=True)
        engine.checker = InvariantChecker() if self.check else None
        hooks.append(SelectionHook(engine.selector, lambda: engine.roster.arms))
        hooks.append(StatsHook(self.stats))
        hooks.extend(self.hooks)
        engine.open()
        return engine
