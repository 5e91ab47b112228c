"""The torch specification of sampling and verification, which every kernel is tested against.

All arithmetic is fp32 whatever the input dtype. Nothing here waits for the device. A row with NaN, +inf or nothing
finite is *bad*: it is reported, and the ids it yields still lie within the vocabulary.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .philox import ACCEPT, COUPLED, RESIDUAL, log_exponential, uniform

Law = Literal["rejection", "coupled"]


class Sample(NamedTuple):
    ids: Tensor
    """int64 [R]"""
    logit: Tensor
    """fp32 [R], of the chosen token, after temperature"""
    logsumexp: Tensor
    """fp32 [R], after temperature"""


class Verdict(NamedTuple):
    ids: Tensor
    """int64 [R, T]: the accepted drafts and one corrected or bonus token, then -1"""
    n_emitted: Tensor
    """int64 [R], 1..T"""
    bad: Tensor
    """bool [R]: a position up to and including the last emitted one had NaN, +inf or nothing finite"""


class Accepted(NamedTuple):
    accepted: Tensor
    """bool [R, G]"""
    first_rejection: Tensor
    """int64 [R]: index of the first candidate that was not accepted, G if all were"""


def bad_rows(logits: Tensor) -> Tensor:
    """bool [...] for logits [..., V]: the row holds NaN or +inf, or nothing finite."""
    return ~_peak(logits)[1].isfinite()


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
    """Draw one token for each row of logits [R, V] by the exponential race argmax(logits / temperature - log E).

    Args:
        logits: [R, V], any float dtype; -inf excludes a token.
        temperature: fp32 [R], 0 means argmax for that row and the row's logit and logsumexp are those at
            temperature 1. None: every row is greedy, no noise is computed.
        seed: 64-bit key, int or 0-d int64 tensor.
        position, request, round: int64 [R], the noise's counters.
        purpose: DRAFT for a drafter under "rejection", COUPLED (with round 0) under "coupled".
    """
    ids, peak = _peak(logits)
    scaled = logits.float()
    if temperature is not None:
        scaled = _scale(scaled, temperature)
        ids = torch.where(temperature > 0, race(scaled, seed, position, request, round, purpose), ids)
    ids = torch.where(peak.isfinite(), ids, 0)
    return Sample(ids, _at(scaled, ids), scaled.logsumexp(-1))


def race(
    log_weights: Tensor, seed: Tensor | int, position: Tensor, request: Tensor, round: Tensor | int, purpose: int
) -> Tensor:
    """argmax(log_weights - log E): int64 [...] ids with P(id) proportional to exp(log_weights), fp32 [..., V]."""
    noise = log_exponential(seed, position, request, round, purpose, log_weights.shape[-1])
    return noise.neg_().add_(log_weights).argmax(-1)


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
    """Leviathan et al. (2023): candidate g of a row is accepted when log u < log p - log q.

    Args:
        draft_logprob: [R, G], log q of the drafted ids. A value that is not finite (the drafter could not have drawn
            this id) rejects.
        target_logprob: [R, G], log p of the drafted ids, -inf where there is no draft.
        uniforms: fp32 [R, G]; None draws them from (seed, position + g, request, round) with purpose ACCEPT.
        position: int64 [R], index of the first candidate.
    """
    draft_logprob, target_logprob = draft_logprob.float(), target_logprob.float()
    count = draft_logprob.shape[-1]
    if uniforms is None:
        steps = torch.arange(count, device=draft_logprob.device)
        uniforms = uniform(seed, position[:, None] + steps, request[:, None], _column(round), ACCEPT)
    accepted = (uniforms.log() < target_logprob - draft_logprob) & draft_logprob.isfinite()
    return Accepted(accepted, accepted.long().cumprod(-1).sum(-1))


def accepted(
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
) -> Tensor:
    """Whether each row's one candidate stands: bool [R]. Arguments as in `verify`, without the T dimension."""
    best, peak = _peak(target_logits)
    agrees = _agreement(
        target_logits[:, None],
        best[:, None],
        draft_ids[:, None],
        None if draft_logits is None else draft_logits[:, None],
        point_mass,
        temperature,
        law,
        (seed, position, request, round),
    )[0]
    return agrees[:, 0] & peak.isfinite()


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
    """Accept a run of drafts and draw the token after it, so that the emitted ids follow the target's law.

    "rejection" is Leviathan et al. (2023): accept while log u < log p - log q, at the first rejection draw from
    max(p - q, 0), after a fully accepted row draw from p. "coupled" is Daliri et al. (2024): accept while the draft
    equals argmax(logits / temperature - log E), with noise that the drafter shares.

    Args:
        target_logits: [R, T, V]; position t scores the token after the first t drafts.
        draft_ids: int64 [R, T - 1], -1 = no draft (and none after it).
        draft_logits: [R, T - 1, V'], what the drafts were drawn from, before temperature. V' may differ from V: a
            token that only one side knows has probability 0 on the other. Unused under "coupled" and in greedy rows.
        point_mass: bool [R], q = 1 at the drafted id. None: all rows if draft_logits is None, else no row.
        temperature: fp32 [R], 0 = greedy row; None = every row is greedy.
        position: int64 [R], unpadded index of the first token to be emitted.
        request, round: int64 [R]. "coupled" ignores the round.

    A draft that its q could not have produced (log q not finite) is rejected and replaced by a draw from p.
    """
    check_verify(target_logits, draft_ids, law)
    length = target_logits.shape[1]
    best, peak = _peak(target_logits)
    fine = peak.isfinite()
    counters = (seed, position, request, round)
    agrees, picks, scaled, log_z, log_q = _agreement(
        target_logits, best, draft_ids, draft_logits, point_mass, temperature, law, counters
    )
    stop = (agrees & fine[:, :-1]).long().cumprod(-1).sum(-1)
    token = _at(picks, stop)
    if scaled is not None:
        drawn = _draw_at_stop(scaled, log_z, log_q, draft_ids, draft_logits, point_mass, temperature, counters, stop)
        token = torch.where(temperature > 0, drawn, token)
    token = torch.where(_at(fine, stop), token, 0)

    steps = torch.arange(length, device=stop.device)
    ids = torch.nn.functional.pad(draft_ids, (0, 1), value=-1)
    ids = torch.where(steps < stop[:, None], ids, torch.where(steps == stop[:, None], token[:, None], -1))
    bad = (~fine & (steps <= stop[:, None])).any(-1)
    return Verdict(ids, stop + 1, bad)


