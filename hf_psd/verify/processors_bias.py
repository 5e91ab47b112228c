"""Rules for sequence bias and bad words: the last tokens of the prefix decide which tokens are biased."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import groupby

import torch
from torch import Tensor
from transformers.generation.logits_process import SequenceBiasLogitsProcessor

from .processors_prefixes import Prefixes
from .processors_rule import Placement, Rule, send

Entry = tuple[tuple[int, ...], float]


@cache
def bias_needs_a_longer_context() -> bool:
    """Whether the installed stock code skips a sequence whose start fills the whole prefix (older releases do)."""
    stock = SequenceBiasLogitsProcessor([[[1, 2], 1.0]])
    return not stock(torch.tensor([[1]]), torch.zeros(1, 3)).any().item()


@cache
def bias_groups_by_length() -> bool:
    """Whether the installed stock code adds biases grouped by length; older releases add them in the given order.

    The order shows in the rounding when several biases meet in one token.
    """
    large = float(2**24)
    stock = SequenceBiasLogitsProcessor([[[3], large], [[4, 3], 0.0], [[1, 2, 3], -large], [[2, 3], 1.0]])
    return stock(torch.tensor([[1, 1, 2]]), torch.zeros(1, 5))[0, 3].item() == 0.0


@dataclass(frozen=True)
class _Group:
    """Sequences of equal length. `slots` says where in `_Biases.columns` each sequence's last token is."""

    starts: Tensor
    slots: Tensor
    biases: Tensor
    shortest_prefix: int


@dataclass(frozen=True)
class _Biases:
    single: Tensor
    columns: Tensor
    single_at_columns: Tensor
    groups: tuple[_Group, ...]


def _ordered_groups(entries: list[Entry]) -> list[list[Entry]]:
    if not bias_groups_by_length():
        return [list(group) for _, group in groupby(entries, key=lambda entry: len(entry[0]))]
    by_length: dict[int, list[Entry]] = {}
    for entry in entries:
        by_length.setdefault(len(entry[0]), []).append(entry)
    return list(by_length.values())


def _prepare(entries: list[Entry], vocabulary: int, device: torch.device) -> _Biases:
    known = [(ids, bias) for ids, bias in entries if ids[-1] < vocabulary]
    single = torch.zeros(vocabulary, dtype=torch.float32)
    for ids, bias in known:
        if len(ids) == 1:
            single[ids[0]] = bias
    longer = [(ids, bias) for ids, bias in known if len(ids) > 1]
    columns = sorted({ids[-1] for ids, _ in longer})
    slot = {token: index for index, token in enumerate(columns)}
    groups = tuple(
        _Group(
            starts=send([ids[:-1] for ids, _ in group], device),
            slots=send([slot[ids[-1]] for ids, _ in group], device),
            biases=send([bias for _, bias in group], device, torch.float32),
            shortest_prefix=len(group[0][0]) - (0 if bias_needs_a_longer_context() else 1),
        )
        for group in _ordered_groups(longer)
    )
    return _Biases(
        single=send(single, device),
        columns=send(columns, device, torch.long),
        single_at_columns=send(single[columns], device),
        groups=groups,
    )


def sequence_bias(processor: SequenceBiasLogitsProcessor, placement: Placement) -> Rule:
    """Biases are summed per token before they are added to the scores, in the stock order, so the rounding agrees."""
    entries: list[Entry] = list(processor.sequence_bias.items())

    @cache
    def prepared(vocabulary: int) -> _Biases:
        return _prepare(entries, vocabulary, placement.device)

    def apply(scores: Tensor, prefixes: Prefixes) -> Tensor:
        biases = prepared(scores.shape[-1])
        result = scores + biases.single
        if not biases.groups:
            return result
        total = biases.single_at_columns.repeat(scores.shape[0], 1)
        for group in biases.groups:
            tail = prefixes.tail(group.starts.shape[1]).flatten(0, 1)
            matches = (tail[:, None] == group.starts).all(dim=-1) & (prefixes.line_lengths >= group.shortest_prefix)
            total.index_add_(1, group.slots, torch.where(matches, group.biases, 0.0))
        return result.index_copy_(1, biases.columns, scores.index_select(1, biases.columns) + total)

    return Rule(apply, writes=tuple({token for ids, _ in entries for token in ids}))
