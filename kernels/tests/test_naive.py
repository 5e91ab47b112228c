from __future__ import annotations

import math

import pytest
import torch
from psd_kernels import naive, philox
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode

INF = float("inf")
P_FLOOR = 1e-4


def counters(rows, *, seed=5, position=17, round=2):
    full = torch.full((rows,), position)
    return {"seed": seed, "position": full, "request": torch.arange(rows), "round": torch.full((rows,), round)}


def chi_square(ids, probabilities):
    """p-value of ids against probabilities; an id that has probability 0 gives 0."""
    counts = torch.bincount(ids, minlength=len(probabilities)).double()
    possible = probabilities > 0
    if counts[~possible].any():
        return 0.0
    expected = probabilities[possible].double() / probabilities[possible].double().sum() * counts.sum()
    return stats.chisquare(counts[possible].numpy(), expected.numpy()).pvalue


def draw_drafts(table, start, count, temperature, common):
    """A Markov drafter: the logits of the next id are table[last id]. Returns ids [R, G] and logits [R, G, V]."""
    last, ids, logits = start, [], []
    for step in range(count):
        logits.append(table[last])
        shifted = dict(common, position=common["position"] + step)
        last = naive.sample(logits[-1], temperature=temperature, purpose=philox.DRAFT, **shifted).ids
        ids.append(last)
    return torch.stack(ids, 1), torch.stack(logits, 1)


def score(table, start, ids):
    return torch.stack([table[start], *[table[ids[:, t]] for t in range(ids.shape[1])]], 1)


@pytest.fixture
def tables():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(5, 5, generator=generator) * 2, torch.randn(5, 5, generator=generator) * 2


def test_sample_law_and_logsumexp():
    rows = 40_000
    logits = torch.tensor([1.0, -INF, 0.3, -2.0, 2.5]).expand(rows, -1)
    temperature = torch.full((rows,), 0.7)
    out = naive.sample(logits, temperature=temperature, purpose=philox.DRAFT, **counters(rows))
    assert chi_square(out.ids, (logits[0] / 0.7).softmax(-1)) > P_FLOOR
    scaled = logits / 0.7
    torch.testing.assert_close(out.logit, scaled.gather(1, out.ids[:, None])[:, 0])
    torch.testing.assert_close(out.logsumexp, scaled.logsumexp(-1))
    assert out.ids.dtype == torch.int64 and out.logit.dtype == out.logsumexp.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sample_greedy_and_mixed_rows(dtype):
    logits = torch.randn(6, 50).to(dtype)
    greedy = naive.sample(logits, temperature=None, purpose=philox.DRAFT, **counters(6))
    assert torch.equal(greedy.ids, logits.argmax(-1))
    torch.testing.assert_close(greedy.logsumexp, logits.float().logsumexp(-1))
    hot = torch.tensor([0.0, 3.0, 0.0, 3.0, 0.0, 3.0])
    mixed = naive.sample(logits, temperature=hot, purpose=philox.DRAFT, **counters(6))
    warm = naive.sample(logits, temperature=torch.full((6,), 3.0), purpose=philox.DRAFT, **counters(6))
    assert torch.equal(mixed.ids[::2], greedy.ids[::2]) and torch.equal(mixed.ids[1::2], warm.ids[1::2])
    torch.testing.assert_close(mixed.logsumexp[::2], greedy.logsumexp[::2])


@pytest.mark.parametrize("temperature", [None, 0.0, 1.0])
def test_bad_rows_are_reported_and_stay_in_the_vocabulary(temperature):
    logits = torch.randn(5, 7)
    logits[0, 3] = math.nan
    logits[1, 2] = INF
    logits[2] = -INF
    logits[3, 1:] = -INF
    assert naive.bad_rows(logits).tolist() == [True, True, True, False, False]
    heat = None if temperature is None else torch.full((5,), temperature)
    out = naive.sample(logits, temperature=heat, purpose=philox.DRAFT, **counters(5))
    assert out.ids[:4].tolist() == [0, 0, 0, 0] and (out.ids < 7).all()


