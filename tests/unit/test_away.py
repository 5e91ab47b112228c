"""Draft turns on another device, with both devices played by the CPU and graphs by plain calls."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch

from hf_psd.away import AwayTurns, pack_proposal, replayed, unpack_proposal
from hf_psd.drafters.base import Drafter, Proposal, Shape
from hf_psd.lanes import Lane
from hf_psd.packing import pack_view, unpack_view
from hf_psd.phases import Request
from hf_psd.reviews import Review
from hf_psd.runner import Rows
from hf_psd.state import Limits, SequenceState

CPU = torch.device("cpu")


class PlainGraphs:
    """Calls where `StepGraphs` would replay, on groups filled up to four rows."""

    def __init__(self):
        self.lane, self.names, self.kept = Lane(CPU, "draft"), [], {}

    def rows(self, slots):
        return Rows([*slots, *[5] * (4 - len(slots))], CPU)

    def numbers(self, name, values, size):
        return torch.tensor([*values, *[0] * (size - len(values))])

    def run(self, name, rows, function):
        self.names.append(name)
        return function()


class Counting(Drafter):
    """Drafts the numbers after each row's last token, which shows whose state it saw."""

    capturable = True

    def __init__(self):
        self.seen = []

    def prepare(self, requests, budgets, view_of):
        self.seen.append(view_of([1]).last_tokens(1)[0].tolist())
        return Shape(list(budgets), 1, max(budgets), 9)

    def propose(self, view, budget, shape):
        last = view.last_tokens(1)[0]
        steps = torch.arange(3)
        ids = torch.where(steps < budget[:, None], last + 1 + steps, -1)
        scores = torch.nn.functional.one_hot(ids.clamp(min=0), 60).float()
        return Proposal(ids, scores, failed=view.request == 11)


class Reviewing(Counting):
    """Tells of each row its slot and how many rows were idle."""

    reviews = True

    def review_idle(self, requests, view_of):
        self.idle = view_of(list(range(len(requests)))).request.tolist() if requests else []

    def reviewed(self, rows):
        return Review(rows.slots / 7, torch.full_like(rows.slots, len(self.idle)))


class Session:
    limits, law, reviewing = Limits(6, 12, 3), "law", False


def state():
    state = SequenceState(Session.limits, CPU, 0)
    prompts = torch.tensor([[0, 0, 7], [0, 8, 9], [1, 2, 3]])
    state.fill(prompts, torch.tensor([2, 1, 0]), 12, torch.tensor([10, 11, 12]))
    return state


@pytest.mark.parametrize("scored", [False, True])
def test_packing_keeps_every_field(scored):
    view = state().view(Rows([2, 0], CPU))
    if scored:
        view = replace(view, log_prob=torch.randn(2, 16).log())  # NaN, too
    again = unpack_view(view.rows, pack_view(view), 16)
    assert len(view.tensors()) == len(again.tensors()) == 7 + scored
    for ours, theirs in zip(view.tensors(), again.tensors()):
        assert torch.equal(ours.nan_to_num(9), theirs.nan_to_num(9)) and ours.dtype == theirs.dtype


def test_a_turn_away_drafts_from_the_rows_state_and_brings_ids_scores_and_failures_home():
    here, graphs = state(), PlainGraphs()
    turns, drafter = AwayTurns(graphs, Lane(CPU)), Counting()
    requests = [Request(0, 2, 0, 3, 12), Request(1, 1, 1, 2, 12)]
    packed = pack_view(here.view(graphs.rows([2, 1])))
    proposal = unpack_proposal(*turns.propose(drafter, 0, requests, [3, 2], packed, Session), 3)
    assert proposal.ids[:2].tolist() == [[4, 5, 6], [10, 11, -1]]
    assert proposal.ids[2:].eq(-1).all()  # rows that fill the graph's size
    assert proposal.scores[0].argmax(-1).tolist() == [4, 5, 6]
    assert proposal.failed[:2].tolist() == [False, True]
    assert drafter.seen == [[[9]]]
    buffer = proposal.scores.data_ptr()
    _, scores = turns.propose(drafter, 0, requests, [1, 1], packed, Session)
    assert scores.data_ptr() == buffer and proposal.review is None


