"""Full information: what drafters tell of committed tokens, against plain forwards, and what it costs."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from zoo import GREEDY, P4, Recorder, assert_plain, noisy, prompts, shared, tiny

import hf_psd
from hf_psd.bandit import Hedge
from hf_psd.hindsight import Hindsight
from hf_psd.phases import Request
from hf_psd.selection import Feedback
from hf_psd.testing import toys

MODES = ("sd", "psd")
SAMPLED = dict(do_sample=True, temperature=0.8, top_k=12, repetition_penalty=1.3, pad_token_id=0, eos_token_id=None)


class Listener:
    """Lets drafters take turns of `stay` rounds and asks all for reviews every `every` turns; keeps what they tell."""

    full_information = True

    def __init__(self, stay=3, every=4):
        self.stay, self.every, self.turn, self.due = stay, every, 0, None
        self.turns: Counter[int] = Counter()
        self.heard: dict[tuple[int, int], list[float]] = {}

    def plan(self, requests, arms, gamma):
        self.turn += 1
        self.turns.update(request.index for request in requests)
        asked = [(self.turns[request.index] + request.index) % self.every == 0 for request in requests]
        self.due = {arm.key: asked for arm in arms}
        arm = arms[self.turn // self.stay % len(arms)]
        return [(arm.key, [gamma - request.index % 2 for request in requests])]

    def feedback(self, results):
        for result in results:
            for drafter, (gain, tokens) in result.reviews.items():
                heard = self.heard.setdefault((result.request.index, drafter), [0.0, 0])
                heard[0] += gain
                heard[1] += tokens


def listen(models, arguments, mode, gamma=3, listener=None, **psd):
    listener = listener or Listener()
    out = shared("llama").generate(
        **arguments, assistant_models=models, psd=dict(selector=listener, gamma=gamma, mode=mode, seed=4, **psd)
    )
    assert not hf_psd.last_stats().errors
    width = arguments["input_ids"].shape[1]
    return listener.heard, out[:, width:], arguments["attention_mask"].argmax(1).tolist()


@torch.no_grad()
def logits_of(model, prompt, text):
    ids = torch.cat([prompt, text])[None]
    return model(ids).logits[0, len(prompt) - 1 : -1].float()


@pytest.mark.parametrize(("mode", "every", "stay"), list(itertools.product(MODES, (1, 4, 7), (1, 5))))
def test_greedy_reviews_count_agreements(mode, every, stay):
    models = [shared("llama", noise=0.03), shared("llama", 11), shared("llama")]
    arguments = prompts(5, seed=2) | GREEDY | dict(max_new_tokens=40)
    heard, texts, padding = listen(models, arguments, mode, listener=Listener(stay, every))
    for row, (text, pad) in enumerate(zip(texts, padding)):
        for key, model in enumerate(models):
            agrees = logits_of(model, arguments["input_ids"][row, pad:], text).argmax(-1) == text
            gain, tokens = heard[row, key]
            assert tokens >= 15 and gain == agrees[:tokens].sum(), (row, key)
    assert all(gain == tokens for (_, key), (gain, tokens) in heard.items() if key == 2)


@pytest.mark.parametrize("mode", MODES)
def test_sampled_reviews_compare_q_with_p(mode):
    """min(1, q / p) at the committed tokens, both after the call's processors on the true prefix."""
    models = [shared("llama", noise=0.05), shared("llama", 11)]
    arguments = P4() | SAMPLED | dict(max_new_tokens=40)
    short = int(arguments["attention_mask"].sum(1).min())  # versions differ in whether a penalty sees padding
    arguments |= {name: arguments[name][:, -short:] for name in ("input_ids", "attention_mask")}
    heard, texts, padding = listen(models, arguments, mode)
    processors = shared("llama")._get_logits_processor(
        shared("llama")._prepare_generation_config(None, **SAMPLED)[0], device="cpu"
    )
    for row, (text, pad) in enumerate(zip(texts, padding)):
        prompt = arguments["input_ids"][row, pad:]

        def law(model, prompt=prompt, text=text):
            scores = logits_of(model, prompt, text)
            prefixes = [torch.cat([prompt, text[:place]])[None] for place in range(len(text))]
            scores = [processors(prefix, score[None])[0] for prefix, score in zip(prefixes, scores)]
            return torch.stack(scores).softmax(-1).gather(1, text[:, None])[:, 0]

        p = law(shared("llama"))
        for key, model in enumerate(models):
            gain, tokens = heard[row, key]
            expected = (law(model) / p).clamp(max=1)[:tokens].sum().item()
            assert tokens >= 20 and gain == pytest.approx(expected, abs=1e-3), (row, key)


