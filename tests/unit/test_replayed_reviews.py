"""Full information by captured graphs, on one device and on two, against the eager route, number by number."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from tapes import play
from test_reviews import SAMPLED, Listener
from zoo import GREEDY, P4, Fixed, prompts, shared, tiny

import hf_psd
from hf_psd.drafters.model import ModelDrafter
from hf_psd.drafters.prompt_lookup import PromptLookup
from hf_psd.drafters.reviewer import Reviewer
from hf_psd.phases import Request
from hf_psd.runner import Rows
from hf_psd.state import Limits

LAWS = {
    "greedy": (GREEDY, {}),
    "coupled": (SAMPLED, dict(verification="coupled")),
    "rejection": (SAMPLED, dict(verification="rejection")),
}
PLACES = {"home": (), "away": (0, 1), "both": (1,)}
"""Which drafters live on the second device."""


def models():
    return [shared("llama", noise=0.03), shared("llama", 11), "prompt_lookup"]


@pytest.fixture
def graphs(monkeypatch):
    """Gives a function that lets the drafters of these numbers live on the second device."""
    yield lambda far=(), *more: play(monkeypatch, [models()[number] for number in far], *more)
    hf_psd.release()


def run(wanted, law, mode, selector, gamma=3, tokens=32, arguments=None, drafters=None, **psd):
    settings, verification = LAWS[law]
    out = shared("llama").generate(
        **(arguments or P4()), **settings | dict(max_new_tokens=tokens), assistant_models=drafters or models(),
        psd=dict(selector=selector, gamma=gamma, mode=mode, seed=4, cuda_graphs=wanted, **verification, **psd),
    )  # fmt: skip
    stats = hf_psd.last_stats()
    assert not stats.errors and not any("selector" in note for note in stats.notes)
    return out, stats


def assert_same(heard, expected, exact):
    assert heard.keys() == expected.keys() and len(heard) > 4
    for key, (gain, tokens) in heard.items():
        assert tokens == expected[key][1] and tokens > 0, key
        assert gain == expected[key][0] if exact else gain == pytest.approx(expected[key][0], abs=2e-3), key


CASES = [
    *[("sd", 3, 2, law, place) for law in LAWS for place in PLACES],
    *[("psd", 9, 4, law, place) for law, place in (("greedy", "both"), ("coupled", "home"), ("rejection", "away"))],
    ("sd", 3, 2, "rejection", "not captured"),
    ("psd", 9, 4, "coupled", "not captured"),
]


@pytest.mark.parametrize(("mode", "every", "stay", "law", "place"), CASES)
def test_replayed_reviews_are_the_eager_ones(graphs, mode, every, stay, law, place):
    eager, replayed = Listener(stay, every), Listener(stay, every)
    text, stats = run(False, law, mode, eager)
    captured = graphs(PLACES.get(place, (1,)), place != "not captured")
    again, graphed = run(True, law, mode, replayed)
    assert torch.equal(text, again) and captured
    assert_same(replayed.heard, eager.heard, exact=law != "rejection")
    assert [by.review_forwards for by in graphed.by_drafter] == [by.review_forwards for by in stats.by_drafter]
    assert sum(by.review_forwards for by in stats.by_drafter) >= 2


@pytest.mark.parametrize(("law", "far"), [("greedy", ()), ("coupled", (1,)), ("rejection", ())])
def test_calls_that_follow_each_other_share_graphs_but_no_reviews(graphs, law, far):
    first, second = P4(), prompts(4, seed=8, max_len=7)
    expected = []
    for arguments in (first, second):
        expected.append(Listener())
        run(False, law, "sd", expected[-1], arguments=arguments)
    captured, counts = graphs(far), []
    for arguments, eager in ((first, expected[0]), (second, expected[1]), (first, expected[0])):
        replayed = Listener()
        run(True, law, "sd", replayed, arguments=arguments)
        counts.append(len(captured))
        assert_same(replayed.heard, eager.heard, exact=law != "rejection")
    assert counts[1] == counts[2] or law == "rejection", "the third call finds all it needs"
    assert counts[0] > 5


@pytest.mark.parametrize("far", [(), (0, 1)])
@pytest.mark.parametrize("per_request", [False, True])
def test_hedge_learns_by_graphs_what_it_learns_without(graphs, per_request, far):
    selectors = []
    _, stats = run(False, "greedy", "sd", "hedge", 2, 40, per_request=per_request)
    selectors.append(stats.selector)
    graphs(far)
    for _ in range(2):
        _, stats = run(True, "greedy", "sd", "hedge", 2, 40, per_request=per_request)
        selectors.append(stats.selector)
    assert selectors[0] == selectors[1] == selectors[2]
    assert all(mean is not None for mean in selectors[0]["means"]) and sum(selectors[0]["pulls"]) > 9


@pytest.mark.parametrize("far", [(), (0,)])
def test_reviews_leave_the_drafts_and_the_text_alone(graphs, far):
    class Deaf(Listener):
        full_information = False

        def feedback(self, results):
            pass

    graphs(far)
    texts, counts = [], []
    for selector in (Listener(), Deaf()):
        text, stats = run(True, "rejection", "sd", selector)
        texts.append(text)
        counts.append((stats.drafted, stats.accepted, [by.rounds for by in stats.by_drafter]))
    assert torch.equal(*texts) and counts[0] == counts[1]


def test_one_prompt_lookup_serves_call_after_call(graphs):
    lookup = PromptLookup()
    arguments = dict(input_ids=torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6], [9, 11, 13, 17, 19, 23, 29, 31]]))
    heard = []
    for wanted in (False, True, True):
        if wanted and len(heard) == 1:
            graphs()
        listener = Listener(stay=2, every=3)
        run(wanted, "greedy", "sd", listener, arguments=arguments, drafters=[lookup, models()[0]])
        heard.append(listener.heard)
    assert heard[0] == heard[1] == heard[2]
    assert sum(tokens for (_, key), (_, tokens) in heard[0].items() if key == 0) > 10


@pytest.mark.parametrize("far", [False, True])
def test_a_drafter_that_turns_to_nan_in_a_replay_is_retired(monkeypatch, far):
    """Its first turns, the captured ones, are sound."""
    target, drafter = shared("llama"), tiny("llama", 11)
    arguments = P4() | GREEDY | dict(max_new_tokens=40)
    text = target.generate(**arguments)
    late = next(token for token in text[0, 30:].tolist() if not (text[:, :30] == token).any())
    with torch.no_grad():
        drafter.get_input_embeddings().weight[late] = float("nan")
    play(monkeypatch, [drafter] if far else [])
    with pytest.warns(UserWarning, match="NaN"):
        out = target.generate(
            **arguments, assistant_models=[drafter], psd=dict(mode="sd", gamma=2, selector="hedge", cuda_graphs=True)
        )
    hf_psd.release()
    assert torch.equal(out, text)


def test_what_a_failed_turn_left_is_not_told_to_the_next_call():
    space = SimpleNamespace(scratch={})
    session = SimpleNamespace(space=space, limits=Limits(3, 20, 2))
    rows, request = Rows([0, 1], torch.device("cpu")), Request(0, 1, 0, 5, 20)
    for _ in range(2):
        reviewer = Reviewer(session, 0, None, rows.slots.device)
        reviewer.begin([request])
        review = reviewer.take(rows)
        assert not review.gain.any() and not review.tokens.any()
        for kept in reviewer._buffers[1:]:
            kept.fill_(3)
    assert len(space.scratch) == 1


@pytest.mark.parametrize("far", [False, True])
def test_graphs_keep_no_model_alive(monkeypatch, far):
    target, drafter = tiny("llama"), tiny("llama", 11)
    with monkeypatch.context() as patch:
        captured = play(patch, [drafter] if far else [])
        psd = dict(mode="sd", selector="hedge:review_every=1", cuda_graphs=True)
        target.generate(**P4(), **GREEDY, max_new_tokens=12, assistant_models=[drafter], psd=psd)
        assert captured
        captured.clear()
    alive = [weakref.ref(target), weakref.ref(drafter)]
    del target, drafter
    gc.collect()
    assert [model() for model in alive] == [None, None]


def test_a_drafter_with_a_name_of_its_own_is_known_by_its_number_too(graphs):
    graphs()
    drafter = ModelDrafter(models()[0], 0)
    drafter.name = "mine"
    for others in ([], ["prompt_lookup"]):
        _, stats = run(True, "greedy", "sd", Fixed((len(others),)), drafters=[*others, drafter])
        assert [by.drafted > 0 for by in stats.by_drafter] == [False] * len(others) + [True]


@pytest.mark.parametrize("far", [(), (0,)])
@pytest.mark.parametrize("part", ["propose", "reviewed"])
def test_a_drafter_that_raises_in_a_captured_turn_is_retired(graphs, monkeypatch, part, far):
    class Broken(ModelDrafter):
        pass

    def breaks(*args):
        raise MemoryError("none left")

    arguments = P4() | GREEDY | dict(max_new_tokens=20)
    text = shared("llama").generate(**arguments)
    graphs(far)
    drafters = [Broken(models()[0], 0), models()[1]]
    monkeypatch.setattr(Broken, part, breaks)
    psd = dict(mode="sd", gamma=2, selector="hedge:review_every=1", cuda_graphs=True)
    with pytest.warns(UserWarning, match="retired for this call: MemoryError: none left"):
        out = shared("llama").generate(**arguments, assistant_models=drafters, psd=psd)
    assert torch.equal(out, text) and len(hf_psd.last_stats().errors) == 1
    assert hf_psd.last_stats().by_drafter[1].drafted > 0
