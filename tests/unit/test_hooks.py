"""Step hooks: when they are called, what they see, and that an error in one ends the call and leaves no trace."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria
from zoo import GREEDY, P4, Fixed, assert_plain, noisy, shared, tiny

import hf_psd
from hf_psd.hooks import StepHookList
from hf_psd.streaming import ProgressHook

EVENTS = ("on_start", "before_draft", "after_draft", "before_verify", "after_verify", "on_commit", "on_end")
ARGUMENTS = P4() | GREEDY | dict(max_new_tokens=20)


class Log(hf_psd.StepHook):
    def __init__(self):
        self.events = []


for _event in EVENTS:
    setattr(Log, _event, lambda self, context, event=_event: self.events.append((event, context)))


def run(mode="sd", models=None, **extra):
    log = Log()
    models = models or [shared("llama", noise=0.03)]
    psd = dict(mode=mode, selector=Fixed())
    shared("llama").generate(**ARGUMENTS, assistant_models=models, psd=psd, psd_hooks=[log], **extra)
    return [name for name, _ in log.events], log.events


@pytest.mark.parametrize("mode", ["ar", "sd", "psd"])
def test_order_of_events(mode):
    names, events = run(mode)
    assert names[0] == "on_start" and names[-1] == "on_end" and set(names[1:-1]) <= set(EVENTS[1:-1])
    verifications = hf_psd.last_stats().target_forwards
    assert names.count("before_verify") == names.count("after_verify") == verifications
    assert verifications - 2 <= names.count("on_commit") <= verifications  # a read of ended rows only is dropped
    letters = "".join(dict(zip(EVENTS, "SbavwcE"))[name] for name in names)
    rounds = {"ar": "(vwc?)+c*", "sd": "(ba?c?vwc?)+c*", "psd": "(b?(vw)?a?c?)+c*"}
    assert re.fullmatch(f"S{rounds[mode]}E", letters), letters
    steps = [context.step for name, context in events if name in ("after_verify", "after_draft")]
    assert steps == sorted(steps) and steps[0] == 0 and steps[-1] == len(set(steps)) - 1
    before = [context.step for name, context in events if name == "before_draft"]
    assert all(step in before for step in [context.step for name, context in events if name == "after_draft"])


def test_what_contexts_hold():
    _, events = run("psd")
    contexts = {name: [context for each, context in events if each == name] for name in EVENTS}
    start = contexts["on_start"][0]
    assert start.step == -1 and start.batch_size == 4 and start.prompts.tolist() == P4()["input_ids"].tolist()
    assert [request.index for request in start.requests] == [0, 1, 2, 3]
    for context in contexts["before_draft"]:
        assert context.plan == [(0, [4] * len(context.requests))] and context.gamma == 4 and context.drafts is None
    for context in contexts["after_draft"]:
        assert context.drafts.shape == (len(context.requests), 4) and context.drafts.dtype == torch.long
    for context in contexts["before_verify"]:
        assert context.drafts.shape == (len(context.requests), context.width - 1)
        assert context.slots.tolist() == [request.slot for request in context.requests]
        assert context.stream is None and 0 <= context.balance <= 1
    texts = {row: [] for row in range(4)}
    for context in contexts["on_commit"]:
        count = len(context.requests)
        assert count == len(context.emitted) == len(context.drafted) == len(context.accepted) == len(context.source)
        for request, emitted, drafted, accepted in zip(
            context.requests, context.emitted, context.drafted, context.accepted
        ):
            texts[request.index] += emitted
            assert 0 <= accepted <= drafted <= 4 and len(emitted) <= accepted + 1
    output = shared("llama").generate(**ARGUMENTS)
    assert [texts[row] for row in range(4)] == output[:, 7:].tolist()
    assert contexts["on_end"][0].stats is hf_psd.last_stats()


class Decider(hf_psd.StepHook):
    """Overrides the selector: row r drafts at most r tokens, by another drafter each turn."""

    turn = 0

    def before_draft(self, context):
        self.turn += 1
        context.plan = [(self.turn % 2, [request.index for request in context.requests])]


@pytest.mark.parametrize("mode", ["sd", "psd"])
def test_a_hook_may_decide_who_drafts(mode):
    models, log = [shared("llama"), shared("llama", 11)], Log()
    output = shared("llama").generate(
        **ARGUMENTS, assistant_models=models, psd=dict(mode=mode), psd_hooks=[Decider(), log]
    )
    assert output.tolist() == shared("llama").generate(**ARGUMENTS).tolist()
    for name, context in log.events:
        if name == "on_commit":
            assert all(drafted <= request.index for request, drafted in zip(context.requests, context.drafted))
    assert all(by.drafted for by in hf_psd.last_stats().by_drafter)


@pytest.mark.parametrize("plan", [None, [], [(0, [0] * 4)], [(0, [-3] * 4)], [(0, [99] * 4)]], ids=str)
def test_any_plan_is_clipped(plan):
    class Odd(hf_psd.StepHook):
        def before_draft(self, context):
            context.plan = plan and [(key, budgets[: len(context.requests)]) for key, budgets in plan]

    output = shared("llama").generate(
        **ARGUMENTS, assistant_models=[shared("llama")], psd=dict(mode="sd"), psd_hooks=[Odd()]
    )
    assert output.tolist() == shared("llama").generate(**ARGUMENTS).tolist()
    assert (hf_psd.last_stats().drafted > 0) == (plan == [(0, [99] * 4)])


WRONG = {
    "too few": [(0, [4] * 3)],
    "too many": [(0, [4] * 5)],
    "a fraction": [(0, [4, 4, 2.5, 4])],
    "nothing": [(0, [4, None, 4, 4])],
    "unknown": [(7, [4] * 4)],
    "negative": [(-1, [4] * 4)],
    "by name": [("model", [4] * 4)],
    "no budgets": [0],
    "one budget": [(0, 4)],
    "no list": 4,
}


@pytest.mark.parametrize("case", WRONG)
def test_a_plan_that_cannot_be_followed_is_refused(case):
    class Odd(Fixed):
        def plan(self, requests, arms, gamma):
            return WRONG[case]

    class Hook(hf_psd.StepHook):
        def before_draft(self, context):
            context.plan = WRONG[case]

    target, models = shared("llama"), [shared("llama")]
    for psd, hooks, author in (
        (dict(selector=Odd(), mode="sd"), [], "selector Odd"),
        (dict(mode="sd"), [Hook()], "a before_draft hook"),
    ):
        with pytest.raises(ValueError, match=f"psd: {author} made a plan that cannot be followed.* for 4 rows"):
            target.generate(**ARGUMENTS, assistant_models=models, psd=psd, psd_hooks=hooks)


class Boom(Exception):
    pass


class Fails(hf_psd.StepHook):
    def __init__(self, event, count=1):
        self.left = count

        def fail(context):
            self.left -= 1
            if self.left == 0:
                raise Boom(event)

        setattr(self, event, fail)


class FailingProcessor(LogitsProcessor):
    def __call__(self, input_ids, scores):
        if input_ids.shape[1] > 9:
            raise Boom("processor")
        return scores


class FailingCriterion(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] > 9:
            raise Boom("criterion")
        return torch.zeros(len(input_ids), dtype=torch.bool)


FAULTS = {event: dict(psd_hooks=[Fails(event)]) for event in EVENTS}
FAULTS |= {f"third {event}": dict(psd_hooks=[Fails(event, 3)]) for event in EVENTS[1:-1]}
FAULTS |= {
    "processor": dict(logits_processor=[FailingProcessor()]),
    "criterion": dict(stopping_criteria=[FailingCriterion()]),
}


@pytest.mark.parametrize("mode", ["sd", "psd"])
@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_ends_the_call_with_that_error_and_leaves_models_clean(fault, mode):
    target, drafter, log = tiny("gpt2"), noisy(tiny("gpt2"), 0.03), Log()
    target.train(), drafter.transformer.h[1].train()
    target.set_attn_implementation("eager"), drafter.set_attn_implementation("sdpa")
    before = [state_of(model) for model in (target, drafter)]
    extra = {name: list(value) for name, value in FAULTS[fault].items()}
    for each in extra.get("psd_hooks", []):
        each.left = 3 if fault.startswith("third") else 1
    extra["psd_hooks"] = [*extra.get("psd_hooks", []), log]
    with pytest.raises(Boom, match=fault.removeprefix("third ")):
        target.generate(**ARGUMENTS, assistant_models=[drafter], psd=dict(mode=mode, selector=Fixed()), **extra)
    assert [state_of(model) for model in (target, drafter)] == before
    assert [name for name, _ in log.events].count("on_end") == 1 and log.events[-1][0] == "on_end"
    target.eval(), drafter.eval()
    assert_plain(target, [drafter], dict(mode=mode), **ARGUMENTS)


def state_of(model):
    modules = [
        (module.training, len(module._forward_hooks), len(module._forward_pre_hooks), "forward" in vars(module))
        for module in model.modules()
    ]
    weights = {name: value.clone().tolist() for name, value in model.state_dict().items()}
    return modules, model.config._attn_implementation, model.generation_config.to_dict(), weights


def test_every_hook_hears_the_end():
    log = Log()
    hooks = StepHookList([Fails("on_end"), log, Fails("on_end")])
    with pytest.raises(Boom):
        hooks.end(None)
    assert [name for name, _ in log.events] == ["on_end"]


def test_progress_hook(capsys):
    shared("llama").generate(**ARGUMENTS, psd=True, psd_hooks=[ProgressHook(total=80, label="demo ")])
    shown = capsys.readouterr().err
    assert "demo [##############################] 80 tokens" in shown and shown.endswith("\n")
