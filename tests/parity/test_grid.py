"""Greedy token-identity with plain `generate` over a grid: a pairwise cover always, the full product as `slow`."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from pairwise import all_pairs
from zoo import DRAFTER_KINDS, FAMILIES, GREEDY, drafters, prompts, shared

import hf_psd

NEW_TOKENS = 16
PROCESSORS = {
    "none": {},
    "repetition": dict(repetition_penalty=1.3),
    "ngram": dict(no_repeat_ngram_size=2),
    "bad_words": dict(bad_words_ids=[[59], [20, 52]]),
    "suppress": dict(suppress_tokens=[38], begin_suppress_tokens=[28]),
    "bias": dict(sequence_bias=[[[49], -5.0], [[21, 3], 8.0]]),
    "decay": dict(exponential_decay_length_penalty=(5, 1.5), eos_token_id=2),
    "encoder": dict(encoder_repetition_penalty=1.5),
}
ENDINGS = {"open": {}, "eos": dict(eos_token_id=[28, 34, 14])}
BATCHES, GAMMAS, MODES = (1, 2, 5, 16), (1, 3, 5, 7), ("ar", "sd", "psd")
FACTORS = dict(
    family=FAMILIES,
    batch=BATCHES,
    gamma=GAMMAS,
    mode=MODES,
    drafters=DRAFTER_KINDS,
    processors=list(PROCESSORS),
    ending=list(ENDINGS),
)
CASES = all_pairs(FACTORS)


def arguments(batch: int, processors: str, ending: str) -> dict:
    settings = GREEDY | PROCESSORS[processors] | ENDINGS[ending]
    return prompts(batch, seed=batch) | settings | dict(max_new_tokens=NEW_TOKENS)


@functools.cache
def plain(family: str, batch: int, processors: str, ending: str) -> torch.Tensor:
    return shared(family).generate(**arguments(batch, processors, ending))


def check(family, batch, gamma, mode, kind, processors, ending):
    psd = hf_psd.PSDConfig(gamma=gamma, mode=mode)
    fast = shared(family).generate(
        **arguments(batch, processors, ending), assistant_models=drafters(kind, family), psd=psd
    )
    assert fast.tolist() == plain(family, batch, processors, ending).tolist()
    assert not hf_psd.last_stats().errors


def test_cover_is_small_and_complete():
    assert len(CASES) <= 300
    for a, b in itertools.combinations(FACTORS, 2):
        assert {(case[a], case[b]) for case in CASES} == set(itertools.product(FACTORS[a], FACTORS[b]))
    assert len(FAMILIES) >= 20


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_cover(case):
    check(*case.values())


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("processors", PROCESSORS)
def test_full_product(family, processors):
    endings = itertools.cycle(ENDINGS)
    for batch in BATCHES:
        check(family, batch, 4, "ar", "lookup", processors, next(endings))  # without drafts the rest does not matter
        for gamma, mode, kind in itertools.product(GAMMAS, MODES[1:], DRAFTER_KINDS):
            check(family, batch, gamma, mode, kind, processors, next(endings))
