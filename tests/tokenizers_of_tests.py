"""Tokenizers built on the spot, that agree on little."""

from __future__ import annotations

import functools
import random
import string

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIALS = ["<pad>", "<s>", "</s>"]
LETTERS = string.ascii_lowercase + string.ascii_uppercase + string.digits


def wrapped(core: Tokenizer, specials: list[str] = SPECIALS) -> PreTrainedTokenizerFast:
    pad, bos, eos = specials
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=pad, bos_token=bos, eos_token=eos)


@functools.cache
def characters(count: int = 64, seed: int | None = None, specials: tuple[str, ...] = tuple(SPECIALS)):
    """One character per token, `count` ids in all with the special ones; `seed` shuffles which id is which."""
    words = [*specials, *LETTERS[: count - len(specials)]]
    if seed is not None:
        random.Random(seed).shuffle(words)
    core = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return wrapped(core, list(specials))


@functools.cache
def pieces(count: int, seed: int):
    """Byte pairs learnt from random words over the first letters."""
    draw = random.Random(seed)
    words = ["".join(draw.choice("abcdefghij") for _ in range(draw.randint(1, 5))) for _ in range(60)]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=count, special_tokens=SPECIALS, initial_alphabet=list("abcdefghij."), show_progress=False
    )
    core.train_from_iterator([" ".join(draw.choice(words) for _ in range(40)) for _ in range(40)], trainer)
    return wrapped(core)