@pytest.mark.parametrize("law", ["rejection", "coupled"])
def test_emitted_ids_follow_the_target(tables, law):
    target, drafter = tables
    rows, gamma = 60_000, 2
    start, temperature = torch.zeros(rows, dtype=torch.int64), torch.full((rows,), 0.8)
    common = counters(rows)
    if law == "coupled":
        last, drafts = start, []
        for step in range(gamma):
            shifted = dict(common, position=common["position"] + step, round=0)
            last = naive.sample(drafter[last], temperature=temperature, purpose=philox.COUPLED, **shifted).ids
            drafts.append(last)
        ids, logits = torch.stack(drafts, 1), None
    else:
        ids, logits = draw_drafts(drafter, start, gamma, temperature, common)
    out = naive.verify(score(target, start, ids), ids, draft_logits=logits, temperature=temperature, law=law, **common)
    assert out.ids.shape == (rows, 3) and not out.bad.any()
    law_of = (target / 0.8).softmax(-1)
    assert chi_square(out.ids[:, 0], law_of[0]) > P_FLOOR
    for first in range(5):
        second = out.ids[(out.ids[:, 0] == first) & (out.n_emitted > 1), 1]
        if len(second) > 500 and law == "rejection":
            assert chi_square(second, law_of[first]) > P_FLOOR
    emitted = (out.ids >= 0).sum(-1)
    assert torch.equal(emitted, out.n_emitted) and set(emitted.tolist()) == {1, 2, 3}
    if law == "rejection":
        overlap = torch.minimum(law_of[0], (drafter / 0.8).softmax(-1)[0]).sum()
        assert (out.n_emitted > 1).float().mean().item() == pytest.approx(overlap.item(), abs=0.012)


def test_shared_noise_would_be_seen(tables, monkeypatch):
    """With draft and residual noise equal the law is off, so the test above can fail."""
    target, drafter = tables
    monkeypatch.setattr(naive, "RESIDUAL", philox.DRAFT)
    rows = 60_000
    start, temperature = torch.zeros(rows, dtype=torch.int64), torch.full((rows,), 0.8)
    common = counters(rows)
    ids, logits = draw_drafts(drafter, start, 1, temperature, common)
    out = naive.verify(score(target, start, ids), ids, draft_logits=logits, temperature=temperature, **common)
    assert chi_square(out.ids[:, 0], (target[0] / 0.8).softmax(-1)) < P_FLOOR


@pytest.mark.parametrize("flag", [True, False])
def test_point_mass_law(flag):
    rows = 40_000
    logits = torch.tensor([0.5, 1.5, -INF, 0.0]).expand(rows, 2, -1)
    ids = (torch.arange(rows) % 4)[:, None]
    extra = {}
    if flag:
        extra = {"draft_logits": torch.full((rows, 1, 4), math.nan), "point_mass": torch.ones(rows, dtype=torch.bool)}
    temperature = torch.ones(rows)
    out = naive.verify(logits, ids, temperature=temperature, **extra, **counters(rows))
    for drafted in range(4):
        assert chi_square(out.ids[drafted::4, 0], logits[0, 0].softmax(-1)) > P_FLOOR
    share = (out.n_emitted[1::4] == 2).float().mean().item()
    assert share == pytest.approx(logits[0, 0].softmax(-1)[1].item(), abs=0.02)


def test_point_mass_and_soft_rows_mix():
    rows, vocab = 8, 20
    target, draft = torch.randn(rows, 3, vocab), torch.randn(rows, 2, vocab)
    ids = torch.randint(vocab, (rows, 2))
    flags = torch.arange(rows) % 2 == 0
    common = dict(temperature=torch.ones(rows), **counters(rows))
    mixed = naive.verify(target, ids, draft_logits=draft, point_mass=flags, **common)
    soft = naive.verify(target, ids, draft_logits=draft, **common)
    hard = naive.verify(target, ids, **common)
    assert torch.equal(mixed.ids, torch.where(flags[:, None], hard.ids, soft.ids))


def test_equal_laws_accept_everything():
    rows = 500
    logits = torch.randn(rows, 3, 11) * 5
    ids = torch.randint(11, (rows, 2))
    out = naive.verify(logits, ids, draft_logits=logits[:, :2], temperature=torch.full((rows,), 0.3), **counters(rows))
    assert (out.n_emitted == 3).all() and torch.equal(out.ids[:, :2], ids)


