"""`hf-psd bench` end to end on the CPU, with the tiny profile."""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import threading
import types
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_psd.bench import command, costs, session
from hf_psd.bench.capped import CapExperiment
from hf_psd.bench.clocks import TokenClock
from hf_psd.bench.decoders import Counts, make_decoder
from hf_psd.bench.flashspec import installed
from hf_psd.bench.lab import Lab
from hf_psd.bench.measure import Measurement, fill_costs
from hf_psd.bench.points import Point
from hf_psd.bench.profiles import PROFILES
from hf_psd.bench.queued import QueuedDecoder
from hf_psd.bench.refusals import refuse
from hf_psd.bench.replicas import ReplicaPool, merge, serve
from hf_psd.bench.rows import Results, row_for
from hf_psd.bench.session import Session
from hf_psd.cli import main
from hf_psd.testing import pairs
from hf_psd.timeline import Timeline

PICTURES = importlib.util.find_spec("matplotlib") is not None
SMALL = replace(PROFILES["tiny"], layers=1, prompt=6, new_tokens=8, warm_ups=0)


@pytest.fixture(scope="module")
def lab():
    found = Lab(SMALL, 4)
    yield found
    found.close()


def bench(path, *options: str) -> dict:
    main(
        [
            *"bench --profile tiny --layers 1 --prompt 6 --new-tokens 8 --warm-ups 0 --no-bar".split(),
            "--json",
            str(path),
            *options,
        ]
    )
    return json.loads(path.read_text())


