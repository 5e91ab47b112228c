"""What a seed fixes, and that no row depends on another."""

from __future__ import annotations

import pytest
import torch

import hf_psd
from hf_psd.testing import judge_samples, sample_joint
from hf_psd.testing.gates import COPYING, MAIN, near, other, target, wrong
from hf_psd.testing.toys import FullDepth, Peeking, RaggedDepths, StayOrSwitch

OPTIONS = MAIN.generate_kwargs


def draw(n=200, tokens=6, prompt=(3, 4, 5), drafters=None, hooks=(), batch_size=512, **psd):
    return sample_joint(
        target(),
        prompt,
        n,
        tokens=tokens,
        assistant_models=[other()] if drafters is None else drafters,
        psd={"gamma": 2, "selector": FullDepth(), **psd},
        psd_hooks=list(hooks),
        batch_size=batch_size,
        **OPTIONS,
    )


@pytest.mark.parametrize("law", ["rejection", "coupled"])
def test_a_seed_gives_the_same_text_twice_and_another_seed_another(law):
    first = draw(seed=5, verification=law)
    assert torch.equal(first, draw(seed=5, verification=law))
    assert not torch.equal(first, draw(seed=6, verification=law))


def test_without_a_seed_torchs_generator_decides():
    torch.manual_seed(3)
    first = draw()
    second = draw()
    torch.manual_seed(3)
    assert torch.equal(first, draw()) and not torch.equal(first, second)


@pytest.mark.parametrize("law", ["rejection", "coupled"])
def test_the_text_of_a_row_does_not_depend_on_the_rows_beside_it(law):
    whole = draw(n=60, seed=5, verification=law)
    assert torch.equal(whole, draw(n=60, seed=5, verification=law, batch_size=7))
    assert torch.equal(whole[::2], draw(n=60, seed=5, verification=law, prompt=[(3, 4, 5), (6, 1, 7, 7, 3)])[::2])
    assert len(whole.unique(dim=0)) > 50


def test_coupled_text_depends_on_the_seed_alone():
    """Equality over drafters, depths, modes and policies, also one that looks at discarded drafts."""
    plain = draw(seed=5, verification="coupled", mode="ar", prompt=COPYING.prompt)
    peeking = Peeking(8)
    for drafters, psd, hooks in (
        ([other()], {}, ()),
        ([near()], {"gamma": 5}, ()),
        (["prompt_lookup"], {"mode": "psd"}, ()),
        ([near(), wrong()], {"selector": StayOrSwitch(), "mode": "psd", "gamma": 3}, ()),
        ([near(), "prompt_lookup"], {"selector": "composite"}, ()),
        ([wrong()], {"selector": RaggedDepths(), "gamma": 4}, ()),
        ([other()], {"selector": peeking}, (peeking,)),
    ):
        text = draw(seed=5, verification="coupled", prompt=COPYING.prompt, drafters=drafters, hooks=hooks, **psd)
        assert torch.equal(text, plain), (len(drafters), psd)


@pytest.mark.parametrize("drafter", [other, near])
def test_a_gate_is_no_vacuous_test(drafter):
    """Drafts are accepted and rejected in the gates' setting."""
    draw(drafters=[drafter()], seed=1)
    stats = hf_psd.last_stats()
    assert 0.2 < stats.acceptance < 0.98 and stats.drafted > 300


def test_judge_samples_takes_any_model_and_length():
    samples = draw(n=4000, tokens=4, seed=8, mode="ar")
    results = judge_samples(target(), MAIN.prompt, samples, MAIN.law, **OPTIONS)
    assert set(results) == {"joint", "tokens"}
    assert all(result.p_value > 1e-4 for result in results.values())
    bent = torch.where(torch.arange(4000)[:, None] % 20 == 0, samples[:1], samples)
    assert judge_samples(target(), MAIN.prompt, bent, MAIN.law, **OPTIONS)["joint"].p_value < 1e-4
