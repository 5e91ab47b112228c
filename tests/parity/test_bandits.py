"""Greedy and coupled text is the same whatever a bandit chooses, by whatever reward, also with gamma as part of it."""

from __future__ import annotations

import pytest
from zoo import GREEDY, P4, assert_plain, shared

import hf_psd

G20 = P4() | GREEDY | dict(max_new_tokens=20)
FORMS = {
    "per group": dict(),
    "per request": dict(per_request=True),
    "goodput": dict(reward="goodput"),
    "gamma auto": dict(reward="goodput", gamma="auto"),
    "gamma auto per request": dict(reward="goodput", gamma="auto", per_request=True),
}

RUNS = [*zip(FORMS, ("psd", "sd", "sd", "psd", "sd")), ("per request", "psd"), ("gamma auto", "auto")]


@pytest.mark.parametrize("name", hf_psd.bandit.names())
def test_every_selector(name):
    models = ["prompt_lookup", shared("llama", noise=0.03), shared("llama", 11)]
    for form, mode in RUNS:
        assert_plain(shared("llama"), models, dict(selector=name, mode=mode, **FORMS[form]), **G20)
        stats = hf_psd.last_stats()
        assert not stats.errors and sum(stats.selector["in_flight"]) == 0
        if mode == "auto":
            continue
        assert stats.drafted > 0 and sum(stats.selector["pulls"]) > 0
        means = [mean for mean in stats.selector["means"] if mean is not None]
        assert means and all(mean >= 0 and (mean <= 1 or "goodput" in FORMS[form].values()) for mean in means)


@pytest.mark.parametrize("verification", ["rejection", "coupled"])
def test_gamma_auto_without_a_bandit(verification):
    psd = dict(gamma="auto", mode="sd", verification=verification)
    assert_plain(shared("llama"), ["prompt_lookup", shared("llama")], psd, **G20 | dict(max_new_tokens=40))
    assert max(depth for depth, tried in enumerate(hf_psd.last_stats().drafted_at, 1) if tried) == 8


@pytest.mark.parametrize("name", ["hedge", "thompson"])
def test_coupled_text_does_not_depend_on_the_bandit(name):
    models = ["prompt_lookup", shared("llama", noise=0.03), shared("llama", 11)]
    arguments = P4() | dict(do_sample=True, top_k=20, pad_token_id=0, eos_token_id=None, max_new_tokens=24)
    texts = [
        shared("llama").generate(
            **arguments, assistant_models=models, psd=dict(verification="coupled", seed=3, selector=name, **form)
        )
        for form in FORMS.values()
    ]
    plain = shared("llama").generate(**arguments, psd=dict(verification="coupled", seed=3, mode="ar"))
    assert all(text.tolist() == plain.tolist() for text in texts)