class TestOneDevice:
    def test_a_run_writes_rows_report_and_pictures_and_goes_on(self, tmp_path, monkeypatch, capsys):
        path = tmp_path / "r.json"
        options = ["--batches", "2", "--sampling", "greedy", "--methods", "hf-eager", "ar", "sd", "psd"]
        found = bench(path, *options, "--only", "*/hf-eager/*", "*/sd/*")
        assert [row["method"] for row in found["rows"]] == ["hf-eager", "sd"]
        for row in found["rows"]:
            assert row["error"] is None and row["tokens_per_second"] > 0 and len(row["digests"]) == 2
            assert row["digests"] == found["rows"][0]["digests"]
            assert row["ttft_ms"]["p50"] <= row["e2e_ms"]["p50"] and row["step_ms"]["p99"] > 0
            assert row["floor_share"] > 0 and row["makespan_per_request_ms"] == 500 * row["seconds"][0]
        assert found["rows"][1]["acceptance"] > 0 and found["rows"][0]["tokens_per_forward"] == 1.0
        assert found["environment"]["versions"]["torch"] and found["facts"]["agreement"] > 0.3
        assert "Where we lose" in path.with_suffix(".md").read_text()
        assert path.with_suffix(".png").exists() == PICTURES
        again = bench(path, *options, "--resume", "--no-plots")
        assert [row["method"] for row in again["rows"]] == ["hf-eager", "ar", "sd", "psd"]
        assert again["rows"][2] == found["rows"][1]  # not measured anew

    def test_every_method_of_transformers_runs_at_batch_one(self, tmp_path):
        methods = ["hf-eager", "hf-static", "hf-assisted", "hf-assisted-default", "hf-lookup"]
        found = bench(tmp_path / "r.json", "--batches", "1", "--methods", *methods, "--no-plots")
        assert [(row["method"], row["sampled"], row["error"]) for row in found["rows"]] == [
            (method, sampled, None)
            for sampled in (False, True)
            for method in ("hf-eager", "hf-static", "hf-assisted", "hf-lookup", "hf-assisted-default")
        ]
        greedy = {row["method"]: row for row in found["rows"] if not row["sampled"]}
        assert len({row["digests"][0] for row in greedy.values()}) == 1
        assert greedy["hf-assisted"]["draft_forwards"] <= 4 * greedy["hf-assisted"]["target_forwards"]
        assert greedy["hf-assisted-default"]["draft_forwards"] != greedy["hf-assisted"]["draft_forwards"]

    def test_no_time_measures_nothing(self, tmp_path, capsys):
        found = bench(tmp_path / "r.json", "--time-limit", "0.000001", "--no-plots")
        assert found["rows"] == [] and "left for want of time" in capsys.readouterr().out

    def test_list_measures_nothing(self, tmp_path, capsys):
        main(["bench", "--profile", "tiny", "--list", "--only", "*/psd/b2/*", "--json", str(tmp_path / "r.json")])
        assert capsys.readouterr().out.split() == ["24", "one/psd/b2/greedy/g4", "29", "one/psd/b2/sampled/g4"]
        assert not (tmp_path / "r.json").exists()

    def test_a_choice_of_nothing_is_refused(self):
        with pytest.raises(SystemExit, match="No point is chosen"):
            main(["bench", "--profile", "tiny", "--only", "three/*"])

    def test_a_failing_method_is_noted_and_the_others_go_on(self, tmp_path, monkeypatch):
        def make(method, *rest):
            if method == "hf-eager":
                raise RuntimeError("CUDA out of memory")
            return make_decoder(method, *rest)

        monkeypatch.setattr(session, "make_decoder", make)
        found = bench(tmp_path / "r.json", "--methods", "hf-eager", "ar", "--batches", "1", "--sampling", "greedy")
        assert [row["error"] for row in found["rows"]] == ["out of memory: CUDA out of memory", None]

    def test_an_interrupt_keeps_what_was_measured(self, tmp_path, monkeypatch):
        def make(method, *rest):
            if method == "ar":
                raise KeyboardInterrupt
            return make_decoder(method, *rest)

        monkeypatch.setattr(session, "make_decoder", make)
        found = bench(tmp_path / "r.json", "--methods", "hf-eager", "ar", "--batches", "1", "--no-plots")
        assert [row["method"] for row in found["rows"]] == ["hf-eager"]

    def test_a_retired_drafter_is_no_result(self, tmp_path, lab):
        decoder = make_decoder("sd", SMALL, lab.target, lab.drafter(), lab.prompts(2), False)
        decoder()
        weight = lab.drafter().lm_head.weight
        before = weight.detach().clone()
        try:
            with torch.no_grad():
                weight.fill_(float("nan"))
            with pytest.warns(UserWarning, match="retired"):
                decoder()
        finally:
            with torch.no_grad():
                weight.copy_(before)
        assert "retired" in decoder.counts().errors[0]

    def test_flashspec_missing_is_told(self, tmp_path):
        if installed() is not None:
            pytest.skip("FlashSpec is installed")
        found = bench(tmp_path / "r.json", "--methods", "flashspec", "--sampling", "greedy", "--no-plots")
        assert found["rows"][0]["error"] == "flashspec is not installed"

    @pytest.mark.skipif(installed() is None, reason="needs FlashSpec")
    @pytest.mark.parametrize("method", ["flashspec", "flashspec-gamma"])
    def test_flashspec_gives_the_same_greedy_text(self, lab, method):
        texts = [
            make_decoder(name, SMALL, lab.target, lab.drafter(), lab.prompts(1), False)().tolist()
            for name in (method, "hf-eager")
        ]
        assert texts[0] == texts[1]

    def test_prompts_from_a_file_need_a_tokenizer(self, tmp_path, lab):
        with pytest.raises(ValueError, match="--tokenizer"):
            Lab(replace(SMALL, prompts="x.txt"), 1).prompts(1)
        with pytest.raises(SystemExit, match="--tokenizer"):
            bench(tmp_path / "r.json", "--prompts", "x.txt")

    def test_assisted_decoding_leaves_the_drafter_as_it_was(self, lab):
        before = dict(vars(lab.drafter().generation_config))
        make_decoder("hf-assisted", SMALL, lab.target, lab.drafter(), lab.prompts(1), False)()
        assert vars(lab.drafter().generation_config) == before

    def test_the_timeline_is_kept(self, tmp_path):
        found = bench(tmp_path / "r.json", "--methods", "psd", "--batches", "2", "--sampling", "greedy")
        row = found["rows"][0]
        assert {span[1] for span in row["spans"]} == {"prefill", "draft", "verify"}
        assert row["draft_ms"] > 0 and row["verify_ms"] > 0 and row["overlap"] == 0.0  # one thread: nothing overlaps
        assert (tmp_path / "r-timeline.png").exists() == PICTURES


