"""Profiles: what a run measures, by name. Options of the command line override single fields."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

HF = ("hf-eager", "hf-static", "hf-assisted", "hf-lookup")
RIVALS = ("flashspec", "flashspec-gamma")
OURS = ("ar", "sd", "psd", "auto")
EXTRA = ("hf-assisted-default",)
GAMMALESS = ("hf-eager", "hf-static", "hf-lookup", "hf-assisted-default", "flashspec", "ar")
METHODS = (*HF, *EXTRA, *RIVALS, *OURS)


@dataclass(frozen=True)
class Published:
    """Somebody's own figures, printed beside ours and never mixed with them.

    Attributes:
        source: who published them, and for what.
        gpu: part of the GPU's name they are said to hold for.
        tokens_per_second, acceptance, step_p50_ms: the figures.
    """

    source: str
    gpu: str
    tokens_per_second: float
    acceptance: float
    step_p50_ms: float


@dataclass(frozen=True)
class Settings:
    """Everything that decides what is measured and how; it is written into the results.

    Attributes:
        profile: its name.
        target, drafters: shapes of `hf_psd.testing.pairs.SHAPES`, or folders of saved models. The first drafter
            drafts; the last is the big one of the memory-cap experiment.
        agreement: share of positions at which target and first drafter choose the same token (random models only).
        layers: build only so many layers of each model.
        dtype: of the weights, a name of torch's.
        quantize: None, or "nf4": the target's layers in bitsandbytes' 4-bit NormalFloat.
        devices: the target's device and the drafters'.
        two: measure the two-device comparison instead of the one-device one.
        methods: what is compared, see docs/benchmarks/README.md.
        batches, two_batches: requests in flight, on one device and on two.
        sampling: which of greedy (False) and sampled (True) decoding to measure.
        temperature: of the sampled runs; top-k and top-p are off.
        gamma, gammas: drafts per round, and the values of the two-device sweep.
        gamma_batch: batch of that sweep.
        capped_batches: batches of the memory-cap experiment.
        memory_cap: GiB per card in it; None works one out that the target fits in and target with drafter do not.
        grid: on two devices, every gamma at every batch.
        queue_factor: requests of the queue layout per seat.
        prompt: prompt tokens per row, at most.
        new_tokens: new tokens per row, exactly: end tokens are ignored.
        prompts, tokenizer: file of prompts and folder of the tokenizer that reads them; None means random ids.
        warm_ups, auto_warm_ups: calls after the first one that are not timed; `mode="auto"` has more, since it tries
            every mode before it settles.
        repeat: timed calls, whose median counts.
        static_batches: batches at which "hf-static" is measured; each of them compiles anew.
        psd: more fields of `PSDConfig` for our own modes.
        published: figures to print beside the measured ones.
    """

    profile: str
    target: str
    drafters: tuple[str, ...]
    agreement: float = 0.75
    layers: int | None = None
    dtype: str = "bfloat16"
    quantize: str | None = None
    devices: tuple[str, str] = ("cuda:0", "cuda:0")
    two: bool = False
    methods: tuple[str, ...] = (*HF, *RIVALS, *OURS)
    batches: tuple[int, ...] = (1, 8, 32, 64, 128)
    two_batches: tuple[int, ...] = (8, 16, 32, 64, 128, 256)
    sampling: tuple[bool, ...] = (False, True)
    temperature: float = 1.0
    gamma: int = 4
    gammas: tuple[int, ...] = (1, 2, 4, 8)
    gamma_batch: int = 64
    capped_batches: tuple[int, ...] = (8, 16, 32, 64, 128)
    memory_cap: float | None = None
    grid: bool = False
    queue_factor: int = 4
    prompt: int = 128
    new_tokens: int = 96
    prompts: str | None = None
    tokenizer: str | None = None
    warm_ups: int = 1
    auto_warm_ups: int = 4
    repeat: int = 3
    static_batches: tuple[int, ...] = (1,)
    psd: tuple[tuple[str, Any], ...] = ()
    published: tuple[Published, ...] = ()


T4_FIGURES = Published("FlashSpec 0.1.4's README: TinyLlama-1.1B NF4, gamma 4", "T4", 44.2, 0.75, 22.1)

PROFILES = {
    "llama-8b": Settings("llama-8b", "llama-3.1-8b", ("llama-3.2-1b", "llama-3.2-3b")),
    "qwen-32b": Settings("qwen-32b", "qwen2.5-32b", ("qwen2.5-1.5b", "qwen2.5-7b"), batches=(1, 8, 32)),
    "t4-nf4": Settings(
        "t4-nf4",
        "tinyllama-1.1b",
        ("llama-68m",),
        dtype="float16",
        quantize="nf4",
        batches=(1, 8),
        methods=("hf-eager", "hf-static", "hf-assisted", "hf-lookup", *RIVALS, *OURS),
        published=(T4_FIGURES,),
    ),
    "tiny": Settings(
        "tiny",
        "tiny",
        ("tiny-drafter",),
        dtype="float32",
        devices=("cpu", "cpu"),
        batches=(1, 2),
        two_batches=(2, 4),
        gammas=(1, 2),
        gamma_batch=4,
        capped_batches=(2, 4),
        prompt=16,
        new_tokens=16,
        repeat=1,
        methods=(*HF, *RIVALS, *OURS),
    ),
}
"""`llama-8b` is the default on CUDA, `tiny` (seconds on a CPU) without it."""


def override(settings: Settings, **values: Any) -> Settings:
    """The settings with every value that is not None put in; lists become tuples."""
    names = {field.name for field in fields(Settings)}
    given = {name: value for name, value in values.items() if name in names and value is not None}
    return replace(settings, **{name: _frozen(value) for name, value in given.items()})


def quick(settings: Settings) -> Settings:
    """A short form: greedy, three batches, fewer calls, and nothing that compiles for minutes."""
    return replace(
        settings,
        methods=tuple(method for method in settings.methods if method not in RIVALS),
        batches=tuple(batch for batch in settings.batches if batch <= 32),
        sampling=(False,),
        new_tokens=min(settings.new_tokens, 64),
        repeat=min(settings.repeat, 2),
    )


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
