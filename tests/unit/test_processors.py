"""Logits processors at ragged positions: every result is compared with the stock processor on each true prefix."""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as stock

from hf_psd.verify import processors as module
from hf_psd.verify.processors import PATHS, ProcessorPipeline, unlisted_processors
from hf_psd.verify.processors_lengths import decay_leaves_infinite_scores
from hf_psd.verify.processors_tokens import encoder_penalty_follows_copies

VOCABULARY = 48
COPIES = 2  # rows that share a prompt, as with num_return_sequences=2
VECTORISED = sorted(name for name, path in PATHS.items() if path == "vectorised")
IGNORES_PADS = "attention_mask" in LlamaForCausalLM._get_logits_processor.__code__.co_consts
trials = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@dataclass
class Round:
    """R rows of a batch, T positions each, at different lengths; and what `generate` knew at the start."""

    scores: Tensor
    ids: Tensor
    base: Tensor
    rows: Tensor
    prompts: Tensor
    pads: Tensor
    rng: random.Random

    @property
    def call(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.scores, self.ids, self.base, self.rows

    @property
    def batch(self) -> int:
        return self.pads.shape[0]

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(8) for _ in range(count)]


@st.composite
def rounds(draw) -> Round:
    seed, positions, width = draw(st.integers(0, 2**31)), draw(st.integers(1, 5)), draw(st.integers(1, 7))
    batch = COPIES * draw(st.integers(1, 3))
    chosen = draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=batch, unique=True))
    generator = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)
    rows = torch.tensor(chosen)
    prompts = torch.randint(8, (batch // COPIES, width), generator=generator)
    pads = torch.randint(width, (batch // COPIES, 1), generator=generator)
    prompts = torch.where(torch.arange(width) < pads, 0, prompts)
    base = width + torch.randint(6, (len(chosen),), generator=generator)
    ids = torch.randint(8, (len(chosen), int(base.max()) + positions + 1), generator=generator)
    ids[:, :width] = prompts[rows // COPIES]
    scores = torch.randn(len(chosen), positions, VOCABULARY, generator=generator) * 3
    if draw(st.booleans()):
        scores = scores.round()  # ties
    if draw(st.booleans()):
        scores[torch.rand(scores.shape, generator=generator) < 0.2] = -math.inf
    return Round(scores, ids, base, rows, prompts, pads[:, 0].repeat_interleave(COPIES), rng)


def reference(processors: list, case: Round) -> Tensor:
    """Each (row, position) through the stock list, inside a whole batch whose other rows hold something else."""
    result = torch.empty_like(case.scores)
    for r, row in enumerate(case.rows.tolist()):
        for i in range(case.scores.shape[1]):
            cur = int(case.base[r]) + i
            ids = torch.randint(8, (case.batch, cur), generator=torch.Generator().manual_seed(i))
            scores = torch.full((case.batch, VOCABULARY), 0.5)
            ids[row], scores[row] = case.ids[r, :cur], case.scores[r, i]
            result[r, i] = LogitsProcessorList(processors)(ids, scores)[row]
    return result


def same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and bool(((left == right) | (left.isnan() & right.isnan())).all())


def ngram_bias(case: Round, *lengths: int) -> dict[tuple[int, ...], float]:
    """Biased sequences that start with the ends of prefixes that occur; several meet in one token at one position."""
    biased = {(case.rng.randrange(8),): case.rng.uniform(-9, 9)}
    place, follower = (0, 0), case.rng.randrange(8)
    for index, length in enumerate(lengths):
        if index < 2 or case.rng.random() < 0.15:
            row = case.rng.randrange(len(case.rows))
            place = row, int(case.base[row]) + case.rng.randrange(case.scores.shape[1])
        start = case.ids[place[0], : place[1]].tolist()[-length:]
        biased[(*start, follower)] = case.rng.uniform(-9, 9)
    return biased


def ignored_lengths(case: Round) -> Tensor | int | None:
    options = [None, 0, 2, case.prompts.shape[1]]
    return case.rng.choice([*options, case.pads, case.pads] if IGNORES_PADS else options)


def near(case: Round) -> int:
    return int(case.base[0]) + case.rng.randrange(4)


BUILD = {
    "TemperatureLogitsWarper": lambda c: stock.TemperatureLogitsWarper(c.rng.uniform(0.1, 3)),
    "TopKLogitsWarper": lambda c: stock.TopKLogitsWarper(c.rng.randint(1, 60)),
    "TopPLogitsWarper": lambda c: stock.TopPLogitsWarper(c.rng.random(), min_tokens_to_keep=c.rng.randint(1, 3)),
    "MinPLogitsWarper": lambda c: stock.MinPLogitsWarper(c.rng.random(), min_tokens_to_keep=c.rng.randint(1, 3)),
    "TypicalLogitsWarper": lambda c: stock.TypicalLogitsWarper(c.rng.uniform(0.01, 0.99)),
    "EpsilonLogitsWarper": lambda c: stock.EpsilonLogitsWarper(c.rng.uniform(0.001, 0.3)),
    "EtaLogitsWarper": lambda c: stock.EtaLogitsWarper(c.rng.uniform(0.001, 0.3), min_tokens_to_keep=2),
    "TopHLogitsWarper": lambda c: stock.TopHLogitsWarper(c.rng.uniform(0.1, 1.0)),
    "LogitNormalization": lambda c: stock.LogitNormalization(),
    "InfNanRemoveLogitsProcessor": lambda c: stock.InfNanRemoveLogitsProcessor(),
    "SuppressTokensLogitsProcessor": lambda c: stock.SuppressTokensLogitsProcessor([-1, *c.tokens(3), 999]),
    "BarkEosPrioritizerLogitsProcessor": lambda c: stock.BarkEosPrioritizerLogitsProcessor(c.tokens(2), 0.05),
    "MinLengthLogitsProcessor": lambda c: stock.MinLengthLogitsProcessor(near(c), c.tokens(2)),
    "MinNewTokensLengthLogitsProcessor": lambda c: stock.MinNewTokensLengthLogitsProcessor(
        c.prompts.shape[1], c.rng.randrange(9), c.tokens(2)
    ),
    "ForcedBOSTokenLogitsProcessor": lambda c: stock.ForcedBOSTokenLogitsProcessor(3),
    "ForcedEOSTokenLogitsProcessor": lambda c: stock.ForcedEOSTokenLogitsProcessor(near(c) + 1, c.tokens(2)),
    "SuppressTokensAtBeginLogitsProcessor": lambda c: stock.SuppressTokensAtBeginLogitsProcessor(c.tokens(3), near(c)),
    "ExponentialDecayLengthPenalty": lambda c: stock.ExponentialDecayLengthPenalty(
        (c.rng.randrange(9), c.rng.choice([1.5, 1.0137, 0.9, 2])), c.tokens(2), c.prompts.shape[1]
    ),
    "RepetitionPenaltyLogitsProcessor": lambda c: stock.RepetitionPenaltyLogitsProcessor(
        c.rng.uniform(0.5, 2), ignored_lengths(c)
    ),
    "NoRepeatNGramLogitsProcessor": lambda c: stock.NoRepeatNGramLogitsProcessor(c.rng.choice([1, 2, 3, 4, 9])),
    "SequenceBiasLogitsProcessor": lambda c: stock.SequenceBiasLogitsProcessor(ngram_bias(c, 1, 3, 2, 2, 1, 7)),
    "NoBadWordsLogitsProcessor": lambda c: stock.NoBadWordsLogitsProcessor(
        [list(ids) for ids in ngram_bias(c, 1, 2, 2, 3)], 1
    ),
    "EncoderRepetitionPenaltyLogitsProcessor": lambda c: stock.EncoderRepetitionPenaltyLogitsProcessor(
        c.rng.uniform(0.5, 2), c.prompts
    ),
    "EncoderNoRepeatNGramLogitsProcessor": lambda c: stock.EncoderNoRepeatNGramLogitsProcessor(
        c.rng.randint(1, 3), c.prompts
    ),
    "PrefixConstrainedLogitsProcessor": lambda c: stock.PrefixConstrainedLogitsProcessor(
        lambda prompt, prefix: [prompt + 9, int(prefix.sum()) % 8, *range(20, 45)], COPIES
    ),
    "WatermarkLogitsProcessor": lambda c: stock.WatermarkLogitsProcessor(VOCABULARY, "cpu", seeding_scheme="lefthash"),
}
LOOKS_AT_PREFIX = [name for name in VECTORISED if name not in list(BUILD)[:12] and "ForcedBOS" not in name]


def pipeline(processors: list, case: Round) -> ProcessorPipeline:
    return ProcessorPipeline(processors, "cpu", batch_size=case.batch)


def test_every_installed_processor_has_a_path_and_a_trial():
    assert unlisted_processors() == []
    assert set(VECTORISED) <= set(BUILD)


def test_a_processor_without_a_path_is_reported(monkeypatch):
    monkeypatch.delitem(PATHS, "TopKLogitsWarper")
    assert unlisted_processors() == ["TopKLogitsWarper"]


@pytest.mark.parametrize("name", VECTORISED)
def test_vectorised_equals_stock_on_every_prefix(name):
    @trials
    @given(rounds())
    def check(case: Round) -> None:
        processor = BUILD[name](case)
        before = case.scores.clone()
        pipe = pipeline([processor], case)
        assert not pipe.exact_only
        result = pipe(*case.call)
        assert same(result, reference([processor], case))
        assert torch.equal(case.scores, before)
        assert same(pipe.draft(*case.call), result)

    check()


@pytest.mark.parametrize("name", BUILD)
def test_one_equals_stock_in_the_batch(name):
    @settings(trials, max_examples=6)
    @given(rounds())
    def check(case: Round) -> None:
        processor = BUILD[name](case)
        pipe = pipeline([processor], case)
        expected = reference([processor], case)
        for r, row in enumerate(case.rows.tolist()):
            for i in range(case.scores.shape[1]):
                result = pipe.one(case.scores[r : r + 1, i], case.ids[r : r + 1, : int(case.base[r]) + i], row)
                assert same(result, expected[r, i][None])

    check()


@pytest.mark.parametrize("name", LOOKS_AT_PREFIX)
def test_a_base_off_by_one_is_noticed(name):
    noticed = []

    @trials
    @given(rounds())
    def check(case: Round) -> None:
        processor = BUILD[name](case)
        if name.startswith("EncoderRepetition"):  # knows the prompt alone: only a wrong row can be noticed
            wrong = pipeline([processor], case)(case.scores, case.ids, case.base, (case.rows + COPIES) % case.batch)
        else:
            wrong = pipeline([processor], case)(case.scores, case.ids, case.base - 1, case.rows)
        noticed.append(not same(wrong, reference([processor], case)))

    check()
    assert any(noticed)


@pytest.mark.skipif(not IGNORES_PADS, reason="this release penalises pads")
def test_pads_seen_by_the_repetition_penalty_are_noticed():
    noticed = []

    @trials
    @given(rounds())
    def check(case: Round) -> None:
        wrong = pipeline([stock.RepetitionPenaltyLogitsProcessor(1.3)], case)(*case.call)
        noticed.append(not same(wrong, reference([stock.RepetitionPenaltyLogitsProcessor(1.3, case.pads)], case)))

    check()
    assert any(noticed)


@functools.cache
def tiny_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    return LlamaForCausalLM(config)


OPTIONS = {
    "sequence_bias": [[[1], 2.5], [[3, 2], -4.0], [[1, 2, 5], 7.0]],
    "encoder_repetition_penalty": 1.5,
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 3,
    "bad_words_ids": [[4], [2, 5]],
    "min_length": 8,
    "min_new_tokens": 3,
    "forced_bos_token_id": 6,
    "forced_eos_token_id": 1,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": (2, 1.5),
    "suppress_tokens": [7],
    "begin_suppress_tokens": [2],
    "temperature": 0.7,
    "top_h": 0.9,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.01,
    "typical_p": 0.95,
    "epsilon_cutoff": 0.001,
    "eta_cutoff": 0.001,
    "renormalize_logits": True,
}


MAKES_NAN = {"remove_invalid_values"} | (
    set() if decay_leaves_infinite_scores() else {"exponential_decay_length_penalty"}
)
RAISES_ON_NAN = {"top_h", "eta_cutoff"}


def as_generate_builds(options: dict, case: Round) -> LogitsProcessorList:
    config = GenerationConfig(eos_token_id=[1, 5], pad_token_id=0, max_length=12, do_sample=True, top_k=None)
    config.update(**options, num_beams=1, num_return_sequences=COPIES)
    for name in ("temperature", "top_p", "typical_p", "repetition_penalty", "encoder_repetition_penalty"):
        setattr(config, name, options.get(name))
    model = tiny_llama()
    model._prepare_special_tokens(config, device="cpu")
    mask = torch.arange(case.prompts.shape[1]) >= case.pads[:, None]
    return model._get_logits_processor(
        config, case.prompts.shape[1], case.prompts, device="cpu", model_kwargs={"attention_mask": mask.long()}
    )


@settings(trials, max_examples=60)
@given(rounds(), st.sets(st.sampled_from(sorted(OPTIONS)), max_size=8))
def test_combinations_in_the_order_of_generate(case, names):
    names = names - RAISES_ON_NAN if names & MAKES_NAN else names
    processors = as_generate_builds({name: OPTIONS[name] for name in names}, case)
    pipe = pipeline(processors, case)
    assert len(processors) == len(names)
    assert pipe.empty == (not names)
    assert same(pipe(*case.call), reference(processors, case))


@given(rounds())
@settings(trials, max_examples=5)
def test_all_options_at_once(case):
    options = {name: value for name, value in OPTIONS.items() if name not in MAKES_NAN}
    processors = as_generate_builds(options, case)
    assert len(processors) == len(options)
    assert same(pipeline(processors, case)(*case.call), reference(processors, case))


def test_encoder_penalty_rows_follow_the_release():
    # Two prompts, four rows: rows 2 and 3 have their own prompt only where the stock code repeats prompts.
    prompts = torch.tensor([[5], [6]])
    pipe = ProcessorPipeline([stock.EncoderRepetitionPenaltyLogitsProcessor(2.0, prompts)], "cpu", batch_size=4)
    ids, rows = torch.zeros(4, 1, dtype=torch.long), torch.arange(4)
    changed = (pipe(torch.ones(4, 1, 8), ids, rows * 0 + 1, rows)[:, 0] != 1).nonzero().tolist()
    expected = [[0, 5], [1, 5], [2, 6], [3, 6]] if encoder_penalty_follows_copies() else [[0, 5], [1, 6]]
    assert changed == expected
    if encoder_penalty_follows_copies():
        with pytest.raises(IndexError):  # an unknown batch size must not leave rows unpenalised
            ProcessorPipeline(pipe.processors, "cpu")(torch.ones(4, 1, 8), ids, rows * 0 + 1, rows)


@pytest.mark.parametrize("name", VECTORISED)
def test_rows_that_fill_a_group_up_change_no_other(name):
    """They have numbers past the batch's, and on a GPU an index out of bounds ends the process."""

    @settings(trials, max_examples=6)
    @given(rounds())
    def check(case: Round) -> None:
        pipe = pipeline([BUILD[name](case)], case)
        scores, ids, base, rows = (torch.cat([part, part[-1:]]) for part in case.call)
        rows[-1] = case.batch
        assert same(pipe(scores, ids, base, rows)[:-1], pipe(*case.call))

    check()


class Waits(TorchDispatchMode):
    """Counts operations that read device values on the host or whose result's shape depends on them."""

    names = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "_unique2", "unique_dim", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = list(args[1] if name.startswith("index") and isinstance(args[1], (list, tuple)) else ())
        if name in self.names or any(isinstance(t, Tensor) and t.dtype == torch.bool for t in masks):
            self.seen[name] += 1
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.numel())
        return result


def everything(batch: int = 4) -> tuple[list, tuple[Tensor, Tensor, Tensor, Tensor]]:
    case = Round(
        scores=torch.randn(batch, 5, VOCABULARY),
        ids=torch.randint(8, (batch, 40)),
        base=torch.arange(batch) + 9,
        rows=torch.arange(batch),
        prompts=torch.randint(8, (batch // COPIES, 7)),
        pads=torch.arange(batch),
        rng=random.Random(0),
    )
    return [BUILD[name](case) for name in BUILD if name in VECTORISED], case.call


def test_no_wait_for_the_device_and_no_huge_tensor(monkeypatch):
    processors, call = everything()
    pipe = ProcessorPipeline(processors, "cpu", batch_size=4)

    def refuse(*args, **kwargs):
        raise AssertionError("a device value was read on the host")

    for method in ("tolist", "numpy", "cpu", "item", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(Tensor, method, refuse)
    with Waits() as waits:
        pipe(*call)
        pipe.draft(*call)
    assert not waits.seen
    lines, width = call[0].shape[0] * call[0].shape[1], call[1].shape[1]
    assert waits.largest <= lines * max(VOCABULARY + 1, width * 8)


@pytest.mark.parametrize("plant", [lambda x: x.max().item(), lambda x: x[x > 0], lambda x: bool(x.any())])
def test_a_wait_is_noticed(plant):
    with Waits() as waits:
        plant(torch.ones(3))
    assert waits.seen


def test_a_copy_lives_on_its_own_device():
    # The meta device has no values: the call fails on any tensor left behind and on any value read.
    processors, call = everything()
    pipe = ProcessorPipeline(processors, "cpu", batch_size=4)
    copy = pipe.to("meta")
    copy.prepare(VOCABULARY, width=40)
    assert copy.draft(*(tensor.to("meta") for tensor in call)).device.type == "meta"
    assert copy.device.type == "meta" and pipe.device.type == "cpu"
    assert pipe(*call).device.type == "cpu"


def test_nothing_to_do_returns_the_scores():
    pipe = ProcessorPipeline(None, "cpu")
    scores, index = torch.randn(1, 1, 4), torch.zeros(1, dtype=torch.long)
    assert pipe.empty and not pipe.exact_only
    assert pipe(scores, index[None], index + 1, index) is scores
    assert pipe.draft(scores, index[None], index + 1, index) is scores


class Recorder(LogitsProcessor):
    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(input_ids)
        scores[:, 0] += 1
        return scores


class CountingPenalty(stock.RepetitionPenaltyLogitsProcessor):
    calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return super().__call__(input_ids, scores)


def test_user_code_is_called_one_by_one_and_never_by_drafters():
    recorder = Recorder()
    pipe = ProcessorPipeline([stock.TemperatureLogitsWarper(0.5), recorder], "cpu")
    scores, ids, index = torch.ones(1, 1, 4), torch.tensor([[3, 2]]), torch.zeros(1, dtype=torch.long)
    assert pipe.exact_only
    assert torch.equal(pipe.draft(scores, ids, index + 1, index), scores * 2)
    assert recorder.seen == []
    with pytest.raises(RuntimeError, match=r"Recorder.*ProcessorPipeline\.one"):
        pipe(scores, ids, index + 1, index)
    only = ProcessorPipeline([recorder], "cpu")
    assert only.one(scores[0], ids, 0).tolist() == [[2, 1, 1, 1]]
    ids.zero_()
    assert scores.eq(1).all() and recorder.seen[0].tolist() == [[3, 2]]


@pytest.mark.skipif(not IGNORES_PADS, reason="this release has no ignored lengths per row")
def test_a_subclass_keeps_its_own_state_and_gets_its_row():
    ignored = torch.tensor([0, 1])
    penalty = CountingPenalty(2.0, ignored)
    pipe = ProcessorPipeline([penalty], "cpu")
    assert pipe.exact_only
    assert pipe.one(torch.ones(1, 4), torch.tensor([[3, 2]]), 1).tolist() == [[1, 1, 0.5, 1]]
    assert penalty.calls == 1 and penalty.prompt_ignore_length is ignored


def test_a_processor_of_a_decoder_family_goes_one_by_one():
    family = pytest.importorskip("transformers.models.unlimited_ocr.generation_unlimited_ocr")
    windowed = family.UnlimitedOcrSlidingWindowNoRepeatNgramLogitsProcessor(2, 4)
    pipe = ProcessorPipeline([windowed], "cpu")
    scores, ids = torch.zeros(1, 8), torch.tensor([[3, 5, 3, 4, 2, 3]])
    assert pipe.exact_only
    assert torch.equal(pipe.one(scores, ids, 0), windowed(ids, scores))


def test_prefix_allowed_tokens_fn_sees_prompt_number_and_prefix():
    seen = []
    constrained = stock.PrefixConstrainedLogitsProcessor(lambda prompt, ids: seen.append((prompt, ids)) or [1], COPIES)
    ProcessorPipeline([constrained], "cpu").one(torch.ones(1, 4), torch.tensor([[3, 2]]), 5)
    assert [(prompt, ids.tolist()) for prompt, ids in seen] == [(5 // COPIES, [3, 2])]


def test_a_constraint_that_leaves_nothing_is_judged_per_row():
    scores, ids = torch.tensor([[-math.inf, 1.0, 2.0]]), torch.tensor([[1, 1]])
    alone = stock.PrefixConstrainedLogitsProcessor(lambda prompt, ids: [0], 1)
    shared = stock.PrefixConstrainedLogitsProcessor(lambda prompt, ids: [0], COPIES)
    assert torch.equal(ProcessorPipeline([shared], "cpu").one(scores, ids, 3), alone(ids, scores))


def impostor(module_name: str, base: type = LogitsProcessor) -> LogitsProcessor:
    return type("Impostor", (base,), {"__module__": module_name, "__init__": lambda self: None})()


REFUSALS = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": lambda: stock.UnbatchedClassifierFreeGuidanceLogitsProcessor(
        1.5, tiny_llama()
    ),
    "SynthIDTextWatermarkLogitsProcessor": lambda: stock.SynthIDTextWatermarkLogitsProcessor(
        5, [1, 2], 8, 0, 4, torch.device("cpu")
    ),
    "ClassifierFreeGuidanceLogitsProcessor": lambda: stock.ClassifierFreeGuidanceLogitsProcessor(1.5),
    "AlternatingCodebooksLogitsProcessor": lambda: stock.AlternatingCodebooksLogitsProcessor(1, 2, 2),
    "WhisperNoSpeechDetection": lambda: stock.WhisperNoSpeechDetection(1, 1),
    "DiaEOSChannelFilterLogitsProcessor": lambda: stock.DiaEOSChannelFilterLogitsProcessor(2, 1),
    "Impostor": lambda: impostor("transformers.models.future.generation_future"),
    "Impostor ": lambda: impostor("xgrammar.contrib.hf"),
    "Impostor  ": lambda: impostor("__main__", stock.SynthIDTextWatermarkLogitsProcessor),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_name_class_reason_and_remedy(name):
    with pytest.raises(ValueError, match=rf"^{name.strip()} cannot be used .*: it .*\. \w.*\.$"):
        ProcessorPipeline([stock.TemperatureLogitsWarper(0.5), REFUSALS[name]()], "cpu")


def test_a_user_class_with_a_stock_name_is_the_users():
    namesake = type("TopKLogitsWarper", (LogitsProcessor,), {})()
    assert ProcessorPipeline([namesake], "cpu").exact_only
    assert module._rule(namesake, None) is None


def test_ids_outside_the_vocabulary():
    processors = [
        stock.ForcedEOSTokenLogitsProcessor(2, [1, 9]),
        stock.ExponentialDecayLengthPenalty((0, 1.5), [2, 9], 0),
        stock.SequenceBiasLogitsProcessor({(9,): 1.0, (9, 3): 2.0, (3, 9): 1.0}),
        stock.RepetitionPenaltyLogitsProcessor(1.3),
        stock.NoRepeatNGramLogitsProcessor(2),
    ]
    ids, index = torch.tensor([[3, 9, 9]]), torch.zeros(1, dtype=torch.long)
    small, large = torch.ones(1, 3, 8), torch.ones(1, 3, 10)
    for processor in processors[:3]:
        with pytest.raises(ValueError, match=rf"{type(processor).__name__} names token ids \[9\].*below 8"):
            ProcessorPipeline([processor], "cpu")(small, ids, index + 1, index)
    for processor in processors:
        pipe = ProcessorPipeline([processor], "cpu")
        assert torch.equal(pipe.draft(small, ids, index + 1, index), pipe(large, ids, index + 1, index)[..., :8])


def test_wrong_batch_sizes_are_refused():
    encoder = stock.EncoderRepetitionPenaltyLogitsProcessor(1.5, torch.ones(3, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="3 prompts"):
        ProcessorPipeline([stock.EncoderNoRepeatNGramLogitsProcessor(2, encoder.encoder_input_ids)], "cpu", 4)
    if IGNORES_PADS:
        with pytest.raises(ValueError, match="2 entries for a batch of 3"):
            ProcessorPipeline([stock.RepetitionPenaltyLogitsProcessor(1.3, torch.tensor([0, 1]))], "cpu", 3)