class TestTwoDevices:
    def test_both_sides_on_the_cpu(self, tmp_path):
        found = bench(
            tmp_path / "r.json", "--devices", "2", "--batches", "2", "--gamma-batch", "2", "--gammas", "1", "4",
            "--capped-batches", "2", "--only", "two/*/g1", "two/*/g4", "capped-*/sd/*", "--no-plots",
        )  # fmt: skip
        assert all(row["error"] is None for row in found["rows"])
        assert [row["name"].split("/greedy")[0] for row in found["rows"]] == [
            "two/ar/b2", "two/sd/b2", "two/sd/b2", "two/psd/b2", "two/psd/b2", "two/auto/b2", "two/auto/b2",
            "capped-two/sd/b2", "capped-one/sd/b2",
        ]  # fmt: skip
        assert {row["devices_used"] for row in found["rows"] if row["method"] == "sd"} == {1, 2}
        assert len({tuple(row["digests"]) for row in found["rows"]}) == 1
        assert "Two devices: ratios" in (tmp_path / "r.md").read_text()

    def test_the_queue_gives_the_texts_of_the_batch_without_its_tail(self, tmp_path):
        found = bench(
            tmp_path / "r.json", "--devices", "2", "--batches", "2", "--gamma-batch", "2", "--gammas", "2",
            "--queue-factor", "3", "--only", "queue/*", "two/ar/*", "--no-plots",
        )  # fmt: skip
        names = [row["name"].split("/greedy/") for row in found["rows"]]
        assert names == [["two/ar/b2", "g4"], ["queue/ar/b2", "g4"], *[
            [f"queue/{mode}/b2", gamma] for mode in ("sd", "psd") for gamma in ("g2", "g4")
        ]]  # fmt: skip
        plain, *queued = found["rows"]
        assert all(row["error"] is None and len(row["digests"]) == 6 for row in queued)
        assert {tuple(row["digests"]) for row in queued} == {tuple(queued[0]["digests"])}
        assert queued[0]["digests"][:2] == plain["digests"] and len(set(queued[0]["digests"])) > 2
        for row in queued:
            assert row["makespan_per_request_ms"] == pytest.approx(1e3 * row["seconds"][0] / 6)
            assert row["decode_tokens_per_second"] > 0 and row["e2e_ms"]["p50"] > row["ttft_ms"]["p50"] > 0
            assert row["verify_ms"] > 0 and (row["draft_ms"] is None) == (row["method"] == "ar")
            assert 1.0 <= row["tokens_per_forward"] <= 5.0 and row["target_forwards"] < 6 * 8 + 12
        assert "Queue: ratios" in (tmp_path / "r.md").read_text()

    def test_a_queue_stays_open_between_calls_and_counts_each_alone(self, lab):
        decoder = QueuedDecoder("psd", SMALL, lab.target, lab.drafter(), lab.prompts(4), True, seats=2)
        engines, counts, texts = set(), [], []
        for _ in range(2):
            clock = TokenClock(4)
            clock.start()
            timeline = Timeline()
            texts.append(decoder(clock, (timeline,)).tolist())
            engines.add(decoder.queue._worker.engine)
            counts.append(decoder.counts())
            assert sum(clock.count.values()) == 4 * 8 == sum(tokens for _, tokens in clock.arrivals)
            assert {span.kind for span in timeline.spans} == {"prefill", "draft", "verify"}
        assert len(engines) == 1 and texts[0] == texts[1]  # each request has the noise it had before
        assert [decoder.queue.stats.target_forwards] == [counts[0].forwards + counts[1].forwards]
        assert counts[0].forwards == counts[1].forwards and counts[0].tokens_per_forward > 1
        decoder.close()
        assert decoder.queue._worker.engine is None

    def test_a_request_that_fails_fails_the_call(self, lab):
        decoder = QueuedDecoder("ar", SMALL, lab.target, lab.drafter(), lab.prompts(2), False, seats=1)
        decoder.texts[1] = [1] * 500  # longer than the blocks were made for
        with pytest.raises((RuntimeError, ValueError), match="KV blocks"):
            decoder()
        decoder.close()

    def test_a_replica_answers_until_told_to_stop(self):
        ours, theirs = multiprocessing.Pipe()
        prompts = Lab(SMALL, 4).prompts(4)
        content = (prompts.ids.tolist(), prompts.mask.tolist())
        barrier = threading.Barrier(1)
        worker = threading.Thread(target=serve, args=(theirs, barrier, SMALL, content), daemon=True)
        worker.start()
        parts = []
        for task in (("ar", 0, 2, False, 4), ("no such", 0, 2, False, 4), ("sd", 2, 4, False, 4)):
            ours.send(task)
            parts.append(ours.recv())
            assert barrier.broken == isinstance(parts[-1], str)
            barrier.reset()
        ours.send(None)
        worker.join(60)
        assert not worker.is_alive() and isinstance(parts[1], str)
        row = merge(row_for(Point("replicas", "sd", 4), SMALL), [parts[0], parts[2]])
        assert len(row.digests) == 4 and row.tokens_per_second > 0 and row.acceptance > 0
        first, second = parts[0].walls[0], parts[2].walls[0]
        assert row.seconds == [max(first[1], second[1]) - min(first[0], second[0])]

    @pytest.mark.slow
    def test_two_processes_give_the_texts_of_one(self):
        prompts = Lab(SMALL, 4).prompts(4)
        pool = ReplicaPool(SMALL, prompts)
        try:
            rows = [pool.measure(row_for(Point("replicas", mode, 4), SMALL), SMALL) for mode in ("ar", "sd")]
            with pytest.raises(RuntimeError, match="a replica failed"):
                pool.measure(row_for(Point("replicas", "no such", 4), SMALL), SMALL)
        finally:
            pool.close()
        assert rows[0].digests == rows[1].digests and len(rows[0].digests) == 4

    def test_the_cap_is_put_and_lifted_around_its_points_alone(self, lab, monkeypatch):
        calls = []
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: calls.append(given))
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(total_memory=2**34)
        )
        cap = CapExperiment(replace(SMALL, devices=("cuda:0", "cuda:1"), memory_cap=4.0), lab)
        monkeypatch.setattr("hf_psd.bench.capped.move", lambda model, device: calls.append((str(device),)))
        with cap.around(Point("two", "sd", 2)):
            assert calls == []
        with pytest.raises(RuntimeError), cap.around(Point("capped-one", "sd", 2)):
            assert calls == [(0.25, "cuda:0"), (0.25, "cuda:1"), ("cuda:0",)]
            raise RuntimeError
        assert calls[3:] == [(1.0, "cuda:0"), (1.0, "cuda:1"), ("cpu",)]


