"""Stateless noise: Philox 4x32-10 in torch, bit for bit what the Triton kernels compute.

Philox is the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Every
number is a function of (seed, position, request, round, purpose, token), so it does not depend on the batch it was
drawn in, on the device or on what was drawn before.
"""

from __future__ import annotations

import torch
from torch import Tensor

DRAFT = 1
ACCEPT = 2
RESIDUAL = 3
COUPLED = 4

WORD = 0xFFFFFFFF
MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
ROUNDS = 10

BELOW_ONE = 1 - 2.0**-24
"""Largest fp32 number under 1: a uniform never reaches 1, so its exponential is finite."""


def philox4x32(c0, c1, c2, c3, key0, key1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox on counters (c0, c1, c2, c3) under the key (key0, key1).

    Args are uint32 values held in int64 tensors that broadcast together; keys may be Python ints. Returns four such
    tensors. A product of two words wraps in int64 with the very bits of the unsigned product, so both are exact.
    """
    for step in range(ROUNDS):
        if step:
            key0 = (key0 + WEYL_0) & WORD
            key1 = (key1 + WEYL_1) & WORD
        low_product = c0 * MULTIPLIER_0
        high_product = c2 * MULTIPLIER_1
        # c1 and c3 keep dirty upper words: they only meet an xor whose result is masked.
        c0 = ((high_product >> 32) ^ (c1 ^ key0)).bitwise_and_(WORD)
        c2 = ((low_product >> 32) ^ (c3 ^ key1)).bitwise_and_(WORD)
        c1, c3 = high_product, low_product
    return c0, c1 & WORD, c2, c3 & WORD


def to_uniform(words: Tensor) -> Tensor:
    """Uint32 words -> fp32 in [2^-32, 1 - 2^-24], with fine steps near 0, where the winners of a race sit.

    The words come in int64, or already rounded to fp32, and then the result is written over them.
    """
    return words.to(torch.float32).clamp_(1, 2.0**32 * BELOW_ONE).mul_(2.0**-32)


def to_log_exponential(words: Tensor) -> Tensor:
    """Uint32 words, as in `to_uniform` -> fp32 log E with E = -log(1 - u) a standard exponential; always finite."""
    return to_uniform(words).neg_().log1p_().neg_().log_()


def _words(value: Tensor | int, like: Tensor) -> Tensor:
    """uint32 words in int64; a Python int is filled in on the device, never copied there."""
    if isinstance(value, Tensor):
        return value.to(torch.int64) & WORD
    return torch.full_like(like, value & WORD, dtype=torch.int64)


def _key(seed: Tensor | int) -> tuple[Tensor | int, Tensor | int]:
    return seed & WORD, (seed >> 32) & WORD


def uniform(seed: Tensor | int, position: Tensor, request: Tensor, round: Tensor | int, purpose: int) -> Tensor:
    """One uniform number for each (position, request, round): fp32, in their broadcast shape, within (0, 1)."""
    c1, c2 = _words(position, position), _words(request, position)
    c3 = _words(purpose | round << 8, position)
    c1, c2, c3 = torch.broadcast_tensors(c1, c2, c3)
    return to_uniform(philox4x32(torch.zeros_like(c1), c1, c2, c3, *_key(seed))[0])


def log_exponential(
    seed: Tensor | int, position: Tensor, request: Tensor, round: Tensor | int, purpose: int, vocab: int
) -> Tensor:
    """log E of a standard exponential for each token: fp32 [..., vocab] over the broadcast shape of the counters.

    Token t reads lane t & 3 of the counter (t >> 2, position, request, purpose | round << 8).

    Args:
        seed: 64-bit key, a Python int or a 0-d int64 tensor on the counters' device.
        position: int64 [...], unpadded index of the token that is drawn.
        request: int64 [...].
        round: int64 [...] or int.
        purpose: DRAFT, ACCEPT, RESIDUAL or COUPLED.
        vocab: number of tokens.
    """
    quads = torch.arange((vocab + 3) // 4, device=position.device)
    c1, c2 = _words(position, position)[..., None], _words(request, position)[..., None]
    c3 = _words(purpose | round << 8, position)[..., None]
    lanes = torch.broadcast_tensors(*philox4x32(quads, c1, c2, c3, *_key(seed)))
    return to_log_exponential(torch.stack([lane.float() for lane in lanes], dim=-1).flatten(-2)[..., :vocab])
