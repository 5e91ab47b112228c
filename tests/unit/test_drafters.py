"""The drafter contract, by toy drafters that use every slot of it, rightly and wrongly."""

from __future__ import annotations

import warnings

import pytest
import torch
from zoo import GREEDY, P4, Fixed, noisy, shared, tiny

import hf_psd
from hf_psd.drafters.base import Proposal

NEW = 20
ARGUMENTS = P4() | GREEDY | dict(max_new_tokens=NEW)
SAMPLED = P4() | dict(do_sample=True, temperature=2.0, top_k=0, pad_token_id=0, eos_token_id=None, max_new_tokens=NEW)
MODES = ("sd", "psd")


def expected():
    return shared("llama").generate(**ARGUMENTS)


class Oracle(hf_psd.Drafter):
    """Knows the greedy text and drafts it: `share(row, asked)` tokens of it per row."""

    name = "oracle"

    def __init__(self, share=lambda row, asked: asked):
        self.text, self.share = torch.nn.functional.pad(expected(), (0, 64)), share

    def start(self, session):
        self.session = session

    def ids(self, task):
        gamma, view = self.session.limits.gamma, task.view
        at = (view.padding + view.length)[:, None] + torch.arange(gamma)
        ids = self.text[view.rows.slots].gather(1, at)
        count = torch.tensor([self.share(r.index, asked) for r, asked in zip(task.requests, task.budgets)])
        return torch.where(torch.arange(gamma) < count[:, None], ids, -1)

    def draft(self, task):
        return Proposal(self.ids(task), point_mass=True)


def decode(drafters, mode="sd", hooks=(), greedy=True, **psd):
    psd = dict(mode=mode, selector=Fixed()) | psd
    arguments = ARGUMENTS if greedy else SAMPLED
    return shared("llama").generate(**arguments, assistant_models=drafters, psd=psd, psd_hooks=hooks)


@pytest.mark.parametrize("mode", MODES)
def test_an_oracle_is_always_right(mode):
    assert decode([Oracle()], mode).tolist() == expected().tolist()
    stats = hf_psd.last_stats()
    assert stats.acceptance == 1.0 and stats.target_forwards <= (5 if mode == "sd" else 10) and not stats.errors
    decode([Oracle()], mode, greedy=False)
    assert not hf_psd.last_stats().errors


@pytest.mark.parametrize("mode", MODES)
def test_ragged_budgets(mode):
    """Row r drafts at most r of the tokens asked for; the first row never drafts."""
    assert decode([Oracle(lambda row, asked: min(row, asked))], mode, gamma=3).tolist() == expected().tolist()
    stats, widest = hf_psd.last_stats(), {}

    class Watch(hf_psd.StepHook):
        def on_commit(self, context):
            for request, drafted in zip(context.requests, context.drafted):
                widest[request.index] = max(widest.get(request.index, 0), drafted)

    decode([Oracle(lambda row, asked: min(row, asked))], mode, gamma=3, hooks=[Watch()])
    assert widest == {0: 0, 1: 1, 2: 2, 3: 3}
    assert stats.acceptance == 1.0 and stats.by_position == [1.0] * 3


@pytest.mark.parametrize("mode", MODES)
def test_where_one_drafter_has_nothing_the_next_one_counts(mode):
    class Both:
        def plan(self, requests, arms, gamma):
            return [(0, [1] * len(requests)), (1, [gamma] * len(requests))]

        def feedback(self, results):
            pass

    models = [Oracle(lambda row, asked: asked * (row % 2)), Oracle()]
    assert decode(models, mode, selector=Both()).tolist() == expected().tolist()
    first, second = hf_psd.last_stats().by_drafter
    assert first.drafted == first.rounds and second.drafted > 3 * second.rounds and first.rounds > second.rounds > 0


