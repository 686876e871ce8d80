"""Run `penstock bench`: choose workloads by the arguments, run their rounds, and write the files of the report."""

from __future__ import annotations

import argparse
import inspect
import math
import secrets
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.markup import escape

from penstock._atomic_write import replace
from penstock._doctor.jaxlib_faults import warn_of_known_faults
from penstock.bench import machine, report, writable
from penstock.bench.arguments import PRECISE_MINUTES, add_only, add_reports, add_timing, add_variant, variant_names
from penstock.bench.faults import command as faults
from penstock.bench.interrupt import signals_as_ctrl_c
from penstock.bench.json_report import as_document, as_json
from penstock.bench.model import SizeName, Workload
from penstock.bench.outcome import Outcome, Run
from penstock.bench.page import as_html
from penstock.bench.rounds import Harness
from penstock.bench.statistics import FEWEST_PAIRS, Comparison
from penstock.bench.suites import SUITES, load
from penstock.bench.verdict import judge

_ALL = "all"
_DEFAULT_ROUNDS = 10


@dataclass(frozen=True)
class _Budget:
    """The conditions under which measuring stops.

    Attributes:
      rounds: the number of rounds of each timed workload; the minimum if `precision` is given.
      minutes: the time limit. A round is not started if it would probably end later.
      precision: continue until every interval is at most ± this share of its ratio; None for a fixed number of rounds.
    """

    rounds: int
    minutes: float
    precision: float | None

    def rounds_of(self, workload: Workload) -> int:
        """Return the number of rounds of a workload. A scored one has the same numbers in each round, so it gets one."""
        return 1 if workload.scored else self.rounds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser of `penstock bench` a command for each suite, and `all`, with its arguments."""
    suites = parser.add_subparsers(title="suites", metavar="suite", required=True)
    for name in SUITES:
        module = load(name)
        about = inspect.getdoc(module)
        suite = suites.add_parser(
            name, help=(about or name).splitlines()[0], description=about, epilog=_epilog(name, module.WORKLOADS)
        )
        suite.set_defaults(suite=name)
        if all(workload.scored for workload in module.WORKLOADS):
            suite.set_defaults(rounds=None, until_precise=None, minutes=None, variant=None)
        else:
            add_timing(suite, getattr(module, "ROUNDS", _DEFAULT_ROUNDS), getattr(module, "MINUTES", None))
            add_variant(suite, module.WORKLOADS)
        add_reports(suite)
        if hasattr(module, "add_arguments"):
            module.add_arguments(suite)
        else:
            add_only(suite, [workload.name for workload in module.WORKLOADS])
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
    add_timing(suite, _DEFAULT_ROUNDS, None)
    add_variant(suite, everything)
    add_reports(suite)
    add_only(suite, [workload.name for workload in everything])
    suite.set_defaults(suite=_ALL)


def run(args: argparse.Namespace) -> int:
    """Run one suite or all suites, print the report, and write its files after each round.

    Returns:
      0, also where a target was missed or a library is not installed; 1 if a variant failed; 2 for arguments or files that
      cannot be used; 130 after Ctrl-C, where the report holds what was measured before.
    """
    try:
        chosen = _chosen(args)
        writable.check_writable(_reports(args))
    except ValueError as error:
        print(f"penstock bench {args.suite}: error: {error}", file=sys.stderr)
        return 2
    warn_of_known_faults()
    console = Console()
    with signals_as_ctrl_c(), console.status("") as status:
        result, interrupted = _measure(chosen, args, lambda text: status.update(escape(text)))
    report.print_report(console, result)
    if interrupted:
        return 130
    return 1 if any(outcome.failures for outcome in result.outcomes) else 0


def _measure(chosen: Sequence[tuple[str, Workload]], args: argparse.Namespace, say: Callable[[str], None]) -> tuple[Run, bool]:
    """Measure the workloads within the budget. Write the reports after each round and after each run of a scored workload.

    Returns:
      The run, and whether Ctrl-C ended it.
    """
    size: SizeName = "quick" if args.quick else "full"
    budget = _budget(args, size)
    done, stage, partial = 0, "before the first round", None
    late: set[str] = set()  # workloads that have missed a round

    def so_far(partial: str | None) -> Run:
        result = Run(args.suite, harness.size, harness.seed, described, harness.outcomes(), harness.seconds, partial)
        _write(result, args)
        return result

    def unfinished() -> None:
        so_far(f"not finished, interrupted {stage}")

    with Harness(chosen, size, secrets.randbits(32), args.variant, say, unfinished) as harness:
        described = machine.describe()
        unfinished()
        try:
            harness.check_agreement()
            while True:
                # Files say "not finished" until the run is: a killed process leaves files that say so.
                current = so_far(f"not finished, rounds done: {done}")
                wanted = _unfinished(current, done, budget)
                if not wanted:
                    partial = _too_late(current, budget) if _miss_rounds(current, late, budget) else None
                    break
                fitting = _that_fit(current, wanted, budget.minutes * 60 - harness.seconds)
                late.update(set(wanted) - set(fitting))
                if not fitting:
                    partial = _too_late(current, budget)
                    break
                stage = f"in round {done + 1}"
                harness.round(done, fitting)
                done += 1
            return so_far(partial), False
        except KeyboardInterrupt:
            return so_far(f"interrupted {stage}"), True


def _unfinished(run: Run, done: int, budget: _Budget) -> list[str]:
    """Return the names of the workloads that should have another round."""
    workloads = [outcome.workload for outcome in run.outcomes]
    if done < budget.rounds or budget.precision is None:
        return [workload.name for workload in workloads if done < budget.rounds_of(workload)]
    claims = judge(run).claims
    return [
        workload.name
        for workload, made in zip(workloads, claims, strict=True)
        if any(_wider(claim.comparison, budget.precision) for claim in made if not claim.control)
    ]


def _wider(comparison: Comparison, precision: float) -> bool:
    """Tell whether an interval is wider than ± this share of its ratio."""
    low, high = comparison.low, comparison.high
    return low is None or high is None or math.sqrt(high / low) - 1 > precision


def _that_fit(run: Run, wanted: Sequence[str], seconds: float) -> list[str]:
    """Return the workloads whose next round would probably end in time, the quick ones before the slow ones."""
    costs = {outcome.workload.name: _usual_round(outcome) for outcome in run.outcomes}
    # `sorted` is stable, so the first round keeps the given order: all estimates are 0 then.
    fitting = []
    for name in sorted(wanted, key=costs.__getitem__):
        seconds -= costs[name]
        if seconds > 0:
            fitting.append(name)
    return fitting


def _miss_rounds(run: Run, names: Collection[str], budget: _Budget) -> bool:
    """Tell whether one of the workloads of these names has fewer rounds than it should have."""
    outcomes = [outcome for outcome in run.outcomes if outcome.workload.name in names]
    return any(outcome.rounds < budget.rounds_of(outcome.workload) for outcome in outcomes)


def _usual_round(outcome: Outcome) -> float:
    """Estimate the seconds of a round; ignore the first, which compiles, once there is another. 0 before the first round."""
    rounds: dict[int, float] = {}
    for sample in outcome.samples:
        rounds[sample.round] = rounds.get(sample.round, 0.0) + sample.seconds
    later = [seconds for number, seconds in rounds.items() if number > 0]
    return median(later or rounds.values() or [0.0])


def _too_late(run: Run, budget: _Budget) -> str:
    """Word the reason of a run that the time limit ended early."""
    if budget.precision is not None:
        return f"its {budget.minutes:g} minutes ended before every interval was within ±{budget.precision * 100:g} %"
    # A workload without any variant that can run was not cut short.
    timed = [outcome for outcome in run.outcomes if not outcome.workload.scored]
    done = min((outcome.rounds for outcome in timed if outcome.rounds), default=0)
    return f"its {budget.minutes:g} minutes ended after {done} of {budget.rounds} rounds"


def _budget(args: argparse.Namespace, size: SizeName) -> _Budget:
    """Return the conditions that the arguments give; the suite's defaults for the others."""
    module = None if args.suite == _ALL else load(args.suite)
    usual = PRECISE_MINUTES if args.until_precise else getattr(module, "MINUTES", math.inf)
    rounds = args.rounds or (1 if size == "quick" else getattr(module, "ROUNDS", _DEFAULT_ROUNDS))
    if args.until_precise:
        rounds = max(args.rounds or 0, FEWEST_PAIRS)
    return _Budget(rounds, args.minutes or usual, args.until_precise)


