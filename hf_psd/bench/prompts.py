"""Prompts: random ids, or a file in the layout of ShareGPT, Spec-Bench, Chatbot Arena, plain JSONL or text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

_HUMAN = ("human", "user")


class Prompts(NamedTuple):
    """Left-padded prompts: `ids` [B, P] int64 and `mask` [B, P] int64, both on the CPU."""

    ids: torch.Tensor
    mask: torch.Tensor

    def rows(self, first: int, last: int) -> Prompts:
        """Some of the rows, without the columns that are padding in all of them."""
        mask = self.mask[first:last]
        start = int(mask.any(0).int().argmax())
        return Prompts(self.ids[first:last, start:], mask[:, start:])


def random_prompts(count: int, length: int, vocab: int) -> Prompts:
    """Uniform random ids; row r is the same whatever the count."""
    rows = [torch.randint(3, vocab, (length,), generator=torch.Generator().manual_seed(row)) for row in range(count)]
    ids = torch.stack(rows)
    return Prompts(ids, torch.ones_like(ids))


def read_prompts(path: str | Path) -> list[str]:
    """The texts of a prompt file.

    Known layouts: a JSON array or JSONL of ShareGPT (`conversations`: `from`/`value`), JSONL of Spec-Bench (`turns`),
    of Chatbot Arena (`conversation_a` or `conversation`: `role`/`content`) or plain (`prompt`), each giving its first
    user turn; any other file is text with one prompt per line.

    Raises:
        ValueError: no prompt in it, or a record of no known layout; the message names record and keys.
    """
    path = Path(path)
    text = path.read_text(encoding="utf-8")
    if path.suffix not in (".json", ".jsonl"):
        prompts = [line.strip() for line in text.splitlines() if line.strip()]
    else:
        found = [_first_turn(record, number, path) for number, record in enumerate(_records(text, path), 1)]
        prompts = [prompt for prompt in found if prompt]
    if not prompts:
        raise ValueError(f"{path} holds no prompt.")
    return prompts


def encode_prompts(texts: Sequence[str], tokenizer: Any, count: int, length: int, vocab: int) -> Prompts:
    """The first `count` texts (from the start again where there are fewer) as at most `length` last tokens each.

    Raises:
        ValueError: the tokenizer gives an id outside the target's vocabulary, or a text gives no id.
    """
    rows = []
    for number in range(count):
        row = tokenizer(texts[number % len(texts)])["input_ids"][-length:]
        if not row:
            raise ValueError(f"Prompt {number % len(texts) + 1} has no tokens.")
        if max(row) >= vocab:
            raise ValueError(
                f"The tokenizer gives id {max(row)}, the target's vocabulary ends at {vocab - 1}: they do not belong "
                "together. Use the target's tokenizer, or leave --prompts out for random ids."
            )
        rows.append(row)
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return Prompts(ids, mask)


def _records(text: str, path: Path) -> list[Any]:
    if text.lstrip().startswith("["):
        return json.loads(text)
    records = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
    return records


def _first_turn(record: Any, number: int, path: Path) -> str | None:
    if isinstance(record, str):
        return record
    if isinstance(record, Mapping):
        if isinstance(record.get("prompt"), str):
            return record["prompt"]
        if isinstance(record.get("turns"), list):
            return record["turns"][0] if record["turns"] else None
        for key in ("conversations", "conversation_a", "conversation"):
            if isinstance(record.get(key), list):
                return next((_said(turn) for turn in record[key] if _speaker(turn) in _HUMAN), None)
    keys = ", ".join(record) if isinstance(record, Mapping) else type(record).__name__
    raise ValueError(
        f"{path}, record {number}: no known layout, it has {keys}. Known: conversations (ShareGPT), turns "
        "(Spec-Bench), conversation_a or conversation (Arena), prompt."
    )


def _speaker(turn: Mapping[str, str]) -> str | None:
    return turn.get("from", turn.get("role"))


def _said(turn: Mapping[str, str]) -> str | None:
    return turn.get("value", turn.get("content"))
