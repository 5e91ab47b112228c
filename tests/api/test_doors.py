"""Every door leads to the same engine, and plain `generate` stays as it was."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList
from zoo import GREEDY, P4, Recorder, assert_plain, noisy, shared, tiny

import hf_psd

ARGUMENTS = P4() | GREEDY | dict(max_new_tokens=16)


def speculates(model, *doors, drafter=None):
    """Whether `model.generate` with psd equals plain and really ran a drafter."""
    drafter = drafter or shared("llama", noise=0.03)
    with Recorder(drafter) as recorder:
        assert_plain(model, [drafter], **ARGUMENTS)
    return recorder.forwards > 0 and hf_psd.last_stats().accepted > 0


def test_import_wraps_generate_once_and_thinly():
    wrapped = GenerationMixin.generate
    hf_psd.enable(), hf_psd.enable()
    assert GenerationMixin.generate is wrapped
    hf_psd.disable(), hf_psd.disable()
    original = GenerationMixin.generate
    try:
        assert original is not wrapped
        assert inspect.signature(wrapped) == inspect.signature(original)
        assert (wrapped.__name__, wrapped.__doc__) == (original.__name__, original.__doc__)
        with pytest.raises(ValueError, match="psd"):
            tiny("llama").generate(**ARGUMENTS, psd=True)
        assert hf_psd.generate(tiny("llama"), **ARGUMENTS).shape == (4, 23), "the plain function needs no wrapping"
    finally:
        hf_psd.enable()
    assert inspect.signature(GenerationMixin.generate) == inspect.signature(original)
    assert speculates(tiny("llama"))


SCRIPT = """
    import torch
    from zoo import GREEDY, P4, noisy, tiny
    target, assistant = tiny("llama"), noisy(tiny("llama"), 0.03)
    one = dict(input_ids=torch.tensor([[5, 9, 17, 33]]), pad_token_id=0, max_new_tokens=12)
    ways = {
        "greedy": P4() | GREEDY | dict(max_new_tokens=12),
        "sampled": P4() | dict(do_sample=True, max_new_tokens=12, pad_token_id=0),
        "beams": P4() | GREEDY | dict(max_new_tokens=12, num_beams=3),
        "assisted": one | dict(assistant_model=assistant, do_sample=False),
        "assisted, sampled": one | dict(assistant_model=assistant, do_sample=True),
        "lookup": one | dict(prompt_lookup_num_tokens=3, do_sample=False),
        "scores": one | dict(output_scores=True, return_dict_in_generate=True, do_sample=False),
    }
    def run():
        results = {}
        for name, way in ways.items():
            torch.manual_seed(1)
            results[name] = target.generate(**way)
        return results
    before = run()
    import sys
    assert "hf_psd" not in sys.modules
    for name in {"triton", "bitsandbytes", "liger_kernel", "matplotlib"} - set(sys.modules):
        sys.modules[name] = None  # importing it fails
    import hf_psd
    for after in (run(), (hf_psd.disable(), run())[1], (hf_psd.enable(), run())[1]):
        for name in set(ways) - {"scores"}:
            assert torch.equal(before[name], after[name]), name
        for a, b in zip(before["scores"].scores, after["scores"].scores):
            assert torch.equal(a, b)
    output = target.generate(**ways["greedy"], assistant_models=[assistant], psd=True)
    assert torch.equal(output, before["greedy"]) and hf_psd.last_stats().accepted > 0
