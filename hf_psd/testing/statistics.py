"""Hypothesis tests for sampled laws, in torch alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ALPHA = 0.01
"""Family-wise chance of a false alarm."""
LEAST_EXPECTED = 5.0
"""Cells that expect fewer samples are pooled."""


@dataclass(frozen=True)
class TestResult:
    """Outcome of one test of samples against a law.

    Attributes:
        statistic: chi-square, or the Kolmogorov-Smirnov distance.
        df: degrees of freedom of the chi-square, 0 for Kolmogorov-Smirnov.
        z: for chi-square (statistic - df) / sqrt(2 df), for Kolmogorov-Smirnov sqrt(n) times the distance.
        p_value: chance of a statistic this large under the law; 0.0 if a sample is impossible under it.
        outside: samples that the law gives probability 0.
        n: samples.
    """

    __test__ = False

    statistic: float
    df: int
    z: float
    p_value: float
    outside: int
    n: int

    def __str__(self) -> str:
        return f"z = {self.z:7.2f}  p = {self.p_value:.2e}  outside = {self.outside}  df = {self.df}  n = {self.n}"


def chi_square(index: Tensor, probabilities: Tensor) -> TestResult:
    """Pearson's chi-square of observed cells against their probabilities.

    Cells expected fewer than 5 times are pooled into one (which takes in the next smallest until it expects 5).

    Args:
        index: [N] int64, the cell of each sample, negative for a sample outside every cell.
        probabilities: [C], summing to 1.
    """
    index, probabilities = index.cpu(), probabilities.double().cpu()
    n, inside = index.numel(), index[index >= 0]
    counts = torch.bincount(inside, minlength=probabilities.numel()).double()
    impossible = n - inside.numel() + int(counts[probabilities <= 0].sum())
    order = probabilities.argsort()
    expected, counts = probabilities[order] * n, counts[order]
    pooled = int((expected < LEAST_EXPECTED).sum())
    while 0 < pooled < expected.numel() and expected[:pooled].sum() < LEAST_EXPECTED:
        pooled += 1
    if pooled:
        expected = torch.cat([expected[:pooled].sum()[None], expected[pooled:]])
        counts = torch.cat([counts[:pooled].sum()[None], counts[pooled:]])
    expected, counts = expected[expected > 0], counts[expected > 0]
    df = expected.numel() - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    if df == 0:
        return TestResult(statistic, 0, 0.0, 0.0 if impossible else 1.0, impossible, n)
    p_value = 0.0 if impossible else chi_square_survival(statistic, df)
    return TestResult(statistic, df, (statistic - df) / math.sqrt(2 * df), p_value, impossible, n)


def kolmogorov_smirnov(uniforms: Tensor) -> TestResult:
    """Distance of numbers from the uniform law on (0, 1), with the asymptotic p-value (Stephens 1970).

    Args:
        uniforms: any shape; NaN is left out, a number outside [0, 1] stands for an impossible sample.
    """
    flat = uniforms.double().flatten().cpu()
    flat = flat[~flat.isnan()]
    possible = flat[(flat >= 0) & (flat <= 1)].sort().values
    n, outside = possible.numel(), flat.numel() - possible.numel()
    if n == 0:
        return TestResult(0.0, 0, 0.0, 0.0 if outside else 1.0, outside, flat.numel())
    steps = torch.arange(1, n + 1, dtype=torch.float64) / n
    distance = float(torch.maximum(steps - possible, possible - (steps - 1 / n)).max())
    root = math.sqrt(n)
    p_value = 0.0 if outside else kolmogorov_survival((root + 0.12 + 0.11 / root) * distance)
    return TestResult(distance, 0, root * distance, p_value, outside, flat.numel())


def chi_square_survival(statistic: float, df: float, noncentrality: float = 0.0) -> float:
    """P(X > statistic) for a chi-square variable X, by Poisson mixing if it is not central."""
    x = torch.tensor(statistic / 2, dtype=torch.float64)
    if noncentrality == 0:
        return float(torch.special.gammaincc(torch.tensor(df / 2, dtype=torch.float64), x))
    mean = noncentrality / 2
    spread = 12 * math.sqrt(mean) + 30
    terms = torch.arange(max(0, int(mean - spread)), int(mean + spread), dtype=torch.float64)
    weights = (terms * math.log(mean) - mean - torch.lgamma(terms + 1)).exp()
    return float((weights * torch.special.gammaincc(terms + df / 2, x.expand_as(terms))).sum())


def kolmogorov_survival(scaled: float) -> float:
    """P(K > scaled) for Kolmogorov's limit law K."""
    if scaled < 0.2:
        return 1.0
    k = torch.arange(1, 101, dtype=torch.float64)
    alternating = 1 - 2 * ((k - 1) % 2)
    return min(1.0, max(0.0, float(2 * (alternating * (-2 * (k * scaled) ** 2).exp()).sum())))


def holm(p_values: Mapping[str, float], alpha: float = ALPHA) -> list[str]:
    """Names that Holm's step-down procedure (1979) rejects, smallest p-value first.

    Under any dependence between the tests, a right law is rejected anywhere with probability at most `alpha`.
    """
    rejected = []
    for done, (name, p_value) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        if p_value > alpha / (len(p_values) - done):
            break
        rejected.append(name)
    return rejected


def smallest_total_variation(n: int, cells: int, alpha: float = ALPHA, power: float = 0.99) -> float:
    """Total variation between law and samples that `n` samples catch, however the error is spread over the cells.

    An error of total variation d has a chi-square noncentrality of at least 4 n d^2 (by Cauchy-Schwarz, with equality
    where every cell is off by the same share), so each error from this size on is rejected with probability `power`;
    an error in rare cells is caught when it is smaller.

    Args:
        n: samples.
        cells: cells of the chi-square test, at least 2.
        alpha: level of the test; for one of m gates under Holm, at worst the family's level over m.
        power: chance of rejection.
    """
    df = cells - 1
    critical = _least(lambda x: chi_square_survival(x, df) <= alpha)
    noncentrality = _least(lambda x: chi_square_survival(critical, df, x) >= power)
    return min(1.0, math.sqrt(noncentrality / (4 * n)))


def _least(holds) -> float:
    """The smallest positive number where a monotone condition holds, by bisection."""
    low, high = 0.0, 1.0
    while not holds(high):
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
