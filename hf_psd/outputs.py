"""Shapes results as transformers does."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .ledger import Ledger
from .stats import PSDStats

Kept = list[list[tuple[torch.Tensor, torch.Tensor]]]
"""Per row and new token: processed scores and raw logits, each [V] fp32."""


def shape_output(
    ledger: Ledger, kept: Kept, generation_config: GenerationConfig, device: torch.device, stats: PSDStats
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """The sequences [B, P + N] int64 on `device`, or transformers' output object around them.

    Scores and logits are tuples of N tensors [B, V] fp32; rows that have ended hold zeros. The object carries the
    statistics as `psd`; it holds no cache.
    """
    sequences = ledger.sequences().to(device)
    if not generation_config.return_dict_in_generate:
        return sequences
    scores = _columns(kept, 0, ledger) if generation_config.output_scores else None
    logits = _columns(kept, 1, ledger) if generation_config.output_logits else None
    # transformers annotates these fields more narrowly than it fills them itself.
    fields: dict[str, Any] = {"sequences": sequences, "scores": scores, "logits": logits}
    output = GenerateDecoderOnlyOutput(**fields)
    output.psd = stats
    return output


def _columns(kept: Kept, which: int, ledger: Ledger) -> tuple[torch.Tensor, ...]:
    template = next(row[0][which] for row in kept if row)
    zeros = torch.zeros(template.shape, device=template.device)
    return tuple(
        torch.stack(
            [kept[row][column][which].float() if column < len(text) else zeros for row, text in enumerate(ledger.rows)]
        )
        for column in range(ledger.width)
    )