def test_empty_residual_falls_back_to_p(monkeypatch):
    """Forced rejection where p == q: nothing is left over, the draw comes from p."""
    rows = 20_000
    logits = torch.tensor([0.0, 1.0, -INF, 2.0]).expand(rows, 2, -1)
    ids = torch.full((rows, 1), 3)
    monkeypatch.setattr(naive, "uniform", lambda *a: torch.full((rows, 1), 2.0))
    out = naive.verify(logits, ids, draft_logits=logits[:, :1], temperature=torch.ones(rows), **counters(rows))
    assert (out.n_emitted == 1).all()
    assert chi_square(out.ids[:, 0], logits[0, 0].softmax(-1)) > P_FLOOR


@pytest.mark.parametrize("broken", [-INF, math.nan, INF])
def test_a_draft_that_q_cannot_have_drawn_is_replaced_by_p(broken):
    rows = 20_000
    target = torch.tensor([0.0, 1.0, 0.5, 2.0]).expand(rows, 2, -1)
    draft = torch.tensor([3.0, 0.0, 0.0, broken]).expand(rows, 1, -1)
    ids = torch.full((rows, 1), 3)
    out = naive.verify(target, ids, draft_logits=draft, temperature=torch.ones(rows), **counters(rows))
    assert (out.n_emitted == 1).all() and not out.bad.any()
    assert chi_square(out.ids[:, 0], target[0, 0].softmax(-1)) > P_FLOOR


def test_p_zero_at_the_drafted_id_rejects():
    rows = 300
    target = torch.tensor([0.0, -INF, 0.5, -INF]).expand(rows, 2, -1)
    draft = torch.zeros(rows, 1, 4)
    out = naive.verify(
        target, torch.ones(rows, 1).long(), draft_logits=draft, temperature=torch.ones(rows), **counters(rows)
    )
    assert (out.n_emitted == 1).all() and set(out.ids[:, 0].tolist()) == {0, 2}


@pytest.mark.parametrize(("word", "accepts"), [(0, True), (1, True), (philox.WORD, False)])
def test_uniform_extremes_decide(monkeypatch, word, accepts):
    value = philox.to_uniform(torch.tensor([[word]]))
    monkeypatch.setattr(naive, "uniform", lambda *a: value)
    target, draft = torch.tensor([[[0.0, 0.1], [0.0, 0.0]]]), torch.tensor([[[0.1, 0.0]]])
    ids = torch.zeros(1, 1, dtype=torch.int64)
    out = naive.verify(target, ids, draft_logits=draft, temperature=torch.ones(1), **counters(1))
    assert (out.n_emitted.item() == 2) == accepts
    same = naive.verify(target, ids, draft_logits=target[:, :1], temperature=torch.ones(1), **counters(1))
    assert same.n_emitted.item() == 2


def test_race_survives_uniform_extremes(monkeypatch):
    for word in (0, philox.WORD):
        noise = philox.to_log_exponential(torch.full((1, 4), word))
        monkeypatch.setattr(naive, "log_exponential", lambda *a, noise=noise: noise)
        ids = naive.race(torch.tensor([[-INF, 0.0, 1.0, -INF]]), 0, None, None, 0, 0)
        assert ids.tolist() == [2]


def test_greedy_verify_ragged_drafts_and_mixed_rows():
    target = torch.randn(4, 4, 9)
    best = target.argmax(-1)
    ids = best[:, :3].clone()
    ids[1, 1] = (ids[1, 1] + 1) % 9
    ids[2, 2] = -1
    ids[3] = -1
    out = naive.verify(target, ids, temperature=None, **counters(4))
    assert out.n_emitted.tolist() == [4, 2, 3, 1]
    for row, count in enumerate([4, 2, 3, 1]):
        assert out.ids[row].tolist() == best[row, :count].tolist() + [-1] * (4 - count)
    draft = torch.full((4, 3, 9), math.nan)
    for law in ("rejection", "coupled"):
        mixed = naive.verify(
            target, ids, draft_logits=draft, temperature=torch.tensor([0.0, 0.0, 1.0, 0.0]), law=law, **counters(4)
        )
        keep = torch.tensor([0, 1, 3])
        assert torch.equal(mixed.ids[keep], out.ids[keep])