def test_reviews_come_home_with_the_drafts_and_without():
    graphs, drafter = PlainGraphs(), Reviewing()
    turns, requests = AwayTurns(graphs, Lane(CPU)), [Request(0, 2, 0, 3, 12), Request(1, 1, 1, 2, 12)]
    packed = pack_view(state().view(graphs.rows([2, 1])))
    packet = turns.propose(drafter, 0, requests, [3, 0], packed, Session, [True, True])
    review = unpack_proposal(*packet, 3).review
    assert drafter.idle == [11] and review.tokens.tolist() == [1] * 4
    assert torch.equal(review.gain, torch.tensor([2.0, 1.0, 5.0, 5.0]) / 7)
    review = turns.fetch(0, turns.review(drafter, 0, requests, [0, 0], packed, Session, [True, True]))
    assert drafter.idle == [12, 11] and review.tokens.tolist() == [2] * 4
    assert torch.equal(review.gain, torch.tensor([2.0, 1.0, 5.0, 5.0]) / 7)
    assert turns.fetch(0, turns.review(Counting(), 0, requests, [0, 0], packed, Session, None)) is None


def test_lanes_wait_for_each_other_in_both_directions(monkeypatch):
    graphs, home, waits = PlainGraphs(), Lane(CPU, "home"), []
    monkeypatch.setattr(Lane, "follow", lambda lane, other: waits.append((lane.name, other.name)))
    packed = pack_view(state().view(graphs.rows([2, 1])))
    requests = [Request(0, 2, 0, 3, 12), Request(1, 1, 1, 2, 12)]
    AwayTurns(graphs, home).propose(Counting(), 0, requests, [3, 2], packed, Session)
    assert waits == [("draft", "home"), ("home", "draft")]
    waits.clear()
    turns, drafter = AwayTurns(graphs, home), Reviewing()
    found = turns.review(drafter, 0, requests, [0, 0], packed, Session, [True, True])
    assert waits == [("draft", "home")], "the target's device drafts meanwhile"
    turns.fetch(0, found)
    assert waits == [("draft", "home"), ("home", "draft")]


@pytest.mark.parametrize("kind", ["propose", "review", "silent"])
def test_the_packed_state_is_not_overwritten_while_a_drafter_that_failed_still_reads_it(monkeypatch, kind):
    class Failing(Counting):
        def prepare(self, requests, budgets, view_of):
            raise MemoryError

        def review_idle(self, requests, view_of):
            if kind == "review":
                raise MemoryError

    graphs, waits = PlainGraphs(), []
    turns = AwayTurns(graphs, Lane(CPU, "home"))
    monkeypatch.setattr(Lane, "follow", lambda lane, other: waits.append((lane.name, other.name)))
    packed = pack_view(state().view(graphs.rows([2, 1])))
    requests = [Request(0, 2, 0, 3, 12), Request(1, 1, 1, 2, 12)]
    call = turns.propose if kind == "propose" else turns.review
    with contextlib.nullcontext() if kind == "silent" else pytest.raises(MemoryError):
        assert call(Failing(), 0, requests, [3, 2], packed, Session, None) is None
    assert waits == [("draft", "home"), ("home", "draft")]


def test_a_proposal_without_scores_or_failures_packs_too():
    ids, scores = pack_proposal(Proposal(torch.tensor([[3, -1]])))
    assert ids.tolist() == [[3, -1, 0]] and scores is None


@pytest.mark.parametrize(
    ("drafter", "reviewing", "expected"),
    [(Counting(), True, {2, 4}), (Reviewing(), True, {5}), (Reviewing(), False, {2, 4})],
)
def test_replayed_shapes_have_two_widths_only(drafter, reviewing, expected):
    class Reviewed(Session):
        pass

    Reviewed.reviewing = reviewing
    assert {replayed(Shape([1], width, 1, 0), Reviewed, drafter).width for width in range(1, 5)} == expected
