"""The parts of `hf-psd bench` that need no model: prompts, points, clocks, spans, comparisons, results files."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch

from hf_psd.bench.comparisons import capped_lines, identical, losses, predicted_gain, queue_lines, ratios
from hf_psd.bench.plots import plot_bars, plot_timeline
from hf_psd.bench.points import BATCH_ONE, Point, all_points, choose
from hf_psd.bench.profiles import METHODS, PROFILES, RIVALS, override, quick
from hf_psd.bench.prompts import encode_prompts, random_prompts, read_prompts
from hf_psd.bench.report import markdown
from hf_psd.bench.rows import Results, Row, digest_rows, row_for
from hf_psd.bench.session import out_of_memory
from hf_psd.testing.pairs import SHAPES

TINY = PROFILES["tiny"]

LAYOUTS = {
    "sharegpt.json": json.dumps(
        [
            {"id": "a", "conversations": [{"from": "system", "value": "no"}, {"from": "human", "value": "one"}]},
            {"id": "b", "conversations": [{"from": "human", "value": "two"}, {"from": "gpt", "value": "no"}]},
            {"id": "c", "conversations": []},
        ]
    ),
    "question.jsonl": '{"question_id": 1, "turns": ["one", "no"]}\n\n{"question_id": 2, "turns": ["two"]}\n',
    "arena.jsonl": "\n".join(
        json.dumps({"model_a": "x", key: [{"role": "user", "content": text}, {"role": "assistant", "content": "no"}]})
        for key, text in (("conversation_a", "one"), ("conversation", "two"))
    ),
    "plain.jsonl": '{"prompt": "one"}\n{"prompt": "two", "other": 3}\n',
    "strings.json": '["one", "two"]',
    "lines.txt": "one\n\n  two  \n",
}


class TestPrompts:
    @pytest.mark.parametrize("name", LAYOUTS)
    def test_every_layout_gives_first_user_turns(self, tmp_path, name):
        path = tmp_path / name
        path.write_text(LAYOUTS[name])
        assert read_prompts(path) == ["one", "two"]

    @pytest.mark.parametrize(
        "content, said",
        [('{"text": "x"}', "record 1: no known layout, it has text"), ("", "no prompt"), ("{", "line 1 is not JSON")],
    )
    def test_other_content_is_refused_with_its_place(self, tmp_path, content, said):
        path = tmp_path / "odd.jsonl"
        path.write_text(content)
        with pytest.raises(ValueError, match=said):
            read_prompts(path)

    def test_encoding_pads_left_keeps_last_tokens_and_repeats(self):
        found = encode_prompts(["abc", "a"], letters, count=3, length=2, vocab=128)
        assert found.ids.tolist() == [[98, 99], [0, 97], [98, 99]]
        assert found.mask.tolist() == [[1, 1], [0, 1], [1, 1]]
        assert found.rows(1, 2).ids.tolist() == [[97]] and found.rows(0, 2).ids.shape == (2, 2)

    def test_a_foreign_tokenizer_is_refused(self):
        with pytest.raises(ValueError, match="id 99, the target's vocabulary ends at 97"):
            encode_prompts(["abc"], letters, 1, 8, vocab=98)

    def test_random_rows_do_not_depend_on_the_batch(self):
        assert torch.equal(random_prompts(2, 5, 50).ids, random_prompts(7, 5, 50).rows(0, 2).ids)


def letters(text: str) -> dict[str, list[int]]:
    return {"input_ids": [ord(letter) for letter in text]}


class TestPoints:
    @pytest.mark.parametrize("profile", PROFILES)
    @pytest.mark.parametrize("two", [False, True])
    def test_names_are_unique_and_shapes_known(self, profile, two):
        settings = replace(PROFILES[profile], two=two)
        points = all_points(settings)
        assert len({point.name for point in points}) == len(points) > 4
        assert {settings.target, *settings.drafters} <= SHAPES.keys()
        assert {point.method for point in points} <= set(METHODS)

    def test_methods_that_know_one_row_stay_at_batch_one(self):
        assert all(point.batch == 1 for point in all_points(PROFILES["llama-8b"]) if point.method in BATCH_ONE)
        assert {point.batch for point in all_points(PROFILES["llama-8b"])} == {1, 8, 32, 64, 128}

    def test_two_devices_cover_sweeps_replicas_and_cap(self):
        points = all_points(replace(PROFILES["llama-8b"], two=True))
        assert {point.layout for point in points} == {"two", "replicas", "capped-two", "capped-one", "queue"}
        assert {point.gamma for point in points if point.batch == 64} == {1, 2, 4, 8}
        assert {point.batch for point in points if point.layout == "two"} == {8, 16, 32, 64, 128, 256}
        layouts = list(dict.fromkeys(point.layout for point in points))
        assert layouts[-2:] == ["replicas", "queue"]  # numbers of points stay what they were without the queue

    def test_the_queue_has_the_points_of_two_devices_without_auto_and_several_requests_per_seat(self):
        settings = replace(PROFILES["llama-8b"], two=True, queue_factor=3)
        points = all_points(settings)
        two, queue = ([point for point in points if point.layout == layout] for layout in ("two", "queue"))
        assert [replace(point, layout="two") for point in queue] == [point for point in two if point.method != "auto"]
        assert [point.requests(settings) for point in (two[0], queue[0])] == [8, 24]
        assert queue[0].name == "queue/ar/b8/greedy/g4" and queue[0].devices_used == 1 < queue[1].devices_used

    def test_choosing_by_pattern_and_number(self):
        points = [Point("one", method, batch) for batch in (1, 8) for method in ("ar", "sd")]
        assert choose(points, ["*/sd/*"], ["2-4"]) == [points[1], points[3]]
        assert choose(points) == points
        with pytest.raises(ValueError, match="No point"):
            choose(points, ["two/*"])
        with pytest.raises(ValueError, match="3-9"):
            choose(points, numbers=["x"])

    def test_plain_decoding_uses_one_card(self):
        used = {method: Point("two", method, 8).devices_used for method in ("ar", "sd", "auto")}
        assert used == {"ar": 1, "sd": 2, "auto": 2}

    def test_quick_leaves_out_what_takes_minutes(self):
        short = quick(PROFILES["llama-8b"])
        assert not set(short.methods) & set(RIVALS) and max(short.batches) == 32 and short.sampling == (False,)

    def test_overrides_ignore_what_was_not_given(self):
        assert override(TINY, gamma=None, batches=[3], unknown=1) == replace(TINY, batches=(3,))


def row(layout="one", method="sd", batch=8, speed=100.0, sampled=False, gamma=4, **values) -> Row:
    found = row_for(Point(layout, method, batch, sampled, gamma), TINY)
    found.tokens_per_second = speed
    found.makespan_per_request_ms = 1e5 / speed if speed else None
    for name, value in values.items():
        setattr(found, name, value)
    return found


class TestComparisons:
    def test_equal_texts_are_counted_against_eager(self):
        rows = [row(method="ar", digests=["a", "x"]), row(method="hf-eager", digests=["a", "b"])]
        assert identical(rows) == {rows[0].name: 0.5, rows[1].name: 1.0}

    def test_losses_name_the_best_rival_and_nothing_we_win(self):
        rows = [
            row(method="hf-eager", speed=40.0),
            row(method="ar", speed=120.0),
            row(method="sd", speed=100.0),
            row(method="flashspec", speed=150.0, first_call_seconds=150.0),
            row(method="psd", speed=None, error="failed"),
            row(method="ar", speed=5.0, batch=1),
        ]
        found = losses(rows)
        assert [(loss.method, loss.rival, loss.what) for loss in found] == [
            ("sd", "flashspec", "tokens/s"),
            ("ar", "flashspec", "tokens/s"),
        ]
        assert found[0].factor == pytest.approx(1.5)

    def test_losses_see_latency_and_memory(self):
        slow = row(method="sd", ttft_ms={"p50": 30.0}, first_call_seconds=5.0, over_gib=1.0)
        fast = row(method="hf-eager", speed=10.0, ttft_ms={"p50": 20.0}, first_call_seconds=1.0, over_gib=0.25)
        assert {loss.what: loss.factor for loss in losses([slow, fast])} == {
            "TTFT p50, ms": 1.5,
            "first call, s": 5.0,
            "memory over weights and KV, GiB": 4.0,
        }

    def test_replicas_stand_against_two_devices(self):
        found = losses([row("two", "psd", speed=100.0), row("replicas", "ar", speed=110.0)])
        assert [(loss.method, loss.rival) for loss in found] == [("psd", "ar (replicas)")]

    def test_ratios_at_equal_and_at_twice_the_requests(self):
        rows = [
            row("two", "ar", 8, 90.0),
            row("two", "sd", 8, 100.0, tpot_ms={"p50": 4.0}, e2e_ms={"p99": 9.0}),
            row("two", "psd", 8, 125.0, tpot_ms={"p50": 5.0}, e2e_ms={"p99": 9.0}),
            row("two", "auto", 8, 121.0, mode="psd"),
            row("two", "psd", 16, 180.0),
            row("replicas", "sd", 8, 200.0),
            row("two", "sd", 8, 50.0, gamma=2),
        ]
        by_point = {(each.batch, each.gamma): each for each in ratios(rows)}
        equal = by_point[8, 4]
        assert equal.psd_over_sd == 1.25 and equal.psd_twice_over_sd == 1.8 and equal.psd_over_sd_replicas == 0.625
        assert equal.makespan_over_sd == pytest.approx(1 / 1.8) and equal.tpot_p50_over_sd == 1.25
        assert equal.auto_over_best == pytest.approx(121 / 125) and equal.auto_mode == "psd"
        assert equal.psd_over_ar_replicas is None
        assert by_point[8, 2].psd_over_sd is None and by_point[8, 2].auto_over_best is None

    def test_the_rule_predicts_from_timed_drafts_and_verifications(self):
        rows = [
            row("two", "sd", 8, draft_full_ms=6.0, verify_full_ms=9.0),
            row("two", "psd", 8, draft_full_ms=5.0, verify_full_ms=6.0),
            row("two", "sd", 16, draft_full_ms=8.0, verify_full_ms=16.0),
            row("two", "sd", 16, draft_full_ms=1.0, verify_full_ms=1.0, gamma=2),
        ]
        assert predicted_gain(rows, 8, 4) == 15 / 12 and predicted_gain(rows, 16, 4) == 24 / 18
        assert predicted_gain(rows, 16, 2) is None and predicted_gain(rows, 32, 4) is None

    def test_the_queue_at_equal_and_at_twice_the_seats(self):
        rows = [
            row("queue", "ar", 8, 50.0),
            row("queue", "sd", 8, 100.0, decode_tokens_per_second=200.0),
            row("queue", "psd", 8, 130.0, decode_tokens_per_second=320.0, overlap_steady=0.9, target_idle_steady=0.1),
            row("queue", "psd", 16, 180.0),
            row("queue", "sd", 8, 40.0, gamma=2),
            row("two", "sd", 8, 1.0),
        ]
        lines = {(line["seats"], line["gamma"]): line for line in queue_lines(rows)}
        assert list(lines) == [(8, 2), (8, 4), (16, 4)]
        assert list(lines[8, 4].values()) == [8, 4, 1.3, 1.6, 1.8, None, 2.6, 0.9, 0.1]
        assert lines[8, 2]["psd over sd"] is lines[16, 4]["psd over sd"] is None

    def test_texts_of_a_queue_are_compared_with_those_of_a_queue(self):
        rows = [
            row("two", "ar", digests=["x"]),
            row("queue", "ar", digests=["a", "b"]),
            row("queue", digests=["a", "c"]),
        ]
        assert identical(rows) == {rows[0].name: 1.0, rows[1].name: 1.0, rows[2].name: 0.5}

    def test_a_capped_card_that_runs_out_is_told(self):
        rows = [
            row("capped-one", "sd", 8, None, error="out of memory: 3 GiB"),
            row("capped-two", "ar", 8, 50.0),
            row("capped-two", "psd", 8, 75.0),
        ]
        (found,) = capped_lines(rows)
        assert found["sd, one card"] == "out of memory" and found["psd over the best of one card"] == 1.5

    def test_out_of_memory_is_found_behind_another_error(self):
        try:
            try:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
            except torch.OutOfMemoryError:
                raise RuntimeError("capture was invalidated")  # noqa: B904
        except RuntimeError as error:
            assert out_of_memory(error).startswith("out of memory: CUDA")
        assert out_of_memory(RuntimeError("psd: no memory for 3.00 GiB of KV cache. (out of memory)"))
        assert out_of_memory(RuntimeError("something else")) is None


class TestResults:
    def test_a_file_from_before_a_setting_existed_goes_on(self, tmp_path):
        Results(tmp_path / "r.json", TINY).save()
        content = json.loads((tmp_path / "r.json").read_text())
        del content["settings"]["queue_factor"]
        (tmp_path / "r.json").write_text(json.dumps(content))
        Results(tmp_path / "r.json", TINY).resume()

    def test_rows_survive_the_file(self, tmp_path):
        results = Results(tmp_path / "deep" / "r.json", TINY)
        results.add(row(step_ms={"p50": 1.0}, digests=["a"]))
        again = Results(results.path, replace(TINY, repeat=9, batches=(5,)))
        again.resume()
        assert [asdict(each) for each in again.rows.values()] == [asdict(each) for each in results.rows.values()]
        assert not list(results.path.parent.glob("*.part"))

    def test_other_settings_are_refused(self, tmp_path):
        Results(tmp_path / "r.json", TINY).save()
        with pytest.raises(ValueError, match="another gamma, prompt"):
            Results(tmp_path / "r.json", replace(TINY, gamma=3, prompt=5)).resume()

    def test_rows_of_two_machines_are_not_mixed(self, tmp_path):
        results = Results(tmp_path / "r.json", TINY)
        results.commit = "abc"
        here = {"devices": ["H200"], "commit": None}
        results.note_environment(here)
        results.note_environment(here)
        assert results.environment == {"devices": ["H200"], "commit": "abc"}
        results.commit = "def"
        results.note_environment({"devices": ["H200"], "commit": "what git says"})
        assert results.environment["resumed"] == [{"devices": ["H200"], "commit": "def"}]
        with pytest.raises(ValueError, match="measured on H200, this is T4"):
            results.note_environment({"devices": ["T4"], "commit": "abc"})

    def test_failures_are_tried_again_but_not_lack_of_memory(self, tmp_path):
        results = Results(tmp_path / "r.json", TINY)
        good, bad, small = (Point("one", method, 8) for method in ("ar", "sd", "psd"))
        results.add(row(method="ar"))
        results.add(row(method="sd", speed=None, error="boom"))
        results.add(row(method="psd", speed=None, error="out of memory: 3 GiB"))
        assert [results.done(point) for point in (good, bad, small)] == [True, False, True]
        assert not results.done(Point("one", "ar", 9))

    def test_a_new_run_keeps_the_old_file(self, tmp_path):
        results = Results(tmp_path / "r.json", TINY)
        assert results.set_aside() is None
        results.save()
        content = results.path.read_text()
        assert results.set_aside().read_text() == content and not results.path.exists()

    def test_digests_tell_rows_apart(self):
        one, two, three = digest_rows(torch.tensor([[1, 2], [1, 2], [1, 3]]))
        assert one == two != three


class TestReport:
    def test_published_figures_stay_marked_until_run_on_that_card(self, tmp_path):
        results = Results(tmp_path / "r.json", PROFILES["t4-nf4"])
        results.environment = {"devices": ["NVIDIA H200"]}
        assert "44.20 | 0.75 | 22.10 | their figure, not reproduced" in markdown(results)
        results.environment = {"devices": ["Tesla T4"]}
        assert "their figure |" in markdown(results) and "not reproduced" not in markdown(results)

    def test_tables_losses_failures_and_plans_are_there(self, tmp_path):
        results = Results(tmp_path / "r.json", TINY)
        for each in (
            row(method="hf-eager", speed=200.0, digests=["a"], step_ms={"p50": 1.0, "p95": 2.0, "p99": 3.0}),
            row(method="sd", digests=["b"], ms_per_forward=7.0),
            row(method="psd", speed=None, error="boom"),
            row("two", "psd", overlap=0.9),
            row("two", "sd"),
        ):
            results.rows[each.name] = each
        results.facts["plans"] = {"one/auto": {"text": "sd, because"}}
        text = markdown(results)
        for part in ("1.00/2.00/3.00", "| sd | hf-eager | tokens/s | 100.0 | 200.0 | 2.00 |", "`one/psd/b8/greedy/g4`: boom",
                     "sd, because", "ratios", "| two/psd/b8/greedy/g4 | 0.90 |"):  # fmt: skip
            assert part in text, part

    def test_pictures(self, tmp_path):
        pytest.importorskip("matplotlib")
        spans = [("target", "verify", 0.0, 4.0), ("drafter", "draft", 1.0, 3.0)]
        rows = [row(), row(method="psd", mode="psd", spans=spans, overlap_steady=1.0), row(sampled=True)]
        assert plot_bars(rows, tmp_path / "a" / "bars.png") and (tmp_path / "a" / "bars.png").stat().st_size > 5000
        assert plot_timeline(rows, tmp_path / "t.png") and (tmp_path / "t.png").stat().st_size > 5000
        assert not plot_timeline(rows[:1], tmp_path / "none.png") and not plot_bars([], tmp_path / "none.png")
