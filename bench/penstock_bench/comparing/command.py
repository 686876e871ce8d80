"""The command `penstock compare`: which of two functions or commands is faster, and how certain that is."""

from __future__ import annotations

import argparse
import math
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock_bench.arguments import PRECISE_MINUTES, add_budget, add_reports
from penstock_bench.comparing.check import check_functions
from penstock_bench.comparing.specification import Specification, kind_of, names_of
from penstock_bench.comparing.workload import workload_of

if TYPE_CHECKING:
    from penstock_bench.budget import Budget

DESCRIPTION = """\
Compare functions, or whole commands, and say which is faster, with an interval and the smallest difference that could have been
shown. The first one is what the others are divided by; it runs a second time as the A/A control.

Functions are called in warm processes that take turns, in several rounds of fresh processes. Their results are compared first,
and results of JAX are waited for. Commands run from start to end, one after the other."""
EPILOG = """\
examples:
  penstock compare train.py:step_a train.py:step_b --with train.py:make_inputs
  penstock compare 'python a.py' 'python b.py' --rounds 10 --html report.html

make_inputs returns a tuple of arguments, or the only argument. Exit status: 0 with an answer, also "no difference shown"; 1
without one, because one of them failed or computes something else, the rounds were too few, or one differed from itself; 2 for
arguments that cannot be used."""
_MINUTES = 0.9  # for functions; with the start of the command, the answer comes within a minute
_ROUNDS = 10  # for commands


def add_arguments(parser: argparse.ArgumentParser, _argv: Sequence[str] = ()) -> None:
    """Add the options of `penstock compare`."""
    parser.add_argument("variants", nargs="+", metavar="A B", help="FILE.py:FUNCTION, or a command in quotes; two or more")
    parser.add_argument("--with", dest="inputs", default="", metavar="FILE.py:FUNCTION", help="makes the functions' arguments")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-3,
        metavar="X",
        help="largest relative difference of the functions' results (default: 0.001)",
    )
    parser.add_argument("--any-output", action="store_true", help="do not compare results: the functions do different things")
    parser.add_argument(
        "--block", type=float, default=0.3, metavar="SECONDS", help="length of a turn of a function (default: 0.3)"
    )
    add_budget(
        parser,
        rounds=f"how often each is started (default: as often as fits for functions, {_ROUNDS} for commands)",
        minutes=f"begin no round that would end later (default: {_MINUTES:g} for functions, none for commands)",
    )
    add_reports(parser)


def run(args: argparse.Namespace) -> int:
    """Compare, print the report, and write its files.

    Returns:
      The exit status, as the help text says; 130 after Ctrl-C.
    """
    from penstock_bench.measurement import ReportFiles, measure_and_report
    from penstock_bench.suites import COMPARISON

    try:
        specification = specify(args)
        files = ReportFiles.of(args)
    except ValueError as error:
        print(f"penstock compare: error: {error}", file=sys.stderr)
        return 2
    chosen = [(f"{COMPARISON}{specification.as_text()}", workload_of(specification))]
    return measure_and_report("compare", chosen, "full", _budget(args, specification), None, files, answers=True)


def specify(args: argparse.Namespace) -> Specification:
    """Return what the arguments ask to compare, after a look at it.

    Raises:
      ValueError: it cannot be compared.
    """
    if len(args.variants) < 2:
        raise ValueError(f"{args.variants[0]} alone is no comparison: name two, which may be the same")
    if not args.block > 0 or not math.isfinite(args.block):
        raise ValueError(f"--block {args.block}: needs seconds > 0")
    if not args.tolerance >= 0:
        raise ValueError(f"--tolerance {args.tolerance}: needs a number >= 0")
    kind = kind_of(args.variants)
    if kind == "commands":
        if args.inputs:
            raise ValueError("--with is for functions, and these are commands")
        for command in args.variants:
            check_command(command)
    else:
        check_functions([*args.variants, *([args.inputs] if args.inputs else [])])
    absolute = [_absolute(text) if kind == "functions" else text for text in args.variants]
    names = dict(zip(names_of(args.variants), absolute, strict=True))
    tolerance = None if args.any_output else args.tolerance
    return Specification(kind, names, _absolute(args.inputs) if args.inputs else "", tolerance, args.block)


def check_command(command: str) -> None:
    """Check that a command can be started.

    Raises:
      ValueError: it cannot.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"{command!r} cannot be read as a command: {error}") from None
    if not words or shutil.which(words[0]) is None:
        raise ValueError(f"{command!r}: {words[0] if words else 'nothing'!r} is not a program: not found, or not executable")


def _absolute(reference: str) -> str:
    file, _, name = reference.rpartition(":")
    return f"{Path(file).resolve()}:{name}"


def _budget(args: argparse.Namespace, specification: Specification) -> Budget:
    from penstock_bench.budget import Budget
    from penstock_bench.levels import FEWEST_ROUNDS
    from penstock_bench.statistics import FEWEST_PAIRS

    if specification.kind == "commands":
        rounds = max(args.rounds or 0, FEWEST_PAIRS) if args.until_precise else args.rounds or _ROUNDS
        return Budget(rounds, args.minutes or (PRECISE_MINUTES if args.until_precise else math.inf), args.until_precise)
    if args.until_precise:
        return Budget(max(args.rounds or 0, FEWEST_ROUNDS), args.minutes or PRECISE_MINUTES, args.until_precise)
    fills = args.rounds is None
    minutes = args.minutes or (_MINUTES if fills else math.inf)
    return Budget(args.rounds or FEWEST_ROUNDS, minutes, None, fills)
