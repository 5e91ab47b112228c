"""One model on one device: forwards over ragged rows of its own KV cache."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from .attention import FAST, MaskBuilder
from .blocks import BlockPool
from .cache import KVAddress, PagedCache, RaggedCache

PIECE_TOKENS = 2048  # prompts are read so many tokens at a time, which bounds the memory of activations
LONGEST_PIECE = 512
_KV_GRANULE = 32  # attention reads a multiple of this many positions, so that shapes repeat


class Features(NamedTuple):
    """What one forward gives: logits [R, T, V] in the model's dtype, and all hidden states if they were asked for."""

    logits: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...] | None


class Rows:
    """The requests of one forward: their slots on the device and as Python ints.

    Args:
        slots: slot numbers, distinct.
        device: where the forward runs.
    """

    def __init__(self, slots: Sequence[int], device: torch.device):
        self.numbers = list(slots)
        self.slots = upload(self.numbers, device)
        first, last = self.numbers[0], self.numbers[-1]
        in_order = self.numbers == list(range(first, last + 1))
        self.span = (first, last + 1) if in_order else None

    def __len__(self) -> int:
        return len(self.numbers)


def upload(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """A small int64 tensor on `device`, without making the host wait for the device."""
    tensor = torch.tensor(numbers, dtype=torch.long, device="cpu")
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class ModelRunner:
    """Runs a causal LM over rows of a `RaggedCache`; the model itself is never changed.

    Args:
        model: any causal LM that passed `support.check_supported`.
        slots: requests held at once.
        capacity: tokens per request, drafts included.
        pool: blocks to keep the KV in; None gives each slot its own `capacity` tokens.
    """

    def __init__(self, model: PreTrainedModel, slots: int, capacity: int, pool: BlockPool | None = None):
        self._model = weakref.ref(model)  # buffers kept with a model must not keep it alive
        text_config = model.config.get_text_config(decoder=True)
        self.device = input_device(model)
        self.vocab_size: int = output_vocab_size(model)
        self.input_vocab_size = input_embedding(model).shape[0]
        self.last_position: int = getattr(text_config, "max_position_embeddings", None) or 2**31
        implementation = text_config._attn_implementation
        eager, self.fast = implementation == "eager", implementation == FAST
        self.masks = MaskBuilder(text_config, _compute_dtype(model) if eager else None)
        layers = text_config.num_hidden_layers
        self.cache = (
            RaggedCache(layers, slots, capacity, in_place=self.fast)
            if pool is None
            else PagedCache(layers, pool, in_place=self.fast)
        )
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._keeps_logits = "logits_to_keep" in parameters

    @property
    def model(self) -> PreTrainedModel:
        model = self._model()
        assert model is not None
        return model

    def forward(
        self,
        rows: Rows,
        ids: torch.Tensor,
        positions: torch.Tensor,
        kv_length: int,
        logits_to_keep: int = 0,
        hidden_states: bool = False,
    ) -> Features:
        """Feeds T tokens per row and stores their KV.

        Args:
            rows: the R requests.
            ids: [R, T] int64; ids outside the model's vocabulary are replaced by 0.
            positions: [R, T] int64; a negative position marks a token that is computed but neither stored nor
                meaningful.
            kv_length: an upper bound of the rows' lengths after this forward, known to the host.
            logits_to_keep: keep the last so many positions' logits (0: all).
            hidden_states: also return every layer's hidden states.
        """
        capacity = self.cache.capacity
        kv_length = min(-(-kv_length // _KV_GRANULE) * _KV_GRANULE, capacity)
        stored = (positions >= 0) & (positions < capacity)
        at = torch.where(stored, positions, -1 if self.fast else capacity)
        address = KVAddress(rows.slots, at, kv_length, rows.span)
        self.cache.point_at(address)
        kwargs: dict[str, Any] = {self._cache_name: self.cache}
        if self.fast:
            kwargs["psd_address"] = address
        if self._keeps_logits and logits_to_keep:
            kwargs["logits_to_keep"] = logits_to_keep
        if hidden_states:
            kwargs["output_hidden_states"] = True
        output = self.model(
            input_ids=torch.where((ids >= 0) & (ids < self.input_vocab_size), ids, 0),
            position_ids=torch.where(stored, positions, 0),
            attention_mask=None if self.fast else self.masks(at, kv_length),
            use_cache=True,
            return_dict=True,
            **kwargs,
        )
        logits = output.logits
        if logits_to_keep and logits.shape[1] > logits_to_keep:
            logits = logits[:, -logits_to_keep:]
        return Features(logits.to(self.device), output.hidden_states if hidden_states else None)

    def feed(self, rows: Rows, ids: torch.Tensor, positions: torch.Tensor, kv_length: int) -> None:
        """Stores the KV of [R, T] tokens (arguments as in `forward`), in pieces that keep the masks small."""
        width = min(LONGEST_PIECE, max(16, PIECE_TOKENS // ids.shape[0]))
        for start in range(0, ids.shape[1], width):
            piece = slice(start, start + width)
            self.forward(rows, ids[:, piece], positions[:, piece], kv_length, logits_to_keep=1)


def implementation_of(model: PreTrainedModel) -> str:
    """Name of the attention implementation the model's decoder is set to."""
    return model.config.get_text_config(decoder=True)._attn_implementation


def input_embedding(model: PreTrainedModel) -> torch.Tensor:
    """The weight of the input embedding, [V, H]."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight


def input_device(model: PreTrainedModel) -> torch.device:
    """The device token ids go to: that of the input embedding, also for a model split over several devices."""
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    if device is not None:
        return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return input_embedding(model).device


def output_vocab_size(model: PreTrainedModel) -> int:
    """Width of the model's logits."""
    head = model.get_output_embeddings()
    out_features = getattr(head, "out_features", None)
    return int(out_features or model.config.get_text_config(decoder=True).vocab_size)


def _compute_dtype(model: PreTrainedModel) -> torch.dtype:
    return model.dtype if model.dtype.is_floating_point else torch.float32


_locks: weakref.WeakKeyDictionary[PreTrainedModel, threading.RLock] = weakref.WeakKeyDictionary()


@contextmanager
def one_call_at_a_time(models: Sequence[PreTrainedModel]) -> Iterator[None]:
    """Lets other threads' calls on any of `models` wait: a call changes flags of theirs and restores them after."""
    with ExitStack() as held:
        for model in sorted(set(models), key=id):  # one order for all, so that no two threads wait for each other
            held.enter_context(_locks.setdefault(model, threading.RLock()))
        yield


@contextmanager
def inference_state(models: Mapping[PreTrainedModel, str]) -> Iterator[None]:
    """Runs with every model in eval mode and on the attention implementation given for it, and restores both after."""
    training = [module for model in models for module in model.modules() if module.training]
    current = {model: model.config.get_text_config(decoder=True)._attn_implementation for model in models}
    switched = {model: current[model] for model, wanted in models.items() if wanted != current[model]}
    try:
        for module in training:
            module.training = False
        for model in switched:
            model.set_attn_implementation(models[model])
        yield
    finally:
        for model, name in switched.items():
            model.set_attn_implementation(name)
        for module in training:
            module.training = True