@pytest.mark.parametrize("law", ["rejection", "coupled"])
def test_no_drafts_at_all(law):
    target = torch.randn(3, 1, 8)
    none = torch.empty(3, 0, dtype=torch.int64)
    for draft in (None, torch.empty(3, 0, 8)):
        out = naive.verify(target, none, draft_logits=draft, temperature=torch.ones(3), law=law, **counters(3))
        assert (out.n_emitted == 1).all() and ((out.ids >= 0) & (out.ids < 8)).all()
    wide = torch.cat([target, torch.randn(3, 2, 8)], 1)
    padded = naive.verify(wide, torch.full((3, 2), -1), temperature=torch.ones(3), law=law, **counters(3))
    assert torch.equal(padded.ids[:, :1], out.ids)


def test_coupled_text_does_not_depend_on_drafts_or_rounds():
    rows, vocab = 32, 12
    target = torch.randn(rows, 3, vocab)
    temperature = torch.full((rows,), 0.9)
    common = counters(rows)
    plain = [
        naive.sample(
            target[:, t],
            temperature=temperature,
            purpose=philox.COUPLED,
            **dict(common, position=common["position"] + t, round=0),
        ).ids
        for t in range(3)
    ]
    drafts = torch.stack([plain[0], torch.where(torch.arange(rows) % 2 == 0, plain[1], (plain[1] + 1) % vocab)], 1)
    out = naive.verify(target, drafts, temperature=temperature, law="coupled", **common)
    late = naive.verify(target, drafts, temperature=temperature, law="coupled", **counters(rows, round=9))
    assert torch.equal(out.ids, late.ids)
    assert out.n_emitted.tolist() == [3, 2] * (rows // 2)
    for t in range(3):
        seen = out.ids[:, t] >= 0
        assert torch.equal(out.ids[seen, t], plain[t][seen])


def test_bad_counts_only_up_to_the_stop_position():
    target = torch.randn(3, 3, 6)
    best = target.argmax(-1)
    target[:, 1, 2] = math.nan
    ids = best[:, :2].clone()
    ids[1, 0] = (ids[1, 0] + 1) % 6
    for temperature in (None, torch.zeros(3)):
        out = naive.verify(target, ids, temperature=temperature, **counters(3))
        assert out.bad.tolist() == [True, False, True]
        assert out.n_emitted.tolist() == [2, 1, 2] and (out.ids < 6).all()
        assert out.ids[0, 1] == out.ids[2, 1] == 0
    for law in ("rejection", "coupled"):
        out = naive.verify(target, ids, temperature=torch.ones(3), law=law, **counters(3))
        assert (out.ids < 6).all() and torch.equal(out.bad, out.n_emitted > 1)


@pytest.mark.parametrize("temperature", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("scale", [1e4, 1.0])
def test_extreme_logits(temperature, scale):
    rows = 64
    generator = torch.Generator().manual_seed(0)
    target = (torch.rand(rows, 3, 30, generator=generator) * 2 - 1) * scale
    draft = (torch.rand(rows, 2, 30, generator=generator) * 2 - 1) * scale
    ids = draft.argmax(-1)
    heat = torch.full((rows,), temperature)
    out = naive.verify(target, ids, draft_logits=draft, temperature=heat, **counters(rows))
    assert not out.bad.any() and ((out.ids >= -1) & (out.ids < 30)).all()
    if scale / temperature >= 1e4:
        last = out.n_emitted - 1
        token = out.ids.gather(1, last[:, None])[:, 0]
        assert torch.equal(token, target[torch.arange(rows), last].argmax(-1))


def test_very_small_probabilities_still_compare():
    """log p - log q = log 1/2 although both probabilities underflow fp32."""
    rows = 20_000
    target = torch.tensor([0.0, -150.0 + math.log(0.5)]).expand(rows, 2, -1)
    draft = torch.tensor([0.0, -150.0]).expand(rows, 1, -1)
    ids = torch.ones(rows, 1, dtype=torch.int64)
    out = naive.verify(target, ids, draft_logits=draft, temperature=torch.ones(rows), **counters(rows))
    assert (out.n_emitted == 2).float().mean().item() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("draft_vocab", [3, 7])
def test_vocabularies_of_different_size(draft_vocab):
    rows = 60_000
    temperature, common = torch.ones(rows), counters(rows)
    target = torch.tensor([0.3, 1.0, -0.5, 0.8, 0.1]).expand(rows, 2, -1)
    draft = torch.linspace(-1, 1, draft_vocab).expand(rows, 1, -1)
    ids = naive.sample(draft[:, 0], temperature=temperature, purpose=philox.DRAFT, **common).ids[:, None]
    out = naive.verify(target, ids, draft_logits=draft, temperature=temperature, **common)
    assert chi_square(out.ids[:, 0], target[0, 0].softmax(-1)) > P_FLOOR
    assert not out.bad.any()


@pytest.mark.parametrize("law", ["rejection", "coupled"])
@pytest.mark.parametrize("kind", ["none", "greedy", "hot", "point"])
def test_accepted_agrees_with_verify(law, kind):
    rows, vocab = 64, 6
    target, draft = torch.randn(rows, 1, vocab), torch.randn(rows, 1, vocab)
    ids = torch.randint(-1, vocab, (rows, 1))
    temperature = {"none": None, "greedy": torch.zeros(rows)}.get(kind, torch.ones(rows))
    q = None if kind == "point" else draft
    common = dict(temperature=temperature, law=law, **counters(rows))
    wide = torch.cat([target, target], 1)
    full = naive.verify(wide, ids, draft_logits=q, **common)
    single = naive.accepted(
        target[:, 0], ids[:, 0], draft_logits=None if q is None else q[:, 0], point_mass=None, **common
    )
    assert single.dtype == torch.bool and torch.equal(single, full.n_emitted == 2)
    assert not single[ids[:, 0] < 0].any() and single.any()


def test_accept_from_uniforms():
    draft = torch.tensor([[0.5, 0.5, 0.5], [0.5, 0.5, -INF]]).clamp(min=-INF)
    draft = torch.where(draft > 0, draft.log(), draft)
    target = torch.tensor([[0.5, 0.25, 0.5], [0.1, 0.5, 0.5]]).log()
    uniforms = torch.tensor([[0.99, 0.51, 0.1], [0.19, 0.3, 0.1]])
    out = naive.accept(draft, target, uniforms=uniforms)
    assert out.accepted.tolist() == [[True, False, True], [True, True, False]]
    assert out.first_rejection.tolist() == [1, 2]


class HostReads(TorchDispatchMode):
    """Refuses what would wait for the device on a GPU: scalars read, shapes that depend on data."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        masks = args[1] if name.startswith("aten.index.") else []
        data_shaped = any(index is not None and index.dtype == torch.bool for index in masks)
        reads = any(word in name for word in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero"))
        assert not (reads or data_shaped), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("law", ["rejection", "coupled"])
@pytest.mark.parametrize("seed", [3, torch.tensor(3)])
def test_nothing_waits_for_the_device(law, seed):
    rows = 4
    common = counters(rows, seed=seed)
    with HostReads():
        for temperature in (None, torch.ones(rows)):
            naive.sample(torch.randn(rows, 9), temperature=temperature, purpose=philox.DRAFT, **common)
            naive.verify(
                torch.randn(rows, 3, 9),
                torch.zeros(rows, 2).long(),
                draft_logits=torch.randn(rows, 2, 9),
                point_mass=torch.zeros(rows, dtype=torch.bool),
                temperature=temperature,
                law=law,
                **common,
            )
    for wait in (lambda x: x[x > 0], lambda x: x.sum().item(), lambda x: x.nonzero()):
        with pytest.raises(AssertionError), HostReads():
            wait(torch.ones(3))


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="draft_ids"):
        naive.verify(torch.randn(2, 3, 5), torch.zeros(2, 3).long(), temperature=None, **counters(2))
    with pytest.raises(ValueError, match="law"):
        naive.verify(
            torch.randn(2, 2, 5), torch.zeros(2, 1).long(), temperature=torch.ones(2), law="typical", **counters(2)
        )
