"""The step loop on CUDA: streams, two devices, no waiting. Runs under pytest, or alone with `python`."""

from __future__ import annotations

import copy
import sys
import traceback
from collections import Counter
from contextlib import ExitStack
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_psd
from hf_psd import StepHook, Timeline
from hf_psd.drafters.prompt_lookup import PromptLookup
from hf_psd.testing import chi_square, joint_law, sample_joint
from hf_psd.timeline import idle_share, overlap_share

try:
    import pytest

    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
except ImportError:  # a bare GPU machine: `python tests/gpu/test_engine_cuda.py`
    pass

PROMPTS = [[5, 9, 17, 33, 21, 40, 41], [7, 8, 9], [12], [30, 31, 32, 33, 34]]
GREEDY = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0, "eos_token_id": None}
SAMPLED = {
    "do_sample": True,
    "max_new_tokens": 24,
    "pad_token_id": 0,
    "eos_token_id": None,
    "temperature": 2.0,
    "top_k": 20,
}


def tiny(seed: int = 0, vocab_size: int = 64, initializer_range: float = 0.5) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=initializer_range,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


def noisy(model: LlamaForCausalLM, scale: float) -> LlamaForCausalLM:
    drafter, generator = copy.deepcopy(model), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale * parameter.std())
    return drafter


def batch(device: str) -> dict[str, torch.Tensor]:
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    return {"input_ids": ids.to(device), "attention_mask": (ids > 0).long().to(device)}


class NoWaiting(StepHook):
    """Turns any wait for the device inside the loop into an error."""

    def on_start(self, context) -> None:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")

    def on_end(self, context) -> None:
        torch.cuda.set_sync_debug_mode("default")


def test_greedy_equals_plain_generate_in_every_mode():
    target = tiny()
    drafters = [noisy(target, 0.03).cuda(), tiny(11).cuda(), "prompt_lookup"]
    target.cuda()
    plain = target.generate(**batch("cuda"), **GREEDY)
    for mode in ("ar", "sd", "psd"):
        for gamma in (1, 4):
            out = target.generate(
                **batch("cuda"), assistant_models=drafters, psd={"mode": mode, "gamma": gamma}, **GREEDY
            )
            assert torch.equal(out, plain), (mode, gamma)


def test_the_loop_never_waits_for_the_device():
    target = tiny().cuda()
    drafters = [noisy(tiny(), 0.03).cuda(), "prompt_lookup"]
    for settings in (GREEDY, SAMPLED):
        for mode in ("ar", "sd", "psd"):
            psd = {"mode": mode, "seed": 3}
            target.generate(**batch("cuda"), assistant_models=drafters, psd=psd, psd_hooks=[NoWaiting()], **settings)
            assert not hf_psd.last_stats().errors, hf_psd.last_stats().errors


def test_a_drafter_on_another_device_gives_the_same_text():
    target, drafter = tiny().cuda(), noisy(tiny(), 0.03)
    plain = target.generate(**batch("cuda"), **GREEDY)
    out = target.generate(**batch("cuda"), assistant_models=[drafter], psd={"mode": "psd"}, **GREEDY)
    stats = hf_psd.last_stats()
    assert torch.equal(out, plain)
    assert stats.acceptance > 0.2 and not stats.errors, stats


def test_coupled_text_is_the_same_on_cpu_and_cuda():
    target = tiny()
    psd = {"verification": "coupled", "seed": 5}
    here = target.generate(**batch("cpu"), psd=psd, **SAMPLED)
    target.cuda()
    for mode in ("sd", "psd"):
        drafters = [noisy(tiny(), 0.03).cuda()]
        there = target.generate(**batch("cuda"), assistant_models=drafters, psd=psd | {"mode": mode}, **SAMPLED)
        assert (there.cpu() == here).float().mean() > 0.98, mode


