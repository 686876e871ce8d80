"""Compare ways to make an interval from live pairs: how often does it contain the true value, and how wide is it?

    python bench/scripts/intervals.py --recording trust.json --json intervals.json

Rounds come from a simulation, or are drawn from a recording of `bench/scripts/trust.py`. The recording has pairs of a variant
beside itself. Each drawn round is reversed at random, so the true value is exactly "no difference". The ways:

- *Student*: over the rounds' numbers, as `penstock_bench.levels` does
- *moderated*: the same, with the variances of twelve comparisons of a report estimated together (`penstock_bench.moderation`)
- *all turns*: Student over all turns, as if they were independent
- *two-level bootstrap*: rounds are drawn, and turns within them; percentiles
- *mixed model*: a random effect for the round, restricted maximum likelihood, and Wald's interval, as lme4 and statsmodels do
- *bootstrap of rounds*: as for variants that run one after the other (`penstock_bench.statistics`)
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import optimize, stats
from trust import of_json

from penstock_bench.levels import compare_rounds, locations
from penstock_bench.live_pairs import RoundPairs, round_pairs
from penstock_bench.moderation import moderate
from penstock_bench.statistics import compare, holm

_COMPARISONS = 12  # of a report
_LEVEL = 0.05
_RESAMPLES = 500
Interval = tuple[float, float]
Draw = Callable[[np.random.Generator, int], list[RoundPairs]]


def simulated(turns: int, between: float, within: float, *, heavy: bool) -> Draw:
    """Return a function that draws rounds: normal rounds, and normal turns or Student's with three degrees of freedom."""

    def draw(rng: np.random.Generator, rounds: int) -> list[RoundPairs]:
        found = []
        for number in range(rounds):
            noise = rng.standard_t(3, turns) / math.sqrt(3) if heavy else rng.standard_normal(turns)
            logs = rng.normal(0, between) + within * noise
            found.append(RoundPairs(number, logs, np.full(turns, np.nan), np.zeros(turns)))
        return found

    return draw


def recorded(path: Path) -> Draw:
    """Return a function that draws rounds of a recording, turned around or not."""
    blocks = of_json(json.loads(path.read_text())["recording"]).blocks
    pairs = [round_pairs(blocks, "step", seat, ("plain", False)) for seat in (("same", False), ("plain", True))]
    pool = [one for found in pairs for one in found]

    def draw(rng: np.random.Generator, rounds: int) -> list[RoundPairs]:
        found = []
        for place, number in enumerate(rng.integers(0, len(pool), rounds)):
            one, sign = pool[number], rng.choice([-1.0, 1.0])
            found.append(RoundPairs(place, sign * one.logs, sign * one.references, one.others))
        return found

    return draw


def all_turns(rounds: Sequence[RoundPairs]) -> Interval:
    logs = np.concatenate([one.logs for one in rounds])
    half = float(stats.t.ppf(1 - _LEVEL / 2, len(logs) - 1)) * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    return float(logs.mean()) - half, float(logs.mean()) + half


def two_levels(rounds: Sequence[RoundPairs], rng: np.random.Generator) -> Interval:
    means = []
    for _ in range(_RESAMPLES):
        chosen = [rounds[number].logs for number in rng.integers(0, len(rounds), len(rounds))]
        means.append(np.mean([logs[rng.integers(0, len(logs), len(logs))].mean() for logs in chosen]))
    low, high = np.quantile(means, [_LEVEL / 2, 1 - _LEVEL / 2])
    return float(low), float(high)


def mixed_model(rounds: Sequence[RoundPairs]) -> Interval:
    """Fit log ratio = mean + effect of the round + residual by restricted maximum likelihood."""
    counts = np.array([len(one.logs) for one in rounds], float)
    means = np.array([one.logs.mean() for one in rounds])
    squares = sum(float(((one.logs - one.logs.mean()) ** 2).sum()) for one in rounds)
    freedom = float(counts.sum()) - len(rounds)

    def center_and_weights(variances: np.ndarray) -> tuple[float, np.ndarray]:
        weights = 1 / (variances[0] + variances[1] / counts)
        return float(weights @ means / weights.sum()), weights

    def loss(logs: np.ndarray) -> float:
        variances = np.exp(logs)
        center, weights = center_and_weights(variances)
        between = -np.log(weights).sum() + weights @ (means - center) ** 2 + math.log(weights.sum())
        return float(between + freedom * logs[1] + squares / variances[1])

    within = math.log(squares / freedom)
    found = optimize.minimize(loss, [within - 2, within], method="Nelder-Mead", options={"xatol": 1e-3, "fatol": 1e-6})
    center, weights = center_and_weights(np.exp(found.x))
    half = float(stats.norm.ppf(1 - _LEVEL / 2)) / math.sqrt(float(weights.sum()))
    return center - half, center + half


def judge(draw: Draw, rounds: int, reports: int, rng: np.random.Generator) -> dict[str, dict[str, float]]:
    """Return, for each way, how often its interval holds the truth, its median width, and how often a report claims falsely."""
    held: dict[str, list[bool]] = {}
    widths: dict[str, list[float]] = {}
    false = {"Student": 0, "moderated": 0}

    def add(name: str, interval: Interval) -> None:
        held.setdefault(name, []).append(interval[0] <= 0 <= interval[1])
        widths.setdefault(name, []).append(interval[1] - interval[0])

    for _ in range(reports):
        drawn = [draw(rng, rounds) for _ in range(_COMPARISONS)]
        alone = [compare_rounds(one) for one in drawn]
        for name, comparisons in (("Student", alone), ("moderated", moderate(alone, range(len(alone))))):
            for one in comparisons:
                assert one.low is not None
                assert one.high is not None
                add(name, (math.log(one.low), math.log(one.high)))
            false[name] += min(holm([one.p for one in comparisons])) < _LEVEL
        first = drawn[0]
        add("all turns", all_turns(first))
        add("two-level bootstrap", two_levels(first, rng))
        add("mixed model", mixed_model(first))
        bootstrap = compare(list(np.exp(locations(first))), [1.0] * rounds)
        if bootstrap.low is not None and bootstrap.high is not None:
            add("bootstrap of rounds", (math.log(bootstrap.low), math.log(bootstrap.high)))
    return {
        name: {
            "holds the truth": float(np.mean(held[name])),
            "width": float(np.median(widths[name])),
            **({"reports with a false claim": false[name] / reports} if name in false else {}),
        }
        for name in held
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recording", type=Path, help="also draw rounds of this recording of bench/scripts/trust.py")
    parser.add_argument("--reports", type=int, default=1000, help="for each number of rounds (default: 1000)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sources = {
        "simulated, normal turns": simulated(6, 0.015, 0.06, heavy=False),
        "simulated, heavy tails": simulated(6, 0.015, 0.06, heavy=True),
        "simulated, many turns": simulated(40, 0.015, 0.06, heavy=True),
    }
    if args.recording:
        sources["recorded"] = recorded(args.recording)
    found: dict[str, Any] = {}
    for source, draw in sources.items():
        for rounds in (4, 6, 10, 20):
            figures = found[f"{source}, {rounds} rounds"] = judge(draw, rounds, args.reports, np.random.default_rng(0))
            print(f"{source}, {rounds} rounds")
            for way, numbers in figures.items():
                print(f"  {way:22}", ", ".join(f"{name} {number:.3f}" for name, number in numbers.items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"reports": args.reports, "figures": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
