"""How likely a drafter's draft would have been accepted at a committed token."""

from __future__ import annotations

import torch
from psd_kernels import COUPLED, sample

from ..state import View
from .sampler import Sampler, fit


def acceptance_chance(
    sampler: Sampler,
    logits: torch.Tensor,
    ids: torch.Tensor,
    view: View,
    position: torch.Tensor,
    log_prob: torch.Tensor | None,
    vocab_size: int,
) -> torch.Tensor:
    """Chance that a draft from these logits would have been accepted, [R, N] fp32 in [0, 1].

    Greedy and coupled verification accept exactly the drafts that equal the committed token, so the chance is 0 or 1.
    Rejection sampling accepts with probability sum_v min(p(v), q(v)) (Leviathan et al. 2023, section 3.2). As the
    committed token y follows p, min(1, q(y) / p(y)) has that sum as its mean: one number is kept for each token
    instead of a distribution, and tokens of any age can be reviewed.

    Args:
        sampler: the drafter's law.
        logits: [R, N, V'] of the drafter.
        ids: [R, N] int64, the committed tokens they predict.
        view: the requests; `view.tokens` holds what came before.
        position: [R] int64, position of the first of the N tokens.
        log_prob: [R, N] fp32, log p of the tokens after the call's processors; None unless sampling by rejection.
        vocab_size: width of the target's logits.
    """
    rows, count = ids.shape
    scores = fit(logits, vocab_size).float()
    if not sampler.pipeline.empty:
        tokens = torch.nn.functional.pad(view.tokens, (0, count))
        scores = sampler.pipeline.draft(scores, tokens, view.padding + position, view.rows.slots)
    if sampler.needs_scores:
        assert log_prob is not None
        ratio = scores.gather(-1, ids[..., None])[..., 0] - scores.logsumexp(-1) - log_prob
        return torch.nan_to_num(ratio.clamp(max=0.0).exp(), nan=0.0)
    guesses = scores.argmax(-1)
    if sampler.do_sample:
        step = torch.arange(count, device=ids.device)
        flat = scores.flatten(0, 1)
        guesses = sample(
            flat,
            temperature=torch.ones(rows * count, device=ids.device),
            seed=sampler.seed,
            position=(position[:, None] + step).flatten(),
            request=view.request.repeat_interleave(count),
            round=torch.zeros(rows * count, dtype=torch.long, device=ids.device),
            purpose=COUPLED,
        ).ids.view(rows, count)
    return (guesses == ids).float()
