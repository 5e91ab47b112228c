"""Drafters with a tokenizer of their own: greedy text is plain `generate`'s, sampled text has the target's law."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from tokenizers_of_tests import characters, pieces
from zoo import GREEDY, P4, Fixed, assert_plain, prompts, shared, tiny

import hf_psd
from hf_psd.drafters.retokenized import RetokenizedDrafter
from hf_psd.drafters.translation import GrowingText, Translator
from hf_psd.testing import joint_law, judge_samples, sample_joint

MODES = ("sd", "psd")
THREE = [28, 34, 14]


def renamed(model, ours, theirs):
    """The same model, speaking the other tokenizer's ids: tokens that both have keep their weights."""
    other = tiny("llama", 3, vocab_size=len(theirs))
    vocabulary = ("model.embed_tokens.weight", "lm_head.weight")
    with torch.no_grad():
        for name, weight in other.state_dict().items():
            if name not in vocabulary:
                weight.copy_(model.state_dict()[name])
        for token, id in theirs.get_vocab().items():
            if token in ours.get_vocab():
                for name in vocabulary:
                    other.state_dict()[name][id] = model.state_dict()[name][ours.get_vocab()[token]]
    return other.eval()


PAIRS = {
    "shuffled": (lambda: characters(64), lambda: characters(64, seed=1)),
    "fewer": (lambda: characters(64), lambda: characters(40, seed=2)),
    "more": (lambda: characters(64), lambda: characters(65, seed=3)),
    "other specials": (lambda: characters(64), lambda: characters(64, 4, ("[p]", "[b]", "[e]"))),
    "pieces": (lambda: pieces(64, 0), lambda: pieces(48, 1)),
    "pieces for characters": (lambda: characters(64), lambda: pieces(64, 0)),
    "characters for pieces": (lambda: pieces(64, 0), lambda: characters(20)),
}


@pytest.mark.parametrize("name, mode", [*zip(PAIRS, MODES * 4), ("pieces", "psd")])
def test_greedy_text_is_plain(name, mode):
    ours, theirs = (build() for build in PAIRS[name])
    drafter = renamed(shared("llama"), ours, theirs)
    ways = (
        P4() | dict(max_new_tokens=30),
        prompts(5, seed=2) | dict(max_new_tokens=20, eos_token_id=THREE, repetition_penalty=1.2),
        dict(input_ids=torch.tensor([[5, 9]]), max_new_tokens=9, min_new_tokens=4, eos_token_id=2),
    )
    drafted = 0
    for way in ways:
        psd = dict(mode=mode, gamma=5, selector=Fixed())
        given = GREEDY | dict(tokenizer=ours, assistant_tokenizers=[theirs])
        expected = shared("llama").generate(**GREEDY | way)
        output = shared("llama").generate(**given | way, assistant_models=[drafter], psd=psd)
        assert output.tolist() == expected.tolist() and not hf_psd.last_stats().errors
        drafted += hf_psd.last_stats().drafted
    assert drafted > 20


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["shuffled", "more", "other specials"])
def test_a_copy_that_speaks_other_ids_has_its_drafts_accepted(name, mode, do_sample):
    ours, theirs = (build() for build in PAIRS[name])
    arguments = P4() | GREEDY | dict(do_sample=do_sample, max_new_tokens=30, suppress_tokens=[0, 1, 2])
    drafter = renamed(shared("llama"), ours, theirs)
    shared("llama").generate(
        **arguments, tokenizer=ours, assistant_tokenizers=[theirs], assistant_models=[drafter],
        psd=dict(mode=mode, selector=Fixed(), seed=1),
    )  # fmt: skip
    stats = hf_psd.last_stats()
    assert stats.by_drafter[0].name.startswith("shared_vocabulary:LlamaForCausalLM#0")
    assert stats.drafted > 60 and stats.acceptance > (0.85 if name == "more" else 0.95)


