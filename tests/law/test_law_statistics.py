"""The hypothesis tests against scipy, and the exact laws against arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from hf_psd.testing import chi_square, holm, joint_law, kolmogorov_smirnov, smallest_total_variation, uniforms
from hf_psd.testing.statistics import chi_square_survival, kolmogorov_survival
from hf_psd.testing.toys import tiny_llama


@pytest.mark.parametrize(
    ("x", "df", "noncentrality"), [(3, 2, 0), (280, 209, 0), (900, 209, 0), (300, 209, 80.0), (20, 7, 3.5)]
)
def test_chi_square_survival(x, df, noncentrality):
    expected = stats.ncx2.sf(x, df, noncentrality) if noncentrality else stats.chi2.sf(x, df)
    assert chi_square_survival(x, df, noncentrality) == pytest.approx(expected, rel=1e-8)


def test_kolmogorov_survival():
    for x in (0.1, 0.5, 0.9, 1.36, 2.5, 5.0):
        assert kolmogorov_survival(x) == pytest.approx(stats.kstwobign.sf(x), rel=1e-9, abs=1e-300)


def test_chi_square_pools_small_cells():
    counts, chances = [500, 480, 9, 7, 4], torch.tensor([0.5, 0.48, 0.01, 0.006, 0.004])
    index = torch.repeat_interleave(torch.arange(5), torch.tensor(counts))
    result = chi_square(index, chances)
    expected = stats.chisquare([500, 480, 9, 11], [500, 480, 10, 10])
    assert result.df == 3 and result.outside == 0 and result.n == 1000
    assert result.statistic == pytest.approx(expected.statistic, rel=1e-5)
    assert result.p_value == pytest.approx(expected.pvalue, rel=1e-5)
    assert result.z == pytest.approx((expected.statistic - 3) / math.sqrt(6), rel=1e-5)


def test_chi_square_of_a_single_possible_cell():
    sure = torch.tensor([1.0, 0.0])
    assert chi_square(torch.zeros(50, dtype=torch.int64), sure).p_value == 1.0
    one_off = torch.zeros(50, dtype=torch.int64)
    one_off[3] = 1
    assert chi_square(one_off, sure).p_value == 0.0


def test_an_impossible_sample_gives_zero():
    index = torch.arange(1000) % 2
    index[0] = -1
    result = chi_square(index, torch.tensor([0.5, 0.5]))
    assert result.p_value == 0.0 and result.outside == 1 and abs(result.z) < 1
    numbers = torch.rand(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    numbers[5] = -1.0
    assert kolmogorov_smirnov(numbers).p_value == 0.0


def test_kolmogorov_smirnov():
    numbers = torch.rand(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    result, expected = kolmogorov_smirnov(numbers), stats.kstest(numbers.numpy(), "uniform")
    assert result.statistic == pytest.approx(expected.statistic, rel=1e-9)
    assert result.p_value == pytest.approx(expected.pvalue, rel=0.05)
    assert kolmogorov_smirnov(numbers.sqrt()).p_value < 1e-12
    with_gaps = torch.cat([numbers, torch.full((7,), torch.nan, dtype=torch.float64)])
    assert kolmogorov_smirnov(with_gaps) == result


def test_p_values_are_uniform_under_the_law():
    generator = torch.Generator().manual_seed(1)
    chances = torch.rand(60, generator=generator).double()
    chances /= chances.sum()
    found = [
        chi_square(torch.multinomial(chances, 4000, True, generator=generator), chances).p_value for _ in range(300)
    ]
    assert stats.kstest(found, "uniform").pvalue > 1e-3


def test_holm():
    assert holm({"a": 0.5, "b": 0.0004, "c": 0.003, "d": 0.02}, alpha=0.01) == ["b", "c"]
    assert holm({"a": 0.0026, "b": 0.9, "c": 0.9, "d": 0.9}, alpha=0.01) == []
    assert holm({"a": 0.0024, "b": 0.0034, "c": 0.9, "d": 0.9}, alpha=0.01) == ["a"]


@pytest.mark.parametrize("cells", [2, 64])
def test_smallest_total_variation_is_what_is_caught(cells):
    n, power = 10_000, 0.9
    distance = smallest_total_variation(n, cells, power=power)
    chances = torch.full((cells,), 1 / cells, dtype=torch.float64)
    bent = chances.clone()
    bent[::2] *= 1 + 2 * distance
    bent[1::2] *= 1 - 2 * distance
    assert float((bent - chances).abs().sum() / 2) == pytest.approx(distance)
    generator = torch.Generator().manual_seed(2)
    caught = [
        chi_square(torch.multinomial(bent, n, True, generator=generator), chances).p_value < 0.01 for _ in range(400)
    ]
    assert sum(caught) / 400 == pytest.approx(power, abs=0.05)
    assert smallest_total_variation(4 * n, cells, power=power) == pytest.approx(distance / 2)
    assert smallest_total_variation(n, 2 * cells, power=power) > distance


def test_joint_law_is_the_product_of_conditionals():
    model = tiny_llama(0)
    options = {"do_sample": True, "temperature": 2.0, "top_k": 3, "eos_token_id": [2, 6], "pad_token_id": 0}
    law = joint_law(model, [3, 4, 5], tokens=3, **options)
    assert law.probabilities.sum().item() == pytest.approx(1.0, abs=1e-12)
    keys = law.cells[:, 0] * 64 + law.cells[:, 1] * 8 + law.cells[:, 2]
    assert (keys.diff() > 0).all()
    assert torch.equal(law.index(law.cells), torch.arange(len(keys)))

    def step(prefix):
        if {2, 6} & set(prefix[3:]):
            return torch.eye(8)[0].double()
        with torch.no_grad():
            scores = model(torch.tensor([prefix])).logits[0, -1] / 2.0
        scores[scores < scores.topk(3).values[-1]] = -torch.inf
        return scores.double().softmax(-1)

    for cell, chance in zip(law.cells.tolist(), law.probabilities.tolist()):
        expected = 1.0
        for place, token in enumerate(cell):
            expected *= step([3, 4, 5, *cell[:place]])[token].item()
        assert chance == pytest.approx(expected, rel=1e-5)

    first = law.first(1)
    direct = joint_law(model, torch.tensor([3, 4, 5]), tokens=1, **options)
    assert torch.equal(first.cells, direct.cells)
    torch.testing.assert_close(first.probabilities, direct.probabilities)
    impossible = [token for token in range(8) if token not in direct.cells.flatten().tolist()]
    assert law.index(torch.tensor([[impossible[0], 1, 1]])).tolist() == [-1]

    samples = torch.tensor([[2, 0, 0], [impossible[0], 1, 1]])
    numbers = uniforms(model, [3, 4, 5], samples, **options)
    assert numbers[1, 0] == -1.0
    if 2 in direct.cells:
        assert 0 <= numbers[0, 0] <= 1 and numbers[0, 1:].isnan().all()


def test_processors_see_where_the_prompt_ends():
    model = tiny_llama(0)
    options = {"do_sample": True, "temperature": 4.0, "eos_token_id": 2, "pad_token_id": 0, "min_new_tokens": 2}
    law = joint_law(model, [3, 4, 5], tokens=3, **options)
    assert not (law.cells[:, :2] == 2).any() and (law.cells[:, 2] == 2).any()


def test_too_large_a_joint_law_is_refused():
    model = tiny_llama(0, vocab_size=64)
    law = joint_law(model, [3, 4, 5], tokens=2, do_sample=True, top_k=1, eos_token_id=None)
    with pytest.raises(ValueError, match="too many"):
        law.index(torch.zeros(1, 11, dtype=torch.int64))
