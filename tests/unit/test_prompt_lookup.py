"""Prompt lookup against a search written out token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from zoo import GREEDY, assert_plain, left_padded, shared

import hf_psd
from hf_psd.drafters.prompt_lookup import PromptLookup, continuation
from hf_psd.runner import Rows
from hf_psd.state import View


def view_of(rows, beyond=0):
    """Rows side by side, left-padded with a token that also occurs in the text, and some garbage after the end."""
    inputs = left_padded(rows, pad=1)
    padding = (inputs["attention_mask"] == 0).sum(1)
    garbage = torch.full((len(rows), beyond), 2)
    lengths = torch.tensor([len(row) for row in rows])
    rest = torch.zeros(len(rows), dtype=torch.long)
    tokens = torch.cat([inputs["input_ids"], garbage], 1)
    return View(Rows(range(len(rows)), torch.device("cpu")), tokens, padding, lengths, rest, rest, rest, rest.bool())


def search(text, count, max_ngram, min_ngram):
    for size in range(max_ngram, min_ngram - 1, -1):
        suffix = text[-size:]
        for start in range(len(text) - size - 1, -1, -1):
            if len(suffix) == size and text[start : start + size] == suffix:
                return text[start + size :][:count]
    return []


@given(
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=16), min_size=1, max_size=5),
    st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.integers(0, 7),
)  # fmt: skip
@example([[1, 3, 1, 1], [2] * 8], 2, 2, 2, 0)  # the padding would complete a match
def test_longest_then_latest_match(rows, count, a, b, beyond):
    min_ngram, max_ngram = sorted((a, b))
    found = continuation(view_of(rows, beyond), count, max_ngram, min_ngram)
    assert found.shape == (len(rows), count) and found.dtype == torch.long
    for row, text in enumerate(rows):
        expected = search(text, count, max_ngram, min_ngram)
        assert found[row].tolist() == expected + [-1] * (count - len(expected))


@pytest.mark.parametrize("ngrams", [(0, 0), (2, 3), (3, 0)])
def test_impossible_sizes_are_refused(ngrams):
    with pytest.raises(ValueError, match="1 <= min_ngram <= max_ngram"):
        PromptLookup(*ngrams)


@pytest.mark.parametrize("mode", ["sd", "psd"])
def test_repeating_text_is_drafted(mode):
    """A model that falls into a loop is followed by lookup alone."""
    inputs = left_padded([[5, 9, 17, 33] * 4, [7, 8, 9], [12, 13, 12, 13, 12]])
    target = shared("llama", initializer_range=0.02)
    assert_plain(target, ["prompt_lookup"], dict(mode=mode, gamma=4), **inputs, **GREEDY, max_new_tokens=40)
    assert hf_psd.last_stats().tokens_per_forward > 1.5 and hf_psd.last_stats().acceptance > 0.6


def test_own_sizes():
    models = [PromptLookup(max_ngram=1, min_ngram=1), PromptLookup(max_ngram=4, min_ngram=4)]
    inputs = left_padded([[5, 9, 17, 33, 5], [7, 8, 9]])
    assert_plain(shared("llama"), models, **inputs, **GREEDY, max_new_tokens=30)
    assert hf_psd.last_stats().by_drafter[0].drafted > 0
