"""`PSDConfig`: every setting of a speculative `generate` call."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from . import bandit

_CHOICES: dict[str, tuple[Any, ...]] = {
    "mode": ("auto", "ar", "sd", "psd"),
    "verification": ("rejection", "coupled"),
    "reward": ("acceptance", "goodput"),
    "attention": ("auto", "native", "triton"),
    "cuda_graphs": ("auto", True, False),
    "fused_ops": ("auto", True, False),
    "compile": (True, False),
    "per_request": (True, False),
}

AUTO_GAMMAS = (0, 1, 2, 4, 8)
"""Draft lengths that `gamma="auto"` chooses from."""


@dataclass(frozen=True)
class PSDConfig:
    """Settings of one speculative call, given as `psd=PSDConfig(...)`, `psd={...}` or `psd=True` (all defaults).

    Attributes:
        gamma: Draft tokens per row and round, an int >= 1. Rows whose drafts keep failing draft fewer. `"auto"`: at
            most 8, chosen each round; a bandit then chooses pairs of drafter and 0, 1, 2, 4 or 8 tokens, by goodput.
        mode: `"ar"` decodes plainly, `"sd"` drafts and verifies the whole batch in turn, `"psd"` alternates two halves
            of the batch. `"auto"` times all that can pay on these devices and goes on in the one that should be done
            first, so a call is hardly slower than the best of the three; rejection sampling with `seed=` does not
            change modes (`"psd"` if a drafter lives on another device than the target, else `"sd"`), as its text
            would then depend on times.
        verification: How sampled drafts are judged; the output law is the target's either way. `"rejection"`:
            Leviathan et al. 2023 (arXiv 2211.17192). `"coupled"`: target and drafter share their noise (Daliri et al.
            2024, arXiv 2408.07978), so the text depends on the seed alone, not on drafters, gamma, mode or batch
            split.
        selector: Who chooses each row's drafter: `"composite"` (prompt lookup where the context has a match, else a
            model drafter, several models in turn), the name of a bandit (`hf_psd.bandit.names()`), a bandit instance,
            which keeps what it has learnt, a class or object with `select` and `update`, or one with `plan` and
            `feedback` (`hf_psd.selection.Selector`).
            A name may carry options: `"sw_ucb:window=100,min_dwell=4,hysteresis=0.02"`.
        reward: What a bandit maximises: `"acceptance"`, the accepted share of the drafted tokens, or `"goodput"`,
            tokens per second of the round, as measured.
        per_request: Bandits learn and choose per request instead of per group.
        context: A tag, or one per row (after `num_return_sequences` expansion); bandits keep statistics per tag.
        seed: 64-bit seed of all sampling noise; None draws one from torch's default CPU generator per sampling call.
        request_ids: One int per row (after `num_return_sequences` expansion) that keys the row's noise; default: row
            number.
        max_batch_size: Requests that a queue runs at once, >= 1; None is 32. This and the next two size the queue of
            `generate_batch`; `generate` has its batch and leaves them unread.
        block_size: Tokens per KV block of a queue, >= 1; None is 64 on CUDA, 32 elsewhere.
        kv_memory: Bytes for the KV blocks of a queue, of all its models together, >= 1; None is what the seats need,
            at most 80 % of the free memory on CUDA and 25 % on the CPU.
        attention: `"native"` uses the model's own attention with explicit masks; `"triton"` an attention that reads
            lengths on the device; `"auto"` the latter on CUDA where it fits the model.
        cuda_graphs: Capture the step in CUDA graphs, on first use of each shape; `"auto"` where the target is on one
            CUDA device and on the fast attention route. KV caches and graphs then stay with the target
            (`hf_psd.release`).
        fused_ops: Use liger-kernel's fused RMSNorm, rotary embedding and SwiGLU during the call, on CUDA, for the
            families they fit; `"auto"` where that package is installed.
        compile: Run the models' MLPs and norms through `torch.compile` during the call; the first call compiles. Where
            `fused_ops` are in use, only what they leave.

    Raises:
        ValueError: a value outside the allowed ones, or one that this version does not serve yet.
    """

    gamma: int | str = 4
    mode: str = "auto"
    verification: str = "rejection"
    selector: Any = "composite"
    reward: str = "acceptance"
    per_request: bool = False
    context: str | Sequence[str] | None = None
    seed: int | None = None
    request_ids: Sequence[int] | None = None
    max_batch_size: int | None = None
    block_size: int | None = None
    kv_memory: int | None = None
    attention: str = "auto"
    cuda_graphs: str | bool = "auto"
    fused_ops: str | bool = "auto"
    compile: bool = False

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            _require(name, getattr(self, name), allowed, "must be one of")
        if self.gamma != "auto" and (
            isinstance(self.gamma, bool) or not isinstance(self.gamma, int) or self.gamma < 1
        ):
            raise ValueError(
                f"psd: gamma must be an int >= 1 or \"auto\", got {self.gamma!r}; mode='ar' decodes without drafts."
            )
        for name in ("max_batch_size", "block_size", "kv_memory"):
            size = getattr(self, name)
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise ValueError(f"psd: {name} must be an int >= 1 or None, got {size!r}.")
        if isinstance(self.selector, str) and self.selector.partition(":")[0] not in ("composite", *bandit.names()):
            known = ", ".join(("composite", *bandit.names()))
            raise ValueError(f"psd: selector must be one of {known}, or a selector object, got {self.selector!r}.")
        if isinstance(self.selector, str) and self.selector.startswith("composite:"):
            raise ValueError(f"psd: selector 'composite' takes no options, got {self.selector!r}.")
        if not isinstance(self.selector, str) and not any(
            all(callable(getattr(self.selector, method, None)) for method in pair)
            for pair in (("plan", "feedback"), ("select", "update"))
        ):
            raise ValueError(
                "psd: a selector object needs the methods plan and feedback, or select and update; got "
                f"{self.selector!r}."
            )
        if self.gamma == "auto" and self.reward != "goodput" and self._by_bandit:
            raise ValueError(
                "psd: gamma='auto' with a bandit needs reward='goodput': accepted shares cannot compare draft lengths."
            )
        if self.seed is not None and not (type(self.seed) is int and -(2**63) <= self.seed < 2**64):
            raise ValueError(f"psd: seed must fit 64 bits, got {self.seed!r}.")

    @property
    def most_drafts(self) -> int:
        """The most draft tokens a row can get in a round."""
        return max(AUTO_GAMMAS) if self.gamma == "auto" else int(self.gamma)

    @property
    def _by_bandit(self) -> bool:
        return self.selector != "composite" and not hasattr(self.selector, "plan")

    @classmethod
    def resolve(cls, psd: PSDConfig | Mapping[str, Any] | bool) -> PSDConfig:
        """Turns the `psd=` argument (True, a mapping or a config) into a config."""
        if isinstance(psd, PSDConfig):
            return psd
        if psd is True:
            return cls()
        if isinstance(psd, Mapping):
            names = [field.name for field in fields(cls)]
            unknown = sorted(set(psd) - set(names))
            if unknown:
                raise ValueError(
                    f"psd: unknown field(s) {', '.join(map(repr, unknown))}; known are {', '.join(names)}."
                )
            return cls(**psd)
        raise TypeError(f"psd must be True, a PSDConfig or a dict of its fields, got {type(psd).__name__}.")


def field_docs() -> dict[str, str]:
    """What `PSDConfig`'s docstring says of each field, on one line each."""
    attributes = inspect.getdoc(PSDConfig).partition("Attributes:\n")[2].partition("\n\n")[0]
    entries = re.split(r"^ {4}(\w+): ", attributes, flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, text in zip(entries[::2], entries[1::2])}


def _require(name: str, value: Any, allowed: tuple[Any, ...], verb: str) -> None:
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in allowed):
        raise ValueError(f"psd: {name} {verb} {', '.join(map(repr, allowed))}; got {value!r}.")
