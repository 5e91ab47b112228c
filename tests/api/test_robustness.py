"""What users do that nobody foresees: each case once went wrong."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria
from zoo import GREEDY, P4, Fixed, noisy, prompts, tiny

import hf_psd
from hf_psd import workspace
from hf_psd.drafters.model import ModelDrafter
from hf_psd.drafters.prompt_lookup import PromptLookup
from hf_psd.workspace import Workspace, fingerprint

ASK = P4() | GREEDY | dict(max_new_tokens=12)


@pytest.fixture
def target():
    return tiny("llama")


def both(target, drafters=("prompt_lookup",), psd=True, **more):
    plain = target.generate(**ASK, **more)
    return plain, target.generate(**ASK, **more, assistant_models=list(drafters), psd=psd)


def test_a_processor_that_returns_the_whole_batch_is_refused(target):
    class PerRow(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores + torch.zeros(4, 64)

    with pytest.raises(ValueError, match="one row at a time"):
        target.generate(**ASK, logits_processor=[PerRow()], psd=True)


def test_criteria_get_the_scores_they_would_get(target):
    class AfterFourScores(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), scores is not None and len(scores) >= 4)

    class Column(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids[:, -1:] > 70

    more = dict(output_scores=True, return_dict_in_generate=True)
    for criterion in (AfterFourScores(), Column()):
        plain, ours = both(target, stopping_criteria=[criterion], **more)
        assert torch.equal(plain.sequences, ours.sequences)


def test_invalid_values_are_removed_where_asked(target):
    target.lm_head.weight.data[7] = float("nan")
    plain, ours = both(target, remove_invalid_values=True)
    assert torch.equal(plain, ours)
    with pytest.raises(RuntimeError, match="NaN"):
        target.generate(**ASK, psd=True)


def test_a_bandit_of_the_users_keeps_its_arms(target):
    class Failing(PromptLookup):
        def draft(self, task):
            raise ValueError("transient")

    bandit = hf_psd.bandit.make("ucb1", 1, 0)
    with pytest.warns(UserWarning, match="transient"):
        target.generate(**ASK, assistant_models=[Failing()], psd=dict(selector=bandit))
    assert bandit.active_arms == [0]
    target.generate(**ASK, assistant_models=[noisy(target, 0.03)], psd=dict(selector=bandit))
    assert hf_psd.last_stats().drafted > 0


def test_a_drafter_that_fails_at_the_start_is_one_arm_less(target):
    class Failing(PromptLookup):
        def start(self, session):
            raise ValueError("no start")

    with pytest.warns(UserWarning, match="no start"):
        plain, ours = both(target, [Failing(), noisy(target, 0.03)], dict(selector="ucb1"))
    assert torch.equal(plain, ours) and hf_psd.last_stats().drafted > 0


def test_a_bandit_for_other_drafters_is_refused_before_any_forward(target):
    seen = []
    handle = target.register_forward_hook(lambda *args: seen.append(1))
    with pytest.raises(ValueError, match="arms"):
        target.generate(**ASK, psd=dict(selector=hf_psd.bandit.make("ucb1", 3, 0)))
    handle.remove()
    assert not seen


def test_n_grams_longer_than_the_text(target):
    ask = dict(input_ids=torch.tensor([[5]]), do_sample=False, pad_token_id=0, max_new_tokens=3)
    out = target.generate(**ask, assistant_models=[PromptLookup(40, 1)], psd=True)
    assert torch.equal(out, target.generate(**ask)) and not hf_psd.last_stats().errors


def test_a_drafter_whose_model_is_gone_is_named(target):
    with pytest.raises(ValueError, match=r"assistant_models\[0\].*gone"):
        target.generate(**ASK, assistant_models=[ModelDrafter(copy.deepcopy(target), 0)], psd=True)


def test_another_default_device_changes_nothing(target):
    plain = target.generate(**ASK)
    torch.set_default_device("meta")
    try:
        out = target.generate(**ASK, psd=True)
    finally:
        torch.set_default_device(None)
    assert torch.equal(out, plain)


def test_threads_take_turns_on_a_target_in_training(target):
    target = tiny("llama", attention_dropout=0.5)
    plain, outputs = target.generate(**ASK), []
    target.train()

    def call():
        outputs.extend(target.generate(**ASK, assistant_models=[noisy(target, 0.03)], psd=True) for _ in range(3))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outputs) == 6 and all(torch.equal(out, plain) for out in outputs)
    assert target.training


def test_a_call_inside_a_call_gets_buffers_of_its_own(target, monkeypatch):
    kept = Workspace(target, workspace.Limits(4, 64, 4), 0, graphs=False)
    monkeypatch.setitem(workspace._kept, target, kept)
    kept.busy = True
    assert workspace.obtain(target, 4, 32, 4, 0, graphs=True) is not kept


def test_kept_buffers_are_for_the_weights_they_were_made_for(target):
    space = Workspace(target, workspace.Limits(5, 64, 4), 0, graphs=False)
    assert space.serves(target, 4, 64, 4) and not space.serves(target, 4, 65, 4)
    before = fingerprint(target)
    target.to(torch.bfloat16)
    assert fingerprint(target) != before and not space.serves(target, 4, 64, 4)


def test_lookups_of_other_lengths_are_other_drafters():
    assert PromptLookup(3, 2).signature != PromptLookup(5, 1).signature


class Failing(hf_psd.StepHook):
    def __init__(self, *events):
        for event in events:
            setattr(self, event, self.fail(event))

    @staticmethod
    def fail(event):
        def failing(context):
            raise KeyError(event)

        return failing


class FailingStreamer:
    def put(self, value):
        if value.dim() == 1:
            raise OSError("put")

    def end(self):
        raise OSError("end")


def test_the_first_error_is_the_one_that_is_raised(target):
    for first in ("on_start", "before_draft", "after_draft", "before_verify", "after_verify", "on_commit"):
        with pytest.raises(KeyError, match=first), pytest.warns(UserWarning, match="KeyError at the end of a call"):
            target.generate(**ASK, psd=True, psd_hooks=[Failing(first, "on_end")])
    with pytest.raises(KeyError, match="on_end"):
        target.generate(**ASK, psd=True, psd_hooks=[Failing("on_end")])
    with pytest.raises(OSError, match="put"), pytest.warns(UserWarning, match="OSError at the end of a call"):
        target.generate(**ASK, psd=True, streamer=FailingStreamer())


def test_drafters_of_the_users_own_are_numbered_by_their_place(target):
    near, far = noisy(target, 0.03), tiny("llama", 11)
    made = [ModelDrafter(near, 0), ModelDrafter(far, 0)]
    for drafters in (made, [made[0], made[0]], [far, made[0]], made[::-1]):
        selector = Fixed((0, 1))
        plain, ours = both(target, drafters, dict(selector=selector))
        assert torch.equal(plain, ours) and not hf_psd.last_stats().errors
        names = [by.name for by in hf_psd.last_stats().by_drafter]
        assert [name[-2:] for name in names] == ["#0", "#1"] and all(
            by.drafted for by in hf_psd.last_stats().by_drafter
        )
    assert [drafter.key for drafter in made] == [0, 0]


def test_prompts_past_the_configured_positions():
    """Rotary positions are computed, so plain `generate` only warns; learned ones run out."""
    for family in ("llama", "mistral", "gemma2"):
        target = tiny(family, max_position_embeddings=16)
        ask = prompts(3, seed=1, max_len=30) | GREEDY | dict(max_new_tokens=8)
        assert ask["input_ids"].shape[1] > 16
        assert torch.equal(target.generate(**ask, psd=True), target.generate(**ask))
