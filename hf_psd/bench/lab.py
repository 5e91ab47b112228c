"""The models and prompts of a run: built on first use, once."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..testing.pairs import SHAPES, measure_agreement, synthetic_pair
from ..workspace import release
from .profiles import Settings
from .prompts import Prompts, encode_prompts, random_prompts, read_prompts


class Lab:
    """Target, drafters and prompts of one run.

    Args:
        settings: of the run.
        most: the largest batch of prompts that will be asked for.
        need_big: whether the last drafter is wanted besides the first.
    """

    def __init__(self, settings: Settings, most: int, need_big: bool = False):
        self.settings, self.most, self.need_big = settings, most, need_big
        self._target: PreTrainedModel | None = None
        self._drafters: dict[int, PreTrainedModel] = {}
        self._prompts: Prompts | None = None
        self.agreement: float | None = None

    @property
    def target(self) -> PreTrainedModel:
        """The target, in eval mode on its device, with end tokens ignored."""
        self.build()
        assert self._target is not None
        return self._target

    def drafter(self, index: int = 0) -> PreTrainedModel:
        """A drafter of the settings, wherever it is at the moment."""
        self.build()
        return self._drafters[index]

    @property
    def models(self) -> list[PreTrainedModel]:
        """Every model that holds memory."""
        return [self.target, *self._drafters.values()]

    def prompts(self, batch: int) -> Prompts:
        """The first `batch` prompts; a smaller batch is a part of a larger one."""
        if self._prompts is None:
            self._prompts = self._read_prompts()
        return self._prompts.rows(0, batch)

    def close(self) -> None:
        """Frees the models and everything kept with them."""
        release()
        self._target, self._drafters = None, {}
        free()

    def _read_prompts(self) -> Prompts:
        settings = self.settings
        vocab = vocabulary_of(settings.target)
        if settings.prompts is None:
            return random_prompts(self.most, settings.prompt, vocab)
        folder = settings.tokenizer or (settings.target if Path(settings.target).is_dir() else None)
        if folder is None:
            raise ValueError("--prompts needs --tokenizer FOLDER, or a target that is a folder with a tokenizer.")
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        return encode_prompts(read_prompts(settings.prompts), tokenizer, self.most, settings.prompt, vocab)

    def build(self) -> None:
        """Makes the models if they are not there."""
        if self._target is not None:
            return
        settings = self.settings
        indices = sorted({0, len(settings.drafters) - 1}) if self.need_big else [0]
        names = [settings.drafters[index] for index in indices]
        target, drafters = build_models(settings, names)
        self._target, self._drafters = target, dict(zip(indices, drafters))
        self.agreement = measure_agreement(target, drafters[0])  # type: ignore[arg-type]
        free()


def vocabulary_of(target: str) -> int:
    """Token ids of a shape or of a saved model, without building it."""
    if Path(target).is_dir():
        return int(AutoConfig.from_pretrained(target).get_text_config(decoder=True).vocab_size)
    return SHAPES[target]["vocab"]


def build_models(settings: Settings, names: list[str]) -> tuple[PreTrainedModel, list[PreTrainedModel]]:
    """The target on its device and the named drafters on theirs; end tokens are ignored by all.

    Raises:
        ValueError: shapes and folders are mixed, or `quantize` is not served.
        ImportError: bitsandbytes is missing where it is asked for.
    """
    dtype, (home, away) = getattr(torch, settings.dtype), settings.devices
    folders = [Path(name).is_dir() for name in (settings.target, *names)]
    if any(folders) and not all(folders):
        raise ValueError("Target and drafters must be shapes, or folders of saved models, not both.")
    target: Any
    drafters: list[Any]
    if all(folders):
        target = _load(settings.target, dtype, home, settings.quantize)
        drafters = [_load(name, dtype, away, None) for name in names]
    else:
        target, built = synthetic_pair(
            settings.target, names, settings.agreement, settings.layers, dtype, home, drafter_device=away
        )
        drafters = list(built)
        if settings.quantize is not None:
            with tempfile.TemporaryDirectory() as folder:
                target.save_pretrained(folder)
                del target
                free()
                target = _load(folder, dtype, home, settings.quantize)
    for model in (target, *drafters):
        model.generation_config.eos_token_id = None
    return target, drafters


def free() -> None:
    """Gives unused memory back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _load(folder: str, dtype: torch.dtype, device: str, quantize: str | None) -> PreTrainedModel:
    options: dict[str, Any] = {"dtype": dtype, "device_map": {"": device}}
    if quantize == "nf4":
        from transformers import BitsAndBytesConfig

        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    elif quantize is not None:
        raise ValueError(f"quantize must be 'nf4', got {quantize!r}.")
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()
