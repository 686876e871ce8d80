"""`penstock bench`: its arguments, and running suites with them."""

from __future__ import annotations

import argparse
import inspect
import math
import secrets
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.markup import escape

from penstock._doctor.jaxlib_faults import warn_of_known_faults
from penstock.bench import files, machine, report
from penstock.bench.document import as_document, as_json
from penstock.bench.harness import Harness
from penstock.bench.interrupt import ended_like_ctrl_c
from penstock.bench.model import Outcome, Run, SizeName, Workload
from penstock.bench.page import as_html
from penstock.bench.statistics import FEWEST_PAIRS, Comparison
from penstock.bench.suites import SUITES, load
from penstock.bench.summary import judge

_ALL = "all"
_ROUNDS = 10
_PRECISE_MINUTES = 60.0  # that --until-precise may take


@dataclass(frozen=True)
class _Budget:
    """When to stop.

    Attributes:
      rounds: that each workload gets, at least where `precision` is given.
      minutes: no round is begun that would probably end later.
      precision: go on until every interval is ± this share of its ratio.
    """

    rounds: int
    minutes: float
    precision: float | None


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
        if hasattr(module, "run"):
            module.add_arguments(suite)
            continue
        _add_common(suite, module.WORKLOADS, getattr(module, "ROUNDS", _ROUNDS), getattr(module, "MINUTES", None))
        if hasattr(module, "add_arguments"):
            module.add_arguments(suite)
        else:
            _add_only(suite, module.WORKLOADS)
    about = "All suites, in one report."
    everything = [workload for name in SUITES for workload in load(name).WORKLOADS]
    suite = suites.add_parser(_ALL, help=about, description=about, epilog=_epilog(_ALL, everything))
    _add_common(suite, everything, _ROUNDS, None)
    _add_only(suite, everything)
    suite.set_defaults(suite=_ALL)


def run(args: argparse.Namespace) -> int:
    """Run a suite, or all, and print the report; its files are there after each round.

    Returns:
      0, also where a target was missed or a library is not installed; 1 if a variant failed; 2 for arguments or files that
      cannot be used; 130 after Ctrl-C, with what was measured until then.
    """
    if args.suite != _ALL and hasattr(module := load(args.suite), "run"):
        return module.run(args)
    try:
        chosen = _chosen(args)
        files.check(_reports(args))
    except ValueError as error:
        print(f"penstock bench {args.suite}: error: {error}", file=sys.stderr)
        return 2
    warn_of_known_faults()
    console = Console()
    size: SizeName = "quick" if args.quick else "full"
    with ended_like_ctrl_c(), console.status("") as status:
        seed = secrets.randbits(32)
        with Harness(chosen, size, seed, args.variant, lambda text: status.update(escape(text))) as harness:
            result, interrupted = _measure(harness, args, _budget(args, size))
    report.print_report(console, result)
    if interrupted:
        return 130
    return 1 if any(outcome.failures for outcome in result.outcomes) else 0


def _measure(harness: Harness, args: argparse.Namespace, budget: _Budget) -> tuple[Run, bool]:
    described = machine.describe()

    def so_far(partial: str | None) -> Run:
        result = Run(args.suite, harness.size, harness.seed, described, harness.outcomes(), harness.seconds, partial)
        _write(result, args)
        return result

    done, stage, partial = 0, "before the first round", None
    late: set[str] = set()  # workloads that have missed a round
    so_far(f"not finished, interrupted {stage}")
    try:
        harness.check_agreement()
        while True:
            # What is on disk says that it is not all, until it is: whatever ends this process.
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
    """Names of the workloads that are to have another round."""
    workloads = [outcome.workload.name for outcome in run.outcomes]
    if done < budget.rounds or budget.precision is None:
        return workloads if done < budget.rounds else []
    claims = judge(run).claims
    return [
        name
        for name, made in zip(workloads, claims, strict=True)
        if any(_wider(claim.comparison, budget.precision) for claim in made if not claim.control)
    ]


def _wider(comparison: Comparison, precision: float) -> bool:
    low, high = comparison.low, comparison.high
    return low is None or high is None or math.sqrt(high / low) - 1 > precision


def _that_fit(run: Run, wanted: Sequence[str], seconds: float) -> list[str]:
    """Those of the workloads whose next round would probably end in time, the quick ones before the slow ones."""
    costs = {outcome.workload.name: _usual_round(outcome) for outcome in run.outcomes}
    fitting = []
    for name in sorted(wanted, key=costs.__getitem__):
        seconds -= costs[name]
        if seconds > 0:
            fitting.append(name)
    return fitting


def _miss_rounds(run: Run, names: Collection[str], budget: _Budget) -> bool:
    """Whether one of the workloads of these names has fewer rounds than it was to have."""
    return any(outcome.rounds < budget.rounds for outcome in run.outcomes if outcome.workload.name in names)


