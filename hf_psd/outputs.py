"""Shapes results as transformers does."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .ledger import Kept, Ledger, score_columns
from .stats import PSDStats


def shape_output(
    ledger: Ledger, kept: Kept, generation_config: GenerationConfig, device: torch.device, stats: PSDStats, cache: Any
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """The sequences [B, P + N] int64 on `device`, or transformers' output object around them.

    Scores and logits are tuples of N tensors [B, V] fp32; rows that have ended hold zeros. `cache` covers all columns
    but the last, ready for a next turn. The object carries the statistics as `psd`.
    """
    sequences = ledger.sequences().to(device)
    if not generation_config.return_dict_in_generate:
        return sequences
    scores = score_columns(kept, 0, ledger.rows, ledger.width) if generation_config.output_scores else None
    logits = score_columns(kept, 1, ledger.rows, ledger.width) if generation_config.output_logits else None
    named = "cache" if "cache" in {field.name for field in fields(GenerateDecoderOnlyOutput)} else "past_key_values"
    # transformers annotates these fields more narrowly than it fills them itself.
    values: dict[str, Any] = {"sequences": sequences, "scores": scores, "logits": logits, named: cache}
    output = GenerateDecoderOnlyOutput(**values)
    output.psd = stats
    return output
