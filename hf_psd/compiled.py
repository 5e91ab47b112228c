"""`compile=True`: the models' MLPs and norms through torch.compile, only for the length of a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from transformers import PreTrainedModel

_PARTS = ("MLP", "RMSNorm", "LayerNorm")


@contextmanager
def compiled(models: Sequence[PreTrainedModel]) -> Iterator[None]:
    """Compiles the parts of `models` that are more than one kernel and know nothing of caches; undone afterwards.

    Layers of a model share their compiled code, and so do calls: torch keeps it with the class.
    """
    with ExitStack() as undo:
        for model in dict.fromkeys(models):
            for module in model.modules():
                if type(module).__name__.endswith(_PARTS) and "forward" not in vars(module):
                    module.forward = torch.compile(module.forward, dynamic=True)
                    undo.callback(vars(module).pop, "forward")
        yield
