"""Measure every mode on your own models and prompts, and tell which is fastest and why.

Example: hf-psd explain --target Qwen/Qwen3-8B --drafter Qwen/Qwen3-0.6B --batch 1 8
"""

from __future__ import annotations

import argparse

_PROMPTS = (
    "Write a Python function that merges two sorted lists, and explain each line of it.",
    "Summarise the causes of the French Revolution in one paragraph.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("--target", required=True, help="folder or Hub name of the target, with its tokenizer")
    parser.add_argument("--drafter", action="append", default=[], help="the same of a drafter; may be repeated")
    parser.add_argument("--prompt", action="append", help="a text to measure acceptance on; may be repeated")
    parser.add_argument("--batch", type=positive, nargs="+", help="batch sizes (default: number of prompts)")
    parser.add_argument("--gamma", type=positive, default=4, help="draft tokens per row and round (default 4)")
    parser.add_argument("--max-new-tokens", type=positive, default=128, help="to predict for (default 128)")


def positive(text: str) -> int:
    """An int >= 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def run(options: argparse.Namespace) -> None:
    """Loads the models, places them and prints the explanation."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .explain import explain
    from .placement import place

    tokenizer = AutoTokenizer.from_pretrained(options.target, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    target, *drafters = (
        AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval() for name in (options.target, *options.drafter)
    )
    print(place(target, drafters))
    batch = tokenizer(options.prompt or list(_PROMPTS), return_tensors="pt", padding=True).to(target.device)
    explanation = explain(
        target,
        drafters or None,
        psd={"gamma": options.gamma},
        batch_sizes=options.batch,
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=options.max_new_tokens,
        do_sample=False,
    )
    print(explanation)
