from __future__ import annotations

import math

import pytest
import torch
from psd_kernels import philox
from scipy import stats

PI_COUNTER = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
PI_KEY = (0xA4093822, 0x299F31D0)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((philox.WORD,) * 4, (philox.WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI_COUNTER, PI_KEY, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
    ids=["zeros", "ones", "pi"],
)
@pytest.mark.parametrize("tensor_key", [False, True])
def test_known_answers(counter, key, expected, tensor_key):
    words = [torch.tensor([word]) for word in counter]
    key = [torch.tensor(word) for word in key] if tensor_key else key
    assert tuple(int(word) for word in philox.philox4x32(*words, *key)) == expected


def words_of(seed, position, request, round, purpose, vocab):
    out = []
    for token in range(vocab):
        counters = [torch.tensor(c & philox.WORD) for c in (token >> 2, position, request, purpose | round << 8)]
        out.append(philox.philox4x32(*counters, seed & philox.WORD, (seed >> 32) & philox.WORD)[token & 3])
    return torch.stack(out)


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1, -1, 0x1234567_89ABCDEF])
@pytest.mark.parametrize("vocab", [1, 4, 10])
def test_counters_and_lanes(seed, vocab):
    counters = torch.tensor([[3, 9], [2**31 - 1, 5]]), torch.tensor([[1], [0]]), torch.tensor(4)
    noise = philox.log_exponential(seed, *counters, philox.RESIDUAL, vocab)
    assert noise.shape == (2, 2, vocab) and noise.dtype == torch.float32
    words = words_of(seed, 9, 1, 4, philox.RESIDUAL, vocab)
    assert torch.equal(noise[0, 1], philox.to_log_exponential(words))
    single = philox.uniform(seed, *counters, philox.RESIDUAL)
    assert torch.equal(single[0, 1], philox.to_uniform(words[0]))
    as_tensor = philox.log_exponential(torch.tensor(seed), *counters, philox.RESIDUAL, vocab)
    assert torch.equal(as_tensor, noise)


def test_every_counter_changes_the_noise():
    base = {"seed": 1, "position": 2, "request": 3, "round": 4, "purpose": philox.DRAFT}
    changed = [dict(base, **{name: value + 1}) for name, value in base.items()] + [dict(base, seed=1 + (1 << 32))]
    draws = []
    for c in [base, *changed]:
        draws.append(
            philox.log_exponential(
                c["seed"], torch.tensor(c["position"]), torch.tensor(c["request"]), c["round"], c["purpose"], 64
            )
        )
    for other in draws[1:]:
        assert (draws[0] == other).float().mean() < 0.05


def test_uniform_extremes():
    words = torch.tensor([0, 1, 2, philox.WORD - 1, philox.WORD])
    u = philox.to_uniform(words)
    assert u.tolist() == [2.0**-32, 2.0**-32, 2.0**-31, philox.BELOW_ONE, philox.BELOW_ONE]
    log_e = philox.to_log_exponential(words)
    assert log_e.isfinite().all()
    assert log_e[0].item() == pytest.approx(-32 * math.log(2), rel=1e-6)
    assert log_e[-1].item() == pytest.approx(math.log(24 * math.log(2)), rel=1e-6)


def test_exponential_law_and_independence():
    position = torch.arange(50)
    noise = philox.log_exponential(11, position, torch.tensor(0), 0, philox.DRAFT, 2000).double().exp()
    assert stats.kstest(noise.flatten().numpy(), "expon").pvalue > 1e-4
    pairs = torch.corrcoef(torch.stack([noise[:, :-1].flatten(), noise[:, 1:].flatten()]))
    assert abs(pairs[0, 1]) < 0.02
    assert abs(torch.corrcoef(noise[:2])[0, 1]) < 0.1
