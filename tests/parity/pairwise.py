"""A small all-pairs generator: few cases in which every pair of values of any two factors meets at least once."""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

Case = dict[str, Hashable]


def all_pairs(factors: Mapping[str, Sequence[Hashable]], seed: int = 0, tries: int = 12) -> list[Case]:
    """Greedy pairwise cover (after Cohen et al. 1997, AETG): the same `factors` and `seed` give the same cases.

    Each case starts from an uncovered pair and takes the best of `tries` random completions, factor by factor the
    value that covers the most pairs still missing.
    """
    draw = random.Random(seed)
    names = list(factors)
    missing = {
        ((a, value), (b, other)): None
        for a, b in combinations(names, 2)
        for value in factors[a]
        for other in factors[b]
    }
    cases: list[Case] = []
    while missing:
        start = next(iter(missing))
        best = max((_complete(dict(start), factors, missing, draw) for _ in range(tries)), key=lambda tried: tried[0])
        for pair in _pairs(best[1], names):
            missing.pop(pair, None)
        cases.append(best[1])
    return cases


def _complete(case: Case, factors, missing, draw) -> tuple[int, Case]:
    names = list(factors)
    rest = [name for name in names if name not in case]
    draw.shuffle(rest)
    for name in rest:
        gains = {
            value: sum(_pair(names, name, value, other, case[other]) in missing for other in case)
            for value in factors[name]
        }
        most = max(gains.values())
        case[name] = draw.choice([value for value, gain in gains.items() if gain == most])
    return sum(pair in missing for pair in _pairs(case, names)), {name: case[name] for name in names}


def _pair(names, name, value, other, its):
    first, second = (name, value), (other, its)
    return (first, second) if names.index(name) < names.index(other) else (second, first)


def _pairs(case: Case, names: Sequence[str]):
    return [((a, case[a]), (b, case[b])) for a, b in combinations(names, 2)]