def _usual_round(outcome: Outcome) -> float:
    """Seconds; 0 before the first round, which tells of the next ones only while there is no other: it compiles for them."""
    rounds: dict[int, float] = {}
    for sample in outcome.samples:
        rounds[sample.round] = rounds.get(sample.round, 0.0) + sample.seconds
    later = [seconds for number, seconds in rounds.items() if number > 0]
    return median(later or rounds.values() or [0.0])


def _too_late(run: Run, budget: _Budget) -> str:
    """What to say of a run that its time limit ended."""
    if budget.precision is not None:
        return f"its {budget.minutes:g} minutes ended before every interval was within ±{budget.precision * 100:g} %"
    # Where nothing could run, nothing was cut.
    done = min((outcome.rounds for outcome in run.outcomes if outcome.rounds), default=0)
    return f"its {budget.minutes:g} minutes ended after {done} of {budget.rounds} rounds"


def _budget(args: argparse.Namespace, size: SizeName) -> _Budget:
    module = None if args.suite == _ALL else load(args.suite)
    usual = _PRECISE_MINUTES if args.until_precise else getattr(module, "MINUTES", math.inf)
    rounds = args.rounds or (1 if size == "quick" else getattr(module, "ROUNDS", _ROUNDS))
    if args.until_precise:
        rounds = max(args.rounds or 0, FEWEST_PAIRS)
    return _Budget(rounds, args.minutes or usual, args.until_precise)


def _chosen(args: argparse.Namespace) -> list[tuple[str, Workload]]:
    """The workloads to run, with their suites' modules.

    Raises:
      ValueError: a choice that makes no sense, or a variant that none of the workloads has.
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
    known = _variants(workload for _, workload in chosen)
    if unknown := [name for name in args.variant or () if name not in known]:
        raise ValueError(f"--variant {unknown[0]}: none of these workloads has it; choose from {', '.join(known)}")
    return chosen


def _reports(args: argparse.Namespace) -> dict[str, Path | None]:
    return {"--json": args.json, "--markdown": args.markdown, "--html": args.html}


def _write(result: Run, args: argparse.Namespace) -> None:
    """Each file whole, or as it was."""
    document = as_document(result)
    if args.json:
        files.replace(args.json, as_json(document))
    if args.markdown:
        files.replace(args.markdown, report.as_markdown(result))
    if args.html:
        files.replace(args.html, as_html(document))


def _add_common(suite: argparse.ArgumentParser, workloads: Sequence[Workload], rounds: int, minutes: float | None) -> None:
    limit = f" (default: {minutes:g})" if minutes else ""
    suite.add_argument("--quick", action="store_true", help="one round of small sizes: shows that all works, not how fast")
    suite.add_argument(
        "--rounds",
        type=_positive(int),
        metavar="N",
        help=f"how often each variant runs (default: {rounds}, or 1 with --quick); fewer than {FEWEST_PAIRS} prove nothing",
    )
    suite.add_argument(
        "--until-precise",
        type=_share,
        metavar="SHARE",
        help=f"go on until each 95 %% interval is within ± this share of its ratio, as 1%%; for {_PRECISE_MINUTES:g} minutes",
    )
    suite.add_argument("--minutes", type=_positive(float), metavar="N", help=f"begin no round that would end later{limit}")
    suite.add_argument(
        "--variant",
        action="append",
        metavar="VARIANT",
        help=f"run this one only, of {', '.join(_variants(workloads))}; may be given several times",
    )
    suite.add_argument("--json", type=Path, metavar="PATH", help="write all samples, how they were taken, and what they say")
    suite.add_argument("--markdown", type=Path, metavar="PATH", help="write the tables, for a pull request")
    suite.add_argument("--html", type=Path, metavar="PATH", help="write the report as one page, with plots and the data")


def _add_only(suite: argparse.ArgumentParser, workloads: Sequence[Workload]) -> None:
    suite.add_argument(
        "--only",
        action="append",
        choices=[workload.name for workload in workloads],
        metavar="WORKLOAD",
        help="run this workload; may be given several times",
    )


def _variants(workloads: Iterable[Workload]) -> list[str]:
    return list(dict.fromkeys(variant.name for workload in workloads for variant in workload.variants))


def _positive(kind: type[int] | type[float]):  # type: ignore[no-untyped-def]  # what argparse calls
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(0)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text}: needs {'an integer >= 1' if kind is int else 'a number > 0'}")
        return value

    return parse


def _share(text: str) -> float:
    try:
        percent = text.rstrip().removesuffix("%")
        value = float(percent) / 100 if percent != text.rstrip() else float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text}: needs a share such as 1% or 0.01, more than 0 and less than 1")
    return value


def _epilog(suite: str, workloads: Sequence[Workload]) -> str:
    width = max(len(workload.name) for workload in workloads)
    lines = [f"  {workload.name:{width}}  {workload.fill(workload.title, 'full')}" for workload in workloads]
    return "\n".join(["workloads:", *lines, "", "example:", f"  penstock bench {suite} --quick --html report.html"])
