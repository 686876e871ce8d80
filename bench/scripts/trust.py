"""Test both designs on this machine, with processes whose true difference is known: live pairs, and one after the other.

    python bench/scripts/trust.py --minutes 60 --json trust.json

The step is a small training step in JAX, of about 5 ms on two cores. Four processes run it: "plain", the same once more as the
A/A control, "same", and "slower", in which every step takes 2 % longer. Rounds of both designs alternate, so that they see the
same hours. Then reports are made of them, as a user would have had them in 10 and in 30 minutes:

- *real* reports: of consecutive rounds, as often as they fit into the recording. Each judges "plain" beside "slower", and "plain"
  beside "same".
- *simulated* reports: of rounds that are drawn from the recording with replacement. "plain", its second process and "same" are
  the same, so their names are permuted at random in each drawn round. Then the truth is exactly "no difference", and the planted
  one is added to the logarithms. They tell how often real reports would be right.

Each report has one comparison and its control, as in `penstock compare`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import statistics as plain_statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from penstock_bench import machine
from penstock_bench.levels import compare_rounds
from penstock_bench.live_pairs import RoundPairs, round_pairs
from penstock_bench.live_round import LiveRound
from penstock_bench.model import Live, Metric, Variant, Workload
from penstock_bench.outcome import Block
from penstock_bench.process import run_variant
from penstock_bench.repetition import repetition, variances
from penstock_bench.rounds import round_order
from penstock_bench.statistics import LEVEL, Comparison, compare, typical
from penstock_bench.verdict import CONTROL_LEVEL

SLOWER = 0.02
_SEATS = (("plain", False), ("same", False), ("slower", False), ("plain", True))
_EQUAL = (("plain", False), ("plain", True), ("same", False))
_LENGTHS = (10.0, 30.0)  # minutes of a report
_WIDTH, _BATCH = 320, 256


@dataclass(frozen=True)
class Size:
    """There is only one."""


@contextlib.contextmanager
def live(slower: float, size: Size) -> Iterator[Live]:
    """Warm a training step up; `slower` is the share of its time by which each step is delayed."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.standard_normal((_WIDTH, _WIDTH), np.float32) * 0.05) for _ in range(3)]
    batch = jnp.asarray(rng.standard_normal((_BATCH, _WIDTH), np.float32))

    def loss(weights: list[Any], batch: Any) -> Any:
        for weight in weights:
            batch = jax.nn.relu(batch @ weight)
        return (batch**2).mean()

    @functools.partial(jax.jit, donate_argnums=0)
    def step(weights: list[Any], batch: Any) -> list[Any]:
        return [weight - 1e-3 * by for weight, by in zip(weights, jax.grad(loss)(weights, batch), strict=True)]

    def block(seconds: float) -> float:
        nonlocal weights
        steps, begin = 0, time.perf_counter()
        while not steps or time.perf_counter() - begin < seconds:
            started = time.perf_counter()
            weights = jax.block_until_ready(step(weights, batch))
            ended = time.perf_counter()
            while time.perf_counter() < ended + slower * (ended - started):  # work, not a sleep, which the load does not change
                pass
            steps += 1
        return (time.perf_counter() - begin) / steps * 1e3

    block(0.5)
    yield Live({"step": block})


WORKLOADS = (
    Workload(
        name="trust",
        title="ms a small training step",
        metrics=(Metric("step", "ms", "lower"),),
        baseline="plain",
        variants=tuple(
            Variant(name, live=functools.partial(live, slower))
            for name, slower in (("plain", 0.0), ("same", 0.0), ("slower", SLOWER))
        ),
        sizes={"full": Size(), "quick": Size()},
        block_seconds=0.25,
    ),
)


@dataclass
class Recording:
    """Rounds of both designs.

    Attributes:
      blocks: of live pairs.
      alone: for each round of the other design, from (variant, again) to the number of its process.
      live_seconds, alone_seconds: of a round of three processes: the two that are compared, and the control.
    """

    blocks: list[Block]
    alone: list[dict[tuple[str, bool], float]]
    live_seconds: list[float]
    alone_seconds: list[float]

    @functools.cached_property
    def by_round(self) -> dict[int, list[Block]]:
        """Return the blocks of each round of a recording that is complete."""
        found: dict[int, list[Block]] = {}
        for block in self.blocks:
            found.setdefault(block.round, []).append(block)
        return found


