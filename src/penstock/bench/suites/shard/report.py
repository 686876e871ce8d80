"""What was found, as tables on the terminal, as Markdown and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.bench.suites.shard.case import Attempt, Case
from penstock.bench.suites.shard.judgement import Cell, Verdict, cells_of, judge
from penstock.shard.text import seconds_of, size_of

FORMAT = 1
_METHOD = (
    "Scores are of the compiled program (XLA:CPU's partitioner, 8 virtual devices), per device. Memory: arguments + temporaries "
    "+ outputs − aliased. Time: FLOPs at the peak of the hardware and then the bytes of each collective over its link, loops "
    "multiplied; nothing overlaps. The ratio is to the fastest baseline that keeps the limit: the hardware's memory (loose), or "
    "half of what replicated data parallel needs."
)
_COLUMNS = (
    *("model", "mesh", "limit", "time", "memory", "of limit"),
    *("best baseline", "time", "memory", "ratio", "planned in", "arguments", "peak", "bytes sent"),
)
_NARROW = ("", "time", "memory", "best by hand", "time", "ratio", "planned in")  # what 80 columns hold
_MOST_MISSES = 8  # of a target, on the terminal


@dataclass(frozen=True)
class Report:
    """A run.

    Attributes:
      hardware: whose speed counts.
      machine: that compiled, as `penstock.bench.machine.describe` says.
      seconds: that it took.
      partial: why it ended before it was done; None where it did not.
    """

    hardware: str
    cases: tuple[Case, ...]
    machine: Mapping[str, Any]
    seconds: float
    partial: str | None


def as_json(report: Report) -> str:
    """All scores, and what they say; numbers that are not finite are null."""
    cells = [cell for case in report.cases for cell in cells_of(case)]
    document = {
        "format": FORMAT,
        "suite": "shard",
        "hardware": report.hardware,
        "partial": report.partial,
        "seconds": report.seconds,
        "machine": dict(report.machine),
        "method": _METHOD,
        "targets": [asdict(verdict) for verdict in judge(report.cases)],
        "cells": [_cell_json(cell) for cell in cells],
        "cases": [asdict(case) for case in report.cases],
    }
    return json.dumps(_finite(document), indent=1, allow_nan=False) + "\n"


def _cell_json(cell: Cell) -> dict[str, Any]:
    return {
        "model": cell.case.model,
        "mesh": cell.case.mesh,
        "limit": cell.plan.limit,
        "best": cell.best and cell.best.name,
        "ratio": cell.ratio,
        "fits": cell.fits,
        "won": cell.won,
        "memory_error": cell.memory_error,
        "wire_error": cell.wire_error,
        "arguments_error": cell.arguments_error,
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_report(console: Console, report: Report) -> None:
    """The table of all cells, and the targets."""
    if report.partial:
        console.print(f"PARTIAL: {report.partial}.", style="bold red", markup=False, highlight=False)
    table = Table(title=f"plans for {report.hardware}, and the best layouts by hand", title_justify="left", box=SIMPLE_HEAD)
    for place, column in enumerate(_NARROW):
        table.add_column(column, justify="right" if column not in ("", "best by hand") else "left", no_wrap=place == 0)
    for case in report.cases:
        for cell in cells_of(case):
            table.add_row(*map(escape, _narrow_row(cell)), style=None if cell.won else "red")
    console.print(table)
    for line in _asides(report.cases):
        console.print(line, style="yellow", markup=False, highlight=False)
    for verdict in judge(report.cases):
        style = {True: "green", False: "red", None: "yellow"}[verdict.met]
        console.print(_sentence(verdict), style=style, markup=False, highlight=False)
        for miss in verdict.misses[:_MOST_MISSES] if verdict.met is False else ():
            console.print(f"    {miss}", style="dim", markup=False, highlight=False)
        if verdict.met is False and len(verdict.misses) > _MOST_MISSES:
            console.print(f"    and {len(verdict.misses) - _MOST_MISSES} more", style="dim")
    for line in (_METHOD, _provenance(report)):
        console.print(line, style="dim", markup=False, highlight=False)


def as_markdown(report: Report) -> str:
    """The same, and every baseline, and what each plan exchanges."""
    lines = ["# penstock bench shard", ""]
    if report.partial:
        lines += [f"**PARTIAL: {report.partial}.**", ""]
    for verdict in judge(report.cases):
        lines += [f"- {_sentence(verdict)}", *(f"  - {miss}" for miss in verdict.misses)]
    cells = [cell for case in report.cases for cell in cells_of(case)]
    lines += ["", f"## Plans for {report.hardware}", "", *_table(_COLUMNS, [_row(cell) for cell in cells]), ""]
    lines += [f"- {line}" for line in _asides(report.cases)]
    lines += ["", "## Layouts by hand", "", "Time and memory of a device.", "", *_baselines(report.cases), ""]
    lines += ["## Collectives of the plans", ""]
    lines += [f"- {cell.name}: {', '.join(cell.plan.score.collectives) or 'none'}" for cell in cells if cell.plan.score]
    return "\n".join([*lines, "", _METHOD, "", _provenance(report), ""])


def _row(cell: Cell) -> list[str]:
    plan, best = cell.plan, cell.best
    score, limit = plan.score, plan.limit_bytes
    ours = ["no plan" if plan.refused else "failed", "–", "–"]
    if score is not None:
        ours = [seconds_of(score.seconds), size_of(score.memory), f"{score.memory / limit:.1%}" if limit else "–"]
    theirs = (
        [best.name, seconds_of(best.score.seconds), size_of(best.score.memory)]
        if best and best.score
        else ["none fits", "–", "–"]
    )
    exact = "–" if cell.arguments_error is None else "exact" if cell.arguments_error == 0 else f"{cell.arguments_error:+,d} B"
    errors = ["–" if error is None else f"{error:+.0%}" for error in (cell.memory_error, cell.wire_error)]
    ratio = "–" if cell.ratio is None else f"{cell.ratio:.3f}×"
    planning = "–" if plan.planning is None else f"{plan.planning:.1f} s"
    return [cell.case.model, cell.case.mesh, plan.limit, *ours, *theirs, ratio, planning, exact, *errors]


def _narrow_row(cell: Cell) -> list[str]:
    row = dict(enumerate(_row(cell)))
    return [f"{row[0]} {row[1]} {row[2]}", *(row[place] for place in (3, 4, 6, 7, 9, 10))]


def _asides(cases: Sequence[Case]) -> Iterator[str]:
    """What is not in the table: failures, and layouts that there are none of."""
    for case in cases:
        if case.failure:
            yield f"{case.model} on {case.mesh}: {case.failure}"
        for plan in case.plans:
            if plan.score is None:
                yield f"{case.model} on {case.mesh}, {plan.limit}: {'no plan' if plan.refused else 'failed'}: {plan.reason}"
        for attempt in case.baselines:
            if attempt.score is None:
                yield f"{case.model} on {case.mesh}: {attempt.name}: {attempt.reason}"
        if case.training:
            training = case.training
            said = training.reason or f"losses differ by {training.difference:.1e} (plan for {training.limit} memory)"
            yield f"{case.model} on {case.mesh}: training: {said}{training.note and '; '}{training.note}"


def _sentence(verdict: Verdict) -> str:
    outcome = {True: "met", False: "MISSED", None: "not judged"}[verdict.met]
    return f"{outcome}: {verdict.target}: {verdict.reached}"


def _provenance(report: Report) -> str:
    machine = report.machine
    versions = ", ".join(f"{name} {machine['versions'][name]}" for name in ("jax", "jaxlib") if name in machine["versions"])
    commit = machine["commit"] or "unknown"
    return (
        f"{machine['date']}, {report.seconds / 60:.1f} minutes on {machine['usable_cores']} cores of {machine['cpu']}; "
        f"Python {machine['python']}, {versions}; penstock {machine['penstock']}, commit {commit}"
    )


def _baselines(cases: Sequence[Case]) -> list[str]:
    names = list(dict.fromkeys(attempt.name for case in cases for attempt in case.baselines))
    rows = []
    for case in cases:
        found = {attempt.name: attempt for attempt in case.baselines}
        rows.append([case.model, case.mesh, *(_attempt(found.get(name)) for name in names)])
    return _table(("model", "mesh", *names), rows)


def _attempt(attempt: Attempt | None) -> str:
    if attempt is None:
        return ""
    return f"{seconds_of(attempt.score.seconds)}, {size_of(attempt.score.memory)}" if attempt.score else "–"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---" if place < 2 else "---:" for place in range(len(columns))]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |" for cells in (columns, rule, *rows)]
