"""Balance of two groups under Poisson arrivals and geometric lengths: our rules and the published ones, no models.

    python -m hf_psd.queue.simulate --json FILE

The published rules are those of MineDraft (arXiv 2603.18016): a request gets its group when it arrives and keeps it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..phases import BatchManager, Request, Step

RATES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Arrivals per step."""
ROUNDS = 16.0
"""Mean number of verifications of a request."""
BINS = ((1, 1), (2, 7), (8, 10**9))
"""Requests in flight, from .. to."""


@dataclass
class Tally:
    """Steps by requests in flight: all of them, and those in which both groups worked."""

    steps: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    both: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    violations: int = 0

    def add(self, flying: int, both: bool) -> None:
        self.steps[flying] += 1
        self.both[flying] += both

    def share(self, least: int, most: int) -> float | None:
        """Share of the steps with `least` to `most` requests in flight in which both groups worked."""
        chosen = [count for count in self.steps if least <= count <= most]
        steps = sum(self.steps[count] for count in chosen)
        return sum(self.both[count] for count in chosen) / steps if steps else None


class Ours:
    """The batch manager; an end is learnt one step late."""

    def __init__(self) -> None:
        self.manager = BatchManager(groups=2)
        self.left: dict[Request, int] = {}
        self.number = self.quiet = 0
        self.late = Step([], [])

    def arrive(self, rounds: int) -> None:
        request = Request(self.number, self.number, 0, 1, 2**40)
        self.number, self.quiet = self.number + 1, 0
        self.left[request] = rounds
        self.manager.add([request])

    def step(self, tally: Tally) -> None:
        before = self.manager.sizes()
        flying = len(self.manager.requests)
        step = self.manager.next_step()
        after = self.manager.sizes()
        tally.violations += abs(after[0] - after[1]) > abs(before[0] - before[1])
        self.manager.advance(step)
        for request in self.late.verify:
            self.left[request] -= 1
            if self.left[request] == 0:
                del self.left[request]
                self.manager.finish(request)
                self.quiet = 0
        self.late = Step([request for request in step.verify if request in self.left], [])
        self.quiet += 1
        sizes = self.manager.sizes()
        tally.violations += self.quiet > 4 and abs(sizes[0] - sizes[1]) > 1
        if flying:
            tally.add(flying, bool(step.verify and step.draft))


class Published:
    """One flag per request, given on arrival; two owners of the phase, as published."""

    def __init__(self) -> None:
        self.groups: dict[int, bool] = {}
        self.left: dict[int, int] = {}
        self.number = self.balance = 0
        self.started = self.skip = False
        self.send = True

    def arrive(self, rounds: int) -> None:
        group = (not self.skip) if self.started else self.balance >= 0
        self.balance += -1 if group else 1
        self.groups[self.number], self.left[self.number] = group, rounds
        self.number += 1

    def step(self, tally: Tally) -> None:
        if not self.groups:
            self.started, self.skip, self.balance, self.send = False, False, 0, True
            return
        verified = [number for number, group in self.groups.items() if group == self.send]
        both = 0 < len(verified) < len(self.groups)
        tally.add(len(self.groups), both)
        for number in verified if both else list(self.groups):
            self.left[number] -= 1
            if self.left[number] == 0:
                self.balance += 1 if self.groups.pop(number) else -1
                del self.left[number]
        self.send = not self.send if both else True
        self.skip = not self.skip if self.started else self.skip
        self.started = True


def simulate(rule: Callable[[], Ours | Published], rate: float, steps: int, seed: int) -> Tally:
    """Runs one rule for so many steps."""
    draw, tally, state = random.Random(seed), Tally(), rule()
    for _ in range(steps):
        for _ in range(_poisson(draw, rate)):
            state.arrive(_geometric(draw, ROUNDS))
        state.step(tally)
    return tally


def table(steps: int = 20_000, seed: int = 0, rates: Sequence[float] = RATES) -> dict:
    """Shares of steps in which both groups worked, by rule, arrival rate and requests in flight."""
    result: dict = {"steps": steps, "seed": seed, "mean_rounds": ROUNDS, "rows": []}
    for name, rule in (("ours", Ours), ("published", Published)):
        for rate in rates:
            tally = simulate(rule, rate, steps, seed)
            row: dict = {"rule": name, "arrivals_per_step": rate, "violations": tally.violations}
            for least, most in BINS:
                row[f"{least}" if most == least else f"{least}-{most}" if most < 10**9 else f"{least}+"] = {
                    "share": tally.share(least, most),
                    "steps": sum(count for flying, count in tally.steps.items() if least <= flying <= most),
                }
            result["rows"].append(row)
    return result


def _poisson(draw: random.Random, mean: float) -> int:
    count, product, bound = 0, draw.random(), math.exp(-mean)
    while product > bound:
        count, product = count + 1, product * draw.random()
    return count


def _geometric(draw: random.Random, mean: float) -> int:
    return 1 + int(math.log(1 - draw.random()) / math.log(1 - 1 / mean))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m hf_psd.queue.simulate", description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the table there")
    asked = parser.parse_args(arguments)
    result = table(asked.steps, asked.seed)
    for row in result["rows"]:
        shares = ", ".join(
            f"{name}: {cell['share']:.3f} of {cell['steps']}"
            for name, cell in row.items()
            if isinstance(cell, dict) and cell["steps"]
        )
        print(f"{row['rule']:9} {row['arrivals_per_step']:5} arrivals a step, both groups busy at {shares}")
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump(result, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