def test_graphs_give_the_eager_text_and_are_kept_between_calls():
    target = tiny()
    drafters = ["prompt_lookup", noisy(target, 0.03).cuda()]
    target.cuda()
    for settings in (
        GREEDY,
        SAMPLED,
        SAMPLED | {"max_new_tokens": 10, "temperature": 1.5},
        GREEDY | {"eos_token_id": [28, 34, 14]},
    ):
        for verification in ("coupled", "rejection"):
            for mode in ("ar", "sd", "psd"):
                psd = {"mode": mode, "seed": 11, "verification": verification}
                texts = [
                    target.generate(
                        **batch("cuda"), assistant_models=drafters, psd=psd | {"cuda_graphs": graphs}, **settings
                    )
                    for graphs in (False, True, True)
                ]
                assert not hf_psd.last_stats().errors and not hf_psd.last_stats().notes, hf_psd.last_stats()
                assert torch.equal(texts[0], texts[1]) and torch.equal(texts[1], texts[2]), (settings, psd)
    hf_psd.release(target)


def test_fused_operators_give_the_same_text_and_leave_no_trace():
    from hf_psd.fused import available

    if not available():
        print("skipped: liger-kernel is not installed")
        return
    target, drafter = tiny().cuda(), noisy(tiny(), 0.03).cuda()
    plain = target.generate(**batch("cuda"), **GREEDY)
    for graphs in (False, True):
        psd = {"fused_ops": True, "cuda_graphs": graphs}
        out = target.generate(**batch("cuda"), assistant_models=[drafter], psd=psd, **GREEDY)
        assert torch.equal(out, plain)
    assert not any("forward" in vars(module) for module in target.modules())
    assert torch.equal(target.generate(**batch("cuda"), **GREEDY), plain)


def test_rejection_sampling_through_graphs_and_kernels_follows_the_law():
    target, drafter = tiny(0, 8, 0.25), tiny(5, 8, 0.25)
    warp = {"do_sample": True, "temperature": 4.0, "top_k": 6, "top_p": 0.95, "eos_token_id": None, "pad_token_id": 0}
    law = joint_law(target, [3, 4, 5], 3, **warp)
    target.cuda(), drafter.cuda()
    for mode in ("sd", "psd"):
        psd = {"gamma": 2, "mode": mode, "seed": 17}
        samples = sample_joint(target, [3, 4, 5], 40_960, tokens=3, assistant_models=[drafter], psd=psd, **warp)
        result = chi_square(law.index(samples), law.probabilities)
        stats = hf_psd.last_stats()
        print(mode, result, f"acceptance {stats.acceptance:.2f}", stats.notes)
        assert result.p_value > 0.01 and 0.1 < stats.acceptance < 0.9 and not stats.notes


def test_the_step_loop_calls_the_kernels():
    from psd_kernels import attention_launch, naive, sample_kernel, verify_launch

    launchers = [
        (verify_launch, "launch_verify"),
        (sample_kernel, "launch_sample"),
        (attention_launch, "launch_ragged_attention"),
        (attention_launch, "launch_kv_write"),
    ]
    calls: Counter[str] = Counter()
    target, drafter = tiny().cuda(), noisy(tiny(), 0.03).cuda()
    with ExitStack() as spies:
        for module, name in [*launchers, (naive, "verify"), (naive, "sample")]:
            spies.enter_context(mock.patch.object(module, name, counting(calls, name, getattr(module, name))))
        psd = {"mode": "sd", "seed": 3, "cuda_graphs": False, "selector": "ucb1", "gamma": 7}  # no prompt lags
        target.generate(**batch("cuda"), assistant_models=[drafter], psd=psd, **SAMPLED)
    stats, layers = hf_psd.last_stats(), target.config.num_hidden_layers
    assert calls["launch_verify"] == stats.target_forwards > 0, calls
    assert calls["launch_sample"] == stats.draft_forwards > 0, calls
    assert calls["launch_ragged_attention"] >= layers * (stats.target_forwards + stats.draft_forwards), calls
    assert calls["launch_kv_write"] >= layers * (stats.target_forwards + stats.draft_forwards), calls
    assert not calls["verify"] and not calls["sample"], calls  # nothing fell back to the specification