"""


def test_plain_generate_is_bitwise_unchanged_and_older_instances_speculate():
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("psd", [True, {}, {"gamma": 2}, hf_psd.PSDConfig(), hf_psd.PSDConfig(mode="psd")], ids=str)
def test_forms_of_psd(psd):
    assert_plain(shared("llama"), [shared("llama", noise=0.03)], psd, **ARGUMENTS)
    assert hf_psd.last_stats().accepted > 0
    assert_plain(shared("llama"), None, psd, **ARGUMENTS)
    assert [by.name for by in hf_psd.last_stats().by_drafter] == ["prompt_lookup"]


def test_psd_false_is_plain():
    with Recorder(shared("llama", 11)) as drafter:
        assert_plain(shared("llama"), [shared("llama", 11)], False, **ARGUMENTS)
    assert drafter.forwards == 0


def test_plain_function():
    expected = tiny("llama").generate(**ARGUMENTS)
    arguments = dict(ARGUMENTS)
    ids = arguments.pop("input_ids")
    for call in (
        lambda: hf_psd.generate(tiny("llama"), ids, assistant_models=[shared("llama", 11)], **arguments),
        lambda: hf_psd.generate(tiny("llama"), input_ids=ids, psd=dict(mode="psd"), **arguments),
        lambda: tiny("llama").generate(ids, psd=True, **arguments),
        lambda: tiny("llama").generate(inputs=ids, psd=True, **arguments),
    ):
        assert call().tolist() == expected.tolist()


class Mixed(hf_psd.PSDGenerationMixin, LlamaForCausalLM):
    pass


@pytest.mark.parametrize("enabled", [True, False])
def test_mixin(enabled):
    model = Mixed(tiny("llama").config).eval()
    model.load_state_dict(tiny("llama").state_dict())
    try:
        if not enabled:
            hf_psd.disable()
        assert speculates(model)
    finally:
        hf_psd.enable()


def test_copies():
    assert speculates(copy.deepcopy(shared("llama")))
    assert speculates(pickle.loads(pickle.dumps(tiny("llama"))))
    assert speculates(tiny("llama"), drafter=pickle.loads(pickle.dumps(noisy(tiny("llama"), 0.03))))


def compiled_whole(model):
    return torch.compile(model, backend="eager")


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


def compiled_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")
    return model


@pytest.mark.parametrize("how", [compiled_whole, compiled_in_place, compiled_forward])
def test_compiled(how):
    short = ARGUMENTS | dict(max_new_tokens=5)
    expected = tiny("llama").generate(**short)
    for target, drafter in ((how(tiny("llama")), tiny("llama", 11)), (tiny("llama"), how(noisy(tiny("llama"), 0.03)))):
        output = target.generate(**short, assistant_models=[drafter], psd=dict(mode="psd"))
        assert output.tolist() == expected.tolist() and not hf_psd.last_stats().errors


def dispatched(model):
    from accelerate import dispatch_model

    return dispatch_model(model, {"": "cpu"}, force_hooks=True)


def split(model):
    from accelerate import dispatch_model

    parts = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "cpu", "model.norm": "cpu"}
    return dispatch_model(model, parts | {"model.rotary_emb": "cpu", "lm_head": "cpu"}, force_hooks=True)


def offloaded(model):
    from accelerate import cpu_offload

    return cpu_offload(model, execution_device=torch.device("cpu"))


def hooked(model):
    from accelerate.hooks import ModelHook, add_hook_to_module

    return add_hook_to_module(model, ModelHook())


@pytest.mark.parametrize("how", [dispatched, split, offloaded, hooked])
def test_hooked_by_accelerate(how):
    target, drafter = how(tiny("llama")), how(noisy(tiny("llama"), 0.03))
    forward, hook = target.forward, target._hf_hook if hasattr(target, "_hf_hook") else None
    assert speculates(target, drafter=drafter) and not hf_psd.last_stats().errors
    assert target.forward is forward and (hook is None or target._hf_hook is hook)


def lora(model, seed=0):
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config).eval()


def test_lora():
    target = lora(tiny("llama"))
    expected = target.generate(**ARGUMENTS)
    assert expected.tolist() != tiny("llama").generate(**ARGUMENTS).tolist()
    for call in (target.generate, target.base_model.model.generate):
        output = call(**ARGUMENTS, assistant_models=[lora(tiny("llama"))], psd=dict(mode="psd"))
        assert output.tolist() == expected.tolist() and hf_psd.last_stats().accepted > 40
    output = hf_psd.generate(target, **ARGUMENTS, assistant_models=[tiny("llama")])
    assert output.tolist() == expected.tolist()
    assert speculates(tiny("llama"), drafter=lora(tiny("llama")).base_model.model)
    with target.disable_adapter():
        assert target.generate(**ARGUMENTS, psd=True).tolist() == tiny("llama").generate(**ARGUMENTS).tolist()


def test_prompt_tuning_is_refused():
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    tuned = peft.get_peft_model(tiny("llama"), config).eval()
    for call in (
        lambda: tuned.generate(**ARGUMENTS, psd=True),
        lambda: hf_psd.generate(tuned, **ARGUMENTS),
        lambda: shared("llama").generate(**ARGUMENTS, assistant_models=[tuned], psd=True),
    ):
        with Recorder(tuned.base_model) as forwards, pytest.raises(ValueError, match="prompt tuning"):
            call()
        assert forwards.forwards == 0


def test_adapters_per_row_are_refused():
    target = lora(tiny("llama"))
    with pytest.raises(ValueError, match="adapter_names"):
        target.generate(**ARGUMENTS, adapter_names=["default"] * 4, psd=True)
    with pytest.raises(ValueError, match="adapter_names"):
        hf_psd.generate(target, **ARGUMENTS, adapter_names=["default"] * 4)


class OwnGenerate(LlamaForCausalLM):
    def generate(self, *args, **kwargs):
        return super().generate(*args, **kwargs)


def test_a_generate_of_its_own_is_refused():
    model = OwnGenerate(tiny("llama").config).eval()
    with Recorder(model) as forwards, pytest.raises(ValueError, match="OwnGenerate has a `generate` of its own"):
        hf_psd.generate(model, **ARGUMENTS)
    with pytest.raises(ValueError, match="OwnGenerate has a `generate` of its own"):
        model.generate(**ARGUMENTS, psd=True)
    assert forwards.forwards == 0


class Nested(hf_psd.StepHook):
    """Runs another call in the middle of one."""

    output = None

    def on_commit(self, context):
        if self.output is None:
            self.output = ()
            self.output = shared("llama").generate(**ARGUMENTS, psd=True)


def test_calls_do_not_disturb_each_other():
    target, results, hook = shared("llama"), {}, Nested()
    expected = target.generate(**ARGUMENTS).tolist()
    models = [shared("llama", noise=0.03), "prompt_lookup"]

    def run(number):
        results[number] = target.generate(**ARGUMENTS, assistant_models=models, psd=dict(mode="psd")).tolist()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(3), expected)
    assert target.generate(**ARGUMENTS, assistant_models=models, psd=True, psd_hooks=[hook]).tolist() == expected
    assert hook.output.tolist() == expected


def test_under_other_modes_of_torch():
    target, models = shared("llama"), [shared("llama", noise=0.03), "prompt_lookup"]
    sampled = P4() | dict(do_sample=True, temperature=2.0, top_k=0, max_new_tokens=12, pad_token_id=0)
    ways = [ARGUMENTS, sampled]
    expected = [target.generate(**way, assistant_models=models, psd=dict(seed=3)).tolist() for way in ways]
    with torch.inference_mode():
        assert [target.generate(**way, assistant_models=models, psd=dict(seed=3)).tolist() for way in ways] == expected
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert [target.generate(**way, assistant_models=models, psd=dict(seed=3)).tolist() for way in ways] == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_positional_arguments():
    inputs, target = P4(), shared("llama")
    config = GenerationConfig(**GREEDY, max_new_tokens=9)
    processors, rest = LogitsProcessorList([Ban()]), dict(attention_mask=inputs["attention_mask"])
    expected = target.generate(inputs["input_ids"], config, processors, **rest).tolist()
    assert target.generate(inputs["input_ids"], config, processors, **rest, psd=True).tolist() == expected
    rest["logits_processor"] = processors
    assert hf_psd.generate(target, inputs["input_ids"], config, **rest).tolist() == expected
    with pytest.raises(TypeError, match="multiple values for argument 'generation_config'"):
        target.generate(inputs["input_ids"], config, generation_config=config, psd=True)
    with pytest.raises(TypeError, match="at most"):
        target.generate(*[None] * 20, psd=True)


class Ban(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.index_fill(1, torch.tensor([38, 49]), -100.0)
