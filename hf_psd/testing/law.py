"""The exact law of a model's next tokens, and samples of it through any decoding mode.

With these, users can test that speculative decoding leaves the law of *their* models alone:

    options = dict(do_sample=True, temperature=1.5, top_k=8)
    samples = sample_joint(model, prompt, 10_000, tokens=8, assistant_models=[drafter], psd=True, **options)
    law = joint_law(model, prompt, tokens=2, **options)
    for name, result in judge_samples(model, prompt, samples, law, **options).items():
        print(name, result)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from ..api import generate, plain_generate
from ..config import PSDConfig
from .statistics import TestResult, chi_square, kolmogorov_smirnov

Prompt = Tensor | Sequence[int]
"""Ids of one prompt, without padding."""

_CHUNK_SCORES = 2**24


@dataclass(frozen=True)
class JointLaw:
    """Law of the next k tokens.

    Attributes:
        cells: [C, k] int64, every continuation with positive probability, in lexicographic order.
        probabilities: [C] float64, summing to 1.
        vocab_size: width of the model's logits.
    """

    cells: Tensor
    probabilities: Tensor
    vocab_size: int

    def index(self, samples: Tensor) -> Tensor:
        """The cell of each sample [N, k]: int64 [N], -1 where the sample has probability 0."""
        keys, wanted = self._keys(self.cells), self._keys(samples.cpu())
        found = torch.searchsorted(keys, wanted).clamp(max=keys.numel() - 1)
        return torch.where(keys[found] == wanted, found, -1)

    def first(self, tokens: int) -> JointLaw:
        """The law of the first `tokens` of the k."""
        cells, index = self.cells[:, :tokens].unique(dim=0, return_inverse=True)
        sums = torch.zeros(cells.shape[0], dtype=torch.float64).index_add_(0, index, self.probabilities)
        return JointLaw(cells, sums, self.vocab_size)

    def _keys(self, rows: Tensor) -> Tensor:
        if self.vocab_size ** rows.shape[1] >= 2**63:
            raise ValueError(f"{rows.shape[1]} tokens of a vocabulary of {self.vocab_size} are too many to enumerate.")
        keys = torch.zeros(rows.shape[0], dtype=torch.int64)
        for column in rows.unbind(1):
            keys = keys * self.vocab_size + column
        return keys


def joint_law(model: PreTrainedModel, prompt: Prompt, tokens: int, **generate_kwargs: Any) -> JointLaw:
    """The exact law of the next `tokens` tokens, by enumeration of every possible continuation.

    Logits come from plain forwards without a cache, processors and end tokens from `generate` itself. After an end
    token the padding id follows with certainty. The number of cells is that of possible continuations: keep the
    vocabulary small, or `top_k`.

    Args:
        model: a causal LM.
        prompt: [P] ids.
        tokens: continuations' length k.
        **generate_kwargs: arguments of `generate`, without `max_new_tokens`.
    """

    def enumerate_cells(rules: _Rules, ids: Tensor) -> JointLaw:
        cells, chance = ids.new_empty(1, 0), torch.ones(1, dtype=torch.float64, device=ids.device)
        vocab_size = 0
        for _ in range(tokens):
            parts, grown = [], []
            for prefix, weight in zip(cells.split(rules.chunk), chance.split(rules.chunk)):
                law = rules.next_token(torch.cat([ids.expand(len(prefix), -1), prefix], 1), ids.shape[1])
                vocab_size = law.shape[1]
                row, token = (law > 0).nonzero(as_tuple=True)
                parts.append(torch.cat([prefix[row], token[:, None]], 1))
                grown.append(weight[row] * law[row, token])
            cells, chance = torch.cat(parts), torch.cat(grown)
        return JointLaw(cells.cpu(), chance.cpu(), vocab_size)

    return _with_rules(model, prompt, tokens, generate_kwargs, enumerate_cells)


def uniforms(model: PreTrainedModel, prompt: Prompt, samples: Tensor, seed: int = 0, **generate_kwargs: Any) -> Tensor:
    """Randomised probability integral transform of samples [N, k], token by token (Rosenblatt 1952).

    Each token becomes F(token - 1) + V p(token), where p is the model's law after the sample's own prefix, F its
    running sum over token ids and V an independent uniform number. If the samples follow the law, these are
    independent and uniform on (0, 1). Any vocabulary and any k will do: nothing is enumerated.

    Returns:
        [N, k] float64; -1 where the token is impossible, NaN after the end of a text.
    """

    def transform(rules: _Rules, ids: Tensor) -> Tensor:
        texts, which = samples.to(ids.device).unique(dim=0, return_inverse=True)
        parts = []
        for part in texts.split(rules.chunk):
            text = torch.cat([ids.expand(len(part), -1), part], 1)
            columns = []
            for step in range(part.shape[1]):
                prefix, token = text[:, : ids.shape[1] + step], part[:, step : step + 1]
                law = rules.next_token(prefix, ids.shape[1])
                chance, upto = law.gather(1, token)[:, 0], law.cumsum(1).gather(1, token)[:, 0]
                chance = torch.where(rules.ended(prefix, ids.shape[1]), torch.nan, chance)
                columns.append(torch.stack([upto - chance, chance], 1))
            parts.append(torch.stack(columns, 1))
        below, chance = torch.cat(parts)[which].cpu().unbind(-1)
        fraction = torch.rand(samples.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        return torch.where(chance == 0, -1.0, (below + fraction * chance).clamp(0, 1))

    return _with_rules(model, prompt, samples.shape[1], generate_kwargs, transform)


def sample_joint(
    model: PreTrainedModel,
    prompt: Prompt | Sequence[Prompt],
    n: int,
    *,
    tokens: int,
    psd: PSDConfig | Mapping[str, Any] | bool = True,
    assistant_models: Sequence[Any] | None = None,
    batch_size: int = 512,
    **generate_kwargs: Any,
) -> Tensor:
    """Draws `n` samples of the next `tokens` tokens, as rows of batches.

    All samples of a call share one seed and differ in their request ids, as the rows of one batch of `n` would.

    Args:
        model: the target.
        prompt: [P] ids, or several prompts, which take turns row by row (and are left-padded).
        psd: settings, or False for plain `generate`. Without `seed`, torch's default generator decides.
        assistant_models, **generate_kwargs: as for `generate`, without `max_new_tokens`.

    Returns:
        [n, tokens] int64 on the CPU, with the padding id after the end of a text.
    """
    prompts = _prompts(prompt)
    config = None if psd is False else PSDConfig.resolve(psd)
    if config is not None and config.seed is None:
        config = replace(config, seed=int(torch.randint(2**62, (1,))))
    parts = []
    for start in range(0, n, batch_size):
        numbers = range(start, min(start + batch_size, n))
        ids, mask = _left_padded([prompts[number % len(prompts)] for number in numbers])
        kwargs = dict(generate_kwargs, attention_mask=mask.to(model.device), max_new_tokens=tokens)
        if config is None:
            out = plain_generate()(model, ids.to(model.device), **kwargs)
        else:
            asked = replace(config, request_ids=list(numbers))
            out = generate(model, ids.to(model.device), psd=asked, assistant_models=assistant_models, **kwargs)
        new = getattr(out, "sequences", out)[:, ids.shape[1] :].cpu()
        parts.append(torch.nn.functional.pad(new, (0, tokens - new.shape[1]), value=_padding_id(model, kwargs)))
    return torch.cat(parts)


def judge_samples(
    model: PreTrainedModel, prompt: Prompt, samples: Tensor, law: JointLaw, **generate_kwargs: Any
) -> dict[str, TestResult]:
    """Tests samples [N, k] of a prompt.

    Returns:
        "joint", chi-square against `law`, the joint law of the first tokens; "tokens", Kolmogorov-Smirnov of all
        `uniforms`.
    """
    index = law.index(samples[:, : law.cells.shape[1]])
    numbers = uniforms(model, prompt, samples, **generate_kwargs)
    return {"joint": chi_square(index, law.probabilities), "tokens": kolmogorov_smirnov(numbers)}


class _Rules:
    """What `generate` has prepared for a call: processors and end tokens, around a model."""

    def __init__(self, model: PreTrainedModel, processors: LogitsProcessorList, config: GenerationConfig):
        self._model, self._processors = model, processors
        eos, pad = config._eos_token_tensor, config._pad_token_tensor
        self._eos = None if eos is None else eos.flatten()
        self._pad = 0 if pad is None else int(pad)
        self.chunk = max(1, _CHUNK_SCORES // model.config.get_text_config(decoder=True).vocab_size)

    def ended(self, prefix: Tensor, prompt_length: int) -> Tensor:
        """Whether each text [N, L] has ended: bool [N]."""
        if self._eos is None:
            return torch.zeros(prefix.shape[0], dtype=torch.bool, device=prefix.device)
        return torch.isin(prefix[:, prompt_length:], self._eos.to(prefix.device)).any(1)

    def next_token(self, prefix: Tensor, prompt_length: int) -> Tensor:
        """Law of the token after each text [N, L]: float64 [N, V]."""
        logits = self._model(input_ids=prefix, use_cache=False, return_dict=True).logits[:, -1].float()
        scores = self._processors(prefix, logits.to(prefix.device))  # type: ignore[arg-type]
        law = scores.double().softmax(-1)
        padding = torch.zeros_like(law[:1])
        padding[0, self._pad] = 1.0
        return torch.where(self.ended(prefix, prompt_length)[:, None], padding, law)


def _with_rules(
    model: PreTrainedModel, prompt: Prompt, tokens: int, kwargs: dict[str, Any], work: Callable[[_Rules, Tensor], Any]
) -> Any:
    """Runs `work` with the processors that `generate` prepares for this call."""
    result = None

    def decode(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        nonlocal result
        result = work(_Rules(model, logits_processor, generation_config), input_ids)
        return input_ids

    ids = _ids(prompt)[None].to(model.device)
    was_training = model.training
    try:
        model.eval()
        with torch.no_grad():
            plain_generate()(model, ids, custom_generate=decode, **dict(kwargs, max_new_tokens=tokens))
    finally:
        model.train(was_training)
    return result


def _ids(prompt: Prompt) -> Tensor:
    ids = torch.as_tensor(prompt, dtype=torch.int64).cpu()
    return ids[0] if ids.dim() == 2 and ids.shape[0] == 1 else ids


def _prompts(given: Any) -> list[Tensor]:
    several = not isinstance(given, Tensor) and not isinstance(given[0], int)
    return [_ids(prompt) for prompt in (given if several else [given])]


def _left_padded(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    ids = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_side="left")
    return ids, (torch.arange(width) >= width - lengths[:, None]).long()


def _padding_id(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> int:
    pad = kwargs.get("pad_token_id", model.generation_config.pad_token_id)
    return 0 if pad is None else int(pad)