def test_the_mean_of_sampled_reviews_is_the_overlap():
    """min(1, q(y) / p(y)) of tokens y that were emitted speculatively averages to sum_v min(p(v), q(v))."""
    target, drafter = toys.tiny_llama(0), toys.tiny_llama(5)
    listener = Listener(stay=1, every=1)
    ids = torch.tensor([[3, 4, 5]]).expand(600, 3)
    arguments = dict(do_sample=True, temperature=4.0, top_k=0, eos_token_id=None, pad_token_id=0, max_new_tokens=10)
    out = target.generate(
        ids, **arguments, assistant_models=[drafter], psd=dict(selector=listener, mode="sd", gamma=2, seed=1)
    )
    total = torch.tensor(list(listener.heard.values())).sum(0)
    with torch.no_grad():
        p, q = ((model(out).logits[:, 2:-1].float() / 4.0).softmax(-1) for model in (target, drafter))
    overlap = torch.minimum(p, q).sum(-1)
    seen = torch.tensor([listener.heard[row, 0][1] for row in range(600)])
    expected = torch.where(torch.arange(10) < seen[:, None], overlap, 0.0).sum()
    deviation = (q / p).clamp(max=1).std() * total[1].sqrt()
    assert total[1] > 3000 and abs(total[0] - expected) < 4 * deviation < 0.03 * expected


@pytest.mark.parametrize("mode", MODES)
def test_coupled_reviews_count_what_would_have_been_accepted(mode):
    """A drafter that always drafts is accepted exactly where it agrees; its idle twin says the same of the text."""
    model, twin = shared("llama", noise=0.03), noisy(shared("llama"), 0.03)
    arguments = P4() | SAMPLED | dict(max_new_tokens=40)
    listener = Listener(stay=10**6, every=2)
    heard, _, _ = listen([model, twin, shared("llama")], arguments, mode, 4, listener, verification="coupled")
    assert all(heard[row, 2][0] == heard[row, 2][1] for row in range(4))
    for row in range(4):
        (gain, tokens), (idle_gain, idle_tokens) = heard[row, 0], heard[row, 1]
        assert 0 < gain < tokens and abs(idle_tokens - tokens) <= 10 and abs(idle_gain - gain) <= 10
    stats = hf_psd.last_stats()
    total = sum(heard[row, 0][0] for row in range(4))
    assert stats.accepted <= total + 40 and total >= 0.9 * stats.accepted


def test_prompt_lookup_reviews_its_standing_drafts():
    models = ["prompt_lookup", shared("llama")]
    arguments = dict(input_ids=torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6], [9, 11, 13, 17, 19, 23, 29, 31]])) | GREEDY
    arguments |= dict(max_new_tokens=30, attention_mask=torch.ones(2, 8, dtype=torch.long))
    listener = Listener(stay=10**6, every=2)
    listen(models, arguments, "sd", 4, listener)
    stats, (gain, tokens) = hf_psd.last_stats(), (sum(parts) for parts in zip(*listener.heard.values()))
    by = stats.by_drafter[0]
    own = [listener.heard[row, 0] for row in range(2)]
    missed = stats.rounds - by.rounds
    assert sum(part[0] for part in own) >= by.accepted - 8
    assert by.rounds + missed <= sum(part[1] for part in own) <= stats.emitted
    assert 0 <= gain <= tokens


def test_selectors_that_do_not_ask_pay_nothing():
    models = [shared("llama", noise=0.03), tiny("llama", 11)]
    arguments = P4() | GREEDY | dict(max_new_tokens=24)
    for name, most in (("ucb1", 0), ("hedge", 99)):
        with Recorder(models[1]) as recorder:
            shared("llama").generate(**arguments, assistant_models=models, psd=dict(selector=name, mode="sd", gamma=2))
        stats = hf_psd.last_stats()
        reviews = sum(by.review_forwards for by in stats.by_drafter)
        assert (reviews > 0) == (most > 0) and stats.by_drafter[1].forwards == recorder.forwards


