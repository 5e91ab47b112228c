"""Streaming row by row: a fast row does not wait for a slow one, as it does where columns are put."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TextStreamer
from transformers.generation.streamers import BaseStreamer

from .hooks import StepContext, StepHook
from .ledger import Ledger


class RowStreamer(BaseStreamer):
    """A streamer for batches, given as `streamer=`; override what you need.

    Calls come in this order: `on_prompts` once, then for each row any number of `put_row` and one `end_row`, rows in
    no order among each other, then `end` once. With `psd=False` it works too; then each row gets a token per column,
    padding after its end included, and no `end_row`.
    """

    def on_prompts(self, prompts: torch.Tensor) -> None:
        """The prompts [B, P] int64 on the CPU, left padding included; no token has been made."""

    def put_row(self, row: int, ids: list[int]) -> None:
        """New tokens of a row, in order and never taken back; several when several drafts were accepted."""

    def end_row(self, row: int) -> None:
        """The row has all its tokens."""

    def end(self) -> None:
        """The call is over, also after an error."""

    def put(self, value: torch.Tensor) -> None:
        """What transformers calls: the prompts first, then (in plain decoding) one id per row."""
        if value.dim() == 2:
            self.on_prompts(value)
        else:
            for row, id in enumerate(value.tolist()):
                self.put_row(row, [id])


class RowTextStreamer(RowStreamer):
    """Text of each row, word by word as transformers' `TextStreamer` cuts it; override `on_text`.

    Args:
        tokenizer: decodes the new tokens; the prompt is not repeated.
        **decode_kwargs: for its `decode`, such as `skip_special_tokens=True`.
    """

    def __init__(self, tokenizer: Any, **decode_kwargs: Any):
        self.tokenizer, self.decode_kwargs = tokenizer, decode_kwargs
        self._texts: list[_RowText] = []

    def on_text(self, row: int, text: str, ended: bool) -> None:
        """A further piece of a row's text, possibly empty; `ended` is True once, with the last one."""
        print(f"[{row}] {text}", flush=True)

    def on_prompts(self, prompts: torch.Tensor) -> None:
        self._texts = [_RowText(self, row) for row in range(prompts.shape[0])]

    def put_row(self, row: int, ids: list[int]) -> None:
        self._texts[row].put(torch.tensor(ids))

    def end_row(self, row: int) -> None:
        self._texts[row].end()


class _RowText(TextStreamer):
    def __init__(self, owner: RowTextStreamer, row: int):
        super().__init__(owner.tokenizer, **owner.decode_kwargs)
        self.owner, self.row = owner, row

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text or stream_end:
            self.owner.on_text(self.row, text, stream_end)


class RowStreamHook(StepHook):
    """Feeds a `RowStreamer` with what no criterion can take back any more."""

    def __init__(self, streamer: RowStreamer, ledger: Ledger):
        self.streamer, self.ledger = streamer, ledger
        self._sent = [0] * len(ledger.rows)
        self._open = [True] * len(ledger.rows)

    def on_commit(self, context: StepContext) -> None:
        for row, tokens in enumerate(self.ledger.rows):
            final = self.ledger.final(row)
            if final > self._sent[row]:
                ids, self._sent[row] = tokens[self._sent[row] : final], final
                self.streamer.put_row(row, ids)
            if self._open[row] and self.ledger.ended[row] and final == len(tokens):
                self._open[row] = False
                self.streamer.end_row(row)
