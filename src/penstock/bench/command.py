"""`penstock bench`: its arguments, and running a suite with them."""

from __future__ import annotations

import argparse
import inspect
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from penstock.bench import machine, report
from penstock.bench.harness import Harness
from penstock.bench.model import Outcome, Run, Workload
from penstock.bench.suites import SUITES, workloads

_ROUNDS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser of `penstock bench` a command for each suite, with its arguments."""
    suites = parser.add_subparsers(title="suites", metavar="suite", required=True)
    for name, module in SUITES.items():
        known = workloads(module)
        about = inspect.getdoc(sys.modules[module])
        suite = suites.add_parser(name, help=about, description=about, epilog=_epilog(name, known))
        suite.add_argument("--quick", action="store_true", help="one round of small sizes: shows that all works, not how fast")
        suite.add_argument(
            "--rounds", type=_rounds, metavar="N", help=f"how often each variant runs (default: {_ROUNDS}, or 1 with --quick)"
        )
        suite.add_argument(
            "--only",
            action="append",
            choices=tuple(known),
            metavar="WORKLOAD",
            help="run this workload, of those below; may be given several times",
        )
        suite.add_argument("--json", type=Path, metavar="PATH", help="write all samples and how they were taken")
        suite.add_argument("--markdown", type=Path, metavar="PATH", help="write the tables")
        suite.set_defaults(suite=name)


def run(args: argparse.Namespace) -> int:
    """Run the suite and print its report; the files have it up to the last workload that is done.

    Returns:
      0, also where a target was missed or a library is not installed; 1 if a variant failed; 2 for a file that cannot be written.
    """
    if error := _unwritable(args):
        print(f"penstock bench {args.suite}: error: {error}", file=sys.stderr)
        return 2
    console = Console()
    known = workloads(SUITES[args.suite])
    rounds = args.rounds or (1 if args.quick else _ROUNDS)
    seed, machine_now = secrets.randbits(32), machine.describe()
    outcomes: list[Outcome] = []
    with console.status("") as status:
        harness = Harness(SUITES[args.suite], "quick" if args.quick else "full", rounds, seed, say=status.update)
        for name in dict.fromkeys(args.only or known):
            outcomes.append(harness.run(known[name]))
            report.print_outcome(console, outcomes[-1])
            result = Run(args.suite, harness.size, rounds, seed, machine_now, tuple(outcomes))
            _write(result, args)
    report.print_closing(console, result)
    return 1 if any(outcome.failures for outcome in outcomes) else 0


def _write(result: Run, args: argparse.Namespace) -> None:
    if args.json:
        args.json.write_text(report.as_json(result), encoding="utf-8")
    if args.markdown:
        args.markdown.write_text(report.as_markdown(result), encoding="utf-8")


def _unwritable(args: argparse.Namespace) -> str | None:
    """What is wrong with a file that the report is to be written to, while nothing was measured that would be lost."""
    for flag, path in (("--json", args.json), ("--markdown", args.markdown)):
        try:
            if path:
                path.open("a").close()  # leaves an earlier report as it is
        except OSError as error:
            return f"{flag} {path}: cannot be written ({error.strerror}); name another file"
    return None


def _rounds(text: str) -> int:
    try:
        rounds = int(text)
    except ValueError:
        rounds = 0
    if rounds < 1:
        raise argparse.ArgumentTypeError(f"{text}: needs an integer >= 1")
    return rounds


def _epilog(suite: str, known: Mapping[str, Workload]) -> str:
    width = max(map(len, known))
    lines = [f"  {name:{width}}  {workload.fill(workload.title, 'full')}" for name, workload in known.items()]
    return "\n".join(["workloads:", *lines, "", "example:", f"  penstock bench {suite} --quick --only {next(iter(known))}"])