def counting(calls: Counter[str], name: str, real):
    def counted(*args, **kwargs):
        calls[name] += 1
        return real(*args, **kwargs)

    return counted


def test_changed_weights_and_settings_are_not_served_by_old_graphs():
    target, drafter = tiny(), noisy(tiny(), 0.03).cuda()
    target.cuda()
    for ngram in (2, 3):
        lookup = PromptLookup(max_ngram=ngram)
        out = target.generate(**batch("cuda"), assistant_models=[lookup, drafter], psd={"mode": "sd"}, **GREEDY)
        assert torch.equal(out, target.generate(**batch("cuda"), **GREEDY))
    target.load_state_dict(tiny(3).state_dict())  # in place: graphs stay valid
    out = target.generate(**batch("cuda"), assistant_models=[drafter], psd={"mode": "sd"}, **GREEDY)
    assert torch.equal(out, target.generate(**batch("cuda"), **GREEDY))
    target.lm_head.weight = torch.nn.Parameter(tiny(5).lm_head.weight.detach().cuda())  # elsewhere: they do not
    out = target.generate(**batch("cuda"), assistant_models=[drafter], psd={"mode": "sd"}, **GREEDY)
    assert torch.equal(out, target.generate(**batch("cuda"), **GREEDY))


def test_a_call_inside_a_call_leaves_the_outer_one_alone():
    target = tiny().cuda()
    plain = target.generate(**batch("cuda"), **GREEDY)

    class Nested(StepHook):
        def on_commit(self, context) -> None:
            if context.step == 5:
                inner = target.generate(**batch("cuda"), psd={"mode": "sd"}, **GREEDY)
                assert torch.equal(inner, plain)

    out = target.generate(**batch("cuda"), psd={"mode": "sd"}, psd_hooks=[Nested()], **GREEDY)
    assert torch.equal(out, plain)


