"""Ragged KV against a dictionary of what was written where."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_psd.attention import MaskBuilder
from hf_psd.cache import KVAddress, RaggedCache
from hf_psd.runner import Rows

CPU, HEADS, DIM, SLOTS, CAPACITY = torch.device("cpu"), 2, 3, 4, 9
ROWS = st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True)


@settings(max_examples=60)
@given(st.lists(st.tuples(ROWS, st.integers(1, 3), st.integers(0, 2**31)), min_size=1, max_size=6))
def test_writes_and_reads(calls):
    cache, model = RaggedCache(2, SLOTS, CAPACITY), {}
    for slots, width, seed in calls:
        draw = torch.Generator().manual_seed(seed)
        rows = Rows(slots, CPU)
        starts = torch.randint(-2, CAPACITY - width + 1, (len(slots), 1), generator=draw)
        positions = starts + torch.arange(width)
        positions = torch.where(positions < 0, CAPACITY, positions)
        kv_length = int(torch.randint(1, CAPACITY + 1, (1,), generator=draw))
        cache.point_at(KVAddress(rows.slots, positions, kv_length, rows.span))
        for layer in range(2):
            keys, values = torch.randn(2, len(slots), HEADS, width, DIM, generator=draw)
            got_keys, got_values = cache.update(keys, values, layer)
            assert got_keys.shape == got_values.shape == (len(slots), HEADS, kv_length, DIM)
            for row, slot in enumerate(slots):
                for column, position in enumerate(positions[row].tolist()):
                    model[layer, slot, position] = keys[row, :, column], values[row, :, column]
                for position in range(kv_length):
                    key, value = model.get((layer, slot, position), (torch.zeros(HEADS, DIM),) * 2)
                    assert torch.equal(got_keys[row, :, position], key) and torch.equal(
                        got_values[row, :, position], value
                    )
    assert cache.get_mask_sizes(1, 0) == (kv_length, 0)


def test_a_range_of_rows_is_read_without_a_copy():
    cache = RaggedCache(1, SLOTS, CAPACITY)
    for slots, shared in (([1, 2], True), ([2, 1], False), ([0, 2], False)):
        rows = Rows(slots, CPU)
        cache.point_at(KVAddress(rows.slots, torch.zeros(2, 1, dtype=torch.long), 4, rows.span))
        keys, _ = cache.update(torch.randn(2, HEADS, 1, DIM), torch.randn(2, HEADS, 1, DIM), 0)
        whole = cache.layers[0].keys
        assert (keys.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()) == shared


def test_cropping_is_an_error():
    with pytest.raises(RuntimeError, match="cannot be cropped"):
        RaggedCache(1, 1, 4).crop(-1)


@given(
    st.lists(st.integers(-3, 9), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(1, 12),
    st.sampled_from([None, 1, 2, 4]),
)
def test_masks(starts, width, kv_length, window):
    from transformers import LlamaConfig, MistralConfig

    positions = torch.tensor(starts)[:, None] + torch.arange(width)
    config = MistralConfig(sliding_window=window) if window else LlamaConfig()
    for dtype in (None, torch.float32):
        mask = MaskBuilder(config, dtype)(positions, kv_length)
        assert mask.shape == (len(starts), 1, width, kv_length)
        for row, start in enumerate(starts):
            for column in range(width):
                at = start + column
                expected = [key <= at and (window is None or key > at - window) for key in range(kv_length)]
                seen = mask[row, 0, column] if dtype is None else mask[row, 0, column] == 0
                assert seen.tolist() == expected
        assert dtype is None or (mask.dtype == dtype and mask.isfinite().all())
