from __future__ import annotations

import math

import pytest
import torch
from cases import DEVICE, DTYPES, INTERPRETED, LAYOUTS, VerifyCase
from hypothesis import given
from hypothesis import strategies as st
from psd_kernels import common, naive, verify, verify_decide
from psd_kernels.verify_launch import launch_verify

pytestmark = pytest.mark.kernels_ci

FAULTS = ("ragged", "masked", "equal", "bad", "bad draft")
CASES = {
    "number": st.integers(0, 2**32),
    "rows": st.integers(1, 2),
    "length": st.integers(1, 3),
    "vocab": st.integers(4, 50),
    "dtype": st.sampled_from(DTYPES),
    "layout": st.sampled_from(LAYOUTS),
    "law": st.sampled_from(["rejection", "rejection", "coupled"]),
    "heat": st.sampled_from(["hot", "mixed", "hot", "greedy", "none"]),
    "source": st.sampled_from(["soft", "point", "both", "narrow"]),
    "faults": st.sets(st.sampled_from(FAULTS), max_size=2),
    "tensor_seed": st.booleans(),
}


def run(case: VerifyCase, **blocks) -> naive.Verdict:
    arguments = dict(case.arguments)
    rows = case.target.shape[0]
    seed = common.seed_words(arguments.pop("seed"), DEVICE)
    numbers = [common.per_row(arguments.pop(name), rows, DEVICE) for name in ("position", "request", "round")]
    law = arguments.pop("law")
    tensors = [arguments[name] for name in ("draft_logits", "point_mass", "temperature")]
    return naive.Verdict(*launch_verify(case.target, case.drafts, *tensors, *seed, *numbers, law, **blocks))


def assert_same_verdict(got: naive.Verdict, expected: naive.Verdict, vocab: int) -> None:
    assert torch.equal(got.n_emitted, expected.n_emitted)
    assert torch.equal(got.bad, expected.bad)
    assert torch.equal(got.ids, expected.ids)
    assert (got.ids < vocab).all() and (got.ids.gather(1, got.n_emitted[:, None] - 1) >= 0).all()


@given(
    case=st.builds(VerifyCase.draw, **CASES),
    scan_block=st.sampled_from([8, 16, 64]),
    race_block=st.sampled_from([4, 16, 64]),
    splits=st.sampled_from([1, 2, 4]),
)
def test_kernel_equals_the_specification(case, scan_block, race_block, splits):
    got = run(case, scan_block=scan_block, race_block=race_block, max_splits=splits, max_race_splits=splits)
    expected = naive.verify(case.target, case.drafts, **case.arguments)
    assert_same_verdict(got, expected, case.target.shape[-1])


def fixed_cases(law: str = "rejection", count: int = 6):
    for number in range(count):
        yield VerifyCase.draw(
            number, rows=3, length=3, vocab=50, dtype=torch.float32, layout="dense", law=law, heat="hot",
            source=("soft", "both", "point")[number % 3], faults=set(), tensor_seed=False,
        )  # fmt: skip


@pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel does not see the planted fault")
@pytest.mark.parametrize("fault", ["RESIDUAL_TAG", "ACCEPT_TAG"])
def test_planted_fault_is_seen(monkeypatch, fault):
    monkeypatch.setattr(verify_decide, fault, verify_decide.tl.constexpr(7))
    differs = []
    for case in fixed_cases():
        got, expected = (
            run(case, scan_block=16, race_block=16),
            naive.verify(case.target, case.drafts, **case.arguments),
        )
        differs.append(not torch.equal(got.ids, expected.ids))
    assert any(differs)


@pytest.mark.parametrize("law", ["rejection", "coupled"])
def test_public_operator_with_its_own_blocks(law):
    for case in fixed_cases(law, 2):
        got = verify(case.target, case.drafts, **case.arguments)
        assert isinstance(got, naive.Verdict)
        assert_same_verdict(got, naive.verify(case.target, case.drafts, **case.arguments), 50)


@pytest.mark.parametrize("broken", [-math.inf, math.nan, math.inf])
def test_a_draft_that_q_cannot_have_drawn_is_replaced_by_p(broken):
    case = next(fixed_cases())
    case.arguments["draft_logits"].scatter_(2, case.drafts[..., None], broken)
    got, expected = run(case, scan_block=16, race_block=16), naive.verify(case.target, case.drafts, **case.arguments)
    assert_same_verdict(got, expected, 50)
    assert (got.n_emitted == 1).all() and not got.bad.any()


def test_result_does_not_depend_on_blocks_or_batch():
    case = next(fixed_cases())
    whole = run(case, scan_block=64, race_block=64)
    for blocks in ((8, 4), (16, 32)):
        assert torch.equal(run(case, scan_block=blocks[0], race_block=blocks[1]).ids, whole.ids)
    row = slice(1, 2)
    alone = {k: v[row] if isinstance(v, torch.Tensor) and v.dim() else v for k, v in case.arguments.items()}
    assert torch.equal(verify(case.target[row], case.drafts[row], **alone).ids, whole.ids[row])


def test_wrong_shapes_are_refused():
    case = next(fixed_cases())
    with pytest.raises(ValueError, match="draft_ids"):
        verify(case.target, case.drafts[:, :1], **case.arguments)
