"""Measure workloads within a budget, print the report, and write its files: for suites and for comparisons of users."""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from penstock._atomic_write import replace
from penstock._jaxlib_faults import warn_of_known_faults
from penstock_bench import machine, report, writable
from penstock_bench.budget import Budget, miss_rounds, that_fit_in_time, too_late, turns, unfinished
from penstock_bench.interrupt import signals_as_ctrl_c
from penstock_bench.json_report import as_document, as_json
from penstock_bench.model import SizeName, Workload
from penstock_bench.outcome import Run
from penstock_bench.page import as_html
from penstock_bench.rounds import Harness
from penstock_bench.suites import SUITES
from penstock_bench.verdict import judge
from penstock_bench.wording import of_command

_EXTRA = '. In a clone of the repository: pip install -e "bench[suites]"'
_EXTRAS = {**dict.fromkeys([*SUITES, "all"], _EXTRA), "shard": _EXTRA + ', and "bench[outside]" for --suite outside'}


@dataclass(frozen=True)
class ReportFiles:
    """The files of a report; None for each that is not requested."""

    json: Path | None = None
    markdown: Path | None = None
    html: Path | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> ReportFiles:
        """Return the files that the arguments name (`arguments.add_reports`).

        Raises:
          ValueError: one of them cannot be written.
        """
        writable.check_writable({"--json": args.json, "--markdown": args.markdown, "--html": args.html})
        return cls(args.json, args.markdown, args.html)

    def write(self, run: Run) -> None:
        """Write the files, each whole or not at all."""
        document = as_document(run)
        if self.json:
            replace(self.json, as_json(document))
        if self.markdown:
            replace(self.markdown, report.as_markdown(run))
        if self.html:
            replace(self.html, as_html(document))


def measure_and_report(
    suite: str,
    chosen: Sequence[tuple[str, Workload]],
    size: SizeName,
    budget: Budget,
    variants: Collection[str] | None,
    files: ReportFiles,
    answers: bool = False,
) -> int:
    """Measure workloads as `measure` does, and print the report.

    Args:
      answers: whether a report in which nothing could be judged is a failure.

    Returns:
      0, also where a target was missed or some variants lack a library; 1 if a variant failed, nothing was measured, or an answer
      is missing. 130 after Ctrl-C; the report then has the measurements so far.
    """
    warn_of_known_faults()
    console = Console()
    with signals_as_ctrl_c(), console.status("") as status:
        result, interrupted = measure(suite, chosen, size, budget, variants, files, lambda text: status.update(escape(text)))
    report.print_report(console, result)
    if interrupted:
        return 130
    nothing = not any(outcome.samples for outcome in result.outcomes)
    if nothing and (reason := why_nothing(result)):
        print(f"penstock {of_command(suite)}: error: {reason}", file=sys.stderr)
    unanswered = answers and judge(result).trusted is not True
    return 1 if nothing or unanswered or any(outcome.failures for outcome in result.outcomes) else 0


def why_nothing(run: Run) -> str:
    """Return why no variant of a run could run, and what to install; "" if some could."""
    missing = [missing for outcome in run.outcomes for missing in outcome.missing]
    if not missing or any(outcome.failures for outcome in run.outcomes) or run.partial:
        return ""
    reasons = dict.fromkeys(f"needs {each.command}" if each.command else each.reason for each in missing)
    install = _EXTRAS.get(run.suite, "") if any(each.command for each in missing) else ""
    return f"nothing was measured: {'; '.join(reasons)}{install}"


def measure(
    suite: str,
    chosen: Sequence[tuple[str, Workload]],
    size: SizeName,
    budget: Budget,
    variants: Collection[str] | None = None,
    files: ReportFiles | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Run, bool]:
    """Measure workloads within a budget. Write the files after each round and after each run of a scored workload.

    Args:
      suite: what the report calls itself.
      chosen: pairs (source of the workload, as for `suites.find`; the workload).
      size: the name of the size to run.
      budget: when to stop.
      variants: names of the variants to run; None for all.
      files: the files of the report; None for none.
      say: is called with the name of the next run.

    Returns:
      The run, and whether Ctrl-C ended it.
    """
    done, stage, partial = 0, "before the first round", None
    late: set[str] = set()  # workloads that have missed a round

    def so_far(partial: str | None) -> Run:
        result = Run(suite, harness.size, harness.seed, described, harness.outcomes(), harness.seconds, partial)
        if files is not None:
            files.write(result)
        return result

    def interrupted() -> None:
        so_far(f"not finished, interrupted {stage}")

    with Harness(chosen, size, secrets.randbits(32), variants, say, interrupted) as harness:
        described = machine.describe()
        interrupted()
        try:
            harness.check_agreement()
            while True:
                # Files say "not finished" until the run is: a killed process leaves files that say so.
                current = so_far(f"not finished, rounds done: {done}")
                wanted = unfinished(current, done, budget)
                if not wanted:
                    partial = too_late(current, budget) if miss_rounds(current, late, budget) else None
                    break
                fitting = that_fit_in_time(current, wanted, budget.minutes * 60 - harness.seconds)
                late.update(set(wanted) - set(fitting))
                if not fitting:
                    partial = too_late(current, budget) if miss_rounds(current, late, budget) else None
                    break
                stage = f"in round {done + 1}"
                left = budget.minutes * 60 - harness.seconds
                share = left / (len(fitting) * budget.rounds)
                harness.round(done, fitting, turns(current, fitting, done, budget, left), budget.minutes * 60, share)
                done += 1
            return so_far(partial), False
        except KeyboardInterrupt:
            return so_far(f"interrupted {stage}"), True
