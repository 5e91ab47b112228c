"""Points: what is measured, one by one, each with a name by which it can be chosen and resumed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

from .profiles import Settings

ONE, TWO, REPLICAS, CAPPED_TWO, CAPPED_ONE, QUEUE = "one", "two", "replicas", "capped-two", "capped-one", "queue"
BATCH_ONE = ("hf-assisted", "hf-assisted-default", "hf-lookup", "flashspec", "flashspec-gamma")
"""Methods that are measured at batch 1 alone: transformers refuses larger ones, FlashSpec has no KV cache there."""


@dataclass(frozen=True)
class Point:
    """One measurement.

    Attributes:
        layout: "one" (everything on one device), "two" (target and drafter apart), "replicas" (a target and a drafter
            on each of two devices, half of the requests each), "capped-two" and "capped-one" (the big drafter under a
            memory cap, on its own device or on the target's), "queue" (as "two", but requests come from a queue).
        method: what decodes.
        batch: requests in flight, over all devices.
        sampled: sampled or greedy.
        gamma: drafts per round; of no effect on methods without a drafter.
        drafter: index into the settings' drafters.
    """

    layout: str
    method: str
    batch: int
    sampled: bool = False
    gamma: int = 4
    drafter: int = 0

    @property
    def name(self) -> str:
        """`layout/method/b<batch>/greedy|sampled/g<gamma>`."""
        kind = "sampled" if self.sampled else "greedy"
        return f"{self.layout}/{self.method}/b{self.batch}/{kind}/g{self.gamma}"

    @property
    def devices_used(self) -> int:
        """Cards that work: plain decoding leaves the drafters' idle."""
        alone = self.layout in (ONE, CAPPED_ONE) or (self.layout != REPLICAS and self.method == "ar")
        return 1 if alone else 2

    def requests(self, settings: Settings) -> int:
        """Prompts that one call decodes."""
        return self.batch * settings.queue_factor if self.layout == QUEUE else self.batch


def all_points(settings: Settings) -> list[Point]:
    """Every point of a run, in the order of measuring."""
    return list(dict.fromkeys(_two(settings) if settings.two else _one(settings)))


def _one(settings: Settings) -> Iterable[Point]:
    for batch in settings.batches:
        for sampled in settings.sampling:
            for method in settings.methods:
                if batch > 1 and method in BATCH_ONE:
                    continue
                if method == "hf-static" and batch not in settings.static_batches:
                    continue
                yield Point(ONE, method, batch, sampled, settings.gamma)


def _two(settings: Settings) -> Iterable[Point]:
    base, big = settings.gamma, len(settings.drafters) - 1
    modes = [method for method in ("ar", "sd", "psd", "auto") if method in settings.methods]
    for sampled in settings.sampling[:1]:
        yield from _sweep(settings, TWO, modes, sampled)
        for layout in (CAPPED_TWO, CAPPED_ONE):
            for batch in settings.capped_batches:
                for mode in ("ar", "sd", "psd") if layout == CAPPED_TWO else ("sd",):
                    yield Point(layout, mode, batch, sampled, base, big)
        for batch in settings.two_batches:
            if batch % 2 == 0:
                yield from (Point(REPLICAS, mode, batch, sampled, base) for mode in ("ar", "sd"))
        yield from _sweep(settings, QUEUE, [mode for mode in modes if mode != "auto"], sampled)


def _sweep(settings: Settings, layout: str, modes: Sequence[str], sampled: bool) -> Iterable[Point]:
    """The modes at every batch, those that draft with every gamma that is asked for there."""
    for batch in settings.two_batches:
        more = settings.gammas if settings.grid or batch == settings.gamma_batch else ()
        for gamma in dict.fromkeys((settings.gamma, *more)):
            for mode in modes:
                if mode != "ar" or gamma == settings.gamma:
                    yield Point(layout, mode, batch, sampled, gamma)


def choose(points: Sequence[Point], only: Sequence[str] = (), numbers: Sequence[str] = ()) -> list[Point]:
    """The points whose names match one of the patterns and whose numbers, from 1, lie in one of the ranges.

    Args:
        only: shell patterns over `Point.name`; none means all.
        numbers: "7" or "3-9"; none means all.

    Raises:
        ValueError: a range that is none, or nothing is left.
    """
    wanted: set[int] = set()
    for text in numbers:
        first, _, last = text.partition("-")
        try:
            wanted |= set(range(int(first), int(last or first) + 1))
        except ValueError:
            raise ValueError(f"--points takes numbers and ranges such as 7 or 3-9, got {text!r}.") from None
    chosen = [
        point
        for number, point in enumerate(points, 1)
        if (not numbers or number in wanted) and (not only or any(fnmatch(point.name, pattern) for pattern in only))
    ]
    if not chosen:
        raise ValueError(f"No point is chosen by --only {' '.join(only)} --points {' '.join(numbers)}; see --list.")
    return chosen
