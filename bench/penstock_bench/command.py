"""Run `penstock bench`: choose workloads by the arguments, run their rounds, and write the files of the report."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import math
import sys
from collections.abc import Sequence
from types import ModuleType

from penstock_bench.arguments import PRECISE_MINUTES, add_only, add_quick, add_reports, add_timing, add_variant, variant_names
from penstock_bench.budget import Budget
from penstock_bench.faults import command as faults
from penstock_bench.levels import FEWEST_ROUNDS
from penstock_bench.measurement import ReportFiles, measure_and_report
from penstock_bench.model import Workload
from penstock_bench.statistics import FEWEST_PAIRS
from penstock_bench.suites import SUITES, is_file, load, source_of

DESCRIPTION = """\
Measure input pipelines and training steps against each other, each in processes of its own, and print how
they compare and how certain that is. Some suites need, in a clone of the repository: pip install -e "bench[suites]".
"""
EPILOG = "example:\n  penstock bench feed --quick"
_ALL = "all"
_DEFAULT_ROUNDS = 10


def add_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] = ()) -> None:
    """Give the parser of `penstock bench` a command for each suite, and `all`, with its arguments.

    Args:
      parser: the parser of the command.
      argv: the arguments that it will parse. If the first one is the path of a user's suite, that is the only command.

    Raises:
      SystemExit: 2, because the file is not a suite.
    """
    file = next((word for word in argv[:1] if is_file(word)), None)
    suites = parser.add_subparsers(title="suites", metavar="suite", required=True)
    for name in [file] if file else SUITES:
        try:
            module = _load(name)
        except ValueError as error:
            parser.exit(2, f"{parser.prog}: error: {error}\n")
        about = inspect.getdoc(module)
        suite = suites.add_parser(
            name, help=(about or name).splitlines()[0], description=about, epilog=_epilog(name, module.WORKLOADS)
        )
        suite.set_defaults(suite=name)
        if all(workload.scored for workload in module.WORKLOADS):
            suite.set_defaults(rounds=None, until_precise=None, minutes=None, variant=None)
            if not hasattr(module, "add_arguments"):
                add_quick(suite)
        else:
            rounds, minutes = getattr(module, "ROUNDS", _DEFAULT_ROUNDS), getattr(module, "MINUTES", None)
            add_timing(suite, rounds, minutes, _fewest(module.WORKLOADS))
            add_variant(suite, module.WORKLOADS)
        add_reports(suite)
        if hasattr(module, "add_arguments"):
            module.add_arguments(suite)
        else:
            add_only(suite, [workload.name for workload in module.WORKLOADS])
    if file:
        return
    breaking = suites.add_parser(
        "faults",
        help="Kill, stop and damage a training, and see that nothing is lost.",
        description=faults.DESCRIPTION,
        epilog=faults.EPILOG,
    )
    faults.add_arguments(breaking)
    breaking.set_defaults(run=faults.run)
    about = "All suites, in one report."
    everything = [workload for name in SUITES for workload in load(name).WORKLOADS]
    suite = suites.add_parser(_ALL, help=about, description=about, epilog=_epilog(_ALL, everything))
    add_timing(suite, _DEFAULT_ROUNDS, None, FEWEST_PAIRS)
    add_variant(suite, everything)
    add_reports(suite)
    add_only(suite, [workload.name for workload in everything])
    suite.set_defaults(suite=_ALL)


def run(args: argparse.Namespace) -> int:
    """Run one suite or all suites, print the report, and write its files after each round.

    Returns:
      0, also where a target was missed or some variants lack a library; 1 if a variant failed or nothing was measured; 2 for
      arguments or files that cannot be used. 130 after Ctrl-C; the report then has the measurements so far.
    """
    try:
        chosen = _chosen(args)
        files = ReportFiles.of(args)
    except ValueError as error:
        print(f"penstock bench {args.suite}: error: {error}", file=sys.stderr)
        return 2
    return measure_and_report(args.suite, chosen, "quick" if args.quick else "full", _budget(args), args.variant, files)


def _fewest(workloads: Sequence[Workload]) -> int:
    """Return the number of rounds below which nothing is judged, in any of the workloads."""
    return max(FEWEST_ROUNDS if workload.live else FEWEST_PAIRS for workload in workloads if not workload.scored)


def _load(suite: str) -> ModuleType:
    """Import the module of a suite.

    Raises:
      ValueError: it is a file that cannot be imported, or has no workloads.
    """
    if not is_file(suite):
        return load(suite)
    try:
        module = load(suite)
    except Exception as error:
        raise ValueError(f"{suite} cannot be imported: {type(error).__name__}: {error}") from error
    workloads = getattr(module, "WORKLOADS", None)
    if not workloads or not all(isinstance(workload, Workload) for workload in workloads):
        raise ValueError(f"{suite} has no WORKLOADS, a list of workloads; docs/own-benchmarks.md has an example")
    if odd := [workload.name for workload in workloads if not all(map(dataclasses.is_dataclass, workload.sizes.values()))]:
        raise ValueError(f"{suite}: the sizes of {odd[0]} are not dataclasses, which reports show field by field")
    return module


def _budget(args: argparse.Namespace) -> Budget:
    """Return the conditions that the arguments give; the suite's defaults for the others."""
    module = None if args.suite == _ALL else _load(args.suite)
    usual = PRECISE_MINUTES if args.until_precise else getattr(module, "MINUTES", math.inf)
    rounds = args.rounds or (1 if args.quick else getattr(module, "ROUNDS", _DEFAULT_ROUNDS))
    if args.until_precise:
        rounds = max(args.rounds or 0, FEWEST_PAIRS)
    return Budget(rounds, args.minutes or usual, args.until_precise)


def _chosen(args: argparse.Namespace) -> list[tuple[str, Workload]]:
    """Return the workloads to run, each after the name of its suite's module.

    Raises:
      ValueError: a choice is not valid, or none of the workloads has the variant.
    """
    chosen = []
    for suite in SUITES if args.suite == _ALL else [args.suite]:
        module = _load(suite)
        if args.suite != _ALL and hasattr(module, "choose"):
            workloads = module.choose(args)
        else:
            all_of_it = module.QUICK if args.quick and not args.only and hasattr(module, "QUICK") else module.WORKLOADS
            workloads = [workload for workload in all_of_it if not args.only or workload.name in args.only]
        chosen += [(source_of(suite), workload) for workload in workloads]
    names = variant_names(workload for _, workload in chosen)
    if unknown := [name for name in args.variant or () if name not in names]:
        raise ValueError(f"--variant {unknown[0]}: none of these workloads has it; choose from {', '.join(names)}")
    return chosen


def _epilog(suite: str, workloads: Sequence[Workload]) -> str:
    """Return the last part of a suite's help: its workloads and an example."""
    width = max(len(workload.name) for workload in workloads)
    lines = [f"  {workload.name:{width}}  {workload.fill(workload.title, 'full')}" for workload in workloads]
    return "\n".join(["workloads:", *lines, "", "example:", f"  penstock bench {suite} --quick --html report.html"])
