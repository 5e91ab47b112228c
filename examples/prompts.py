"""Eight chat prompts: four whose answer copies from the prompt, four whose answer does not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

EDIT_CODE = """\
Repeat the following Python code and change nothing but the name "amount", which becomes "value".

```python
class Account:
    interest = 0.025

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
```"""

QUOTE_TEXT = """\
Repeat the following text exactly, word for word.

The lighthouse was built in 1867 on the northern tip of the island. It stands 34 metres high and its lamp can be seen \
from 20 nautical miles away. For ninety years a keeper and his family lived beside the tower, and they wrote down the \
weather every day. Their notebooks are now kept in the town library, where students of climate still read them. The \
last keeper left in 1957, when an electric motor took over his work."""

FIX_SPELLING = """\
Fix the spelling mistakes in this text and return the corrected text:

The wether in Lisbon is mild all year. In sumer the days are long and dry, and a cool wind blows in from the ocean \
every evenning. In winter it rains offen, but snow is very rare and the sun comes back quikly. Most visiters arrive \
in May, when the streets are full of music and the jacaranda trees are in bloom."""

EDIT_LETTER = """\
Copy this letter and replace "Bristol" by "Leeds":

Dear Tom,

Thank you for your letter of 3 March. We have sent the two red chairs and the oak table to your house in Bristol. \
They should arrive on Friday morning. The driver will carry everything upstairs and take the empty boxes away. My son \
has grown tall, so the old desk is yours as a present.

Kind regards,
Mary Harris"""


def copying() -> list[str]:
    """Returns the four prompts that ask for text or code of their own again, with or without a small edit."""
    return [EDIT_CODE, QUOTE_TEXT, FIX_SPELLING, EDIT_LETTER]


def other() -> list[str]:
    """Returns two factual questions, one that asks for an explanation, and one for a story."""
    return [
        "What is the capital of France?",
        "What is the capital of Japan, and what is it known for?",
        "Why is the sky blue?",
        "Write a short story about a robot who learns to paint.",
    ]


def batch(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Puts each prompt into the chat template and returns one left-padded batch for `generate`.

    Returns:
        ``input_ids`` and ``attention_mask``, int64 of shape [len(prompts), longest prompt in tokens], on `device`.
    """
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        for prompt in prompts
    ]
    encoded = tokenizer(chats, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}
