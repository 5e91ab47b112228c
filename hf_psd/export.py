"""Write a folder that `model.generate(..., custom_generate=FOLDER)` runs without this package.

transformers loads a custom generation method from `custom_generate/generate.py` and copies only files beside it that
are imported as `from .name import ...`. So the modules that a call needs are written side by side under flat names,
`psd_kernels` among them, with their imports rewritten and nothing else changed.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import sys
from dataclasses import fields
from pathlib import Path
from string import Template

from huggingface_hub import ModelCard

from . import bandit
from .config import PSDConfig, field_docs

_ROOTS = {"hf_psd": "", "psd_kernels": "psd_kernels"}
_ENTRY = "hf_psd.api"
_TAG = "custom_generate"
_HEADING = "# Lossless speculative decoding for whole batches"
_MAIN_SETTINGS = ("gamma", "mode", "verification", "selector", "reward", "seed", "compile")
_INSTALLED = {"torch", "transformers", "accelerate", "safetensors"}
_REQUIREMENTS = "torch>=2.9\ntransformers>=5.17\n"  # transformers reads one clause a line and no markers
_GENERATE = '''"""Lossless speculative decoding for whole batches as a generation method of transformers."""

from __future__ import annotations

import inspect
from typing import Any

from .api import _dispatch, plain_generate

_LOADING = (
    "cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "repo_type", "revision",
    "subfolder", "token", "trust_remote_code",
)  # fmt: skip


def generate(*args: Any, model: Any, psd: Any = True, **kwargs: Any) -> Any:
    """`model.generate` with `assistant_models=[...]`; `psd`: True, a dict of settings, or False to decode plainly."""
    named = inspect.signature(plain_generate()).parameters  # transformers passes all of these, set or not
    given = {name: value for name, value in kwargs.items() if value is not None or name not in named}
    for name in _LOADING:
        given.pop(name, None)
    return _dispatch(plain_generate(), model, *args, psd=psd, **given)
'''
_README = Template("""---
library_name: transformers
license: apache-2.0
tags:
- $tag
---

$heading

## Description

Drafts tokens with one or several small models, or by looking them up in the text, and verifies them with the model
itself, for left-padded batches of any size. Greedy output is token-identical to plain `generate` in float32; sampled
output follows the same law. These are the modules of `hf_psd` $version under flat names.

## Base model

None: the method works with any model that is compatible.

## Model compatibility

Decoder-only models whose KV cache can be rolled back. A model that cannot be served is refused with the reason.
Prompts are padded on the left.

## Additional arguments

- `assistant_models` (list): causal language models, or `"prompt_lookup"`, which is also the default.
- `psd` (dict): settings, such as `dict(gamma=4, mode="sd")`; `False` decodes plainly. See below.
- `psd_hooks` (list): observers of the steps.
- `assistant_tokenizers` (list, with `tokenizer`): for drafters whose token ids are not the model's.

Main settings, with their defaults; a name that is not known is refused with the list of all:

$settings

The bandits are $bandits.

## Output type changes

None. With `return_dict_in_generate=True` the output has the statistics of the call as its attribute `psd`.

## Example usage

