"""What must hold on the GPU before anything is timed; each check returns figures for the report or raises."""

from __future__ import annotations

import itertools
import math

import torch
import triton
import triton.language as tl
from psd_kernels import DRAFT, naive, naive_attention, philox, ragged_attention, sample, tiles, verify
from psd_kernels.common import signed_words

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def numbers(rows: int, start: int = 0) -> dict:
    index = torch.arange(start, start + rows, device="cuda")
    return {"position": index % 4096, "request": index, "round": index % 7}


@triton.jit(do_not_specialize=["position", "request", "tag", "key0", "key1"])
def words_kernel(out_ptr, position, request, tag, key0, key1, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    c1, c2, c3 = position.to(tl.uint32), request.to(tl.uint32), tag.to(tl.uint32)
    r0, r1, r2, r3 = tiles.philox(lane.to(tl.uint32), c1, c2, c3, key0.to(tl.uint32), key1.to(tl.uint32))
    tl.store(out_ptr + lane * 4, r0.to(tl.int64))
    tl.store(out_ptr + lane * 4 + 1, r1.to(tl.int64))
    tl.store(out_ptr + lane * 4 + 2, r2.to(tl.int64))
    tl.store(out_ptr + lane * 4 + 3, r3.to(tl.int64))


def check_philox() -> dict:
    for seed in (0, 1, -1, 2**63 - 1, 0x0123456789ABCDEF):
        counters = 2**31 - 3, 77, 3 | 5 << 8
        got = torch.empty(4096, 4, dtype=torch.int64, device="cuda")
        words_kernel[(1,)](got, *counters, *signed_words(seed), BLOCK=4096)
        key = seed & philox.WORD, (seed >> 32) & philox.WORD
        full = [torch.full((4096,), value) for value in counters]
        expected = torch.stack(philox.philox4x32(torch.arange(4096), *full, *key), 1)
        assert torch.equal(got.cpu(), expected), f"Philox bits differ for seed {seed}"
    return {"philox_words_compared": 5 * 4096 * 4}


def check_logsumexp() -> dict:
    """Error against float64, in units of max(1, |logsumexp|)."""
    worst = 0.0
    for vocab, scale, dtype in itertools.product((32_000, 50_257, 151_936), (1.0, 10.0, 1000.0), DTYPES):
        logits = (torch.randn(16, vocab, device="cuda") * scale).to(dtype)
        for temperature in (None, torch.full((16,), 0.7, device="cuda")):
            got = sample(logits, temperature=temperature, seed=1, purpose=DRAFT, **numbers(16)).logsumexp
            inverse = 1.0 if temperature is None else float(temperature[0].reciprocal())
            exact = (logits.double() * inverse).logsumexp(-1)
            worst = max(worst, ((got.double() - exact).abs() / exact.abs().clamp(min=1)).max().item())
    assert worst <= 1e-6, worst
    return {"logsumexp_error": worst}


def chi_square(counts: torch.Tensor, law: torch.Tensor) -> float:
    """z-score of Pearson's statistic."""
    possible = law > 0
    assert not counts[~possible].any(), "an impossible token was drawn"
    expected = law[possible].double() / law[possible].double().sum() * counts.sum()
    statistic = ((counts[possible].double() - expected) ** 2 / expected).sum().item()
    freedom = int(possible.sum()) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def check_residual_law(draws: int = 1_000_000, rows: int = 50_000, vocab: int = 600) -> dict:
    g = torch.Generator(device="cuda").manual_seed(7)
    target = torch.randn(2, vocab, device="cuda", generator=g) * 1.5
    draft = target[0] + torch.randn(vocab, device="cuda", generator=g)
    target[:, 5] = -math.inf  # so that draft 5 is always refused
    p, q = target[0].softmax(-1), draft.softmax(-1)
    temperature = torch.ones(rows, device="cuda")
    common = {"draft_logits": draft.expand(rows, 1, -1), "temperature": temperature, "seed": 11}
    refused = torch.zeros(vocab, dtype=torch.int64, device="cuda")
    emitted = torch.zeros_like(refused)
    fives = torch.full((rows, 1), 5, device="cuda")
    for start in range(0, draws, rows):
        counters = numbers(rows, start)
        out = verify(target.expand(rows, -1, -1), fives, **common, **counters)
        refused += torch.bincount(out.ids[:, 0], minlength=vocab)
        ids = sample(draft.expand(rows, -1), temperature=temperature, seed=11, purpose=DRAFT, **counters).ids
        out = verify(target.expand(rows, -1, -1), ids[:, None], **common, **counters)
        emitted += torch.bincount(out.ids[:, 0], minlength=vocab)
    scores = {
        "residual_chi_square_z": chi_square(refused, (p - q).clamp(min=0)),
        "first_token_chi_square_z": chi_square(emitted, p),
        "draws": draws,
    }
    assert abs(scores["residual_chi_square_z"]) < 5 and abs(scores["first_token_chi_square_z"]) < 5, scores
    return scores


def verify_inputs(rows, gamma, vocab, dtype, seed=0):
    """Logits whose drafts are accepted about as often as a good drafter's."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    target = torch.randn(rows, gamma + 1, vocab, device="cuda", generator=g).mul_(2).to(dtype)
    draft = (target[:, :gamma].float() + torch.randn(rows, gamma, vocab, device="cuda", generator=g) * 0.5).to(dtype)
    ids = torch.stack(
        [
            sample(
                draft[:, t], temperature=torch.ones(rows, device="cuda"), seed=3, purpose=DRAFT, **numbers(rows, t)
            ).ids
            for t in range(gamma)
        ],
        1,
    )
    return target, draft, ids


def check_verify() -> dict:
    """Kernels against the specification on the GPU, and for the smallest shapes against it on the CPU."""
    rows_seen, different = 0, 0
    shapes = ((3, 8, 50_257), (8, 4, 128_256), (1, 4, 32_000), (16, 7, 151_936), (5, 1, 1000))
    for dtype in DTYPES:
        brief = dtype != torch.bfloat16
        for rows, gamma, vocab in shapes[: 2 if brief else None]:
            target, draft, ids = verify_inputs(rows, gamma, vocab, dtype)
            target[0, 0, 100:] = -math.inf
            ids[-1, -1] = -1
            heat = torch.rand(rows, device="cuda") + 0.4
            mixed = torch.where(torch.arange(rows, device="cuda") % 3 == 0, 0.0, heat)
            point = torch.arange(rows, device="cuda") % 2 == 0
            laws = (
                ("rejection", mixed, draft, point),
                ("coupled", mixed, None, None),
                ("rejection", heat, draft, None),
                ("rejection", heat, None, None),
                ("rejection", heat, draft[..., : vocab - 17], None),
                ("coupled", None, None, None),
            )
            for law, temperature, q, flags in laws[: 2 if brief else None]:
                call = {
                    "draft_logits": q, "point_mass": flags, "temperature": temperature, "law": law, "seed": 5,
                    **numbers(rows, 100),
                }  # fmt: skip
                got, expected = verify(target, ids, **call), naive.verify(target, ids, **call)
                assert torch.equal(got.bad, expected.bad)
                different += int((got.ids != expected.ids).any(-1).sum())
                rows_seen += rows
                if rows <= 3:
                    here = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in call.items()}
                    on_cpu = naive.verify(target.cpu(), ids.cpu(), **here)
                    different += int((got.ids.cpu() != on_cpu.ids).any(-1).sum())
                    rows_seen += rows
    bad = torch.randn(4, 3, 5000, device="cuda")
    bad[0, 0, 7], bad[1, 0, 9], bad[2, 0] = math.nan, math.inf, -math.inf
    out = verify(
        bad,
        torch.zeros(4, 2, dtype=torch.int64, device="cuda"),
        temperature=torch.ones(4, device="cuda"),
        seed=1,
        **numbers(4),
    )
    assert out.bad.tolist() == [True, True, True, False] and int(out.ids.max()) < 5000
    assert different <= 1, f"{different} of {rows_seen} rows differ"  # one near-tie may fall either way
    return {"verify_rows_compared": rows_seen, "verify_rows_different": different}


def attention_inputs(rows, length, context, heads, kv_heads, dim, dtype, block=0):
    """Full rows of `context` tokens in one slot each, or in shuffled blocks of `block` tokens."""
    size = block or context
    per_row = context // size
    shape = rows * per_row, size, kv_heads, dim
    keys, values = (torch.randn(shape, device="cuda").to(dtype) for _ in range(2))
    query = torch.randn(rows, length, heads, dim, device="cuda").to(dtype)
    blocks = torch.randperm(rows * per_row, device="cuda").view(rows, per_row)
    positions = torch.arange(context - length, context, device="cuda").expand(rows, -1).contiguous()
    return query, keys, values, blocks if block else blocks[:, 0].contiguous(), positions


def check_attention() -> dict:
    worst = {}
    for dtype, (heads, kv_heads, dim), (block, context) in itertools.product(
        DTYPES, ((32, 8, 128), (12, 12, 64), (8, 1, 256), (16, 4, 80), (6, 6, 96)), ((0, 300), (256, 1024), (16, 320))
    ):
        if (dim in (80, 96) and dtype == torch.float16) or (block == 16 and dim != 128):
            continue
        query, keys, values, blocks, positions = attention_inputs(3, 5, context, heads, kv_heads, dim, dtype, block)
        positions = positions - torch.tensor([[0], [100], [context - 3]], device="cuda")
        options = {} if block else {"sliding_window": 70, "softcap": 20.0, "sinks": torch.randn(heads, device="cuda")}
        got = ragged_attention(query, keys, values, blocks, positions, **options).float()
        expected = naive_attention.ragged_attention(query.float(), keys, values, blocks, positions, **options)
        error = ((got - expected).norm() / expected.norm()).item()
        name = str(dtype).removeprefix("torch.")
        worst[name] = max(worst.get(name, 0.0), error)
    limits = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
    assert all(error < limits[name] for name, error in worst.items()), worst
    return {"attention_relative_error": worst}


def run_all() -> dict:
    found = {}
    for check in (check_philox, check_verify, check_logsumexp, check_attention, check_residual_law):
        found |= check()
        print(check.__name__, "ok", flush=True)
    return found