class TestCosts:
    def test_kv_bytes_are_those_of_a_cache(self, lab):
        cache = DynamicCache()
        with torch.no_grad():
            lab.target(input_ids=torch.ones(2, 5, dtype=torch.long), past_key_values=cache)
        stored = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        assert costs.kv_bytes_per_token(lab.target) * 2 * 5 == stored

    def test_shared_weights_count_once(self):
        sizes = {}
        for tied in (False, True):
            config = LlamaConfig(
                vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=2, tie_word_embeddings=tied,
            )  # fmt: skip
            model = LlamaForCausalLM(config)
            sizes[tied] = (costs.weight_bytes(model), costs.read_bytes(model))
        table = 64 * 32 * 4
        assert sizes[False][0] - sizes[True][0] == table
        assert sizes[False][1] == sizes[True][1] == sizes[True][0]

    def test_a_round_reads_target_drafter_and_kv(self, lab):
        plain = costs.round_bytes(lab.target, None, 0, 2, 10)
        assert plain == costs.read_bytes(lab.target) + 20 * costs.kv_bytes_per_token(lab.target)
        more = costs.round_bytes(lab.target, lab.drafter(), 3, 2, 10) - plain
        assert more == 3 * (costs.read_bytes(lab.drafter()) + 20 * costs.kv_bytes_per_token(lab.drafter()))

    def test_bandwidth_is_a_rate(self):
        assert 1e8 < costs.copy_bandwidth("cpu", gib=0.01) < 1e13

    def test_memory_is_what_exceeds_weights_leftovers_and_kv(self, lab):
        gib, found = 2.0**30, Measurement()
        found.ids, found.counts = torch.zeros(2, 8, dtype=torch.long), Counts(8, 1.0)
        weights = sum(costs.weight_bytes(model) for model in lab.models)
        found.before, found.peaks = {"cuda:0": weights + 5000}, {"cuda:0": weights + 5000 + int(gib)}
        row = row_for(Point("one", "ar", 2), SMALL)
        fill_costs(row, found, lab.target, lab.drafter(), lab.models, 6.0, None)
        assert row.kv_gib == 2 * (6 + 8) * costs.kv_bytes_per_token(lab.target) / gib
        assert row.over_gib == pytest.approx(1 - row.kv_gib, abs=1e-6)
        found.counts = Counts(8, 1.0, draft_forwards=3)
        fill_costs(row, found, lab.target, lab.drafter(), lab.models, 6.0, None)
        assert row.over_gib < 1 - 28 * costs.kv_bytes_per_token(lab.target) / gib

    def test_no_cuda_no_memory_figures(self):
        assert costs.peaks(("cpu", "cpu")) == costs.allocated(("cpu",)) == {}


