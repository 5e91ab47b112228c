"""Block pools against a model of who owns what, and paged KV against a dictionary of what was written where."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_psd.blocks import TRASH, ZERO, BlockPool
from hf_psd.cache import KVAddress, PagedCache
from hf_psd.runner import Rows

CPU, HEADS, DIM, SLOTS = torch.device("cpu"), 2, 3, 3


@given(
    st.integers(1, 12),
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(["cover", "trim", "release"]), st.integers(0, SLOTS - 1), st.integers(0, 20))),
)
def test_blocks_are_conserved(total, size, events):
    pool, held = BlockPool(total, size, SLOTS, 20, CPU), [0] * SLOTS
    for event, slot, tokens in events:
        wanted = -(-tokens // size)
        if event == "cover":
            fits = wanted - held[slot] <= total - sum(held)
            assert pool.cover(slot, tokens) == fits
            held[slot] = max(held[slot], wanted) if fits else held[slot]
        elif event == "trim":
            pool.trim(slot, tokens)
            held[slot] = min(held[slot], wanted)
        else:
            assert len(pool.release(slot)) == held[slot]
            held[slot] = 0
        pool.check()
        assert [len(owned) for owned in pool.owned] == held
        assert (pool.used, pool.free) == (sum(held), total - sum(held))
        pool.upload()
        for slot, owned in enumerate(pool.owned):
            row = pool.table[slot].tolist()
            assert row == owned + [ZERO] * (len(row) - len(owned)) and TRASH not in row


def test_a_lost_or_shared_block_is_noticed():
    pool = BlockPool(4, 2, SLOTS, 8, CPU)
    assert pool.cover(0, 4)
    pool.owned[1].append(pool.owned[0][0])
    with pytest.raises(AssertionError, match="lost or owned twice"):
        pool.check()
    pool.owned[1].clear()
    pool.owned[0].reverse()
    with pytest.raises(AssertionError, match="not what it owns"):
        pool.check()


def test_widening():
    pool = BlockPool(9, 2, SLOTS, 4, CPU)
    assert pool.cover(0, 4) and pool.columns == 4
    pool.widen(9)
    assert pool.columns == 10 and pool.table.shape == (SLOTS, 5) and pool.cover(0, 9)
    pool.upload()
    pool.check()
    assert pool.table[0].tolist() == pool.owned[0]


ROWS = st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True)


@settings(max_examples=60)
@given(st.integers(1, 4), st.lists(st.tuples(ROWS, st.integers(1, 3), st.integers(0, 2**31)), min_size=1, max_size=6))
def test_writes_and_reads(size, calls):
    pool = BlockPool(30, size, SLOTS, 9, CPU)
    cache, model = PagedCache(2, pool), {}
    capacity = pool.columns
    for slots, width, seed in calls:
        draw = torch.Generator().manual_seed(seed)
        rows = Rows(slots, CPU)
        starts = torch.randint(-2, 9 - width + 1, (len(slots), 1), generator=draw)
        positions = starts + torch.arange(width)
        positions = torch.where(positions < 0, capacity, positions)
        for slot in slots:
            pool.cover(slot, int(torch.randint(0, 10, (1,), generator=draw)))
        pool.upload()
        kv_length = int(torch.randint(1, capacity + 1, (1,), generator=draw))
        cache.point_at(KVAddress(rows.slots, positions, kv_length, rows.span))
        for layer in range(2):
            keys, values = torch.randn(2, len(slots), HEADS, width, DIM, generator=draw)
            got_keys, got_values = cache.update(keys, values, layer)
            assert got_keys.shape == got_values.shape == (len(slots), HEADS, kv_length, DIM)
            for row, slot in enumerate(slots):
                for column, position in enumerate(positions[row].tolist()):
                    if position < len(pool.owned[slot]) * size:
                        model[layer, slot, position] = keys[row, :, column], values[row, :, column]
                for position in range(kv_length):
                    key, value = model.get((layer, slot, position), (torch.zeros(HEADS, DIM),) * 2)
                    assert torch.equal(got_keys[row, :, position], key)
                    assert torch.equal(got_values[row, :, position], value)
    assert not cache.layers[0].keys[ZERO].any(), "the block that stands for none is never written"


def test_scrubbing():
    pool = BlockPool(4, 2, SLOTS, 8, CPU)
    cache = PagedCache(1, pool)
    cache.scrub([2])
    pool.cover(0, 4), pool.upload()
    states = torch.full((1, HEADS, 4, DIM), torch.nan)
    cache.point_at(KVAddress(torch.tensor([0]), torch.arange(4)[None], 4))
    cache.update(states, states, 0)
    cache.scrub(pool.release(0))
    assert cache.layers[0].keys.isfinite().all()


def test_no_memory_names_the_setting(monkeypatch):
    pool = BlockPool(4, 2, SLOTS, 8, CPU)
    cache = PagedCache(1, pool)
    cache.point_at(KVAddress(torch.tensor([0]), torch.arange(4)[None], 4))

    def refuse(*args):
        raise RuntimeError("full")

    monkeypatch.setattr(torch.Tensor, "new_zeros", refuse)
    with pytest.raises(RuntimeError, match="no memory for .* 4 blocks of 2 tokens. Lower `kv_memory`. .full"):
        cache.update(torch.zeros(1, HEADS, 4, DIM), torch.zeros(1, HEADS, 4, DIM), 0)
