"""Compare lengths of slices: how much do the ratios of two variants' blocks scatter, and how much slower do steps become?

    python bench/scripts/slices.py keras bert-fit-b8 --json slices.json
    python bench/scripts/slices.py frameworks vit-tiny-b8-fp32-eager-sgd-random --variant "PyTorch eager" --variant JAX

The processes of a workload stay alive, and take turns as in `penstock bench`. The blocks of a turn run one after the other
("whole"), or in slices of one of several lengths; the order of these is random. So all lengths are of the same processes and the
same minutes. Two figures are printed for each length. The first is the standard deviation of the log ratio of two blocks with its
95 % interval (chi-squared, so it is rough). The second is the time of a step, relative to whole blocks of the same repetition
(the mean of log ratios over both variants, with Student's interval).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from penstock_bench import machine
from penstock_bench.live_round import LiveRound
from penstock_bench.suites import SUITES, find

_LENGTHS: tuple[float | None, ...] = (None, 0.01, 0.025, 0.05, 0.1)  # seconds


def record(module: str, name: str, variants: list[str], metric: str | None, repetitions: int) -> dict[float | None, np.ndarray]:
    """Return the numbers of two variants' blocks for each length of a slice, [repetitions, 2]."""
    workload = find(module, name)
    metrics = tuple(one for one in workload.metrics if metric is None or one.name == metric)[:1]
    seats = [(variant, False) for variant in variants or [one.name for one in workload.variants]][:2]
    rng = random.Random(0)
    numbers: dict[float | None, list[list[float]]] = {length: [] for length in _LENGTHS}
    workload = replace(workload, metrics=metrics, slice_seconds=_LENGTHS[-1])
    with tempfile.TemporaryDirectory() as folder:
        live = LiveRound(module, workload, seats, "full", Path(folder), 0, 1, time.perf_counter)
        with live:
            live.start()
            for _ in range(repetitions):
                for length in rng.sample(_LENGTHS, len(_LENGTHS)):
                    live.slice_seconds = length
                    live.turn()
                    values = {(block.variant, block.again): block.value for block in live.blocks[-2:]}
                    numbers[length].append([values[seat] for seat in seats])
        if live.failed:
            raise SystemExit(f"failed: {live.failed}")
    return {length: np.array(values) for length, values in numbers.items()}


def figures(numbers: dict[float | None, np.ndarray]) -> dict[str, Any]:
    """Return the figures of each length."""
    whole = np.log(numbers[None])
    made = {}
    for length, values in numbers.items():
        logs = np.log(values)
        ratios, slower = logs[:, 1] - logs[:, 0], (logs - whole).mean(axis=1)
        count = len(ratios)
        scatter = float(ratios.std(ddof=1))
        low, high = (scatter * math.sqrt((count - 1) / stats.chi2.ppf(at, count - 1)) for at in (0.975, 0.025))
        half = float(stats.t.ppf(0.975, count - 1) * slower.std(ddof=1)) / math.sqrt(count)
        made["whole blocks" if length is None else f"slices of {1e3 * length:g} ms"] = {
            "scatter of the ratio": f"{scatter:.1%} ({low:.1%} to {high:.1%})",
            "ratio, median": math.exp(float(np.median(ratios))),
            "time beside whole blocks": f"{math.exp(slower.mean()):.3f} (± {half:.3f})",
        }
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("suite", choices=sorted(SUITES))
    parser.add_argument("workload")
    parser.add_argument("--variant", action="append", help="one of two variants (default: the first two)")
    parser.add_argument("--metric", help="default: the first one")
    parser.add_argument("--repetitions", type=int, default=20, help="turns with each length (default: %(default)s)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    numbers = record(SUITES[args.suite], args.workload, args.variant or [], args.metric, args.repetitions)
    made = figures(numbers)
    print(json.dumps(made, indent=2))
    if args.json:
        recorded = {"whole" if length is None else f"{length:g}": values.tolist() for length, values in numbers.items()}
        document = {"machine": machine.describe(), "figures": made, "numbers": recorded, "workload": args.workload}
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
