"""`penstock bench`: its arguments, and running a suite with them."""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path

from rich.console import Console

from penstock.bench import machine, report
from penstock.bench.harness import Harness
from penstock.bench.model import Outcome, Run
from penstock.bench.suites import SUITES, workloads

_ROUNDS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser of `penstock bench` its arguments."""
    parser.add_argument("suite", choices=sorted(SUITES), help="what to measure")
    parser.add_argument("--quick", action="store_true", help="one round of small sizes: shows that all works, not how fast")
    parser.add_argument("--rounds", type=_rounds, help=f"how often each variant runs (default {_ROUNDS}, or 1 with --quick)")
    parser.add_argument("--only", action="append", metavar="WORKLOAD", help="run this workload; may be given several times")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all samples and how they were taken")
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="write the tables")


def run(args: argparse.Namespace) -> int:
    """Run the suite and print its report.

    Returns:
      0, also where a target was missed or a library is not installed; 1 if a variant failed; 2 for an unknown workload.
    """
    console = Console()
    known = workloads(SUITES[args.suite])
    chosen = list(dict.fromkeys(args.only or known))
    if unknown := [name for name in chosen if name not in known]:
        console.print(f"no workload {unknown[0]!r} in suite {args.suite!r}: choose from {', '.join(known)}", markup=False)
        return 2
    rounds = args.rounds or (1 if args.quick else _ROUNDS)
    seed, machine_now = secrets.randbits(32), machine.describe()
    outcomes: list[Outcome] = []
    with console.status("") as status:
        harness = Harness(SUITES[args.suite], "quick" if args.quick else "full", rounds, seed, say=status.update)
        for name in chosen:
            outcomes.append(harness.run(known[name]))
            report.print_outcome(console, outcomes[-1], harness.size)
    result = Run(args.suite, harness.size, rounds, seed, machine_now, tuple(outcomes))
    report.print_closing(console, result)
    if args.json:
        args.json.write_text(report.as_json(result), encoding="utf-8")
    if args.markdown:
        args.markdown.write_text(report.as_markdown(result), encoding="utf-8")
    return 1 if any(outcome.failures for outcome in outcomes) else 0


def _rounds(text: str) -> int:
    rounds = int(text)  # argparse reports a ValueError by itself
    if rounds < 1:
        raise argparse.ArgumentTypeError(f"{text}: needs an integer >= 1")
    return rounds