class Features(Oracle):
    """Compares the hidden states it is given with those of a plain forward over the text."""

    needs_hidden_states = True
    compared = 0

    def prefill(self, view):
        self.length = view.length.clone()

    def commit(self, outcome):
        view, states = outcome.view, outcome.hidden_states
        assert len(states) == 3 and states[-1].dim() == 3
        for row, slot in enumerate(view.rows.numbers):
            start, end = int(self.length[slot]), int(view.length[row])
            self.length[slot] = end
            if end == start:
                continue
            text = view.tokens[row, int(view.padding[row]) : int(view.padding[row]) + end][None]
            direct = shared("llama")(text, output_hidden_states=True).hidden_states
            for ours, theirs in zip(states, direct):
                torch.testing.assert_close(
                    ours[row, : end - start], theirs[0, start - 1 : end - 1], rtol=1e-3, atol=1e-4
                )
            self.compared += end - start


@pytest.mark.parametrize("mode", ["sd", "psd"])
def test_hidden_states_are_those_of_the_verified_tokens(mode):
    drafter = Features(lambda row, asked: min(asked, 1 + row))
    assert decode([drafter], mode).tolist() == expected().tolist()
    assert drafter.compared == 4 * NEW and not hf_psd.last_stats().errors


class Eager(Oracle):
    """Works ahead while its rows are verified."""

    draft_ahead = True

    def __init__(self):
        super().__init__()
        self.seen = []

    def ahead(self, view, draft_ids):
        self.seen.append((view.rows.slots.tolist(), draft_ids.tolist(), view.length.tolist()))


@pytest.mark.parametrize("mode", MODES)
def test_draft_ahead_is_told_what_is_being_verified(mode):
    drafter, verified = Eager(), []

    class Watch(hf_psd.StepHook):
        def before_verify(self, context):
            verified.append((context.slots.tolist(), context.drafts.tolist()))

    assert decode([drafter], mode, hooks=[Watch()]).tolist() == expected().tolist()
    assert [(slots, drafts) for slots, drafts, _ in drafter.seen] == verified and len(verified) > 3
    assert drafter.seen[0][2] == [length for length, slot in zip([7, 3, 1, 5], range(4)) if slot in drafter.seen[0][0]]


class Announcing(Oracle):
    """Says how many drafts it will have next time: as many as the row's number."""

    announces = True

    def __init__(self):
        super().__init__(lambda row, asked: min(row, asked))

    def announce(self, view):
        return view.rows.slots.clone()


@pytest.mark.parametrize("mode", MODES)
def test_announced_drafts_bound_the_width(mode):
    widths = []

    class Watch(hf_psd.StepHook):
        def before_verify(self, context):
            widths.append((context.width, max(request.slot for request in context.requests)))

    assert decode([Announcing()], mode, gamma=7, hooks=[Watch()]).tolist() == expected().tolist()
    assert all(width <= 1 + most for width, most in widths[2:]) and hf_psd.last_stats().acceptance == 1.0


METHODS = ("start", "prefill", "draft", "ahead", "commit", "announce", "end")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", METHODS)
def test_raising_in_any_method_retires_with_one_warning(method, mode):
    class Raising(Announcing):
        draft_ahead = True

    def fail(self, *args):
        raise ZeroDivisionError("toy")

    setattr(Raising, method, fail)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert (
            decode([Raising(), noisy(shared("llama"), 0.03)], mode, selector=Fixed((0, 1))).tolist()
            == expected().tolist()
        )
    told = [str(entry.message) for entry in caught if "psd" in str(entry.message)]
    assert (
        told == ["psd: drafter oracle is retired for this call: ZeroDivisionError: toy"] == hf_psd.last_stats().errors
    )
    assert (
        method in ("end", "draft")
        or hf_psd.last_stats().by_drafter[0].drafted == 0
        or method in ("ahead", "commit", "announce")
    )
    assert hf_psd.last_stats().by_drafter[1].drafted > 0


def spoil(change):
    class Spoiled(Oracle):
        def draft(self, task):
            return change(self, self.ids(task))

    return Spoiled


