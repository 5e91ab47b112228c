"""It really speculates: few target forwards, half batches in turn, one late read per verification, flat memory."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import GREEDY, P4, Fixed, Recorder, assert_plain, noisy, prompts, shared, tiny

import hf_psd
from hf_psd.engine import Engine
from hf_psd.lanes import HostRing

G40 = prompts(5, seed=2) | GREEDY | dict(max_new_tokens=40)


@pytest.mark.parametrize("selector", ["composite", Fixed()], ids=["composite", "fixed"])
def test_copy_as_drafter_saves_target_forwards(selector):
    target = shared("llama")
    expected = target.generate(**G40)
    with Recorder(target) as recorder:
        output = target.generate(
            **G40, assistant_models=[tiny("llama")], psd=dict(mode="sd", gamma=4, selector=selector)
        )
    assert output.tolist() == expected.tolist()
    decode = recorder.shapes[1:]  # the first reads the prompts
    assert len(decode) <= 12 and recorder.rows == [5] * len(recorder.rows)
    assert hf_psd.last_stats().target_forwards == len(decode)


def test_two_groups_take_turns():
    target, groups = shared("llama"), []

    class Watch(hf_psd.StepHook):
        def before_verify(self, context):
            groups.append(
                ({request.group for request in context.requests}, {request.index for request in context.requests})
            )

    with Recorder(target) as recorder:
        target.generate(**G40, assistant_models=[tiny("llama")], psd=dict(mode="psd", gamma=4), psd_hooks=[Watch()])
    assert recorder.rows[0] == 5 and max(recorder.rows[1:]) <= 3 and min(recorder.rows[1:]) == 2
    assert len(groups) == len(recorder.rows) - 1 and all(len(group) == 1 for group, _ in groups)
    assert [group for group, _ in groups[:8]] == [{0}, {1}] * 4
    assert groups[0][1] | groups[1][1] == set(range(5))
    assert hf_psd.last_stats().balance > 0.5


def test_mode_ar_runs_no_drafter():
    target, drafter = shared("llama"), tiny("llama")
    with Recorder(target) as recorder, Recorder(drafter) as idle:
        target.generate(**G40, assistant_models=[drafter], psd=dict(mode="ar"))
    assert idle.forwards == 0 and all(shape[1] == 1 for shape in recorder.shapes[1:])
    assert 40 <= len(recorder.shapes) - 1 <= 41 and hf_psd.last_stats().tokens_per_forward == 1.0


def test_steps_beyond_the_end_of_a_row_are_dropped():
    arguments = P4() | GREEDY | dict(eos_token_id=[28, 34, 14], max_new_tokens=40)
    shared("llama").generate(**arguments, psd=dict(mode="ar"))
    stats = hf_psd.last_stats()
    assert (stats.rounds, stats.emitted, stats.target_forwards) == (26, 26, 11), "the last row ends after ten tokens"


def test_hopeless_drafts_cost_little():
    """Rows whose drafts keep failing stop drafting, so both models run hardly more than without drafts."""
    target, drafter = shared("llama"), tiny("llama", 11)
    with Recorder(target) as recorder, Recorder(drafter) as drafting:
        target.generate(**G40, assistant_models=[drafter], psd=dict(mode="sd", gamma=7))
    assert len(recorder.shapes) <= 43 and sum(tokens for _, tokens in recorder.shapes[1:]) < 2 * 40
    assert drafting.forwards < 30


class Syncs(TorchDispatchMode):
    """Counts what would make the host wait for a device, while `active`."""

    OPS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "is_nonzero", "_unique2", "unique_dim")
    METHODS = (
        "tolist",
        "numpy",
        "cpu",
        "item",
        "__iter__",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__array__",
    )

    def __init__(self, monkeypatch):
        super().__init__()
        self.active, self.seen = False, []
        for name in self.METHODS:
            monkeypatch.setattr(torch.Tensor, name, self._noting(name, getattr(torch.Tensor, name)))

    def _noting(self, name, original):
        def noting(tensor, *args, **kwargs):
            self.note(name)
            return original(tensor, *args, **kwargs)

        return noting

    def note(self, what):
        if self.active:
            self.seen.append(what)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1].split(".")[0]
        by_bool = name.startswith("index") and any(
            isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
            for index in (args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ())
        )
        if name in self.OPS or by_bool:
            self.note(f"{name}{' by bool' if by_bool else ''}")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def loop(monkeypatch):
    """Syncs within the step loop, and the order of its launches and reads as ("launch" | "read", step)."""
    syncs, order, advance, pop = Syncs(monkeypatch), [], Engine.advance, HostRing.pop

    class Order(hf_psd.StepHook):
        def after_verify(self, context):
            order.append(("launch", context.step))

        after_draft = after_verify

    def counted(engine):
        syncs.active = True
        try:
            return advance(engine)
        finally:
            syncs.active = False

    def read(ring):
        order.append(("read", ring.oldest.step))
        syncs.active = False
        try:
            return pop(ring)
        finally:
            syncs.active = True

    monkeypatch.setattr(Engine, "advance", counted)
    monkeypatch.setattr(HostRing, "pop", read)
    return syncs, order, Order()


SAMPLED = dict(do_sample=True, temperature=0.9, top_k=20, top_p=0.95, pad_token_id=0)


@pytest.mark.parametrize("selector", ["composite", "hedge", "thompson:burn_in=0"])
@pytest.mark.parametrize("mode", ["ar", "sd", "psd"])
@pytest.mark.parametrize("law", ["greedy", "rejection", "coupled"])
def test_one_late_read_per_verification(law, mode, selector, loop):
    syncs, order, watch = loop
    arguments = GREEDY | dict(eos_token_id=[28, 34, 14]) if law == "greedy" else SAMPLED | dict(eos_token_id=[28, 34])
    psd = dict(mode=mode, verification="rejection" if law == "greedy" else law, seed=1, selector=selector)
    if selector.startswith("thompson"):
        psd |= dict(reward="goodput", gamma="auto")
    models = ["prompt_lookup", shared("llama", noise=0.03), shared("llama", 11)]
    with syncs:
        shared("llama").generate(
            **prompts(5, seed=2), **arguments, max_new_tokens=24, assistant_models=models, psd=psd, psd_hooks=[watch]
        )
    assert not syncs.seen
    launched = [step for what, step in order if what == "launch"]
    reads = [step for what, step in order if what == "read"]
    assert reads == sorted(set(reads)) and len(reads) == hf_psd.last_stats().target_forwards
    for place, (what, step) in enumerate(order):
        if what == "read":
            assert step + 1 in [number for kind, number in order[:place] if kind == "launch"] or step == max(launched)


def test_sync_counter_counts(monkeypatch):
    """The counter used above sees every way of waiting."""
    values = torch.arange(4)
    with Syncs(monkeypatch) as syncs:
        syncs.active = True
        ways = [
            lambda: values.tolist(), lambda: values.cpu(), lambda: values.numpy(), lambda: values[1].item(),
            lambda: bool(values[1]), lambda: int(values[1]), lambda: list(values), lambda: values[values > 1],
            lambda: values.nonzero(), lambda: torch.equal(values, values), lambda: values[: values[2]],
        ]  # fmt: skip
        for way in ways:
            syncs.seen.clear()
            way()
            assert syncs.seen


def live_tensors() -> tuple[int, int]:
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    return len(tensors), sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize("mode", ["sd", "psd"])
def test_memory_stays_flat_over_2000_tokens(mode):
    target = tiny("llama", max_position_embeddings=2100)
    samples = []

    class Watch(hf_psd.StepHook):
        def on_commit(self, context):
            known = max(len(request.tokens) for request in context.requests)
            if len(samples) < 3 and known >= (400, 1100, 1900)[len(samples)]:
                samples.append((*live_tensors(), sys.getallocatedblocks()))

    arguments = dict(input_ids=torch.tensor([[5, 6], [7, 8]]), **GREEDY, max_new_tokens=2000)
    models = ["prompt_lookup", noisy(target, 0.001)]
    before = live_tensors()
    output = target.generate(**arguments, assistant_models=models, psd=dict(mode=mode, gamma=15), psd_hooks=[Watch()])
    assert output.shape == (2, 2002)
    (first, size, blocks), _, (last, last_size, last_blocks) = samples
    assert abs(last - first) <= 8 and abs(last_size - size) < 64 * 1024
    assert last_blocks - blocks < 750, "less than one Python object for every second step over 1,500 tokens"
    del output
    after = live_tensors()
    assert after[0] - before[0] <= 8 and after[1] - before[1] < 64 * 1024


def test_stats_of_the_first_round_name_the_right_drafter():
    """Prompt lookup finds nothing in a prompt without repeats: then the model's drafts are the model's."""
    target, first = shared("llama"), []

    class Watch(hf_psd.StepHook):
        def on_commit(self, context):
            first.extend(zip(context.source, context.drafted, context.accepted))

    psd = dict(mode="sd", gamma=4, selector=AllAtOnce())
    inputs = torch.tensor([[5, 9, 17, 33], [7, 8, 12, 11]])
    assert_plain(target, ["prompt_lookup", tiny("llama")], psd, input_ids=inputs, **GREEDY, max_new_tokens=20)
    arguments = dict(input_ids=inputs, **GREEDY, max_new_tokens=20, psd_hooks=[Watch()])
    target.generate(**arguments, assistant_models=["prompt_lookup", tiny("llama")], psd=psd)
    assert first[:2] == [(1, 4, 4), (1, 4, 4)]


class AllAtOnce(Fixed):
    """Asks lookup for two drafts, and the model for four where lookup has none."""

    def plan(self, requests, arms, gamma):
        return [(0, [2] * len(requests)), (1, [gamma] * len(requests))]
