"""Synthetic languages over the same tokens, and small models that learn them in a minute on one CPU core.

A language is a random chain: each token is followed by one of four. The languages agree on what follows a third of the
tokens. Nothing in a text names its language; a model that knows several has to tell it from the text so far.
"""

from __future__ import annotations

import copy
import statistics
import time

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, SPECIAL = 48, 3
"""Token ids, of which the first are padding, beginning and end."""
_CHOICES = torch.tensor([0.62, 0.2, 0.12, 0.06])
"""Chances of the tokens that may follow."""
_COMMON = (VOCAB - SPECIAL) // 3
"""Tokens after which all languages go on alike."""


class Language:
    """Draws texts.

    Args:
        seed: of the chain.
    """

    def __init__(self, seed: int):
        common, own = (torch.Generator().manual_seed(each) for each in (0, seed))
        every, mine = (torch.rand(VOCAB, VOCAB - SPECIAL, generator=draw).argsort(1) for draw in (common, own))
        mine[: SPECIAL + _COMMON] = every[: SPECIAL + _COMMON]
        self.following = mine[:, : len(_CHOICES)] + SPECIAL

    def texts(self, count: int, length: int, draw: torch.Generator) -> torch.Tensor:
        """[count, length] int64."""
        tokens = torch.empty(count, length, dtype=torch.long)
        tokens[:, 0] = torch.randint(SPECIAL, VOCAB, (count,), generator=draw)
        for place in range(1, length):
            choice = torch.multinomial(_CHOICES, count, replacement=True, generator=draw)
            tokens[:, place] = self.following[tokens[:, place - 1], choice]
        return tokens


def build(layers: int, width: int, seed: int) -> LlamaForCausalLM:
    """A Llama of the given size with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def train(model: LlamaForCausalLM, languages: list[Language], steps: int, seed: int, length: int = 64) -> float:
    """Trains on texts of the languages; returns the last loss in nats per token."""
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    model.train()
    loss = torch.zeros(())
    for _ in range(steps):
        texts = torch.cat([language.texts(48 // len(languages), length, draw) for language in languages])
        logits = model(input_ids=texts[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    return loss.item()


def lengthen(model: LlamaForCausalLM, layers: int) -> None:
    """Appends layers that cost what the others cost and add nothing."""
    first = model.config.num_hidden_layers
    for number in range(first, first + layers):
        layer = copy.deepcopy(model.model.layers[0])
        layer.self_attn.layer_idx = number
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            torch.nn.init.zeros_(weight)
        model.model.layers.append(layer)
    model.config.num_hidden_layers = first + layers
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = ["full_attention"] * (first + layers)


@torch.no_grad()
def milliseconds(model: LlamaForCausalLM, rows: int, tokens: int) -> float:
    """Median CPU time of a forward without a cache."""
    ids, times = torch.full((rows, tokens), SPECIAL), []
    for _ in range(20):
        began = time.process_time()
        model(input_ids=ids, use_cache=False)
        times.append(1e3 * (time.process_time() - began))
    return statistics.median(times)
