"""What the kernels are measured against: the same work in plain PyTorch, with torch's own generator."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def eager_verify(target: Tensor, draft: Tensor, ids: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Rejection sampling by probabilities: (ids [R, T] padded with -1, emitted [R])."""
    rows, count = ids.shape
    scale = temperature[:, None, None]
    p = (target.float() / scale).softmax(-1)
    q = (draft.float() / scale).softmax(-1)
    p_drafted = p[:, :count].gather(-1, ids[..., None]).squeeze(-1)
    q_drafted = q.gather(-1, ids[..., None]).squeeze(-1)
    accepted = torch.rand_like(p_drafted) < p_drafted / q_drafted
    stop = accepted.long().cumprod(-1).sum(-1)
    index = torch.arange(rows, device=ids.device)
    at_stop = p[index, stop]
    residual = (at_stop - q[index, stop.clamp(max=count - 1)]).clamp(min=0)
    weights = torch.where((stop < count)[:, None], residual, at_stop)
    token = (weights / torch.empty_like(weights).exponential_()).argmax(-1)
    steps = torch.arange(count + 1, device=ids.device)
    padded = torch.nn.functional.pad(ids, (0, 1), value=-1)
    out = torch.where(steps < stop[:, None], padded, torch.where(steps == stop[:, None], token[:, None], -1))
    return out, stop + 1


def eager_greedy_verify(target: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    best = target.argmax(-1)
    stop = (best[:, :-1] == ids).long().cumprod(-1).sum(-1)
    steps = torch.arange(best.shape[1], device=ids.device)
    return torch.where(steps <= stop[:, None], best, -1), stop + 1


def eager_sample(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scaled = logits.float() / temperature[:, None]
    log_z = scaled.logsumexp(-1)
    probabilities = (scaled - log_z[:, None]).exp()
    ids = (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1)
    return ids, scaled.gather(-1, ids[:, None]).squeeze(-1), log_z


def eager_accept(log_q: Tensor, log_p: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    accepted = uniforms.log() < log_p.float() - log_q.float()
    return accepted, accepted.long().cumprod(-1).sum(-1)


def warp(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Top-k then top-p, as transformers' warpers do them: one topk, one full sort."""
    scores = logits.masked_fill(logits < logits.topk(top_k)[0][..., -1:], float("-inf"))
    ordered, order = scores.sort(descending=False)
    drop = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
    drop[..., -1:] = False
    return scores.masked_fill(drop.scatter(-1, order, drop), float("-inf"))


def gathered(keys: Tensor, blocks: Tensor, context: int) -> Tensor:
    """[R, Hkv, context, D], contiguous."""
    table = blocks[:, None] if blocks.dim() == 1 else blocks
    return keys[table].flatten(1, 2)[:, :context].transpose(1, 2).contiguous()


def sdpa_variants(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> dict:
    """Calls of torch's attention over gathered keys and values; mask and repetition are made beforehand."""
    q = query.transpose(1, 2).contiguous()
    mask = (torch.arange(keys.shape[2], device=q.device) <= positions[:, :, None])[:, None].contiguous()
    group = q.shape[1] // keys.shape[1]
    wide_keys, wide_values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    calls = {
        "repeated": lambda: scaled_dot_product_attention(q, wide_keys, wide_values, attn_mask=mask),
        "gqa": lambda: scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True),
    }
    if q.shape[2] == 1:
        # One query per row over a full row needs no mask, which opens the flash kernel.
        calls["gqa, no mask"] = lambda: scaled_dot_product_attention(q, keys, values, enable_gqa=True)
    return calls
