"""What a vectorised logits processor is, and the small tools that the rules share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .processors_prefixes import Prefixes

Apply = Callable[[Tensor, Prefixes], Tensor]


@dataclass(frozen=True)
class Rule:
    """One processor, applied to all lines at once.

    `apply(scores [R*T, V], prefixes) -> [R*T, V]` leaves its input alone. `writes` are the ids that the stock
    processor cannot do without: a target vocabulary must contain them, a smaller drafter vocabulary skips them.
    """

    apply: Apply
    writes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Placement:
    """Where a rule's tensors live, and how many rows the original batch has (None: as many as the processor knows)."""

    device: torch.device
    batch_size: int | None = None

    def copies(self, sources: int) -> int:
        """How many consecutive batch rows share one of `sources` prompts (as `num_return_sequences` makes them)."""
        if self.batch_size is None:
            return 1
        if self.batch_size % sources:
            raise ValueError(
                f"The processors know {sources} prompts, which do not divide a batch of {self.batch_size} rows. Build "
                "them from the prompts of this batch, before `num_return_sequences` expansion."
            )
        return self.batch_size // sources


def token_list(tokens: Any) -> list[int]:
    """Token ids given as an int, a list or a tensor, as a flat list of ints."""
    return torch.as_tensor(tokens).reshape(-1).tolist()


def send(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Host values as a tensor on `device`, without waiting for the device."""
    return torch.as_tensor(values, dtype=dtype).to(device, non_blocking=True)


def vocabulary_mask(tokens: Iterable[int], device: torch.device) -> Callable[[int], Tensor]:
    """A function `V -> [V]` bool, True at `tokens`; ids outside the vocabulary are left out."""
    ids = list(tokens)

    @cache
    def mask(vocabulary: int) -> Tensor:
        chosen = torch.zeros(vocabulary, dtype=torch.bool)
        chosen[[token for token in ids if 0 <= token < vocabulary]] = True
        return send(chosen, device)

    return mask


def rewrite(scores: Tensor, tokens: Tensor, chosen: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """`scores [N, V]` with `change` applied to the scores of the chosen tokens.

    Args:
        tokens: `[N, M]` int64, in any order and with repeats; ids outside the vocabulary are left out.
        chosen: `[N, M]` bool; the other entries change nothing.
        change: elementwise.
    """
    chosen = chosen & (tokens >= 0) & (tokens < scores.shape[-1])
    tokens = torch.where(chosen, tokens, 0)
    # Entries left out are parked on token 0: they write what the chosen entries for token 0 write, if there are any.
    changes = chosen | (chosen & (tokens == 0)).any(dim=-1, keepdim=True)
    old = scores.gather(1, tokens)
    return scores.scatter(1, tokens, torch.where(changes, change(old), old))
