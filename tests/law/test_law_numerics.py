"""Laws stay exact and finite at the edges of fp32."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from psd_kernels import naive, philox

import hf_psd
from hf_psd.testing import chi_square, joint_law, sample_joint
from hf_psd.testing.gates import other, target
from hf_psd.testing.toys import FullDepth

P_FLOOR = 1e-4
ROWS = 40_000


def counters(rows=ROWS, seed=11):
    return {
        "seed": seed,
        "position": torch.full((rows,), 9),
        "request": torch.arange(rows),
        "round": torch.ones(rows).long(),
    }


def two_tokens(p, q, temperature):
    """Two tokens a row by one draft, its verification and, where it was rejected, a second round; their law."""
    heat, first = torch.full((ROWS,), temperature), counters()
    draft = naive.sample(q.expand(ROWS, -1), temperature=heat, purpose=philox.DRAFT, **first).ids[:, None]
    verdict = naive.verify(p.expand(ROWS, 2, -1), draft, draft_logits=q.expand(ROWS, 1, -1), temperature=heat, **first)
    assert not verdict.bad.any() and (verdict.n_emitted == 1).any() and (verdict.n_emitted == 2).any()
    later = dict(first, position=first["position"] + 1, round=first["round"] + 1)
    more = naive.sample(p.expand(ROWS, -1), temperature=heat, purpose=philox.RESIDUAL, **later).ids
    second = torch.where(verdict.n_emitted == 2, verdict.ids[:, 1], more)
    law = (p.double() / temperature).softmax(-1)
    return verdict.ids[:, 0] * len(p) + second, torch.outer(law, law).flatten()


@pytest.mark.parametrize("level", [1e4, -1e4])
def test_logits_far_from_zero(level):
    p = level + torch.tensor([0.0, 1.0, -1.5, 0.5, -3.0])
    q = -level + torch.tensor([1.0, 0.0, 0.5, -2.0, -1.0])
    assert chi_square(*two_tokens(p, q, 1.0)).p_value > P_FLOOR


def test_logits_of_both_extremes():
    p = torch.tensor([1e4, 1e4 - 1.0, -1e4, 1e4 - 0.5, -1e4])
    q = torch.tensor([1e4 - 1.0, 1e4, 1e4 - 2.0, -1e4, -1e4])
    result = chi_square(*two_tokens(p, q, 1.0))
    assert result.p_value > P_FLOOR and result.outside == 0


def test_a_temperature_of_a_thousandth():
    p, q = torch.tensor([0.0, 1e-3, -1.5e-3, 5e-4, -2.0]), torch.tensor([1e-3, 0.0, 5e-4, -2e-3, -1.0])
    result = chi_square(*two_tokens(p, q, 1e-3))
    assert result.p_value > P_FLOOR and result.df >= 8


def judge_second_token(p, q):
    """Verdict on the draft 1 in every row: whether it was rejected [ROWS], and what replaced it where it was."""
    draft = torch.ones(ROWS, 1, dtype=torch.int64)
    out = naive.verify(
        p.expand(ROWS, 2, -1), draft, draft_logits=q.expand(ROWS, 1, -1), temperature=torch.ones(ROWS), **counters()
    )
    assert not out.bad.any() and ((out.ids >= -1) & (out.ids < len(p))).all()
    rejected = out.n_emitted == 1
    return rejected, out.ids[rejected, 0]


def test_log_probabilities_under_minus_100_are_compared_exactly():
    p, q = torch.tensor([0.0, -150.0, -300.0]), torch.tensor([0.0, -150.0 + math.log(4.0), -200.0])
    rejected, _ = judge_second_token(p, q)
    assert chi_square(rejected.long(), torch.tensor([0.25, 0.75])).p_value > P_FLOOR


def test_a_residual_of_tiny_probabilities_keeps_its_proportions():
    p = torch.tensor([0.0, -82.0, -80.0, -80.0 + math.log(3.0)])
    q = torch.tensor([0.0, -82.0 + math.log(4.0), -95.0, -95.0])
    _, replacement = judge_second_token(p, q)
    assert chi_square(replacement, torch.tensor([0.0, 0.0, 0.25, 0.75])).p_value > P_FLOOR


def scaled(model, factor=1.0, lift=0.0):
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(factor)
    model.lm_head.bias = torch.nn.Parameter(torch.full((model.config.vocab_size,), lift))
    return model


@pytest.mark.parametrize(
    ("factor", "lift", "temperature"),
    [
        (1.0, 1e4, 4.0),
        (1.0, -1e4, 4.0),
        (800.0, 0.0, 3200.0),
        (1e-3 / 4, 0.0, 1e-3),
        (100.0, 0.0, 1.0),
        (1.0, 0.0, 1e-3),
    ],
)
@pytest.mark.parametrize("law", ["rejection", "coupled"])
def test_through_the_engine(factor, lift, temperature, law):
    model, drafter = scaled(target(), factor, lift), scaled(other(), factor, -lift)
    options = {"do_sample": True, "temperature": temperature, "top_k": 0, "eos_token_id": None, "pad_token_id": 0}
    psd = {"gamma": 2, "selector": FullDepth(), "seed": 21, "verification": law}
    samples = sample_joint(model, (3, 4, 5), 1024, tokens=3, psd=psd, assistant_models=[drafter], **options)
    assert hf_psd.last_stats().errors == [] and hf_psd.last_stats().drafted > 0
    exact = joint_law(model, (3, 4, 5), 2, **options)
    result = chi_square(exact.index(samples[:, :2]), exact.probabilities)
    assert result.p_value > P_FLOOR and result.outside == 0


def test_scores_of_the_engine_are_finite():
    out = hf_psd.generate(
        scaled(target(), 100.0),
        torch.tensor([[3, 4, 5]]),
        assistant_models=[other()],
        psd={"seed": 1},
        do_sample=True,
        temperature=1e-3,
        top_k=0,
        eos_token_id=None,
        max_new_tokens=6,
        return_dict_in_generate=True,
        output_scores=True,
    )
    scores = torch.stack(out.scores)
    assert scores.isfinite().all() and scores.log_softmax(-1).min() < -100
    assert torch.equal(scores.argmax(-1)[:, 0], out.sequences[0, 3:])