def check_verify(target_logits: Tensor, draft_ids: Tensor, law: str) -> None:
    """Raises ValueError for shapes that do not fit or an unknown law."""
    rows, length, _ = target_logits.shape
    if draft_ids.shape != (rows, length - 1):
        raise ValueError(
            f"draft_ids must be [R, T - 1] = {(rows, length - 1)} for target_logits {tuple(target_logits.shape)}, "
            f"got {tuple(draft_ids.shape)}"
        )
    if law not in ("rejection", "coupled"):
        raise ValueError(f'law must be "rejection" or "coupled", got {law!r}')


def _agreement(target_logits, best, draft_ids, draft_logits, point_mass, temperature, law, counters):
    """Which drafts stand, each on its own: bool [R, G]; and what the law needs further on.

    Returns (agrees [R, G], picks [R, T], scaled [R, T, V] | None, log_z [R, T] | None, log_q [R, G] | None); the last
    three are None unless the stop position is still to be raced.
    """
    seed, position, request, round = counters
    count = draft_ids.shape[-1]
    if temperature is None:
        return draft_ids == best[:, :count], best, None, None, None
    scaled = _scale(target_logits, temperature)
    steps = torch.arange(target_logits.shape[1], device=draft_ids.device)
    sampled = temperature[:, None] > 0
    if law == "coupled":
        raced = race(scaled, seed, position[:, None] + steps, request[:, None], 0, COUPLED)
        picks = torch.where(sampled, raced, best)
        return draft_ids == picks[:, :count], picks, None, None, None
    log_z = scaled.logsumexp(-1)
    log_p = _log_prob(scaled[:, :count], log_z[:, :count], draft_ids)
    log_q = torch.zeros_like(log_p)
    if draft_logits is not None:
        draft_scaled = _scale(draft_logits, temperature)
        soft = _log_prob(draft_scaled, draft_scaled.logsumexp(-1), draft_ids)
        log_q = soft if point_mass is None else torch.where(point_mass[:, None], log_q, soft)
    stands = accept(log_q, log_p, seed=seed, position=position, request=request, round=round).accepted
    return torch.where(sampled, stands, draft_ids == best[:, :count]), best, scaled, log_z, log_q


def _draw_at_stop(scaled, log_z, log_q, draft_ids, draft_logits, point_mass, temperature, counters, stop):
    """One draw a row, from the residual where a draft was rejected, else from p: int64 [R]."""
    seed, position, request, round = counters
    rows, vocab, count = stop.shape[0], scaled.shape[-1], draft_ids.shape[-1]
    index = torch.arange(rows, device=stop.device)
    log_p = scaled[index, stop] - log_z[index, stop][:, None]
    if count:
        at = stop.clamp(max=count - 1)
        refused = (stop < count) & (_at(draft_ids, at) >= 0) & _at(log_q, at).isfinite()
        tokens = torch.arange(vocab, device=stop.device)
        row_log_q = torch.where(tokens == _at(draft_ids, at)[:, None], 0.0, float("-inf"))
        if draft_logits is not None:
            soft = _scale(draft_logits[index, at], temperature)
            soft = soft - soft.logsumexp(-1, keepdim=True)
            soft = torch.nn.functional.pad(soft, (0, vocab - soft.shape[-1]), value=float("-inf"))
            row_log_q = soft if point_mass is None else torch.where(point_mass[:, None], row_log_q, soft)
        residual = (log_p.exp() - row_log_q.exp()).clamp(min=0).log()
        # Where p and q differ by rounding alone nothing may be left over, and p itself is the law.
        refused = refused & (residual.amax(-1) > float("-inf"))
        log_p = torch.where(refused[:, None], residual, log_p)
    return race(log_p, seed, position + stop, request, round, RESIDUAL)


def _peak(logits: Tensor) -> tuple[Tensor, Tensor]:
    """argmax (int64) and fp32 max over the last dimension; NaN wins, so the max alone tells a bad row."""
    ids = logits.argmax(-1)
    return ids, _at(logits, ids).float()


def _at(values: Tensor, index: Tensor) -> Tensor:
    return values.gather(-1, index[..., None]).squeeze(-1)


def _scale(logits: Tensor, temperature: Tensor) -> Tensor:
    """fp32 logits times 1 / temperature, which is 1 in greedy rows; temperature runs over the first dimension."""
    inverse = torch.where(temperature > 0, temperature.float().reciprocal(), 1.0)
    return logits.float() * inverse.view(-1, *[1] * (logits.dim() - 1))


def _log_prob(scaled: Tensor, log_z: Tensor, ids: Tensor) -> Tensor:
    """log-probability of ids [R, G] under scaled [R, G, V]; -inf for ids outside the vocabulary."""
    vocab = scaled.shape[-1]
    found = _at(scaled, ids.clamp(0, vocab - 1)) - log_z
    return torch.where((ids >= 0) & (ids < vocab), found, float("-inf"))


def _column(value: Tensor | int) -> Tensor | int:
    return value[:, None] if isinstance(value, Tensor) else value
