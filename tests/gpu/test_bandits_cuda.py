"""Bandits on CUDA: measured rounds, reviews without a wait, the note of the graph route. Runs alone with `python`, too."""

from __future__ import annotations

import sys
import traceback

import torch
from test_engine_cuda import GREEDY, SAMPLED, batch, noisy, tiny

import hf_psd

try:
    import pytest

    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
except ImportError:
    pass


def models() -> tuple[torch.nn.Module, list]:
    target = tiny().cuda()
    return target, [tiny(11).cuda(), noisy(tiny(), 0.02).cuda(), "prompt_lookup"]


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


def test_the_graph_route_says_what_it_does_not_serve():
    target, drafters = models()
    target.generate(
        **batch("cuda"), **GREEDY, assistant_models=drafters, psd=dict(selector="hedge", mode="sd", cuda_graphs=True)
    )
    stats = hf_psd.last_stats()
    graphed = not any("no CUDA graphs" in note for note in stats.notes)
    assert any("selector learns" in note for note in stats.notes) == graphed


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
                traceback.print_exc()
                print("FAILED", name)
    sys.exit(failed)