def test_drafters_take_the_targets_vocabulary(monkeypatch):
    monkeypatch.setitem(pairs.SHAPES, "tiny-drafter", pairs.SHAPES["tiny-drafter"] | {"vocab": 7990})
    target, (drafter,) = pairs.synthetic_pair("tiny", ("tiny-drafter",), layers=1, dtype=torch.float32)
    assert drafter.config.vocab_size == target.config.vocab_size == 8000


def test_a_second_drafter_changes_nothing(monkeypatch):
    monkeypatch.setitem(pairs.SHAPES, "wider", pairs.SHAPES["tiny-drafter"] | {"hidden": 192})
    alone = pairs.synthetic_pair("tiny", ("tiny-drafter",), layers=1, dtype=torch.float32)
    among = pairs.synthetic_pair("tiny", ("tiny-drafter", "wider"), layers=1, dtype=torch.float32)
    for one, other in ((alone[0], among[0]), (alone[1][0], among[1][0])):
        assert all(torch.equal(weight, other.state_dict()[name]) for name, weight in one.state_dict().items())


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(SystemExit, match="cuda:9 is asked for"):
        main(["bench", "--device", "cuda:9", "--profile", "tiny"])


@pytest.mark.parametrize(
    "options, named",
    [
        ("--batches 2 0", "--batches"),
        ("--devices 2 --batches -1", "--batches"),
        ("--gamma 0", "--gamma"),
        ("--new-tokens 0", "--new-tokens"),
        ("--repeat 0", "--repeat"),
        ("--warm-ups -1", "--warm-ups"),
        ("--temperature 0", "--temperature"),
        ("--agreement 1.5", "--agreement"),
        ("--dtype int7", "--dtype"),
        ("--target nowhere", "nowhere"),
        ("--drafters tiny-drafter elsewhere", "elsewhere"),
        ("--prompts nowhere.txt --tokenizer here", "nowhere.txt"),
        ("--device mars", "mars"),
        ("--psd mode=sd", "--psd mode"),
        ("--psd seed=1 gamma=3", "--psd gamma"),
        ("--psd gama=3", "gama"),
        ("--psd nonsense", "nonsense"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_built(options, named, tmp_path):
    file = tmp_path / "r.json"
    with pytest.raises(SystemExit, match=f"hf-psd bench: .*{named}"):
        main(["bench", "--profile", "tiny", "--list", "--json", str(file), *options.split()])
    assert not file.exists()


def test_every_profile_can_be_measured():
    for settings in PROFILES.values():
        refuse(settings)


@pytest.mark.parametrize(
    "options, devices",
    [
        ("--profile llama-8b", ("cuda:0", "cuda:0")),
        ("--profile llama-8b --devices 2", ("cuda:0", "cuda:1")),
        ("--profile llama-8b --devices 2 --device cuda:0 cuda:0", ("cuda:0", "cuda:0")),
        ("--profile llama-8b --device cuda:1", ("cuda:1", "cuda:1")),
        ("--profile tiny --devices 2 --psd fused_ops=False selector=ucb1", ("cpu", "cpu")),
    ],
)
def test_options_become_settings(options, devices):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    settings = command.resolve(parser.parse_args(options.split()))
    assert settings.devices == devices and settings.two == ("--devices 2" in options)
    assert settings.profile in options
    assert dict(settings.psd) == ({"fused_ops": False, "selector": "ucb1"} if "--psd" in options else {})


def test_results_are_saved_after_every_point(tmp_path, monkeypatch):
    results, seen = Results(tmp_path / "r.json", SMALL), []
    points = [Point("one", method, 1) for method in ("hf-eager", "hf-lookup")]
    running = Session(
        results, points, say=lambda text: seen.append(len(json.loads(results.path.read_text())["rows"])), bar=False
    )
    running.run()
    assert seen == [1, 2]