def wide(layers: int, seed: int) -> LlamaForCausalLM:
    """Large enough for its graphs to take longer than launching them, small enough to leave room beside them."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


def overlap_on(device: str) -> float:
    target, drafter = wide(16, 0).cuda(), wide(4, 1).to(device)
    timeline = Timeline()
    for hooks in ([], [timeline]):
        target.generate(
            **batch("cuda"),
            assistant_models=[drafter],
            psd={"mode": "psd", "selector": "ucb1"},
            psd_hooks=hooks,
            **GREEDY,
        )
    assert not hf_psd.last_stats().notes
    share = overlap_share(timeline.spans)
    print(f"drafter on {device}: overlap {share:.2f}, target idle {idle_share(timeline.spans):.2f}")
    return share


def test_two_graphs_overlap_on_one_device():
    assert overlap_on("cuda:0") > 0.5


def test_auto_tries_all_modes_and_keeps_the_text():
    target, drafter = tiny().cuda(), noisy(tiny(), 0.03).cuda()
    settings = GREEDY | {"max_new_tokens": 300}
    plain = target.generate(**batch("cuda"), **settings)
    seen: Counter[str] = Counter()
    for _ in range(3):
        assert torch.equal(target.generate(**batch("cuda"), assistant_models=[drafter], psd=True, **settings), plain)
        seen += hf_psd.last_stats().forwards_by_mode
    assert set(seen) == {"ar", "sd", "psd"}, seen


def needs_two_devices() -> bool:
    if torch.cuda.device_count() > 1:
        return False
    if "pytest" in globals():
        pytest.skip("needs two CUDA devices")
    print("skipped: needs two CUDA devices")
    return True


def test_a_drafter_on_another_gpu_gives_the_text_of_one_gpu_and_nothing_waits():
    if needs_two_devices():
        return
    target, far, near = tiny().cuda(), noisy(tiny(), 0.03).to("cuda:1"), noisy(tiny(), 0.03).cuda()
    for settings in (GREEDY, SAMPLED):
        for mode in ("sd", "psd"):
            psd = {"mode": mode, "seed": 3, "verification": "coupled"}
            expected = target.generate(**batch("cuda"), assistant_models=[near], psd=psd, **settings)
            for drafters in ([far], ["prompt_lookup", far], [far, near]):
                for graphs in (False, True):
                    for hooks in ([], [NoWaiting()]):
                        out = target.generate(
                            **batch("cuda"), assistant_models=drafters, psd=psd | {"cuda_graphs": graphs}, psd_hooks=hooks,
                            **settings,
                        )  # fmt: skip
                        assert torch.equal(out, expected), (settings, mode, drafters, graphs)
                        stats = hf_psd.last_stats()
                        assert not stats.notes and not stats.errors and stats.acceptance > 0.2, stats
    hf_psd.release()


def test_two_graphs_overlap_on_two_devices():
    if not needs_two_devices():
        assert overlap_on("cuda:1") > 0.5


def test_the_drafter_reads_the_prompts_while_the_target_does():
    if needs_two_devices():
        return
    target, drafter, timeline = wide(24, 0).cuda(), wide(2, 1).to("cuda:1"), Timeline()
    prompts = torch.randint(3, 512, (64, 1024), device="cuda")
    for mode in ("sd", "psd"):
        for hooks in ([], [timeline]):
            target.generate(
                prompts,
                assistant_models=[drafter],
                psd={"mode": mode},
                psd_hooks=hooks,
                **GREEDY | {"max_new_tokens": 8},
            )
        prefill = next(span for span in timeline.spans if span.kind == "prefill")
        draft = next(span for span in timeline.spans if span.kind == "draft")
        print(f"{mode}: target reads {prefill}, first draft turn {draft}")
        assert draft.start < prefill.start + (prefill.end - prefill.start) / 2


def test_rejection_sampling_across_two_devices_follows_the_law():
    if needs_two_devices():
        return
    target, drafter = tiny(0, 8, 0.25), tiny(5, 8, 0.25)
    warp = {"do_sample": True, "temperature": 4.0, "top_k": 6, "top_p": 0.95, "eos_token_id": None, "pad_token_id": 0}
    law = joint_law(target, [3, 4, 5], 3, **warp)
    target.cuda(), drafter.to("cuda:1")
    for mode in ("sd", "psd"):
        psd = {"gamma": 2, "mode": mode, "seed": 23}
        samples = sample_joint(target, [3, 4, 5], 40_960, tokens=3, assistant_models=[drafter], psd=psd, **warp)
        result = chi_square(law.index(samples), law.probabilities)
        stats = hf_psd.last_stats()
        print("two devices", mode, result, f"acceptance {stats.acceptance:.2f}", stats.notes)
        assert result.p_value > 0.01 and 0.1 < stats.acceptance < 0.9 and not stats.notes


def test_half_precision_runs_and_accepts_a_copy():
    """Sampling at temperature 1 as well, where the kernels get the models' own logits."""
    for dtype in (torch.bfloat16, torch.float16):
        target = tiny().cuda().to(dtype)
        for sampling in ({}, {"do_sample": True, "top_k": 0}):
            for graphs in (False, True):
                settings = GREEDY | sampling | {"psd": {"mode": "sd", "cuda_graphs": graphs}}
                out = target.generate(**batch("cuda"), assistant_models=[copy.deepcopy(target)], **settings)
                assert out.shape == (4, 47)
                assert hf_psd.last_stats().acceptance > 0.8


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    failed = 0
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            try:
                test()
                print("passed", name, flush=True)
            except Exception:
                failed += 1
                torch.cuda.set_sync_debug_mode("default")
                print("FAILED", name, traceback.format_exc(limit=-6), flush=True)
    sys.exit(failed)
