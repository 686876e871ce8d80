"""Try other statistics on benchmarks of simulated machines, and print the figures at the end of docs/measuring.md.

    python bench/scripts/alternatives.py

For each method, it judges 2,000 benchmarks with one comparison. It prints how often the method says "different" where nothing
differs, and where one variant is 2 % slower.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import stats

from penstock_bench.statistics import compare

_BENCHMARKS = 2_000
_SPREAD = 0.005  # from run to run

Noise = Callable[[np.random.Generator, int], np.ndarray]
Verdict = Callable[[np.ndarray], bool]  # from pairs, logarithms [n], to whether they are called different


def quiet(rng: np.random.Generator, runs: int) -> np.ndarray:
    return rng.normal(0, _SPREAD, runs)


def outliers(rng: np.random.Generator, runs: int) -> np.ndarray:
    return quiet(rng, runs) + (rng.random(runs) < 0.1) * rng.exponential(0.3, runs)


def drift(rng: np.random.Generator, runs: int) -> np.ndarray:
    return quiet(rng, runs) + np.linspace(0, 0.3, runs)


def pairs(rng: np.random.Generator, noise: Noise, rounds: int, effect: float, there_and_back: bool) -> np.ndarray:
    runs = noise(rng, 2 * rounds).reshape(rounds, 2)
    first = rng.random(rounds) < 0.5
    if there_and_back:
        first[1::2] = ~first[: rounds // 2 * 2 : 2]
    return np.where(first, runs[:, 1] - runs[:, 0], runs[:, 0] - runs[:, 1]) + effect


def ours(logs: np.ndarray) -> bool:
    found = compare(np.exp(logs), np.ones(len(logs)))
    return found.p is not None and found.p < 0.05 and not found.may_be(1.0)


def ours_by_the_test_alone(logs: np.ndarray) -> bool:
    found = compare(np.exp(logs), np.ones(len(logs)))
    return found.p is not None and found.p < 0.05


def student(logs: np.ndarray) -> bool:
    return stats.ttest_1samp(logs, 0).pvalue < 0.05


def yuen_by_the_book(logs: np.ndarray) -> bool:
    ordered, cut = np.sort(logs), len(logs) // 5
    winsorized = ordered.clip(ordered[cut], ordered[-cut - 1])
    error = winsorized.std(ddof=1) / ((1 - 2 * cut / len(logs)) * math.sqrt(len(logs)))
    return abs(ordered[cut : len(logs) - cut].mean() / error) > stats.t.ppf(0.975, len(logs) - 2 * cut - 1)


def wilcoxon(logs: np.ndarray) -> bool:
    return stats.wilcoxon(logs).pvalue < 0.05


def bootstrap_t(logs: np.ndarray) -> bool:
    drawn = np.random.default_rng(0).choice(logs, (2_000, len(logs)))
    error = max(logs.std(ddof=1), 1e-12) / math.sqrt(len(logs))
    sizes = abs(drawn.mean(axis=1) - logs.mean()) / np.maximum(drawn.std(axis=1, ddof=1) / math.sqrt(len(logs)), 1e-12)
    return abs(logs.mean()) / error > np.quantile(sizes, 0.95)


WAYS: dict[str, Verdict] = {
    "ours": ours,
    "ours, by the test alone": ours_by_the_test_alone,
    "Student's t": student,
    "Yuen's test by the book": yuen_by_the_book,
    "Wilcoxon's test": wilcoxon,
    "bootstrap-t": bootstrap_t,
}


def main() -> None:
    print(f"{'way':26}{'rounds':>8}{'machine':>12}{'order':>18}{'no difference':>16}{'2 %':>10}")
    for rounds in (6, 10):
        for noise in (quiet, outliers, drift):
            for there_and_back in (True, False) if noise is drift else (True,):
                for name, different in WAYS.items():
                    rates = [_rate(different, noise, rounds, effect, there_and_back) for effect in (0.0, math.log(1.02))]
                    order = "there and back" if there_and_back else "random"
                    print(f"{name:26}{rounds:8}{noise.__name__:>12}{order:>18}{rates[0]:16.1%}{rates[1]:10.1%}", flush=True)


def _rate(different: Verdict, noise: Noise, rounds: int, effect: float, there_and_back: bool) -> float:
    rng = np.random.default_rng(0)
    return float(np.mean([different(pairs(rng, noise, rounds, effect, there_and_back)) for _ in range(_BENCHMARKS)]))


if __name__ == "__main__":
    main()
