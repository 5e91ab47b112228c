"""Timing on a GPU: graph replays on warm caches, single replays after the L2 was flushed, and the copy bandwidth."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable

import torch
import triton

FLUSH_BYTES = 512 * 2**20


def capture(call: Callable, repeats: int) -> torch.cuda.CUDAGraph:
    """A graph of `repeats` calls, warmed up on a side stream first."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    return graph


def _elapsed(call: Callable) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def warm_us(call: Callable, repeats: int = 20, samples: int = 15) -> float:
    """Median microseconds a call within a replayed graph of `repeats` calls over the same data."""
    graph = capture(call, repeats)
    graph.replay()
    times = [_elapsed(graph.replay) for _ in range(samples)]
    return statistics.median(times) / repeats


def cold_us(call: Callable, samples: int = 15) -> float:
    """Median microseconds of one replay after the L2 was overwritten; the launch of the graph is part of it."""
    graph = capture(call, 1)
    waste = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    times = []
    for _ in range(samples):
        waste.zero_()
        times.append(_elapsed(graph.replay))
    return statistics.median(times)


def eager_us(call: Callable, samples: int = 15) -> float:
    """Median microseconds between events around one call launched from Python."""
    call()
    return statistics.median(_elapsed(call) for _ in range(samples))


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy of 4 GiB, the best of a copy engine's and a kernel's."""
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    times = [eager_us(lambda: target.copy_(source)), eager_us(lambda: torch.mul(source, 1.0, out=target))]
    return 2 * source.nbytes / (min(times) * 1e-6)


def by_kernel(call: Callable, calls: int = 20) -> dict[str, float]:
    """Mean microseconds in each kernel of a call, without the gaps between them."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    return {event.key[:40]: event.device_time_total / calls for event in profile.key_averages()}


def environment() -> dict:
    def output(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return "unknown"

    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": output("git", "rev-parse", "HEAD"),
        "uncommitted": bool(output("git", "status", "--porcelain", "kernels")),
    }
