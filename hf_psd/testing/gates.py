"""The published family of law gates: `python -m hf_psd.testing.gates [--fresh] [names]` runs it."""

from __future__ import annotations

import argparse
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..hooks import StepHook
from . import toys
from .law import JointLaw, joint_law, judge_samples, sample_joint
from .queued import sample_queue
from .statistics import ALPHA, TestResult, chi_square, holm

SAMPLES = 10_240


@cache
def llama(seed: int, vocab_size: int = 8, spread: float = 0.35, lift: float = 0.0) -> PreTrainedModel:
    """`toys.tiny_llama`, made once."""
    return toys.tiny_llama(seed, vocab_size, spread, lift)


@cache
def near(amount: float = 0.1) -> PreTrainedModel:
    """The target's noisy copy; its twin if the amount is 0."""
    return toys.noisy_copy(target(), amount)


target = partial(llama, 0)
other = partial(llama, 5)
wrong = partial(llama, 11, spread=0.7)
flat = partial(llama, 5, spread=0.05)


@dataclass(frozen=True, eq=False)
class Setting:
    """A law to be met: of a target's `joint_tokens` tokens after a prompt, under arguments of `generate`."""

    target: Callable[[], PreTrainedModel]
    kwargs: Mapping[str, Any]
    prompt: tuple[int, ...] = (3, 4, 5)
    joint_tokens: int = 3

    @cached_property
    def law(self) -> JointLaw:
        """By enumeration."""
        return joint_law(self.target(), self.prompt, self.joint_tokens, **self.generate_kwargs)

    @property
    def generate_kwargs(self) -> dict[str, Any]:
        """Arguments of `generate`: sampling, without end tokens or `top_k` unless asked for."""
        return {"do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0, **self.kwargs}


@dataclass(frozen=True, eq=False)
class Gate:
    """One way to sample a setting's law.

    Attributes:
        seed: the published one.
        drafters: builds `assistant_models`.
        psd: settings apart from selector and seed, or None for plain `generate`.
        selector: builds the policy; one that is also a `StepHook` is passed in `psd_hooks` too.
        tokens: length of each sample.
        beside: a prompt that every fourth row has instead; those rows are not tested.
        pairs: whether neighbouring rows are tested for independence, too.
        queued: whether samples are requests of a queue, beside others of other settings.
        known_ids: vocabulary of a drafter that lacks the target's last ids; their frequency is tested, too.
    """

    seed: int
    setting: Setting
    drafters: Callable[[], Sequence[Any]] = lambda: [llama(5)]
    psd: Mapping[str, Any] | None = field(default_factory=dict)
    selector: Callable[[], Any] = toys.FullDepth
    tokens: int = 4
    samples: int = SAMPLES
    beside: tuple[int, ...] | None = None
    pairs: bool = False
    queued: bool = False
    known_ids: int = 0


def run_gate(gate: Gate, seed: int | None = None, samples: int | None = None) -> dict[str, TestResult]:
    """Samples a gate and tests the joint law of its first tokens, every token's own and what else it asks for."""
    drawn = sample_gate(gate, gate.seed if seed is None else seed, samples or gate.samples)
    setting = gate.setting
    results = judge_samples(setting.target(), setting.prompt, drawn, setting.law, **setting.generate_kwargs)
    if gate.pairs:
        results["pairs"] = check_pairs(drawn, setting.law)
    if gate.known_ids:
        results["unknown ids"] = count_unknown(drawn, setting.law, gate.known_ids)
    return results


def sample_gate(gate: Gate, seed: int, samples: int) -> Tensor:
    """Draws a gate's samples, [samples, tokens] int64."""
    setting, options = gate.setting, dict(gate.setting.generate_kwargs)
    psd: Mapping[str, Any] | bool = False
    if gate.psd is None:
        torch.manual_seed(seed)
    else:
        selector = gate.selector()
        psd = {"selector": selector, "seed": seed, **gate.psd}
        options["assistant_models"] = gate.drafters()
        if isinstance(selector, StepHook):
            options["psd_hooks"] = [selector]
    if gate.queued:
        assert isinstance(psd, dict)
        return sample_queue(setting.target(), setting.prompt, samples, tokens=gate.tokens, psd=psd, **options)
    if gate.beside is None:
        return sample_joint(setting.target(), setting.prompt, samples, tokens=gate.tokens, psd=psd, **options)
    prompts = [setting.prompt] * 3 + [gate.beside]
    drawn = sample_joint(setting.target(), prompts, samples * 4 // 3, tokens=gate.tokens, psd=psd, **options)
    return drawn[torch.arange(len(drawn)) % 4 < 3]


def check_pairs(drawn: Tensor, law: JointLaw) -> TestResult:
    """Whether the second tokens of rows 2i and 2i + 1 are as if drawn apart: chi-square over all such pairs."""
    alone = law.first(2)
    index = alone.index(drawn[:, :2])
    second = alone.cells[:, 1]
    chances = torch.zeros(law.vocab_size, dtype=torch.float64).index_add_(0, second, alone.probabilities)
    token = torch.where(index >= 0, second[index.clamp(min=0)], -1)
    left, right = token[0::2], token[1::2]
    both = torch.where((left >= 0) & (right >= 0), left * law.vocab_size + right, -1)
    return chi_square(both, torch.outer(chances, chances).flatten())


def count_unknown(drawn: Tensor, law: JointLaw, known_ids: int) -> TestResult:
    """Whether ids from `known_ids` on, which the drafter lacks, are as frequent as they should be."""
    tokens = law.cells.shape[1]
    chances = torch.zeros(tokens + 1, dtype=torch.float64)
    chances.index_add_(0, (law.cells >= known_ids).sum(1), law.probabilities)
    return chi_square((drawn[:, :tokens] >= known_ids).sum(1), chances)


def run_family(
    names: Iterable[str] = (), seed: Callable[[], int] | None = None, report: Callable[[str], None] = lambda line: None
) -> dict[str, TestResult]:
    """Runs the named gates (all if none), with their published seeds unless `seed` draws others."""
    results = {}
    for name in list(names) or list(GATES):
        began = time.process_time()
        for kind, result in run_gate(GATES[name], None if seed is None else seed()).items():
            results[f"{name}/{kind}"] = result
            report(f"{name + '/' + kind:28s} {result}  {time.process_time() - began:5.1f} s")
    return results


HOT = {"temperature": 4.0}
MAIN = Setting(target, dict(HOT, top_k=6, top_p=0.95))
COPYING = Setting(target, MAIN.kwargs, prompt=(3, 4, 5, 6, 3, 4, 7, 3, 4))
# Logits far from 0, as many models have them, where a 16-bit q is coarse.
LIFTED = Setting(partial(llama, 0, spread=0.2, lift=-60.0), {"temperature": 0.7})
WIDE = Setting(partial(llama, 0, 72), dict(HOT, top_k=12), prompt=(5, 9, 17, 33, 21), joint_tokens=2)
NARROW = Setting(partial(llama, 0, 64), WIDE.kwargs, prompt=WIDE.prompt, joint_tokens=2)

COUPLED = {"verification": "coupled"}
TWO_GROUPS = {"mode": "psd"}
AUTO = {"gamma": "auto", "reward": "goodput"}

GATES: dict[str, Gate] = {
    "main": Gate(101, MAIN, psd={"gamma": 2}, tokens=3, samples=40_960, pairs=True),
    "main-coupled": Gate(102, MAIN, psd=dict(COUPLED, gamma=2), tokens=3, samples=20_480, pairs=True),
    "plain": Gate(103, MAIN, psd=None),
    "ar": Gate(104, MAIN, psd={"mode": "ar"}),
    "two-groups": Gate(105, MAIN, psd=dict(TWO_GROUPS, gamma=2)),
    "gamma-1": Gate(107, MAIN, psd={"gamma": 1}),
    "gamma-3": Gate(108, MAIN, lambda: [near()], {"gamma": 3}),
    "gamma-4": Gate(109, MAIN, lambda: [near()], {"gamma": 4}, tokens=5),
    "twin": Gate(110, MAIN, lambda: [near(0.0)], {"gamma": 3}),
    "wrong": Gate(111, MAIN, lambda: [wrong()], {"gamma": 3}),
    "lookup": Gate(112, COPYING, lambda: ["prompt_lookup"], {"gamma": 3}),
    "temperature": Gate(114, Setting(target, {"temperature": 2.0}), psd={"gamma": 2}),
    "top-k": Gate(115, Setting(target, dict(HOT, top_k=4)), psd={"gamma": 2}),
    "top-p": Gate(116, Setting(target, dict(HOT, top_p=0.8)), psd={"gamma": 2}),
    "penalty": Gate(117, Setting(target, dict(HOT, repetition_penalty=4.0)), psd={"gamma": 3}),
    "end": Gate(118, Setting(target, dict(HOT, eos_token_id=[2, 6])), lambda: [near()], {"gamma": 3}),
    "lifted": Gate(119, LIFTED, lambda: [llama(5, spread=0.2, lift=-60.0)], {"gamma": 2}),
    "composite": Gate(120, COPYING, lambda: [near(), wrong(), "prompt_lookup"], {"gamma": 3}, lambda: "composite"),
    "stay-or-switch": Gate(121, MAIN, lambda: [near(), wrong()], {"gamma": 2}, toys.StayOrSwitch),
    "stay-or-switch-two-groups": Gate(
        122, MAIN, lambda: [near(), wrong()], dict(TWO_GROUPS, gamma=2), toys.StayOrSwitch
    ),
    "stay-or-switch-coupled": Gate(123, MAIN, lambda: [near(), wrong()], dict(COUPLED, gamma=2), toys.StayOrSwitch),
    "best-for-all": Gate(
        124, MAIN, lambda: [other(), near()], dict(TWO_GROUPS, gamma=2), toys.BestForAll, 3, 20_480, pairs=True
    ),
    "both-at-once": Gate(125, COPYING, lambda: ["prompt_lookup", other()], {"gamma": 2}, toys.BothAtOnce),
    "ragged-depths": Gate(126, MAIN, psd={"gamma": 3}, selector=toys.RaggedDepths),
    "peeking": Gate(
        127, Setting(target, HOT, joint_tokens=2), lambda: [flat()], {"gamma": 2}, lambda: toys.Peeking(8), 3
    ),
    "ragged-prompts": Gate(128, MAIN, psd=dict(TWO_GROUPS, gamma=2), beside=(6, 1, 7, 3, 4, 4), tokens=3),
    "narrow-drafter": Gate(129, WIDE, lambda: [llama(3, 64)], {"gamma": 2}, known_ids=64),
    "wide-drafter": Gate(130, NARROW, lambda: [llama(3, 72)], {"gamma": 2}),
    "thompson": Gate(131, MAIN, lambda: [near(), wrong()], {"gamma": 2, "per_request": True}, lambda: "thompson"),
    "ucb1": Gate(132, MAIN, lambda: [near(), wrong()], dict(TWO_GROUPS, gamma=2), lambda: "ucb1"),
    "peeking-choice": Gate(
        133,
        Setting(target, HOT, joint_tokens=2),
        lambda: [flat(), wrong()],
        {"gamma": 2},
        lambda: toys.PeekingChoice(8),
    ),
    "every-bandit": Gate(
        134, MAIN, lambda: [near(), wrong()], dict(TWO_GROUPS, gamma=2), lambda: toys.EveryBandit(2, gamma=2)
    ),
    "every-bandit-per-request": Gate(
        135,
        MAIN,
        lambda: [near(), wrong()],
        {"gamma": 2},
        lambda: toys.EveryBandit(2, gamma=2, per_request=True),
        tokens=5,
    ),
    "hedge": Gate(137, MAIN, lambda: [near(), wrong()], {"gamma": 2, "per_request": True}, lambda: "hedge", 6),
    "gamma-auto": Gate(
        136, MAIN, lambda: [near(), wrong()], dict(AUTO, per_request=True), lambda: "thompson", tokens=6
    ),
    "queue": Gate(138, MAIN, lambda: [near()], dict(TWO_GROUPS, gamma=2, max_batch_size=384), tokens=4, queued=True),
}
"""Gates by name, each with its published seed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: prints a line per test and what Holm's procedure rejects; the exit status is 1 if anything is."""
    parser = argparse.ArgumentParser(prog="python -m hf_psd.testing.gates", description=__doc__)
    parser.add_argument("names", nargs="*", help="gates to run; all if none")
    parser.add_argument("--fresh", action="store_true", help="new seeds instead of the published ones")
    asked = parser.parse_args(arguments)
    unknown = set(asked.names) - set(GATES)
    if unknown:
        parser.error(f"unknown gates {', '.join(sorted(unknown))}; known are {', '.join(GATES)}")
    fresh = (lambda: secrets.randbits(62)) if asked.fresh else None
    results = run_family(asked.names, fresh, partial(print, flush=True))
    rejected = holm({name: result.p_value for name, result in results.items()})
    print(f"{len(results)} tests, family-wise alpha {ALPHA}: rejected {', '.join(rejected) or 'none'}")
    return bool(rejected)


if __name__ == "__main__":
    raise SystemExit(main())