def at(column, value):
    def change(self, ids):
        ids = ids.clone()
        ids[:, column] = value
        return Proposal(ids, point_mass=True)

    return change


STRANGE = {"one too many": 64, "huge": 2**40, "negative": -5, "gap": -1}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("name", STRANGE)
def test_ids_outside_the_vocabulary_end_the_draft(name, greedy, mode):
    for column in (0, 2):
        output = decode([spoil(at(column, STRANGE[name]))()], mode, greedy=greedy)
        stats = hf_psd.last_stats()
        assert output.min() >= 0 and output.max() < 64 and not stats.errors
        assert len([share for share, count in zip(stats.by_position, stats.drafted_at) if count]) == column
        assert not greedy or (output.tolist() == expected().tolist() and stats.acceptance == (column > 0))


WRONG = {
    "too narrow": (lambda self, ids: Proposal(ids[:, :2], point_mass=True), r"ids must be int64 \[4, 4\]"),
    "too few rows": (lambda self, ids: Proposal(ids[:1], point_mass=True), r"ids must be int64 \[4, 4\]"),
    "float": (lambda self, ids: Proposal(ids.float(), point_mass=True), "got torch.float32"),
    "scores": (lambda self, ids: Proposal(ids, torch.zeros(4, 4, 65)), r"scores must be \[4, 4, 64\]"),
    "failed": (lambda self, ids: Proposal(ids, torch.zeros(4, 4, 64), failed=ids > 0), r"failed must be \[4\]"),
    "nothing": (lambda self, ids: None, "AttributeError"),
}


@pytest.mark.parametrize("name", WRONG)
def test_malformed_proposals_retire(name):
    change, reason = WRONG[name]
    with pytest.warns(UserWarning, match=f"drafter oracle is retired for this call: .*{reason}"):
        assert decode([spoil(change)()]).tolist() == expected().tolist()


def test_sampled_drafts_need_their_scores():
    unscored = spoil(lambda self, ids: Proposal(ids))
    with pytest.warns(UserWarning, match="need the scores they were sampled from"):
        decode([unscored()], greedy=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode([unscored()])
        decode([unscored()], greedy=False, verification="coupled")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_impossible_scores_are_rejected_drafts(value):
    scored = spoil(lambda self, ids: Proposal(ids, torch.full((*ids.shape, 64), value)))
    output = decode([scored()], greedy=False)
    assert output.min() >= 0 and output.max() < 64 and hf_psd.last_stats().accepted == 0


def test_rows_reported_as_failed_retire_the_drafter():
    failing = spoil(lambda self, ids: Proposal(ids, point_mass=True, failed=torch.arange(len(ids)) == 1))
    with pytest.warns(UserWarning, match="retired for this call: it gave NaN or no finite logit"):
        assert decode([failing()]).tolist() == expected().tolist()


def test_a_drafter_object_serves_several_calls():
    drafter = Oracle()
    for mode in (*MODES, "sd"):
        assert decode([drafter], mode).tolist() == expected().tolist()


def test_model_drafter_feeds_what_it_lacks_and_no_more():
    """After a pause it reads everything committed meanwhile; then two tokens, or one after a rejected draft."""
    drafter, shapes = tiny("llama"), []
    drafter.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    keys = (0, 0, 0, 1, 1, 0, 0)
    assert decode([drafter, Oracle()], gamma=2, selector=Fixed(keys)).tolist() == expected().tolist()
    assert hf_psd.last_stats().acceptance == 1.0, "its KV misses nothing"
    prompts, first, usual = [(2, 6), (4, 3)], [(4, 1)], [(4, 2), (4, 1)]
    pause = [
        (4, 8),
        (4, 1),
        (4, 1),
    ]  # three rounds of three tokens since it was asked last: 8 fed ahead, then the last
    assert shapes == prompts + first + usual + usual + pause + usual
