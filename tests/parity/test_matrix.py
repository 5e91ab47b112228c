"""The parity matrix: every feature in every column, equal to plain `generate` or refused word for word."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from features import COLUMNS, FEATURES, Feature, prompts, render
from zoo import GREEDY, Fixed

import hf_psd
from hf_psd.turns import cache_of

DOCUMENT = Path(__file__).parents[2] / "docs" / "parity.md"
NEW_TOKENS = 14
CASES = [pytest.param(feature, column, id=f"{feature.name}-{column}") for feature in FEATURES for column in COLUMNS]


class Recorded:
    """A streamer's own account."""

    def __init__(self):
        self.values, self.ends = [], 0

    def put(self, value):
        self.values.append(value.tolist())

    def end(self):
        self.ends += 1


def ask(feature: Feature) -> dict:
    arguments = prompts() | GREEDY | dict(max_new_tokens=NEW_TOKENS) | feature.arguments()
    if "generation_config" in arguments:
        arguments = prompts() | feature.arguments()
    return {name: value for name, value in arguments.items() if value is not None or name == "eos_token_id"}


def plainly(feature: Feature, **arguments):
    arguments.pop("assistant_tokenizers", None)
    return feature.target().generate(**arguments)


def rows_of(arguments: dict) -> tuple[list[list[int]], dict]:
    """The prompts without their padding, and the rest."""
    rest = dict(arguments)
    ids, mask = rest.pop("input_ids"), rest.pop("attention_mask")
    return [row[keep.bool()].tolist() for row, keep in zip(ids, mask)], rest


def queued(feature: Feature, arguments: dict, requests=None, **psd):
    rows, rest = rows_of(arguments)
    results = hf_psd.generate_batch(
        feature.target(), rows, feature.models(), psd=dict(mode="psd", gamma=4) | feature.psd | psd, max_batch_size=3,
        requests=requests, **rest,
    )  # fmt: skip
    for result in results.values():
        if result.exception is not None:
            raise result.exception
    return rows, [result.generated_tokens for result in results.values()]


def speculated(feature: Feature, column: str, arguments: dict, **psd):
    settings = dict(mode=column.lower(), gamma=4, selector=Fixed(range(len(feature.models())))) | feature.psd | psd
    return hf_psd.generate(feature.target(), **arguments, assistant_models=feature.models(), psd=settings)


def same_text(feature: Feature, column: str) -> None:
    arguments = ask(feature)
    if column == "queue":
        for row, tokens in zip(*queued(feature, arguments)):
            alone = ask(feature) | dict(input_ids=torch.tensor([row]), attention_mask=torch.ones(1, len(row)).long())
            if "max_length" in arguments:  # counts the prompt
                assert tokens == plainly(feature, **alone)[0, len(row) :].tolist()
                continue
            assert tokens == ended(plainly(feature, **alone)[0, len(row) :].tolist(), tokens)
        return
    output = speculated(feature, column, arguments)
    assert output.tolist() == plainly(feature, **ask(feature)).tolist()
    assert not hf_psd.last_stats().errors and (column == "AR" or hf_psd.last_stats().drafted or output.shape[1] == 8)


def ended(expected: list[int], tokens: list[int]) -> list[int]:
    """A queue gives no padding after a row's end."""
    return expected[: len(tokens)] if set(expected[len(tokens) :]) <= {0, 28} else expected


def same_coupled(feature: Feature, column: str) -> None:
    law = dict(verification="coupled", seed=3)
    arguments = ask(feature)
    if column == "queue":
        for number, (row, tokens) in enumerate(zip(*queued(feature, arguments, **law))):
            alone = ask(feature) | dict(input_ids=torch.tensor([row]), attention_mask=torch.ones(1, len(row)).long())
            expected = speculated(feature, "AR", alone, **law, request_ids=[number])
            assert tokens == expected[0, len(row) :].tolist()
        return
    output = speculated(feature, column, arguments, **law)
    assert output.tolist() == speculated(feature, "AR", ask(feature), **law).tolist()
    torch.manual_seed(0)
    assert output.shape == plainly(feature, **ask(feature)).shape
    assert not hf_psd.last_stats().errors


