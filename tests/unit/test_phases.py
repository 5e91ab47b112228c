"""The batch manager, driven by random finishes and arrivals, against the rules it must keep."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_psd.phases import BatchManager, Phase, Request


def requests(count, limit=10**6):
    return [Request(index, index, 0, 5, limit) for index in range(count)]


def run_step(manager):
    step = manager.next_step()
    assert not {id(each) for each in step.verify} & {id(each) for each in step.draft}
    assert all(each.phase is Phase.HAS_DRAFT for each in step.verify)
    assert all(each.phase is Phase.NEEDS_DRAFT for each in step.draft)
    manager.advance(step)
    return step


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "step", "finish", "add", "withdraw", "one", "two"]), st.integers(0, 99)
    ),
    max_size=60,
)


@given(start=st.integers(1, 9), events=EVENTS)
def test_two_groups(start, events):
    manager, made, quiet, verified, drafted = BatchManager(groups=2), start, 0, {}, {}
    manager.add(requests(start))
    for event, number in [*events, *[("step", 0)] * 8]:
        if event == "add":
            manager.add([Request(made, made, 0, 5, 10**6)])
            made, quiet = made + 1, 0
        elif event in ("finish", "withdraw") and manager.requests:
            taken = manager.requests[number % len(manager.requests)]
            manager.finish(taken)
            if event == "withdraw":  # preempted: it comes back without its draft
                drafted[taken.index] = verified.get(taken.index, 0)
                manager.add([taken])
            quiet = 0
        elif event in ("one", "two"):
            manager.groups = 1 if event == "one" else 2
            quiet = 0
        elif event == "step":
            before, running = manager.sizes(), list(manager.requests)
            step = run_step(manager)
            after = manager.sizes()
            if manager.groups == 2:
                assert abs(after[0] - after[1]) <= abs(before[0] - before[1]), "a sit-out must lower the imbalance"
            assert not running or step.verify or step.draft, "somebody always works"
            assert len({each.group for each in step.draft}) <= 1
            for each in step.draft:
                assert drafted.get(each.index, 0) == verified.get(each.index, 0), "one draft, then its verification"
                drafted[each.index] = drafted.get(each.index, 0) + 1
            for each in step.verify:
                verified[each.index] = verified.get(each.index, 0) + 1
                assert verified[each.index] == drafted[each.index]
            quiet += 1
            if quiet >= 4 and manager.groups == 1:
                assert not (step.verify and step.draft), "one group drafts and verifies in turn"
                assert len(step.verify or step.draft) == len(running), "all of it"
            elif quiet >= 4:
                sizes = manager.sizes()
                assert abs(sizes[0] - sizes[1]) <= 1, "balanced within two rounds of a change"
                if quiet >= 6 and len(running) > 1:
                    assert step.verify and step.draft, "both halves work at each step"
                    assert {each.group for each in step.verify} != {each.group for each in step.draft}


def test_switching_between_one_and_two_groups():
    manager = BatchManager(groups=1)
    manager.add(requests(6))
    run_step(manager)
    manager.groups = 2
    assert len(run_step(manager).verify) == 6, "drafts that exist are verified"
    assert len(run_step(manager).draft) == 3
    halves = [run_step(manager) for _ in range(2)]
    assert all(len(step.verify) == len(step.draft) == 3 for step in halves) and manager.balance == 1.0
    manager.groups = 1
    assert (len(run_step(manager).verify), len(run_step(manager).draft)) == (3, 6)
    for count in (0, 3, None):
        with pytest.raises(ValueError, match="1 or 2 groups"):
            manager.groups = count


def test_newcomers_join_the_smaller_group_and_of_equal_ones_that_with_less_text():
    manager = BatchManager(groups=2)
    short, long, third, ending = (Request(index, index, 0, length, 99) for index, length in enumerate((5, 50, 5, 98)))
    manager.add([short, long, third])
    assert [each.group for each in (short, long, third)] == [0, 1, 0]
    manager.finish(third)
    manager.add([third])
    assert third.group == 0
    ending.unread = [1]
    manager.add([ending, fourth := Request(4, 4, 0, 5, 99)])
    assert ending.group == 1 and fourth.group == 1, "a request about to end counts no more"


def test_a_newcomer_beside_the_group_that_verifies_is_drafted_for_at_once():
    manager = BatchManager(groups=2)
    manager.add(requests(2))
    run_step(manager)
    for request in list(manager.requests):
        if request.phase is Phase.NEEDS_DRAFT:
            manager.finish(request)
    newcomer = Request(7, 7, 0, 5, 99)
    manager.add([newcomer])
    newcomer.group = manager.requests[0].group
    assert run_step(manager).draft == [newcomer]


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_a_round_verifies_everybody_once(count):
    manager = BatchManager(groups=2)
    manager.add(requests(count))
    steps = [run_step(manager) for _ in range(9)]
    for first in range(1, 8, 2):
        seen = [each.index for step in steps[first : first + 2] for each in step.verify]
        assert sorted(seen) == list(range(count))
    assert manager.balance == ((count // 2) / -(-count // 2) if count > 1 else 0.0)


def test_one_group_alternates():
    manager = BatchManager(groups=1)
    manager.add(requests(3))
    steps = [run_step(manager) for _ in range(6)]
    assert [(len(step.verify), len(step.draft)) for step in steps] == [(0, 3), (3, 0)] * 3


def test_without_drafting_everybody_is_verified_at_each_step():
    manager = BatchManager(drafting=False)
    manager.add(requests(3))
    assert all(len(run_step(manager).verify) == 3 for _ in range(3))


def test_requests_that_reach_their_limit_by_what_is_under_way_rest():
    manager = BatchManager(groups=1)
    short, long = Request(0, 0, 0, 5, 7), Request(1, 1, 0, 5, 20)
    manager.add([short, long])
    run_step(manager), run_step(manager)
    short.unread, long.unread = [1, 1], [1, 1]
    assert short.surely_ended and not long.surely_ended
    assert run_step(manager).draft == [long]


@pytest.mark.parametrize(
    "proposals, available, pending",
    [
        ([], {}, (None, 0)),
        ([(0, 3)], {}, (0, 3)),
        ([(0, 3)], {0: 1}, (0, 1)),
        ([(0, 3), (1, 2)], {0: 0}, (1, 2)),
        ([(0, 2), (1, 4)], {}, (0, 4)),
        ([(0, 2), (1, 4)], {0: 1}, (0, 1)),
        ([(0, 2)], {0: 0}, (None, 0)),
    ],
)
def test_pending_bounds_the_drafts(proposals, available, pending):
    request = Request(0, 0, 0, 5, 20, proposals=proposals, available=available)
    assert request.pending() == pending


def test_what_the_host_knows():
    request = Request(0, 0, 2, 5, 12)
    assert (request.most, request.room) == (5, 6)
    request.unread = [4, 3]
    assert (request.most, request.room) == (12, 4)
    request.proposals = [(1, 2)]
    request.learn([9, 8], 2, {0: 3})
    assert (request.length, request.tokens, request.unread) == (7, [9, 8], [3])
    assert request.covered == {1: 7} and request.available == {0: 3} and (request.most, request.room) == (10, 3)
