"""The ledger against the loop of plain `generate`, written out: any texts, any block sizes, any criteria."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

from hf_psd.ledger import Ledger, StopRules

PAD, WIDTH = 0, 3


class Sum(StoppingCriteria):
    """Ends a row whose new ids sum to at least a limit."""

    def __init__(self, limit):
        self.limit = limit

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, WIDTH:].sum(1) >= self.limit


class Together(StoppingCriteria):
    """Ends all rows at a number of new columns, by one bool."""

    def __init__(self, columns):
        self.columns = columns

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] - WIDTH >= self.columns


def plain_loop(texts, prompts, criteria, has_eos):
    """What `generate` does with rows that would emit `texts`: [B, P + N] int64."""
    ids, unfinished = prompts, torch.ones(len(texts), dtype=torch.long)
    for column in range(len(texts[0])):
        token = torch.tensor([text[column] for text in texts])
        token = token * unfinished + PAD * (1 - unfinished) if has_eos else token
        ids = torch.cat([ids, token[:, None]], 1)
        done = torch.zeros(len(texts), dtype=torch.bool)
        for criterion in criteria:
            done = done | torch.as_tensor(criterion(ids, None))
        unfinished = unfinished & ~done.long() & 1
        if unfinished.max() == 0:
            break
    return ids


@given(
    st.integers(1, 4),
    st.lists(st.integers(1, 9), min_size=10, max_size=40),
    st.lists(st.integers(1, 4), min_size=1, max_size=30),
    st.none() | st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.none() | st.integers(4, 40),
    st.none() | st.integers(1, 12),
    st.integers(1, 10),
)
def test_any_blocks_give_what_the_plain_loop_gives(batch, pool, blocks, eos, total, together, new_tokens):
    texts = [[pool[(row * 7 + i) % len(pool)] for i in range(new_tokens)] for row in range(batch)]
    prompts = torch.full((batch, WIDTH), 5)
    criteria = StoppingCriteriaList([MaxLengthCriteria(WIDTH + new_tokens)])
    if eos is not None:
        criteria.append(EosTokenCriteria(eos))
    criteria += [Sum(total)] if total is not None else []
    criteria += [Together(together)] if together is not None else []
    ledger = Ledger(prompts, StopRules.sort(criteria), PAD, torch.device("cpu"), track_columns=True)
    columns, turn = [], 0
    while not all(ledger.ended):
        for row in range(batch):
            if not ledger.ended[row]:
                size = blocks[turn % len(blocks)]
                turn += 1
                at = len(ledger.rows[row])
                block = texts[row][at : at + size]
                if eos is not None and any(token in eos for token in block):
                    block = block[: next(i for i, token in enumerate(block) if token in eos) + 1]
                ended = at + len(block) == new_tokens or (eos is not None and block[-1] in eos)
                ledger.append(row, block, ended)
        ledger.settle()
        columns, ledger.new_columns = columns + ledger.new_columns, []
    expected = plain_loop(texts, prompts, criteria, eos is not None)
    assert ledger.sequences().tolist() == expected.tolist()
    assert torch.tensor(columns).T.tolist() == expected[:, WIDTH:].tolist()
    assert ledger.width == expected.shape[1] - WIDTH


def test_rules_are_sorted_by_who_can_tell():
    criteria = StoppingCriteriaList([MaxLengthCriteria(20), MaxLengthCriteria(12), EosTokenCriteria([4, 5]), Sum(3)])
    rules = StopRules.sort(criteria)
    assert (rules.max_columns, rules.eos_ids, rules.freezes) == (12, [4, 5], True)
    assert not rules.by_row and [type(each) for each in rules.by_column] == [Sum]
    assert not StopRules.sort(StoppingCriteriaList([MaxLengthCriteria(20), Sum(3)])).freezes
