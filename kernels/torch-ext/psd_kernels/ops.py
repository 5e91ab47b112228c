"""The public operators: torch operators over the kernels, and dispatchers that fall back to the torch specification.

The signatures are those of `naive` and `naive_attention`, whose docstrings hold the contracts. A kernel serves a CUDA
tensor where Triton is installed (and a CPU tensor under TRITON_INTERPRET=1); everything else runs the specification.
Triton is imported when the first kernel runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import naive, naive_attention
from .common import per_row, register, seed_words, uses_kernels
from .naive import Accepted, Law, Sample, Verdict


def _verify(*arguments):
    from .verify_launch import launch_verify

    return launch_verify(*arguments)


def _verify_fake(target_logits, *rest):
    rows, length, _ = target_logits.shape
    count = target_logits.new_empty(rows, dtype=torch.int64)
    return count.new_empty(rows, length), count, count.new_empty(rows, dtype=torch.bool)


def _sample(*arguments):
    from .sample_kernel import launch_sample

    return launch_sample(*arguments)


def _sample_fake(logits, *rest):
    rows = logits.shape[0]
    number = logits.new_empty(rows, dtype=torch.float32)
    return logits.new_empty(rows, dtype=torch.int64), number, torch.empty_like(number)


def _accept(*arguments):
    from .accept_kernel import launch_accept

    return launch_accept(*arguments)


def _accept_fake(draft_logprob, *rest):
    flags = draft_logprob.new_empty(draft_logprob.shape, dtype=torch.bool)
    return flags, flags.new_empty(draft_logprob.shape[0], dtype=torch.int64)


def _ragged_attention(*arguments):
    from .attention_launch import launch_ragged_attention

    return launch_ragged_attention(*arguments)


def _ragged_attention_fake(query, *rest):
    return query.new_empty(query.shape)


def _kv_write(*arguments):
    from .attention_launch import launch_kv_write

    launch_kv_write(*arguments)


def _kv_write_fake(*_):
    return None


_NOISE = "Tensor? seed_tensor, SymInt seed, Tensor position, Tensor request, Tensor round"
_verify_op = register(
    "verify",
    "(Tensor target_logits, Tensor draft_ids, Tensor? draft_logits, Tensor? point_mass, Tensor? temperature, "
    f"{_NOISE}, str law) -> (Tensor, Tensor, Tensor)",
    _verify,
    _verify_fake,
)
_sample_op = register(
    "sample",
    f"(Tensor logits, Tensor? temperature, {_NOISE}, SymInt purpose) -> (Tensor, Tensor, Tensor)",
    _sample,
    _sample_fake,
)
_accept_op = register(
    "accept",
    "(Tensor draft_logprob, Tensor target_logprob, Tensor? uniforms, Tensor? seed_tensor, SymInt seed, "
    "Tensor? position, Tensor? request, Tensor? round) -> (Tensor, Tensor)",
    _accept,
    _accept_fake,
)
_ragged_attention_op = register(
    "ragged_attention",
    "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor blocks, Tensor positions, float? scaling, "
    "SymInt? sliding_window, float? softcap, Tensor? sinks, SymInt? kv_length) -> Tensor",
    _ragged_attention,
    _ragged_attention_fake,
)
_kv_write_op = register(
    "kv_write",
    "(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor keys, Tensor values, Tensor blocks, "
    "Tensor positions) -> ()",
    _kv_write,
    _kv_write_fake,
    mutates=("key_cache", "value_cache"),
)


def verify(
    target_logits: Tensor,
    draft_ids: Tensor,
    *,
    draft_logits: Tensor | None = None,
    point_mass: Tensor | None = None,
    temperature: Tensor | None,
    law: Law = "rejection",
    seed: Tensor | int,
    position: Tensor,
    request: Tensor,
    round: Tensor | int,
) -> Verdict:
    """`naive.verify` in two launches: no probability tensor is written, and only one position a row is raced."""
    if not uses_kernels(target_logits):
        return naive.verify(
            target_logits, draft_ids, draft_logits=draft_logits, point_mass=point_mass, temperature=temperature,
            law=law, seed=seed, position=position, request=request, round=round,
        )  # fmt: skip
    naive.check_verify(target_logits, draft_ids, law)
    rows, device = target_logits.shape[0], target_logits.device
    counters = [per_row(value, rows, device) for value in (position, request, round)]
    heat = None if temperature is None else temperature.float().contiguous()
    flags = None if point_mass is None else point_mass.contiguous()
    return Verdict(
        *_verify_op(target_logits, draft_ids, draft_logits, flags, heat, *seed_words(seed, device), *counters, law)
    )


def sample(
    logits: Tensor,
    *,
    temperature: Tensor | None,
    seed: Tensor | int,
    position: Tensor,
    request: Tensor,
    round: Tensor | int,
    purpose: int,
) -> Sample:
    """`naive.sample` in two launches."""
    if not uses_kernels(logits):
        return naive.sample(
            logits,
            temperature=temperature,
            seed=seed,
            position=position,
            request=request,
            round=round,
            purpose=purpose,
        )
    rows, device = logits.shape[0], logits.device
    counters = [per_row(value, rows, device) for value in (position, request, round)]
    heat = None if temperature is None else temperature.float().contiguous()
    return Sample(*_sample_op(logits, heat, *seed_words(seed, device), *counters, purpose))


def accept(
    draft_logprob: Tensor,
    target_logprob: Tensor,
    *,
    uniforms: Tensor | None = None,
    seed: Tensor | int | None = None,
    position: Tensor | None = None,
    request: Tensor | None = None,
    round: Tensor | int | None = None,
) -> Accepted:
    """`naive.accept` in one launch: two scalars are read for each candidate, whatever the vocabulary."""
    if not uses_kernels(draft_logprob):
        return naive.accept(
            draft_logprob,
            target_logprob,
            uniforms=uniforms,
            seed=seed,
            position=position,
            request=request,
            round=round,
        )
    rows, device = draft_logprob.shape[0], draft_logprob.device
    if uniforms is not None:
        return Accepted(*_accept_op(draft_logprob, target_logprob, uniforms, None, 0, None, None, None))
    counters = [per_row(value, rows, device) for value in (position, request, round)]
    return Accepted(*_accept_op(draft_logprob, target_logprob, None, *seed_words(seed, device), *counters))


def ragged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    blocks: Tensor,
    positions: Tensor,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kv_length: int | None = None,
) -> Tensor:
    """`naive_attention.ragged_attention` in two launches: keys and values are read once, masks are never built."""
    # Triton's interpreter multiplies the bit patterns of bf16 matrices.
    if not uses_kernels(query) or (query.dtype == torch.bfloat16 and not query.is_cuda):
        return naive_attention.ragged_attention(
            query, key_cache, value_cache, blocks, positions, scaling=scaling, sliding_window=sliding_window,
            softcap=softcap, sinks=sinks, kv_length=kv_length,
        )  # fmt: skip
    return _ragged_attention_op(
        _dense(query), _dense(key_cache), _dense(value_cache), blocks, positions,
        scaling, sliding_window, softcap, None if sinks is None else sinks.contiguous(), kv_length,
    )  # fmt: skip


def kv_write(
    key_cache: Tensor, value_cache: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, positions: Tensor
) -> None:
    """`naive_attention.kv_write` in one launch."""
    if key_cache.stride(-1) != 1 or value_cache.stride(-1) != 1 or not uses_kernels(key_cache):
        naive_attention.kv_write(key_cache, value_cache, keys, values, blocks, positions)
    else:
        _kv_write_op(key_cache, value_cache, _dense(keys), _dense(values), blocks, positions)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