```py
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("HuggingFaceTB/SmolLM2-1.7B-Instruct", padding_side="left")
model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-1.7B-Instruct", device_map="auto")
drafter = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct", device_map="auto")
texts = ["The capital of France is", "One, two, three,"]
inputs = tokenizer(texts, return_tensors="pt", padding=True).to(model.device)
output = model.generate(
    **inputs, custom_generate="path/or/name of this repository", trust_remote_code=True,
    assistant_models=["prompt_lookup", drafter], max_new_tokens=64,
)
```
""")


def export_hub(folder: str | Path) -> list[Path]:
    """Writes the repository into `folder`; returns the files written. Other files there are left alone.

    A README.md that is there already, say of the model whose repository it is, keeps its text and gets the tag.
    """
    folder = Path(folder)
    target = folder / "custom_generate"
    target.mkdir(parents=True, exist_ok=True)
    files = {target / f"{_flat(name)}.py": source for name, source in _modules().items()}
    files[target / "generate.py"] = _GENERATE
    files[target / "requirements.txt"] = _REQUIREMENTS
    files[folder / "README.md"] = _card(folder / "README.md")
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    return sorted(files)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="where the repository is written; created if it is not there")


def run(parsed: argparse.Namespace) -> None:
    files = export_hub(parsed.folder)
    print(f"{len(files)} files in {parsed.folder}")


def _card(path: Path) -> str:
    """The text of README.md: the method's card, or another one that lies there, with the tag added to its metadata."""
    from . import __version__

    if path.is_file() and _HEADING not in path.read_text(encoding="utf-8").splitlines():
        card = ModelCard.load(path, ignore_metadata_errors=True)
        card.data.tags = [*dict.fromkeys([*(card.data.tags or ()), _TAG])]
        card.data.library_name = card.data.library_name or "transformers"
        return str(card)
    docs, defaults = field_docs(), {field.name: field.default for field in fields(PSDConfig)}
    return _README.substitute(
        version=__version__,
        tag=_TAG,
        heading=_HEADING,
        settings="\n".join(f"- `{name}` (`{_literal(defaults[name])}`): {docs[name]}" for name in _MAIN_SETTINGS),
        bandits=", ".join(f"`{name}`" for name in bandit.names()),
    )


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _modules() -> dict[str, str]:
    """Rewritten source by module name, for the entry and all that it imports."""
    done: dict[str, str] = {}
    waiting = [_ENTRY]
    while waiting:
        name = waiting.pop()
        if name not in done:
            done[name], needed = _rewritten(name)
            waiting += needed
    return done


def _flat(name: str) -> str:
    """`hf_psd.drafters.base` becomes `drafters_base`, `psd_kernels.ops` becomes `psd_kernels_ops`."""
    root, *rest = name.split(".")
    return "_".join(filter(None, (_ROOTS[root], *rest)))


def _path(name: str) -> Path | None:
    """The file of a module of ours, None if there is none."""
    spec = importlib.util.find_spec(name.split(".")[0])
    if spec is None or spec.origin is None:
        return None
    base = Path(spec.origin).parent.joinpath(*name.split(".")[1:])
    return next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()), None)


def _rewritten(name: str) -> tuple[str, list[str]]:
    """A module's source with flat imports, and the modules of ours that it imports."""
    path = _path(name)
    assert path is not None, name
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    source = path.read_text(encoding="utf-8")
    lines, needed = source.splitlines(), []
    tree = ast.parse(source)
    guarded = {id(inner) for outer in ast.walk(tree) if isinstance(outer, ast.Try) for inner in ast.walk(outer)}
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    for node in sorted(nodes, key=lambda node: node.lineno, reverse=True):
        new, modules = _statement(node, package, id(node) in guarded)
        if new is not None:
            assert node.end_lineno is not None
            indent = " " * node.col_offset
            lines[node.lineno - 1 : node.end_lineno] = [indent + line for line in new]
            needed += modules
    return "\n".join(lines) + "\n", needed


def _statement(node: ast.Import | ast.ImportFrom, package: str, guarded: bool) -> tuple[list[str] | None, list[str]]:
    """The lines that stand for an import (None: as it is) and the modules of ours that they import."""
    text = ast.unparse(node)
    module = _absolute(node, package) if isinstance(node, ast.ImportFrom) else node.names[0].name
    if module.split(".")[0] not in _ROOTS:
        known = {*sys.stdlib_module_names, *_INSTALLED}
        if guarded or module.split(".")[0] in known:
            return None, []
        # Optional packages: transformers asks for whatever is imported outside of a `try`.
        return ["try:", f"    {text}", "except ImportError:", "    raise"], []
    assert isinstance(node, ast.ImportFrom), text
    lines, modules, rest = [], [], []
    for alias in node.names:
        inner = f"{module}.{alias.name}"
        if _path(inner) is None:
            rest.append(ast.unparse(alias))
            continue
        flat = _flat(inner)
        # The first line is what transformers looks for when it copies files; the second binds the module.
        lines += [f"from .{flat} import __name__ as _{flat}", f"from . import {flat} as {alias.asname or alias.name}"]
        modules.append(inner)
    if rest and _path(module) is None:
        lines.append("raise ImportError")  # a module that only another build has
    elif rest:
        lines.append(f"from .{_flat(module)} import {', '.join(rest)}")
        modules.append(module)
    return lines, modules


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if node.level == 0:
        return node.module or ""
    parts = package.split(".")
    return ".".join(filter(None, (*parts[: len(parts) - node.level + 1], node.module)))