def same_scores(feature: Feature, column: str) -> None:
    ours = queued(feature, ask(feature)) if column == "queue" else speculated(feature, column, ask(feature))
    theirs = plainly(feature, **ask(feature))
    assert ours.sequences.tolist() == theirs.sequences.tolist() and set(ours.keys()) == set(theirs.keys())
    for name in ("scores", "logits"):
        for a, b in zip(getattr(ours, name) or (), getattr(theirs, name) or ()):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def same_stream(feature: Feature, column: str) -> None:
    if column == "queue":
        logs = [Recorded() for _ in prompts()["input_ids"]]
        rows, _ = queued(feature, ask(feature), requests=[dict(streamer=log) for log in logs])
        for row, log in zip(rows, logs):
            plain = Recorded()
            alone = dict(input_ids=torch.tensor([row]), **GREEDY, max_new_tokens=NEW_TOKENS)
            feature.target().generate(**alone, streamer=plain)
            assert flat(log.values) == flat(plain.values) and log.ends == plain.ends == 1
        return
    ours, theirs = Recorded(), Recorded()
    speculated(feature, column, ask(feature) | dict(streamer=ours))
    plainly(feature, **ask(feature), streamer=theirs)
    assert ours.values == theirs.values and ours.ends == theirs.ends == 1


def flat(values) -> list[int]:
    return [id for value in values for id in flat(value)] if isinstance(values, list) else [values]


def same_next_turn(feature: Feature, column: str) -> None:
    first = ask(feature) | dict(return_dict_in_generate=True)
    turn = speculated(feature, "AR" if column == "queue" else column, first)
    ids = torch.cat([turn.sequences, torch.tensor([[44, 45]] * 4)], 1)
    mask = torch.cat([first["attention_mask"], torch.ones(4, ids.shape[1] - 7).long()], 1)
    second = ask(feature) | dict(input_ids=ids, attention_mask=mask)
    expected = plainly(feature, **second).tolist()
    second["past_key_values"] = cache_of(turn)
    output = queued(feature, second) if column == "queue" else speculated(feature, column, second)
    assert output.tolist() == expected


def same_in_training(feature: Feature, column: str) -> None:
    trained = feature.target()
    still = Feature(feature.name, feature.arguments, lambda: trained, feature.models)
    text = queued(still, ask(still))[1] if column == "queue" else speculated(still, column, ask(still)).tolist()
    assert trained.training
    evaluated = Feature(feature.name, feature.arguments, trained.eval, feature.models)
    again = queued(evaluated, ask(still))[1] if column == "queue" else plainly(evaluated, **ask(still)).tolist()
    assert text == again


CHECKS = {
    "text": same_text,
    "coupled": same_coupled,
    "scores": same_scores,
    "streamer": same_stream,
    "next turn": same_next_turn,
    "trained": same_in_training,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("feature, column", CASES)
def test_cell(feature: Feature, column: str):
    for package in feature.needs:
        pytest.importorskip(package)
    expected = feature.expected(column)
    if expected is None:
        CHECKS[feature.check](feature, column)
        return
    seen = []
    module = getattr(feature.target(), "base_model", feature.target())
    handle = module.register_forward_pre_hook(lambda *args: seen.append(1))
    try:
        with pytest.raises(ValueError) as raised:
            refused(feature, column)
    finally:
        handle.remove()
    assert str(raised.value) == expected and (not seen or feature.check == "next turn")


def refused(feature: Feature, column: str) -> None:
    if feature.check == "next turn":
        same_next_turn(feature, column)
    elif column == "queue":
        queued(feature, ask(feature))
    else:
        speculated(feature, column, ask(feature))


def test_the_committed_table_is_what_these_tests_say(request):
    if request.config.getoption("--write-parity"):
        DOCUMENT.write_text(render(), encoding="utf-8")
    assert DOCUMENT.read_text(encoding="utf-8") == render(), "run pytest tests/parity/test_matrix.py --write-parity"


def test_required_rows_are_the_same_in_generate():
    """What must not be refused."""
    rows = {feature.name for feature in FEATURES if all(feature.expected(column) is None for column in COLUMNS[:3])}
    required = {
        "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "suppress_tokens",
        "begin_suppress_tokens", "exponential_decay_length_penalty", "encoder_repetition_penalty", "min_length",
        "min_new_tokens", "max_length", "eos_token_id list", "stop_strings", "stopping_criteria of one's own",
        "logits_processor of one's own", "prefix_allowed_tokens_fn", "num_return_sequences", "output_scores",
        "output_logits", "a returned cache in the next turn", "vocabularies of other sizes",
        "other tokenizers, greedy", "other tokenizers, sampling", "bitsandbytes NF4", "LoRA",
    }  # fmt: skip
    assert required <= rows and len({feature.name for feature in FEATURES}) == len(FEATURES)