def record(minutes: float, say: Callable[[str], None]) -> Recording:
    """Run rounds of both designs in turn."""
    (workload,) = WORKLOADS
    begin = time.perf_counter()
    recording = Recording([], [], [], [])
    costs: list[tuple[float, float, int]] = []
    source = str(Path(__file__).resolve())
    with tempfile.TemporaryDirectory() as folder:
        number = 0
        while time.perf_counter() - begin < minutes * 60:
            with LiveRound(source, workload, _SEATS, "full", Path(folder), number, 0, lambda: time.perf_counter() - begin) as one:
                one.start()
                turns = _turns(recording.blocks, costs)
                while one.turns < turns:
                    one.turn()
                one.finish()
            if one.failed:
                raise RuntimeError(str(one.failed))
            recording.blocks += one.blocks
            costs.append((one.starting, one.turning, one.turns))
            recording.live_seconds.append((one.starting + one.turning) * 3 / 4)
            recording.alone.append(_alone(source, workload, Path(folder), number, recording.alone_seconds))
            number += 1
            say(f"{number} rounds, {(time.perf_counter() - begin) / 60:.1f} minutes: {turns} turns")
    return recording


def _turns(blocks: list[Block], costs: list[tuple[float, float, int]]) -> int:
    """Return the turns of the next round, as the harness would for two variants and a control."""
    if not costs:
        return 8
    found = [variances([one.logs for one in _pairs(blocks, seat)]) for seat in _SEATS[1:]]
    starting = plain_statistics.median(start for start, _, _ in costs) * 3 / 4
    turning = plain_statistics.median(seconds / turns for _, seconds, turns in costs) * 3 / 4
    plan = repetition([one for one in found if one], starting, turning)
    return plan.turns if plan else 8


def _alone(source: str, workload: Workload, folder: Path, number: int, seconds: list[float]) -> dict[tuple[str, bool], float]:
    begin = time.perf_counter()
    found = {}
    for seat in round_order(_SEATS, 0, workload.name, number):
        finished = run_variant(source, workload, workload.variant(seat[0]), "full", folder)
        if finished.reason or finished.result is None:
            raise RuntimeError(f"{seat}: {finished.reason}\n{finished.output}")
        found[seat] = typical(finished.result["steps"]["step"])
    seconds.append((time.perf_counter() - begin) * 3 / 4)
    return found


def _pairs(blocks: Sequence[Block], seat: tuple[str, bool], again: bool = False) -> list[RoundPairs]:
    return round_pairs(blocks, "step", seat, ("plain", again))


@dataclass(frozen=True)
class Report:
    """The claim of a report with one comparison and its control."""

    comparison: Comparison
    control: Comparison

    @property
    def trusted(self) -> bool:
        return self.control.p is not None and self.control.p >= CONTROL_LEVEL

    @property
    def different(self) -> bool:
        p = self.comparison.p
        return self.trusted and p is not None and p < LEVEL and not self.comparison.may_be(1.0)


def _live_report(blocks: Sequence[Block], other: str) -> Report:
    """Return the report of live pairs about "plain" and another variant."""
    seat = (other, False)
    comparison = compare_rounds(_pairs(blocks, seat), _pairs(blocks, seat, again=True))
    return Report(comparison, compare_rounds(_pairs(blocks, ("plain", True))))


def real_report(recording: Recording, other: str, numbers: list[int]) -> tuple[Report, Report]:
    """Return the reports of live pairs and of the other design about "plain" and another variant, of these rounds."""
    logs = [[_alone_log(recording.alone[number], seat) for number in numbers] for seat in ((other, False), ("plain", True))]
    blocks = [block for number in numbers for block in recording.by_round[number]]
    return _live_report(blocks, other), Report(*map(_compare_logs, logs))


def simulated_report(
    recording: Recording, planted: float, counts: tuple[int, int], rng: np.random.Generator
) -> tuple[Report, Report]:
    """Return the same for rounds that are drawn, and a difference that is planted in the logarithms.

    Args:
      recording: the rounds.
      planted: the difference, as a logarithm.
      counts: the numbers of rounds of live pairs and of the other design.
      rng: draws the rounds, and which of two equal variants is called which.
    """
    drawn: list[Block] = []
    for place, number in enumerate(rng.choice(sorted(recording.by_round), counts[0])):
        drawn += _renamed(recording.by_round[number], place, rng, math.exp(planted))
    alone: list[list[float]] = [[], []]
    for number in rng.integers(0, len(recording.alone), counts[1]):
        logs = rng.permutation([math.log(recording.alone[number][seat]) for seat in _EQUAL])
        alone[0].append(logs[0] - logs[1] + planted)
        alone[1].append(logs[2] - logs[1])
    return _live_report(drawn, "same"), Report(*map(_compare_logs, alone))


