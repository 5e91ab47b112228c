"""The host's record of the texts: where each row ends, and which columns are final."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria


@dataclass
class StopRules:
    """How a call ends, sorted by who can tell.

    Attributes:
        max_columns: columns, padding included, that no row exceeds. The device knows it.
        eos_ids: end tokens; the device knows them.
        freezes: whether a finished row is padded while others go on, as plain `generate` does only if there are end
            tokens.
        by_row: criteria that look at one row's text alone.
        by_column: all others, called with the whole batch column by column, exactly as plain `generate` calls them.
    """

    max_columns: int
    eos_ids: list[int] = field(default_factory=list)
    freezes: bool = False
    by_row: list = field(default_factory=list)
    by_column: list = field(default_factory=list)

    @classmethod
    def sort(cls, criteria: StoppingCriteriaList) -> StopRules:
        rules = cls(max_columns=2**31)
        rules.freezes = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        for criterion in criteria:
            if type(criterion) is MaxLengthCriteria:
                rules.max_columns = min(rules.max_columns, criterion.max_length)
            elif type(criterion) is EosTokenCriteria:
                rules.eos_ids += criterion.eos_token_id.flatten().tolist()
            elif type(criterion) is StopStringCriteria and rules.freezes:
                rules.by_row.append(criterion)
            else:
                rules.by_column.append(criterion)
        return rules


Kept = list[list[tuple[torch.Tensor, torch.Tensor]]]
"""Per row and new token: processed scores and raw logits, each [V]."""


def score_columns(kept: Kept, which: int, rows: list[list[int]], columns: int) -> tuple[torch.Tensor, ...]:
    """The first `columns` columns of kept scores (`which` 0) or logits (1), each [B, V] fp32; zeros in ended rows."""
    template = next(row[0][which] for row in kept if row)
    zeros = torch.zeros(template.shape, device=template.device)
    return tuple(
        torch.stack(
            [kept[row][column][which].float() if column < len(text) else zeros for row, text in enumerate(rows)]
        )
        for column in range(columns)
    )


class Ledger:
    """New tokens of each row as the host learns of them, cut exactly where plain `generate` would stop.

    Args:
        prompts: [B, P] int64 on the CPU, padding included.
        rules: how the call ends.
        pad_id: fills rows after their end.
        device: where stopping criteria expect their `input_ids`.
        track_columns: keep the queue of final columns for a streamer.
    """

    def __init__(
        self, prompts: torch.Tensor, rules: StopRules, pad_id: int, device: torch.device, track_columns: bool
    ):
        batch = prompts.shape[0]
        self.rules, self.pad_id = rules, pad_id
        self.rows: list[list[int]] = [[] for _ in range(batch)]
        self.ended = [False] * batch
        self.new_columns: list[list[int]] = []
        self.kept: Kept | None = None
        self._prompts, self._device = prompts, device
        self._satisfied = [False] * batch
        self._clock = 0
        self._track = track_columns or bool(rules.by_column)

    def append(self, row: int, ids: Sequence[int], ended: bool) -> int:
        """Adds the tokens of one verification; returns how many stand (a stop string may cut them)."""
        tokens = self.rows[row]
        for count, token in enumerate(ids, start=1):
            tokens.append(token)
            if self.rules.by_row and self._row_stops(row):
                self.ended[row] = True
                return count
        self.ended[row] = self.ended[row] or ended
        return len(ids)

    def settle(self) -> None:
        """Moves the column clock as far as every row has come; criteria on whole columns may end or cut rows."""
        while self._track and self._column_is_known():
            column = [row[self._clock] if self._clock < len(row) else self.pad_id for row in self.rows]
            self._clock += 1
            self.new_columns.append(column)
            if self.rules.by_column:
                self._judge_column()

    def final(self, row: int) -> int:
        """How many tokens of a row nothing can cut any more: criteria on whole columns may still cut later ones."""
        length = len(self.rows[row])
        return min(length, self._clock) if self.rules.by_column else length

    @property
    def width(self) -> int:
        """Columns of the longest row."""
        return max((len(row) for row in self.rows), default=0)

    def sequences(self) -> torch.Tensor:
        """[B, P + width] int64 on the CPU: prompts, texts, padding after the end."""
        width = self.width
        text = [row + [self.pad_id] * (width - len(row)) for row in self.rows]
        new = torch.tensor(text, dtype=torch.long, device="cpu").reshape(len(self.rows), width)
        return torch.cat([self._prompts, new], dim=1)

    def _column_is_known(self) -> bool:
        if all(self.ended) and self._clock >= self.width:
            return False
        return all(ended or len(row) > self._clock for row, ended in zip(self.rows, self.ended))

    def _row_stops(self, row: int) -> bool:
        ids = torch.cat([self._prompts[row], torch.tensor(self.rows[row], device="cpu")])[None].to(self._device)
        return any(bool(torch.as_tensor(criterion(ids, None)).all()) for criterion in self.rules.by_row)

    def _judge_column(self) -> None:
        new = [(row + [self.pad_id] * self._clock)[: self._clock] for row in self.rows]
        ids = torch.cat([self._prompts, torch.tensor(new, device="cpu")], dim=1).to(self._device)
        scores = None if self.kept is None else score_columns(self.kept, 0, self.rows, self._clock)
        for criterion in self.rules.by_column:
            verdict = torch.as_tensor(criterion(ids, scores)).reshape(-1).expand(len(self.rows)).tolist()
            self._satisfied = [old or new for old, new in zip(self._satisfied, verdict)]
        if self.rules.freezes:
            ending = [row for row, satisfied in enumerate(self._satisfied) if satisfied]
        else:
            ending = list(range(len(self.rows))) if all(self._satisfied) else []
        for row in ending:
            self.ended[row] = True
            del self.rows[row][self._clock :]
