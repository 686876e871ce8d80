"""Test the statistics on this machine, with reports about real processes whose true difference is known.

    python benchmarks/trust.py --reports 200 --json benchmarks/results/trust-cpu.json

Each report has 10 rounds of three runs: a variant, the same once more as the A/A control, and one that is the same too, or
in which every step takes 2 % longer. A run is a fresh process that
times 40 steps, of hashing and of Python, of about a millisecond each.
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import time
from pathlib import Path

from scipy import stats

from penstock.bench import machine
from penstock.bench.model import Measurement, Metric, Variant, Workload
from penstock.bench.outcome import Outcome, Run, Sample
from penstock.bench.rounds import round_order
from penstock.bench.statistics import FEWEST_PAIRS, typical
from penstock.bench.verdict import judge

# Work of a fixed size, not a sleep, because the load of the machine does not change a sleep. The delay is a share of the step.
_WORKER = """
import hashlib, sys, time
data = bytes(range(256)) * 2048
def step():
    hashlib.sha256(data).digest()
    sum(range(20_000))
for _ in range(4):
    step()
steps, delay = [], float(sys.argv[1])
for _ in range(40):
    begin = time.perf_counter()
    step()
    end = time.perf_counter()
    until = end + delay * (end - begin)
    while time.perf_counter() < until:
        pass
    steps.append((time.perf_counter() - begin) * 1e3)
print(*steps)
"""

_NAMES = ("plain", "other")


def report(delay: float, rounds: int) -> Run:
    """Return a report in which "other" is slower than "plain" by the share `delay`."""
    seed, samples = secrets.randbits(32), []
    for number in range(rounds):
        order = round_order([*((name, False) for name in _NAMES), (_NAMES[0], True)], seed, "trust", number)
        for position, (name, again) in enumerate(order):
            steps = _steps(delay if name == "other" else 0.0)
            samples.append(Sample(name, again, number, position, 0.0, 0.0, None, {"step": typical(steps)}, {}, {}))
    variants = tuple(Variant(name, lambda size: Measurement()) for name in _NAMES)
    workload = Workload("trust", "steps", (Metric("step", "ms", "lower"),), "plain", variants, {})
    return Run("trust", "full", seed, {}, (Outcome(workload, "full", "plain", tuple(samples)),), 0.0)


def _steps(delay: float) -> list[float]:
    done = subprocess.run([sys.executable, "-I", "-S", "-c", _WORKER, str(delay)], capture_output=True, text=True, check=True)
    return [float(step) for step in done.stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reports", type=int, default=200, help="of each kind (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="of each report (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures")
    args = parser.parse_args()
    if args.rounds < FEWEST_PAIRS or args.reports < 1:
        parser.error(f"needs at least {FEWEST_PAIRS} rounds, as fewer are not judged, and 1 report")
    kinds, begun = {"A/A": 0.0, "2 % planted": 0.02}, time.perf_counter()
    found: dict[str, list[dict[str, object]]] = {name: [] for name in kinds}
    for _ in range(args.reports):
        for name, delay in kinds.items():
            judgement = judge(report(delay, args.rounds))
            (control, claim) = judgement.claims[0]
            found[name].append(
                {
                    "trusted": judgement.trusted,
                    "call": claim.call,
                    "ratio": claim.comparison.ratio,
                    "low": claim.comparison.low,
                    "high": claim.comparison.high,
                    "control": control.comparison.ratio,
                    "detectable": claim.detectable,
                }
            )
    figures = {name: _figures(reports, 1 + kinds[name]) for name, reports in found.items()}
    print(json.dumps(figures, indent=2))
    if args.json:
        everything = {
            "machine": machine.describe(),
            "rounds": args.rounds,
            "seconds": time.perf_counter() - begun,
            "figures": figures,
            "reports": found,
        }
        args.json.write_text(json.dumps(everything, indent=1) + "\n")


def _figures(reports: list[dict[str, object]], truth: float) -> dict[str, object]:
    different = sum(one["call"] == "different" for one in reports)
    covered = sum(one["low"] <= truth <= one["high"] for one in reports)
    ratios = [float(one["ratio"]) for one in reports]
    return {
        "reports": len(reports),
        "called different": _rate(different, len(reports)),
        "control failed": _rate(sum(one["trusted"] is False for one in reports), len(reports)),
        "interval holds the truth": _rate(covered, len(reports)),
        "median ratio": float(stats.scoreatpercentile(ratios, 50)),
        "median smallest difference that would have been shown": float(
            stats.scoreatpercentile([one["detectable"] for one in reports], 50)
        ),
    }


def _rate(count: int, of: int) -> str:
    interval = stats.binomtest(count, of).proportion_ci(0.95)
    return f"{count} of {of} (95 %: {interval.low:.1%} to {interval.high:.1%})"


if __name__ == "__main__":
    main()