def _chosen(args: argparse.Namespace) -> list[tuple[str, Workload]]:
    """Return the workloads to run, each after the name of its suite's module.

    Raises:
      ValueError: a choice is not valid, or none of the workloads has the variant.
    """
    chosen = []
    for suite in SUITES if args.suite == _ALL else [args.suite]:
        module = load(suite)
        if args.suite != _ALL and hasattr(module, "choose"):
            workloads = module.choose(args)
        else:
            all_of_it = module.QUICK if args.quick and not args.only and hasattr(module, "QUICK") else module.WORKLOADS
            workloads = [workload for workload in all_of_it if not args.only or workload.name in args.only]
        chosen += [(SUITES[suite], workload) for workload in workloads]
    names = variant_names(workload for _, workload in chosen)
    if unknown := [name for name in args.variant or () if name not in names]:
        raise ValueError(f"--variant {unknown[0]}: none of these workloads has it; choose from {', '.join(names)}")
    return chosen


def _reports(args: argparse.Namespace) -> dict[str, Path | None]:
    return {"--json": args.json, "--markdown": args.markdown, "--html": args.html}


def _write(result: Run, args: argparse.Namespace) -> None:
    """Write the reports that the arguments ask for."""
    document = as_document(result)
    if args.json:
        replace(args.json, as_json(document))
    if args.markdown:
        replace(args.markdown, report.as_markdown(result))
    if args.html:
        replace(args.html, as_html(document))


def _epilog(suite: str, workloads: Sequence[Workload]) -> str:
    """Return the last part of a suite's help: its workloads and an example."""
    width = max(len(workload.name) for workload in workloads)
    lines = [f"  {workload.name:{width}}  {workload.fill(workload.title, 'full')}" for workload in workloads]
    return "\n".join(["workloads:", *lines, "", "example:", f"  penstock bench {suite} --quick --html report.html"])