def _renamed(blocks: list[Block], number: int, rng: np.random.Generator, slower: float) -> list[Block]:
    """Return the blocks of a round with the names of its equal processes exchanged by chance, and "same" slowed down."""
    names = dict(zip(_EQUAL, (_EQUAL[place] for place in rng.permutation(len(_EQUAL))), strict=True))
    found = []
    for block in blocks:
        if (seat := (block.variant, block.again)) in names:
            name, again = names[seat]
            value = block.value * (slower if name == "same" else 1.0)
            found.append(replace(block, variant=name, again=again, round=number, value=value))
    return found


def _alone_log(one: dict[tuple[str, bool], float], seat: tuple[str, bool]) -> float:
    return math.log(one[seat] / one["plain", False])


def _compare_logs(logs: list[float]) -> Comparison:
    return compare([math.exp(log) for log in logs], [1.0] * len(logs))


def _figures(made: list[Report], truth: float) -> dict[str, Any]:
    count = len(made)
    held = sum(one.comparison.low is not None and one.comparison.may_be(truth) for one in made)
    return {
        "reports": count,
        "called different": _rate(sum(one.different for one in made), count),
        "control failed": _rate(sum(not one.trusted for one in made), count),
        "interval holds the truth": _rate(held, count),
        "median ratio": float(np.median([one.comparison.ratio for one in made])),
        "median smallest difference that would have been shown": float(
            np.median([one.comparison.detectable(LEVEL, by_interval=True) or math.inf for one in made])
        ),
    }


def _rate(count: int, of: int) -> str:
    interval = stats.binomtest(count, of).proportion_ci(0.95)
    return f"{count} of {of} (95 %: {interval.low:.1%} to {interval.high:.1%})"


def judged(recording: Recording, simulated: int) -> dict[str, Any]:
    """Return the figures of real and of simulated reports, for each design, length and difference."""
    rng = np.random.default_rng(0)
    recorded = len(recording.alone)
    found: dict[str, Any] = {}
    seconds = {
        "live pairs": plain_statistics.median(recording.live_seconds),
        "one after the other": plain_statistics.median(recording.alone_seconds),
    }
    for minutes in _LENGTHS:
        counts = [int(minutes * 60 / of_a_round) for of_a_round in seconds.values()]
        for name, other, truth in (("A/A", "same", 1.0), (f"{SLOWER:.0%} planted", "slower", 1 + SLOWER)):
            drawn = [simulated_report(recording, math.log(truth), (counts[0], counts[1]), rng) for _ in range(simulated)]
            for place, (design, of_a_round) in enumerate(seconds.items()):
                fits = counts[place]
                real = [
                    real_report(recording, other, list(range(first, first + fits)))[place]
                    for first in range(0, recorded - fits + 1, fits)
                ]
                found[f"{design}, {minutes:g} minutes, {name}"] = {
                    "rounds": fits,
                    "seconds of a round": of_a_round,
                    "simulated": _figures([pair[place] for pair in drawn], truth),
                    **({"real": _figures(real, truth)} if real else {}),
                }
    return found


def as_json(recording: Recording) -> dict[str, Any]:
    """Return a recording as data for JSON."""
    return {
        "blocks": {field.name: [getattr(block, field.name) for block in recording.blocks] for field in fields(Block)},
        "alone": [{f"{name}{' again' * again}": number for (name, again), number in one.items()} for one in recording.alone],
        "live_seconds": recording.live_seconds,
        "alone_seconds": recording.alone_seconds,
    }


def of_json(data: dict[str, Any]) -> Recording:
    """Return the recording that `as_json` wrote."""
    columns = data["blocks"]
    names = [field.name for field in fields(Block) if field.name in columns]  # recordings before slices have no number of them
    blocks = [Block(*row) for row in zip(*(columns[name] for name in names), strict=True)]
    alone = [
        {(name.removesuffix(" again"), name.endswith(" again")): number for name, number in one.items()} for one in data["alone"]
    ]
    return Recording(blocks, alone, data["live_seconds"], data["alone_seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="of the recording (default: 60)")
    parser.add_argument("--simulated", type=int, default=400, help="reports of each kind (default: 400)")
    parser.add_argument("--json", type=Path, help="write the recording and the figures")
    parser.add_argument("--again", type=Path, metavar="JSON", help="judge this recording, and record nothing")
    args = parser.parse_args()
    if args.again:
        document = json.loads(args.again.read_text())
        recording, described = of_json(document["recording"]), document["machine"]
    else:
        described, recording = machine.describe(), record(args.minutes, lambda text: print(text, flush=True))
    figures = judged(recording, args.simulated)
    print(json.dumps(figures, indent=2))
    if args.json:
        everything = {"machine": described, "figures": figures, "recording": as_json(recording)}
        args.json.write_text(json.dumps(everything) + "\n")


if __name__ == "__main__":
    main()
