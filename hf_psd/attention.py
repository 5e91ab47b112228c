"""The two attention routes over ragged rows.

Native: the model's own attention with explicit 4-D masks. Fast: an attention function that reads lengths and slots on
the device, without masks and without gathering keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
from psd_kernels import ragged_attention
from transformers import AttentionInterface, PretrainedConfig

from .cache import KVAddress

FAST = "psd_ragged"

FULL, SLIDING = "full_attention", "sliding_attention"


class MaskBuilder:
    """Builds the attention masks of one model for rows that are at different positions.

    A model whose config lists `layer_types` gets a dict of masks keyed by them, any other a single tensor. Attention
    kinds other than full and sliding raise a `ValueError`.
    """

    def __init__(self, config: PretrainedConfig, additive_dtype: torch.dtype | None):
        """`config`: the text config; `additive_dtype`: dtype of 0/-inf masks (eager), None for boolean masks."""
        self.additive_dtype = additive_dtype
        layer_types = getattr(config, "layer_types", None)
        self.keyed = layer_types is not None
        self.window: int | None = getattr(config, "sliding_window", None)
        self.kinds = sorted(set(layer_types)) if layer_types else [SLIDING if self.window else FULL]
        unknown = [kind for kind in self.kinds if kind not in (FULL, SLIDING)]
        if unknown:
            raise ValueError(
                f"it has layers of kind {', '.join(map(repr, unknown))}, which cannot be rolled back or masked row by "
                "row."
            )

    def __call__(self, positions: torch.Tensor, kv_length: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """Masks [R, 1, T, kv_length] for queries at `positions` [R, T] (int64); keys sit at 0 .. kv_length - 1."""
        query = positions[:, :, None]
        key = torch.arange(kv_length, device=positions.device)
        causal = key <= query
        masks = {
            kind: self._finish(causal if kind == FULL else causal & (key > query - self.window)) for kind in self.kinds
        }
        return masks if self.keyed else masks[self.kinds[0]]

    def _finish(self, allowed: torch.Tensor) -> torch.Tensor:
        allowed = allowed[:, None]
        if self.additive_dtype is None:
            return allowed
        mask = torch.zeros(allowed.shape, dtype=self.additive_dtype, device=allowed.device)
        return mask.masked_fill_(~allowed, torch.finfo(self.additive_dtype).min)


def attend_in_place(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    psd_address: KVAddress | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface for a `RaggedCache` read in place.

    `query` is [R, H, T, D]; `key` and `value` are the whole cache, [slots or blocks, positions, H_kv, D]. Returns
    [R, T, H, D].
    """
    assert psd_address is not None
    at = psd_address.on(query.device)
    out = ragged_attention(
        query.transpose(1, 2),
        key,
        value,
        at.table,
        at.positions,
        scaling=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        kv_length=at.kv_length,
    )
    return out, None


AttentionInterface.register(FAST, attend_in_place)
