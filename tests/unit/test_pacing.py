"""`mode="auto"` on a made-up machine whose times and acceptance are known, and in real calls."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_psd.hooks import StepContext, StepHook
from hf_psd.pacing import Pacer, Profile
from hf_psd.phases import BatchManager, Request


class Machine:
    """Runs calls under a pacer: `seconds[mode]` a round, `tokens` a round under speculation."""

    def __init__(self, seconds, tokens, rows=4, modes=("sd", "ar", "psd"), late=("psd",)):
        self.seconds, self.tokens, self.rows, self.modes, self.late = dict(seconds), tokens, rows, modes, late
        self.profile, self.now, self.captured = Profile(), 0.0, 0

    def call(self, length=200):
        """Modes of the rounds of one call."""
        pacer = Pacer(self.profile, self.modes, self.late, captures=lambda: self.captured, clock=lambda: self.now)
        manager = BatchManager()
        requests = [Request(row, row, 0, 1, length + 1) for row in range(self.rows)]
        manager.add(requests)
        seen = []
        while manager.requests:
            pacer.steer(manager)
            mode = pacer.mode
            halves = 2 if mode == "psd" else 1
            for half in range(halves):
                part = [request for request in manager.requests if request.index % halves == half]
                self.now += self.seconds[mode] / halves
                count = 1 if mode == "ar" else self.tokens
                context = StepContext(0, part, 4, emitted=[[1] * count for _ in part])
                for request in part:
                    request.length = min(request.limit, request.length + count)
                pacer.on_commit(context)
            for request in list(manager.requests):
                if request.length >= request.limit:
                    manager.finish(request)
            seen.append(mode)
        return seen


def share(modes, mode):
    return modes.count(mode) / len(modes)


@pytest.mark.parametrize(
    ("seconds", "tokens", "best"),
    [
        ({"ar": 1.0, "sd": 1.6, "psd": 2.4}, 2, "sd"),
        ({"ar": 1.0, "sd": 2.6, "psd": 3.0}, 2, "ar"),
        ({"ar": 1.0, "sd": 1.8, "psd": 1.2}, 2, "psd"),
        ({"ar": 1.0, "sd": 1.1, "psd": 1.5}, 4, "sd"),
    ],
)
def test_after_two_calls_the_best_mode_runs(seconds, tokens, best):
    machine = Machine(seconds, tokens)
    for _ in range(3):
        machine.call(400)
    assert share(machine.call(400), best) >= 0.9


def test_time_lost_in_the_first_call_is_small():
    machine = Machine({"ar": 1.0, "sd": 2.6, "psd": 3.0}, 2)
    machine.call(400)
    assert machine.now < 400 * 1.08


def test_modes_that_are_unlikely_to_win_are_timed_only_after_a_while():
    machine = Machine({"ar": 1.0, "sd": 1.5, "psd": 9.0}, 2)
    assert "psd" not in machine.call(60)
    assert "psd" in machine.call(200)
    assert "psd" not in machine.call(200)


def test_new_prompts_get_their_chance_although_the_last_ones_did_not_repay_drafting():
    machine = Machine({"ar": 1.0, "sd": 1.2, "psd": 9.0}, 1)
    for _ in range(4):
        assert share(machine.call(), "ar") > 0.8
    machine.tokens = 4
    assert share(machine.call(), "sd") > 0.8


def test_earlier_calls_count_for_little_in_a_call_of_other_prompts():
    profile = Profile(tokens=4000.0, rounds=2000.0)
    Pacer(profile, ("sd", "ar"))
    assert profile.rounds <= 2 and profile.rate == 2


def test_costly_speculation_that_keeps_losing_is_tried_in_ever_fewer_calls():
    machine = Machine({"ar": 1.0, "sd": 3.0, "psd": 9.0}, 1, modes=("sd", "ar"), late=())
    tried = ["sd" in machine.call(100) for _ in range(40)]
    assert sum(tried[:10]) >= 3 and sum(tried[20:]) <= 3


def test_a_mode_that_has_become_fast_is_found_within_a_call():
    machine = Machine({"ar": 1.0, "sd": 2.2, "psd": 9.0}, 2, modes=("sd", "ar"), late=())
    machine.call(), machine.call()
    machine.seconds["sd"] = 1.0
    assert share(machine.call(2000), "sd") > 0.5


def test_rounds_in_which_a_graph_is_captured_are_not_timed():
    machine = Machine({"ar": 1.0, "sd": 1.5, "psd": 9.0}, 2)

    class Capturing(dict):
        left = 3

        def __getitem__(self, mode):
            if mode == "sd" and self.left:
                self.left -= 1
                machine.captured += 1
                return 500.0
            return super().__getitem__(mode)

    machine.seconds = Capturing(machine.seconds)
    machine.call(20)  # short: old times make way for new ones
    assert all(max(times) < 100 for times in machine.profile.seconds.values())


def tiny(seed, layers=1):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2,
        initializer_range=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("sampled", [False, True])
def test_auto_gives_the_text_of_plain_generate_while_it_tries_modes(sampled):
    import hf_psd

    target = tiny(0, 2)
    ids = torch.randint(3, 60, (3, 7))
    settings = {
        "attention_mask": torch.ones_like(ids), "max_new_tokens": 60, "eos_token_id": None, "pad_token_id": 0,
        "do_sample": sampled,
    }  # fmt: skip
    psd = {"mode": "sd", "verification": "coupled", "seed": 4}
    expected = target.generate(ids, psd=psd, **settings) if sampled else target.generate(ids, **settings)
    for drafter in (copy.deepcopy(target), tiny(5)):
        for _ in range(3):
            out = target.generate(ids, assistant_models=[drafter], psd=psd | {"mode": "auto"}, **settings)
            assert torch.equal(out, expected)
            stats = hf_psd.last_stats()
            assert sum(stats.forwards_by_mode.values()) == stats.target_forwards
            assert set(stats.forwards_by_mode) <= {"ar", "sd"}  # halves cannot overlap on one CPU


def test_the_first_call_tries_both_ways_of_decoding():
    import hf_psd

    target = tiny(1, 2)
    ids = torch.randint(3, 60, (2, 5))
    target.generate(
        ids, attention_mask=torch.ones_like(ids), assistant_models=[tiny(6)], psd=True, do_sample=False,
        max_new_tokens=40, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert set(hf_psd.last_stats().forwards_by_mode) == {"ar", "sd"}


def test_what_is_kept_of_drafters_that_come_and_go_is_bounded():
    from hf_psd.pacing import _MOST_PROFILES, _profiles, profile_of

    target = tiny(0)
    first = profile_of(target, "first")
    for number in range(3 * _MOST_PROFILES):
        profile_of(target, number)
        assert profile_of(target, "first") is first, "it is in use"
    assert len(_profiles[target]) == _MOST_PROFILES


def test_a_new_drafter_does_not_inherit_the_times_of_one_that_is_gone():
    from hf_psd.drafters.model import ModelDrafter
    from hf_psd.engine import _identity

    assert _identity(ModelDrafter(target := tiny(0), 0)) == _identity(ModelDrafter(target, 0))
    drafter = tiny(1)
    old = _identity(ModelDrafter(drafter, 0))
    del drafter
    others = [tiny(1) for _ in range(4)]
    assert old not in [_identity(ModelDrafter(other, 0)) for other in others]


@pytest.mark.parametrize("selector", ["composite", "hedge:review_every=1", "thompson"])
def test_modes_may_change_at_any_step(selector, monkeypatch):
    """Whatever the pacer does, two groups included: texts are plain `generate`'s and the counts add up."""
    import random

    import hf_psd
    from hf_psd import engine

    class Restless(Pacer):
        def _decide(self):
            return random.choice(self.modes), "", random.choice([0, 1, 2, 5])

    class Drawn(StepHook):
        """Drafts under way, per request: each verification gets what was drawn for it, and nothing older."""

        def __init__(self):
            self.drawn, self.verifying = {}, {}

        def after_draft(self, context):
            counts = (context.drafts >= 0).sum(1).tolist()
            self.drawn.update((request.index, count) for request, count in zip(context.requests, counts))

        def after_verify(self, context):
            for request in context.requests:
                self.verifying.setdefault(request.index, []).append(self.drawn.pop(request.index, 0))

        def on_commit(self, context):
            for request, drafted in zip(context.requests, context.drafted):
                assert drafted <= self.verifying[request.index].pop(0)

    monkeypatch.setattr(engine.Engine, "_pacer", lambda *_: Restless(Profile(), ("psd", "sd", "ar")))
    target = tiny(0, 2)
    models = [copy.deepcopy(target), "prompt_lookup", tiny(5)]
    for trial in range(6):
        random.seed(trial)
        ids = torch.randint(3, 60, (1 + trial, 4))
        settings = {
            "attention_mask": torch.ones_like(ids), "max_new_tokens": 30, "eos_token_id": [5, 9] if trial % 2 else None,
            "pad_token_id": 0, "do_sample": trial % 3 == 2, "top_k": 20,
        }  # fmt: skip
        psd = {"selector": selector, "verification": "coupled", "seed": trial}
        plain = {"psd": psd | {"mode": "ar", "selector": "composite"}} if settings["do_sample"] else {}
        expected = target.generate(ids, **plain, **settings)
        output = target.generate(ids, assistant_models=models, psd=psd, psd_hooks=[Drawn()], **settings)
        assert torch.equal(output, expected)
        stats = hf_psd.last_stats()
        assert sum(stats.forwards_by_mode.values()) == stats.target_forwards
        assert sum(stats.drafted_at) == stats.drafted >= stats.accepted == sum(stats.accepted_at)
        assert stats.emitted <= stats.rounds + stats.accepted
        assert stats.selector is None or not any(stats.selector["in_flight"])
