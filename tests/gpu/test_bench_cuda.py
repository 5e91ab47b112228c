"""`hf-psd bench` on CUDA with small models: memory, graphs, two devices, replicas and the memory cap."""

from __future__ import annotations

import json

import pytest
import torch

from hf_psd.cli import main

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
two_cards = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def bench(path, *options: str) -> dict:
    small = "--profile llama-8b --target tiny --drafters tiny-drafter --prompt 32 --new-tokens 24 --repeat 1 --no-bar"
    main(["bench", *small.split(), "--json", str(path), *options])
    return json.loads(path.read_text())


def test_one_device(tmp_path):
    options = "--batches 1 8 --methods hf-eager hf-assisted hf-lookup ar sd psd auto"
    rows = bench(tmp_path / "r.json", *options.split())["rows"]
    assert len(rows) == 2 * (7 + 5)
    for row in rows:
        assert row["error"] is None and row["tokens_per_second"] > 0
        assert list(row["peak_gib"]) == ["cuda:0"] and row["weights_gib"] < row["peak_gib"]["cuda:0"]
        assert row["gb_per_second"] > 0 and row["ttft_ms"]["p50"] > 0
    assert all(row["verify_ms"] > 0 for row in rows if row["method"] in ("ar", "sd", "psd", "auto"))


@two_cards
def test_two_devices_with_cap_and_replicas(tmp_path):
    options = "--devices 2 --batches 8 --gammas 4 --capped-batches 8 --sampling greedy --memory-cap 0.2"
    rows = bench(tmp_path / "r.json", *options.split())["rows"]
    by_name = {f"{row['layout']}/{row['method']}": row for row in rows}
    for name, row in by_name.items():
        assert row["error"] is None or row["layout"].startswith("capped"), (name, row["error"])
    assert set(by_name["two/psd"]["peak_gib"]) == {"cuda:0", "cuda:1"}
    assert set(by_name["replicas/sd"]["peak_gib"]) == {"cuda:0", "cuda:1"}
    assert by_name["two/psd"]["overlap"] is not None
