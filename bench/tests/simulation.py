"""Benchmarks of made-up machines, to see what the reports would have said of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock_bench.model import Measurement, Metric, Target, Variant, Workload
from penstock_bench.outcome import Outcome, Run, Sample
from penstock_bench.rounds import round_order
from penstock_bench.statistics import typical

MACHINE = {
    "date": "2026-01-01T00:00:00+00:00",
    "cpu": "a made-up machine",
    "cores": 2,
    "usable_cores": 2,
    "memory_bytes": None,
    "clocks": None,
    "huge_pages": None,
    "known_cases": [],
    "gpus": [],
    "platform": "none",
    "python": "3",
    "versions": {"jax": "0"},
    "load_average": None,
    "flags": {},
    "penstock": "0",
    "commit": None,
}

# From the number of runs and a generator to what each run is slower by, as a logarithm, in the order of running.
Noise = Callable[[int, np.random.Generator], np.ndarray]


def quiet(runs: int, rng: np.random.Generator) -> np.ndarray:
    """Half a percent from run to run: memory layout, the neighbours, the temperature."""
    return rng.normal(0, 0.005, runs)


def drift(runs: int, rng: np.random.Generator) -> np.ndarray:
    """A third slower at the end than at the start."""
    return quiet(runs, rng) + np.linspace(0, 0.3, runs)


def outliers(runs: int, rng: np.random.Generator) -> np.ndarray:
    """One run in ten shares the machine with something heavy."""
    return quiet(runs, rng) + (rng.random(runs) < 0.1) * rng.exponential(0.3, runs)


def autocorrelated(runs: int, rng: np.random.Generator) -> np.ndarray:
    """Slow and fast spells that last for several runs."""
    noise = quiet(runs, rng)
    for place in range(1, runs):
        noise[place] += 0.9 * noise[place - 1]
    return noise


@dataclass(frozen=True)
class Size:
    steps: int = 50


def workload(*names: str, targets: tuple[Target, ...] = (), metrics: int = 1) -> Workload:
    variants = tuple(Variant(name, lambda size: Measurement()) for name in names)
    kinds = tuple(Metric(f"m{number}", "ms", "lower") for number in range(metrics))
    return Workload("pace", "a title", kinds, names[0], variants, {"full": Size(), "quick": Size()}, targets)


def simulate(
    noise: Noise, seed: int, slower: dict[str, float] | None = None, rounds: int = 10, names: tuple[str, ...] = ("a", "b")
) -> Run:
    """A run of the harness on a machine with this noise, where a variant is slower than others by its share.

    Within a run every step has noise of its own, a warm-up drift and now and then a step that takes three times as long.
    """
    rng = np.random.default_rng(seed)
    order = [round_order([*((name, False) for name in names), (names[0], True)], seed, "pace", r) for r in range(rounds)]
    factors = iter(np.exp(noise(rounds * len(order[0]), rng)))
    samples = []
    for number, runs in enumerate(order):
        for position, (name, again) in enumerate(runs):
            steps = 10 * next(factors) * (1 + (slower or {}).get(name, 0.0)) * _steps(rng)
            values = {"m0": typical(list(steps))}
            samples.append(Sample(name, again, number, position, 0.0, 1.0, None, values, {"m0": list(steps)}, {}))
    return Run("pace", "full", seed, MACHINE, (Outcome(workload(*names), "full", names[0], tuple(samples)),), 1.0)


def _steps(rng: np.random.Generator, count: int = 50) -> np.ndarray:
    steps = 1 + np.abs(rng.normal(0, 0.02, count))
    steps[: count // 10] *= 1.5
    return steps * np.where(rng.random(count) < 0.03, 3.0, 1.0)