@pytest.mark.parametrize("law", ["greedy", "rejection", "coupled"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["shuffled", "other specials"])
def test_the_same_drafter_in_other_ids_makes_the_same_drafts(name, mode, law):
    """Where both vocabularies hold the same tokens, translation changes nothing: texts and counts are equal."""
    ours, theirs = (build() for build in PAIRS[name])
    near = copy.deepcopy(shared("llama", noise=0.03))
    with torch.no_grad():
        near.lm_head.weight[:3] = 0  # special tokens end a re-encoded draft
    arguments = P4() | GREEDY | dict(do_sample=law != "greedy", max_new_tokens=30, suppress_tokens=[0, 1, 2])
    psd = dict(mode=mode, seed=3, verification="rejection" if law == "greedy" else law)
    other = renamed(near, ours, theirs)
    with torch.no_grad():
        other.lm_head.weight[theirs.all_special_ids] = 0
    results = []
    for drafter, given in ((near, {}), (other, dict(tokenizer=ours, assistant_tokenizers=[theirs, None]))):
        psd["selector"] = Fixed((0, 0, 1))  # so that it meets text that it has not drafted
        models = [drafter, shared("llama", noise=0.02)]
        text = shared("llama").generate(**arguments, **given, assistant_models=models, psd=psd)
        stats = hf_psd.last_stats()
        results.append((text.tolist(), stats.drafted_at, stats.accepted_at))
    assert results[0] == results[1] and 0.05 < stats.acceptance < 0.95


LAW = dict(do_sample=True, temperature=4.0, top_k=7, top_p=0.95, pad_token_id=0, eos_token_id=None)


def small():
    return tiny("llama", vocab_size=8, initializer_range=0.35), characters(8)


def few_shared():
    """A drafter of ten tokens, six of which are among the target's eight, under other ids."""
    tokenizer = characters(10, 6, ("[p]", "[b]", "[e]"))
    return tiny("llama", 5, vocab_size=10, initializer_range=0.35), tokenizer


@pytest.mark.parametrize("mode, form", [("sd", "re-encoded"), ("psd", "shared vocabulary")])
def test_sampled_text_has_the_targets_law(mode, form):
    (target, ours), (drafter, theirs), prompt = small(), few_shared(), (3, 4, 5)
    models, given = [drafter], dict(tokenizer=ours, assistant_tokenizers=[theirs])
    if form == "re-encoded":
        models, given = [RetokenizedDrafter(drafter, 0, ours, theirs)], {}
    psd = dict(mode=mode, gamma=2, selector=Fixed(), seed=11)
    samples = sample_joint(target, prompt, 8_000, tokens=3, assistant_models=models, psd=psd, **given, **LAW)
    stats = hf_psd.last_stats()
    assert stats.drafted > 300 and 0.02 < stats.acceptance < 0.98 and not stats.errors
    law = joint_law(target, prompt, tokens=3, **LAW)
    assert len(law.cells) > 150
    for result in judge_samples(target, prompt, samples, law, **LAW).values():
        assert result.p_value > 1e-4, result


@pytest.mark.parametrize("mode", ["ar", *MODES])
def test_coupled_text_depends_on_the_seed_alone(mode):
    ours, theirs = characters(64), characters(65, seed=3)
    ask = P4() | dict(do_sample=True, temperature=0.9, pad_token_id=0, max_new_tokens=16)
    psd = dict(verification="coupled", seed=4)
    expected = shared("llama").generate(**ask, psd=psd | dict(mode="ar"))
    drafter = renamed(shared("llama"), ours, theirs)
    for models in ([drafter], [RetokenizedDrafter(drafter, 0, ours, theirs)], [shared("llama"), drafter]):
        tokenizers = [None, theirs][-len(models) :] if isinstance(models[-1], torch.nn.Module) else [theirs]
        output = shared("llama").generate(
            **ask, psd=psd | dict(mode=mode), assistant_models=models, tokenizer=ours, assistant_tokenizers=tokenizers
        )
        assert output.tolist() == expected.tolist() and not hf_psd.last_stats().errors


def test_several_drafters_share_a_pair_of_tokenizers():
    """Each keeps its own translation and its own weights."""
    ours, theirs, target = characters(64), characters(64, seed=1), shared("llama")
    models = [renamed(target, ours, theirs), renamed(shared("llama", 11), ours, theirs), target]
    before = [copy.deepcopy(model.state_dict()) for model in models]
    given = dict(tokenizer=ours, assistant_tokenizers=[theirs, theirs, None])
    psd = dict(selector=Fixed((0, 1, 2)), mode="psd")
    output = target.generate(**P4(), **GREEDY, max_new_tokens=30, **given, assistant_models=models, psd=psd)
    assert output.tolist() == target.generate(**P4(), **GREEDY, max_new_tokens=30).tolist()
    rates = [by.acceptance for by in hf_psd.last_stats().by_drafter]
    assert rates[0] > 0.9 and rates[1] < 0.5 and rates[2] > 0.9
    for model, weights in zip(models, before):
        assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("mode", MODES)
def test_the_drafters_end_token_becomes_the_targets(mode):
    ours, theirs = characters(64), characters(64, 4, ("[p]", "[b]", "[e]"))
    translator = Translator(ours, theirs)
    assert translator.to_target([5, 6], [7], [theirs.eos_token_id, 9]) == [2]
    assert translator.to_drafter([1, 5]) == [theirs.bos_token_id, *theirs.encode(ours.decode([5]))]
    drafter = renamed(shared("llama"), ours, theirs)
    with torch.no_grad():
        drafter.lm_head.weight[theirs.eos_token_id] = 0
        drafter.lm_head.weight *= 0
    drafter.lm_head.bias = torch.nn.Parameter(torch.nn.functional.one_hot(torch.tensor(theirs.eos_token_id), 64) * 9.0)
    arguments = GREEDY | dict(eos_token_id=2, max_new_tokens=12, tokenizer=ours, assistant_tokenizers=[theirs])
    psd = dict(mode=mode, selector=Fixed())
    output = shared("llama").generate(**P4(), **arguments, assistant_models=[drafter], psd=psd)
    assert (
        output.tolist()
        == shared("llama").generate(**P4(), **GREEDY | dict(eos_token_id=2, max_new_tokens=12)).tolist()
    )
    assert hf_psd.last_stats().drafted >= 4


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_text_that_outgrows_the_drafter(do_sample):
    """Its own tokens count: here three characters for one of the target's."""
    ours, theirs = pieces(64, 0), characters(20)
    small = tiny("gpt2", vocab_size=20, n_positions=24)
    arguments = P4() | GREEDY | dict(do_sample=do_sample, max_new_tokens=30)
    given = dict(tokenizer=ours, assistant_tokenizers=[theirs], assistant_models=[small])
    with pytest.warns(UserWarning, match="knows 24 positions; rows that are longer in its own tokens"):
        output = shared("llama").generate(**arguments, **given, psd=dict(selector=Fixed(), seed=1))
    assert not hf_psd.last_stats().errors and hf_psd.last_stats().drafted
    if not do_sample:
        assert output.tolist() == shared("llama").generate(**arguments).tolist()


def test_the_drafters_cache_grows_with_its_text():
    ours, theirs = pieces(64, 0), characters(20)
    target, drafter = shared("llama"), tiny("llama", 5, vocab_size=20)
    arguments = prompts(2, seed=1, max_len=150) | GREEDY | dict(max_new_tokens=60)
    given = dict(tokenizer=ours, assistant_tokenizers=[theirs], assistant_models=[drafter])
    output = target.generate(**arguments, **given, psd=dict(selector=Fixed()))
    assert output.tolist() == target.generate(**arguments).tolist() and not hf_psd.last_stats().errors
    assert len(theirs(ours.decode(output[0]))["input_ids"]) > 256


def test_translation_of_growing_text():
    ours, theirs = pieces(64, 0), pieces(48, 1)
    draw = random.Random(3)
    text = " ".join("".join(draw.choice("abcdefghij") for _ in range(draw.randint(1, 6))) for _ in range(200))
    ids, growing = ours.encode(text), GrowingText(Translator(ours, theirs))
    assert len(ids) > 400 and ours.decode(ids) == text
    for end in range(1, len(ids) + 1, 3):
        part = growing.translate(ids[:end])
        assert theirs.decode(part) == ours.decode(ids[:end])
    whole, direct = growing.translate(ids), theirs.encode(text)
    assert theirs.decode(whole) == text and whole == direct, "pieces are cut in front of words"
    translator = Translator(ours, theirs)
    continued = translator.to_target(
        ids[:100], translator.to_drafter(ids[:100]), theirs.encode(ours.decode(ids[100:110]))
    )
    assert ours.decode(ids[:100] + continued) == ours.decode(ids[:110])


def test_shared_ids_name_each_token_once():
    ours, theirs = pieces(64, 0), characters(20)
    first, second = Translator(ours, theirs).shared_ids()
    assert len(first) == len(set(first)) == len(set(second)) > 10
    spelled = [ours.convert_ids_to_tokens(i) for i in first]
    assert spelled == [theirs.convert_ids_to_tokens(i) for i in second]
    assert Translator(ours, characters(20, 4, ("[p]", "[b]", "[e]"))).shared_ids()[0].count(2) == 1


REFUSED = {
    "no target tokenizer": (dict(assistant_tokenizers=[characters(64, 1)]), "pass tokenizer="),
    "too many": (
        dict(tokenizer=characters(64), assistant_tokenizers=[None, None]),
        "one tokenizer .* 1 assistant_models",
    ),
    "not a list": (dict(tokenizer=characters(64), assistant_tokenizers=characters(64, 1)), "must be a list with one"),
    "no model": (
        dict(tokenizer=characters(64), assistant_tokenizers=[characters(64, 1)], assistant_models=["prompt_lookup"]),
        r"assistant_tokenizers\[0\] does not map.*prompt_lookup.*pass None",
    ),
    "transformers' name": (dict(assistant_tokenizer=characters(64)), r"assistant_tokenizers=\[\.\.\.\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    given, pattern = REFUSED[name]
    with pytest.raises(ValueError, match=pattern):
        shared("llama").generate(**P4(), **GREEDY | dict(assistant_models=[shared("llama", 11)], psd=True) | given)


def test_the_same_tokenizer_needs_no_translation():
    ours = characters(64)
    given = dict(tokenizer=ours, assistant_tokenizers=[copy.deepcopy(ours), None])
    models = [shared("llama", 11), "prompt_lookup"]
    output = shared("llama").generate(**P4(), **GREEDY, max_new_tokens=9, **given, assistant_models=models, psd=True)
    assert hf_psd.last_stats().by_drafter[0].name.startswith("model:")
    plain = shared("llama").generate(**P4(), **GREEDY, max_new_tokens=9, **given, assistant_models=models, psd=False)
    assert output.tolist() == plain.tolist()
    assert_plain(shared("llama"), models, **P4(), **GREEDY, max_new_tokens=9)


def test_a_tokenizer_that_fails_retires_its_drafter():
    ours, theirs = characters(64), copy.deepcopy(characters(64, 1))
    theirs.decode = None
    given = dict(tokenizer=ours, assistant_tokenizers=[theirs], assistant_models=[shared("llama", 11)])
    with pytest.warns(UserWarning, match="retired"):
        output = shared("llama").generate(**P4(), **GREEDY, max_new_tokens=9, **given, psd=dict(selector=Fixed()))
    assert output.tolist() == shared("llama").generate(**P4(), **GREEDY, max_new_tokens=9).tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["shuffled", "pieces for characters"])
def test_in_a_queue(name, mode):
    """Seats change hands: what a drafter has read of one request is not taken for another's."""
    ours, theirs = (build() for build in PAIRS[name])
    draw = random.Random(0)
    rows = [[draw.randrange(3, 64) for _ in range(length)] for length in (90, 100, 3, 80, 95)]
    results = hf_psd.generate_batch(
        shared("llama"), rows, [renamed(shared("llama"), ours, theirs)], psd=dict(mode=mode, selector=Fixed()),
        max_batch_size=2, max_new_tokens=12, tokenizer=ours, assistant_tokenizers=[theirs], **GREEDY,
    )  # fmt: skip
    for row, result in zip(rows, results.values()):
        plain = shared("llama").generate(torch.tensor([row]), max_new_tokens=12, **GREEDY)[0, len(row) :]
        assert result.generated_tokens == plain.tolist()
    stats = hf_psd.last_stats()
    assert not stats.errors and stats.drafted > 10 and (name != "shuffled" or stats.acceptance > 0.9)
