"""Prompts and settings for queues, and what plain or speculative `generate` gives for each prompt alone."""

from __future__ import annotations

import functools

import torch
import zoo

import hf_psd

DRAFTERS = ("noisy", "lookup", "both")
PROMPTS = [
    [5, 9, 17, 33, 21, 40, 41],
    [7, 8, 9],
    [12],
    [30, 31, 32, 33, 34],
    [3, 4, 5, 3, 4, 5, 3, 4],
    [17, 4] * 15,  # longer than a chunk of the tests
]
SAMPLED = dict(do_sample=True, pad_token_id=0, eos_token_id=None)


def target():
    return zoo.shared("llama")


def drafters(kind):
    near = zoo.shared("llama", noise=0.03)
    return {"noisy": [near], "lookup": ["prompt_lookup"], "both": ["prompt_lookup", near]}[kind]


def new_tokens(output, prompt):
    return output[0, len(prompt) :].tolist()


@functools.cache
def _plain(prompt, frozen):
    return new_tokens(target().generate(torch.tensor([prompt]), **dict(frozen)), prompt)


def plain(prompt, **kwargs):
    """New tokens of plain `generate` for one prompt; the pad id after the end included."""
    return _plain(tuple(prompt), tuple(sorted({**zoo.GREEDY, **kwargs}.items())))


@functools.cache
def _coupled(prompt, seed, noise_id, frozen):
    psd = dict(verification="coupled", seed=seed, request_ids=[noise_id], mode="ar")
    output = hf_psd.generate(target(), torch.tensor([prompt]), psd=psd, **dict(frozen))
    return new_tokens(output, prompt)


def coupled(prompt, seed, noise_id, **kwargs):
    """New tokens of coupled `generate` for one prompt alone, without drafts."""
    return _coupled(tuple(prompt), seed, noise_id, tuple(sorted({**SAMPLED, **kwargs}.items())))
