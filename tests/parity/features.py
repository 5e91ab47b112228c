"""Everything `generate` can do for a decoder, one entry a feature: the source of tests/parity/test_matrix.py and of
docs/parity.md."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers_of_tests import characters
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    StaticCache,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from zoo import P4, noisy, shared, tiny

COLUMNS = ("AR", "SD", "PSD", "queue")
THREE = [28, 34, 14]
SAMPLED = dict(do_sample=True, pad_token_id=0, eos_token_id=None)


def llama():
    return shared("llama")


def near_and_lookup():
    return [shared("llama", noise=0.03), "prompt_lookup"]


@dataclass(frozen=True)
class Feature:
    """One row of the matrix.

    Attributes:
        name: as users know it.
        arguments: of `generate`, beside the prompts and greedy defaults; called for each cell.
        target: the model.
        models: its drafters.
        refused: the error of a refusal in `generate`, word for word; None: the same as plain.
        queue: the same for a queue; "" repeats `refused`.
        check: names the way to compare in `test_matrix.py`.
        psd: further settings.
        more: tests that say more about it.
        needs: packages without which it is skipped.
    """

    name: str
    arguments: Callable[[], dict[str, Any]] = dict
    target: Callable[[], Any] = llama
    models: Callable[[], list[Any]] = near_and_lookup
    refused: str | None = None
    queue: str | None = ""
    check: str = "text"
    psd: dict[str, Any] = field(default_factory=dict)
    more: str = ""
    needs: tuple[str, ...] = ()

    def expected(self, column: str) -> str | None:
        """None for "same", else the message of the refusal."""
        return self.queue if column == "queue" and self.queue != "" else self.refused


class BanBefore(LogitsProcessor):
    """Bans the token before the last."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids[:, -2:-1], -100.0) if input_ids.shape[1] > 1 else scores


