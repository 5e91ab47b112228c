"""Bandits on CUDA: measured rounds, full information by graphs and without. Runs alone with `python`, too."""

from __future__ import annotations

import sys
import traceback
import warnings

import torch
from test_engine_cuda import GREEDY, SAMPLED, NoWaiting, batch, needs_two_devices, noisy, tiny

import hf_psd

try:
    import pytest

    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
except ImportError:
    pass


LAWS = {"greedy": (GREEDY, "rejection"), "coupled": (SAMPLED, "coupled"), "rejection": (SAMPLED, "rejection")}


class Listener:
    """Lets drafters take turns of three rounds, asks all for reviews at every fourth, and keeps what they tell."""

    full_information = True

    def __init__(self) -> None:
        self.turn, self.due = 0, None
        self.heard: dict[tuple[int, int], list[float]] = {}

    def plan(self, requests, arms, gamma):
        self.turn += 1
        self.due = {arm.key: [self.turn % 4 == 0] * len(requests) for arm in arms}
        return [(arms[self.turn // 3 % len(arms)].key, [gamma - request.index % 2 for request in requests])]

    def feedback(self, results):
        for result in results:
            for drafter, told in result.reviews.items():
                heard = self.heard.get((result.request.index, drafter), (0.0, 0))
                self.heard[result.request.index, drafter] = [old + new for old, new in zip(heard, told)]


def models(bad: str = "cuda", good: str = "cuda") -> tuple[torch.nn.Module, list]:
    target = tiny().cuda()
    return target, [tiny(11).to(bad), noisy(tiny(), 0.02).to(good), "prompt_lookup"]


def assert_graphs_tell_what_eager_steps_tell(bad: str, good: str) -> None:
    """Text, what was reviewed and what it was worth, also where the graphs and buffers of an earlier call serve."""
    target, drafters = models(bad, good)
    for law, (settings, verification) in LAWS.items():
        for mode in ("sd", "psd"):
            listeners, texts = [], []
            for graphs in (False, True, True):
                listeners.append(Listener())
                psd = dict(selector=listeners[-1], mode=mode, seed=3, verification=verification, cuda_graphs=graphs)
                texts.append(target.generate(**batch("cuda"), **settings, assistant_models=drafters, psd=psd))
                stats = hf_psd.last_stats()
                assert not stats.errors and not stats.notes, stats
                assert sum(by.review_forwards for by in stats.by_drafter) > 2
            assert torch.equal(texts[0], texts[1]) and torch.equal(texts[1], texts[2]), (law, mode)
            expected = listeners[0].heard
            for heard in (listeners[1].heard, listeners[2].heard):
                assert expected.keys() == heard.keys() and len(expected) > 8
                for key, (gain, tokens) in expected.items():
                    assert tokens == heard[key][1] > 0, (law, mode, key)
                    assert abs(gain - heard[key][0]) <= (0.01 if law == "rejection" else 0), (law, mode, key)
    hf_psd.release()


def assert_hedge_learns_and_nothing_waits(bad: str, good: str) -> None:
    target, drafters = models(bad, good)
    for settings, verification in LAWS.values():
        for mode in ("sd", "psd"):
            for per_request in (False, True):
                psd = dict(selector="hedge", mode=mode, seed=3, verification=verification, per_request=per_request)
                arguments = settings | dict(max_new_tokens=100)
                target.generate(
                    **batch("cuda"), **arguments, assistant_models=drafters, psd=psd, psd_hooks=[NoWaiting()]
                )
                stats = hf_psd.last_stats()
                assert not stats.errors and not stats.notes, stats
                means = stats.selector["means"]
                assert all(mean is not None for mean in means) and means[1] > means[0]
                assert sum(by.review_forwards for by in stats.by_drafter) > 0
                print(mode, verification, per_request, means, stats.selector["pulls"])
    hf_psd.release()


def test_greedy_parity_of_bandits():
    target, drafters = models()
    plain = target.generate(**batch("cuda"), **GREEDY)
    for graphs in (False, "auto"):
        for psd in (
            dict(selector="hedge"),
            dict(selector="hedge", per_request=True),
            dict(selector="ucb1", reward="goodput"),
            dict(selector="thompson", reward="goodput", gamma="auto"),
        ):
            for mode in ("sd", "psd"):
                out = target.generate(
                    **batch("cuda"), **GREEDY, assistant_models=drafters, psd=dict(psd, mode=mode, cuda_graphs=graphs)
                )
                assert out.tolist() == plain.tolist(), (psd, mode, graphs)
                stats = hf_psd.last_stats()
                assert not stats.errors and sum(stats.selector["pulls"]) > 0
                if psd.get("reward") == "goodput":
                    means = [mean for mean in stats.selector["means"] if mean is not None]
                    assert all(0 < mean < 1e6 for mean in means)


def test_reviews_on_the_eager_route_find_the_good_drafter():
    target, drafters = models()
    for arguments in (GREEDY, SAMPLED):
        target.generate(
            **batch("cuda"),
            **dict(arguments, max_new_tokens=100),
            assistant_models=drafters,
            psd=dict(selector="hedge", mode="sd", seed=3, cuda_graphs=False),
        )
        stats = hf_psd.last_stats()
        assert not stats.errors and not any("selector learns" in note for note in stats.notes)
        means = stats.selector["means"]
        assert all(mean is not None for mean in means) and means[1] > means[0]
        assert sum(by.review_forwards for by in stats.by_drafter) > 0


def test_graphs_tell_what_eager_steps_tell():
    assert_graphs_tell_what_eager_steps_tell("cuda", "cuda")


def test_a_drafter_on_the_cpu_is_reviewed_beside_one_with_graphs():
    assert_graphs_tell_what_eager_steps_tell("cpu", "cuda")


def test_graphs_tell_what_eager_steps_tell_across_two_devices():
    if not needs_two_devices():
        assert_graphs_tell_what_eager_steps_tell("cuda:1", "cuda:1")
        assert_graphs_tell_what_eager_steps_tell("cuda", "cuda:1")


def test_hedge_learns_by_graphs_and_nothing_waits():
    assert_hedge_learns_and_nothing_waits("cuda", "cuda")


def test_hedge_learns_by_graphs_on_two_devices_and_nothing_waits():
    if not needs_two_devices():
        assert_hedge_learns_and_nothing_waits("cuda:1", "cuda:1")
        assert_hedge_learns_and_nothing_waits("cuda:1", "cuda")


def test_processors_that_know_each_row_serve_groups_that_are_filled_up():
    """A penalty that leaves out each row's padding has one number per row, and none for the idle slot."""
    target, drafters = models()
    arguments = {name: tensor[:3] for name, tensor in batch("cuda").items()}
    arguments |= GREEDY | dict(repetition_penalty=1.3)
    plain = target.generate(**arguments)
    psd = dict(selector="hedge", mode="sd", cuda_graphs=True)
    out = target.generate(**arguments, assistant_models=drafters, psd=psd)
    assert torch.equal(out, plain) and not hf_psd.last_stats().notes


def test_a_far_drafter_that_turns_to_nan_is_retired():
    if needs_two_devices():
        return
    target, drafter = tiny().cuda(), tiny(11)
    plain = target.generate(**batch("cuda"), **GREEDY)
    late = next(token for token in plain[0, 25:].tolist() if not (plain[:, :25] == token).any())
    with torch.no_grad():
        drafter.get_input_embeddings().weight[late] = float("nan")
    drafter.to("cuda:1")
    psd = dict(mode="sd", gamma=2, selector="ucb1", cuda_graphs=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = target.generate(**batch("cuda"), **GREEDY, assistant_models=[drafter], psd=psd)
    assert torch.equal(out, plain) and any("NaN" in error for error in hf_psd.last_stats().errors)


def test_reviews_make_the_host_wait_for_nothing():
    target, drafters = models()
    arguments = dict(**batch("cuda"), **SAMPLED, assistant_models=drafters)
    psd = dict(selector="hedge", mode="sd", seed=3, cuda_graphs=False)
    target.generate(**arguments, psd=psd)

    class Strict(hf_psd.StepHook):
        def before_draft(self, context):
            torch.cuda.set_sync_debug_mode("error")

        def on_commit(self, context):
            torch.cuda.set_sync_debug_mode("error")

        def on_end(self, context):
            torch.cuda.set_sync_debug_mode("default")

    target.generate(**arguments, psd=psd, psd_hooks=[Strict()])
    assert not hf_psd.last_stats().errors


if __name__ == "__main__":
    failed = 0
    for name, test in sorted(globals().items()):
        if name.startswith("test_"):
            try:
                test()
                print("passed", name)
            except Exception:
                failed += 1
                torch.cuda.set_sync_debug_mode("default")
                traceback.print_exc()
                print("FAILED", name)
    sys.exit(failed)