def test_reviews_are_bounded_by_the_policy():
    models = [shared("llama", noise=0.03), shared("llama", 11)]
    arguments = P4() | GREEDY | dict(max_new_tokens=60)
    spent = {}
    for every in (0, 2, 16):
        psd = dict(selector=f"hedge:review_every={every}", gamma=2, mode="sd")
        assert_plain(shared("llama"), models, psd, **arguments)
        stats = hf_psd.last_stats()
        spent[every] = sum(by.review_forwards for by in stats.by_drafter) / stats.target_forwards
    assert spent[0] == 0 < spent[16] < spent[2] and spent[16] < 0.3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("per_request", [False, True])
def test_hedge_finds_the_good_drafter_without_drafting_by_the_others(mode, per_request):
    models = [shared("llama", 11), shared("llama", noise=0.01), shared("llama", 12)]
    arguments = P4() | GREEDY | dict(max_new_tokens=100)
    psd = dict(selector="hedge", mode=mode, per_request=per_request, seed=3)
    assert_plain(shared("llama"), models, psd, **arguments)
    stats = hf_psd.last_stats()
    assert stats.by_drafter[1].rounds > 0.75 * stats.rounds
    means = stats.selector["means"]
    assert all(mean is not None for mean in means) and means.index(max(means)) == 1


def test_a_drafter_that_cannot_review_is_known_by_its_own_rounds(recwarn):
    class Silent(hf_psd.Drafter):
        name = "silent"

        def draft(self, task):
            from hf_psd.drafters.base import Proposal

            return Proposal(torch.full((len(task.budgets), 4), 5), point_mass=True)

    arguments = P4() | GREEDY | dict(max_new_tokens=80)
    assert_plain(
        shared("llama"),
        [Silent(), shared("llama", noise=0.01)],
        dict(selector="hedge", mode="sd", seed=1),
        **arguments,
    )
    stats = hf_psd.last_stats()
    assert not stats.errors and stats.by_drafter[1].rounds > 0.6 * stats.rounds


@pytest.mark.parametrize("after", [1, 3, 8])
def test_a_drafter_that_fails_while_it_reviews_is_retired(after):
    failing, arguments = tiny("llama", 11), P4() | GREEDY | dict(max_new_tokens=60)

    def fail(module, args, kwargs, calls=itertools.count()):  # noqa: B008
        if next(calls) >= after:
            raise ValueError("worn out")

    failing.register_forward_pre_hook(fail, with_kwargs=True)
    models = [failing, shared("llama", noise=0.03), "prompt_lookup"]
    with pytest.warns(UserWarning, match="worn out"):
        assert_plain(shared("llama"), models, dict(selector="hedge:review_every=1", mode="sd", seed=2), **arguments)
    stats = hf_psd.last_stats()
    assert stats.selector["active_arms"] == [1, 2] and stats.by_drafter[1].rounds > 10


def test_rounds_wait_for_the_reviews_of_all():
    hedge = Hedge(2, 0)
    hindsight = Hindsight(hedge, 4)
    hindsight.able = {0, 1}
    request = Request(0, 0, 0, 10, 99)

    def land(arm, reviews):
        assert hedge.select() == hedge.select() or True
        hindsight.land(arm, None, [Feedback(request, arm, 4, 1, 2, None, reviews)])

    assert [hindsight.due(None, 0) for _ in range(14)] == [
        False, True, False, True, False, False, False, True, False, False, False, True, False, False,
    ]  # fmt: skip
    land(0, {0: (1.0, 2)})
    assert hedge.stats()["means"] == [None, None]
    land(1, {0: (1.0, 2), 1: (3.0, 4)})
    assert hedge.stats()["means"] == [0.5, 0.75]
    assert hedge._table(None).rounds == pytest.approx(2, abs=0.1), "both rounds count"
    land(0, {0: (0.0, 2)})
    hindsight.end()
    assert hedge.stats()["means"][0] == pytest.approx(2 / 6) and hedge.stats()["means"][1] == 0.75