class FiveLarge(StoppingCriteria):
    """Ends a row after five ids of at least 32 after the prompt's first token."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -8:] >= 32).sum(1) >= 6


def allowed(row, ids):
    return [id for id in range(3, 64) if (id + int(ids[-1])) % 3]


def broken_logit():
    model = tiny("llama")
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")
    return model


def training():
    model = tiny("llama", attention_dropout=0.5)
    return model.train()


@functools.cache
def lora(seed: int = 0):
    import peft

    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(tiny("llama"), config).eval()


@functools.cache
def prompt_tuned():
    import peft

    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    return peft.get_peft_model(tiny("llama"), config).eval()


@functools.cache
def quantised(kind: str):
    import sys
    from pathlib import Path

    sys.path.append(str(Path(__file__).parents[1] / "api"))
    from test_quantised import quantised as build

    return build(kind)


@functools.cache
def seeing():
    from test_images import seeing as build

    return build("llava")


def image_prompt():
    from test_images import prompt

    return prompt("llava")


@functools.cache
def renamed_drafter():
    from test_tokenizers import renamed

    return renamed(llama(), characters(64), characters(64, seed=1))


@functools.cache
def mamba():
    config = AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=2, state_size=8, vocab_size=64)
    return AutoModelForCausalLM.from_config(config).eval()


@functools.cache
def t5():
    config = AutoConfig.for_model(
        "t5", vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return AutoModelForSeq2SeqLM.from_config(config).eval()


def compiled(model):
    return torch.compile(model, backend="eager")


def one(**arguments):
    return lambda: dict(arguments)


def only_greedy(name: str, value: Any) -> str:
    return f"psd: {name}={value!r} cannot be combined with psd; use plain generate."


NO_CACHE_IN_QUEUE = "psd: a queue reads no cache of an earlier turn; add the whole text as the prompt."
ASK_LOGPROBS = "psd: {}=True has no place in a queue; ask the manager for `return_logprobs=True`."

FEATURES = [
    Feature("greedy"),
    Feature("sampling, temperature, top_k, top_p", one(**SAMPLED, temperature=1.5, top_k=20, top_p=0.95), check="coupled",
            more="tests/law, tests/parity/test_speculation.py"),
    Feature("min_p, typical_p, epsilon_cutoff, eta_cutoff",
            one(**SAMPLED, min_p=0.02, typical_p=0.9, epsilon_cutoff=1e-3, eta_cutoff=1e-3), check="coupled"),
    Feature("repetition_penalty", one(repetition_penalty=1.3)),
    Feature("no_repeat_ngram_size", one(no_repeat_ngram_size=2)),
    Feature("bad_words_ids", one(bad_words_ids=[[59], [20, 52]])),
    Feature("suppress_tokens", one(suppress_tokens=[38])),
    Feature("begin_suppress_tokens", one(begin_suppress_tokens=[28])),
    Feature("sequence_bias", one(sequence_bias=[[[49], -5.0], [[21, 3], 8.0]])),
    Feature("exponential_decay_length_penalty", one(exponential_decay_length_penalty=(5, 1.5), eos_token_id=2)),
    Feature("encoder_repetition_penalty", one(encoder_repetition_penalty=1.5)),
    Feature("encoder_no_repeat_ngram_size", one(encoder_no_repeat_ngram_size=2)),
    Feature("forced_eos_token_id", one(forced_eos_token_id=2)),
    Feature("renormalize_logits", one(renormalize_logits=True)),
    Feature("remove_invalid_values", one(remove_invalid_values=True), target=broken_logit),
    Feature("watermarking_config", lambda: dict(watermarking_config=WatermarkingConfig(bias=3.0, seeding_scheme="selfhash"))),
    Feature("padding id = end token, with penalties",
            one(repetition_penalty=1.3, no_repeat_ngram_size=2, pad_token_id=28, eos_token_id=28)),
    Feature("prefix_allowed_tokens_fn", one(prefix_allowed_tokens_fn=allowed)),
    Feature("logits_processor of one's own", lambda: dict(logits_processor=[BanBefore()]),
            more="tests/parity/test_processors_and_outputs.py"),
    Feature("max_new_tokens", one(max_new_tokens=1)),
    Feature("max_length", one(max_new_tokens=None, max_length=12)),
    Feature("min_length", one(min_length=15, eos_token_id=THREE)),
    Feature("min_new_tokens", one(min_new_tokens=12, eos_token_id=THREE)),
    Feature("eos_token_id list", one(eos_token_id=THREE)),
    Feature("stop_strings", lambda: dict(stop_strings=["zs", "U1", "Xh"], tokenizer=characters(64), eos_token_id=2),
            more="tests/parity/test_endings.py"),
    Feature("max_time", one(max_time=1e9)),
    Feature("stopping_criteria of one's own", lambda: dict(stopping_criteria=[FiveLarge()], eos_token_id=2),
            more="tests/parity/test_endings.py"),
    Feature("generation_config", lambda: dict(
        generation_config=GenerationConfig(repetition_penalty=1.3, max_new_tokens=9, pad_token_id=0, eos_token_id=THREE))),
    Feature("num_return_sequences", one(**SAMPLED, num_return_sequences=3), check="coupled",
            queue="psd: num_return_sequences=3 has no place in a queue; add the prompt as often as wanted."),
    Feature("output_scores", one(return_dict_in_generate=True, output_scores=True), check="scores",
            queue=ASK_LOGPROBS.format("output_scores"), more="tests/parity/test_processors_and_outputs.py"),
    Feature("output_logits", one(return_dict_in_generate=True, output_logits=True), check="scores",
            queue=ASK_LOGPROBS.format("output_logits")),
    Feature("streamer", check="streamer", more="tests/api/test_streamers.py, tests/api/test_row_streamers.py"),
    Feature("a returned cache in the next turn", check="next turn", queue=NO_CACHE_IN_QUEUE,
            more="tests/parity/test_turns.py"),
    Feature("use_cache=False", one(use_cache=False)),
    Feature("vocabularies of other sizes", target=lambda: shared("llama", vocab_size=72),
            models=lambda: [shared("llama", 3), noisy(shared("llama"), 0.03)], more="tests/parity/test_greedy.py"),
    Feature("other tokenizers, greedy",
            lambda: dict(tokenizer=characters(64), assistant_tokenizers=[characters(64, seed=1)]),
            models=lambda: [renamed_drafter()], more="tests/parity/test_tokenizers.py"),
    Feature("other tokenizers, sampling",
            lambda: dict(**SAMPLED, tokenizer=characters(64), assistant_tokenizers=[characters(64, seed=1)]),
            models=lambda: [renamed_drafter()], check="coupled", more="tests/parity/test_tokenizers.py"),
    Feature("bitsandbytes NF4", target=lambda: quantised("nf4"), models=lambda: [quantised("nf4")],
            more="tests/api/test_quantised.py", needs=("bitsandbytes",)),
    Feature("bitsandbytes int8 drafter", models=lambda: [tiny("llama"), quantised("int8")],
            more="tests/api/test_quantised.py", needs=("bitsandbytes",)),
    Feature("torchao int8", target=lambda: quantised("torchao int8"), models=lambda: [quantised("torchao int8")],
            more="tests/api/test_quantised.py", needs=("torchao",)),
    Feature("LoRA", target=lora, models=lambda: [lora(1), llama()], more="tests/api/test_doors.py", needs=("peft",)),
    Feature("torch.compile", target=lambda: compiled(tiny("llama")), models=lambda: [tiny("llama", 11)],
            arguments=one(max_new_tokens=5), more="tests/api/test_doors.py"),
    Feature("models in training mode", target=training, models=lambda: [training()], check="trained"),
    Feature("images in the prompt", image_prompt, target=seeing, models=lambda: [seeing()], more="tests/parity/test_images.py",
            queue="psd: pixel_values cannot be queued, which reads text alone; use `generate`."),
    Feature("inputs_embeds", lambda: dict(inputs_embeds=torch.zeros(4, 3, 32)),
            refused="psd: inputs_embeds cannot be used with psd; drafters need token ids; pass input_ids."),
    Feature("output_hidden_states", one(return_dict_in_generate=True, output_hidden_states=True),
            refused=only_greedy("output_hidden_states", True)),
    Feature("output_attentions", one(return_dict_in_generate=True, output_attentions=True),
            refused=only_greedy("output_attentions", True)),
    Feature("num_beams", one(num_beams=2), refused=only_greedy("num_beams", 2)),
    Feature("guidance_scale", one(guidance_scale=1.5),
            refused="UnbatchedClassifierFreeGuidanceLogitsProcessor cannot be used with speculative decoding: it runs the model a "
            "second time and keeps a key-value cache that grows by one token per call, which rejected drafts would corrupt. "
            "Leave `guidance_scale` unset, or call `generate` without `psd`."),
    Feature("SynthID watermark", lambda: dict(
        **SAMPLED, watermarking_config=SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3])),
        refused="SynthIDTextWatermarkLogitsProcessor cannot be used with speculative decoding: it keeps a context and a call counter "
        "that advance with every call, which rejected drafts would corrupt. Use `WatermarkingConfig` instead of "
        "`SynthIDTextWatermarkingConfig`, or call `generate` without `psd`."),
    Feature("penalty_alpha", one(penalty_alpha=0.6, top_k=4), refused=only_greedy("penalty_alpha", 0.6)),
    Feature("dola_layers", one(dola_layers="low", repetition_penalty=1.2), refused=only_greedy("dola_layers", "low")),
    Feature("token_healing", one(token_healing=True), refused="psd: token_healing cannot be used with psd; it rewrites the prompts before they are decoded; use plain generate."),
    Feature("prompt_lookup_num_tokens", one(prompt_lookup_num_tokens=3),
            refused="psd: prompt_lookup_num_tokens cannot be used with psd; pass assistant_models=['prompt_lookup'] and set gamma."),
    Feature("assistant_model", lambda: dict(assistant_model=llama()),
            refused="psd: assistant_model cannot be used with psd; pass drafters as assistant_models=[...] only."),
    Feature("cache_implementation", one(cache_implementation="static"),
            refused="psd: cache_implementation='static' cannot be combined with psd, which keeps its own cache."),
    Feature("a static or offloaded cache", lambda: dict(
        past_key_values=StaticCache(config=llama().config, max_cache_len=32)),
        refused="psd: the cache passed in must be a plain DynamicCache, as `generate` returns it, got StaticCache with "
        "StaticLayer; leave it out and pass the whole text as input_ids."),
    Feature("an empty cache to be filled", lambda: dict(past_key_values=DynamicCache()), queue=NO_CACHE_IN_QUEUE),
    Feature("synced_gpus", one(synced_gpus=True),
            refused="psd: synced_gpus cannot be used with psd; ranks would run different numbers of steps; use plain generate."),
    Feature("position_ids", lambda: dict(position_ids=torch.zeros(4, 7, dtype=torch.long)),
            refused="psd: position_ids cannot be used with psd; positions follow from the attention mask; leave them out."),
    Feature("per-row LoRA adapters", one(adapter_names=["default"] * 4), target=lora, needs=("peft",),
            refused="psd: adapter_names cannot be used with psd; per-row adapters assume that the whole batch runs at once; "
            "use one adapter for all rows."),
    Feature("prompt tuning", target=prompt_tuned, needs=("peft",),
            refused="psd: the target uses prompt tuning, whose virtual tokens are not in the prompt; use LoRA."),
    Feature("recurrent models (Mamba, RWKV, hybrids)", target=mamba,
            refused="psd: the target MambaForCausalLM (model type 'mamba') is not supported: it keeps a recurrent state, "
            "which cannot be rolled back when drafts are rejected. Use plain `generate` for it."),
    Feature("encoder-decoder models", target=t5,
            refused="psd: the target T5ForConditionalGeneration (model type 't5') is not supported: it is an "
            "encoder-decoder model. Use plain `generate` for it."),
]  # fmt: skip


def prompts() -> dict[str, torch.Tensor]:
    return P4()


def render() -> str:
    """docs/parity.md."""
    lines = [
        "# What works, and what is refused",
        "",
        "Each row is a feature of `generate` for decoders, each column a way to decode: `mode=\"ar\"`, `\"sd\"`, `\"psd\"`, and",
        "`hf_psd.generate_batch`. **same**: the text (scores, streamed tokens, the next turn) is what plain `generate` gives on the same",
        "batch in float32; in a queue, on each prompt alone; where tokens are sampled, the text of the coupled law for the same seed,",
        "which follows plain `generate`'s law. **refused**: a `ValueError` before any forward, with the message given.",
        "",
        "The table is written by `pytest tests/parity/test_matrix.py --write-parity` from the cases that the same file runs: the cell of a",
        "feature and a column is the test `test_cell[feature-column]`. Scores of rows that have ended are zeros.",
        "",
        "| feature | " + " | ".join(COLUMNS) + " | more tests |",
        "|---|" + "---|" * (len(COLUMNS) + 1),
    ]  # fmt: skip
    notes: list[str] = []
    for feature in FEATURES:
        cells = []
        for column in COLUMNS:
            message = feature.expected(column)
            if message is None:
                cells.append("same")
                continue
            if message not in notes:
                notes.append(message)
            cells.append(f"refused [{notes.index(message) + 1}]")
        lines.append(f"| {feature.name} | " + " | ".join(cells) + f" | {feature.more} |")
    lines += ["", "Messages of the refusals:", ""]
    lines += [f"{number}. {message}" for number, message in enumerate(notes, start=1)]
    return "\n".join(lines) + "\n"
