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

from penstock.bench.machine import known_faults
from penstock.bench.suites.shard.case import Case, Score, Training
from penstock.bench.suites.shard.judgement import Cell, Verdict, cells_of, judge
from penstock.shard.units import seconds_of, size_of

FORMAT = 1
_METHOD = (
    "Scores are of the compiled program (XLA:CPU's partitioner, 8 virtual devices), per device. Memory: arguments + temporaries "
    "+ outputs − aliased. Time: FLOPs at the peak of the hardware and then the bytes of each collective over its link, loops "
    "multiplied, but for those of unknown length, which are named; nothing overlaps. The ratio is to the fastest baseline that "
    "keeps the limit: the hardware's memory (loose), or half of what replicated data parallel needs."
)
_NARROW = ("time", "of limit", "best by hand", "ratio", "planned in")  # what 80 columns hold
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
    table.add_column("", no_wrap=True)
    for column in _NARROW:
        words = column == "best by hand"
        table.add_column(column, justify="left" if words else "right", no_wrap=not words)
    for case in report.cases:
        for cell in cells_of(case):
            row = _row(cell)
            name = f"{row['model']} {row['mesh']} {row['limit']}"
            table.add_row(name, *(escape(row[column]) for column in _NARROW), style=_style(cell))
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
    lines += ["", f"## Plans for {report.hardware}", "", *_table([_row(cell) for cell in cells]), ""]
    lines += [f"- {line}" for line in _asides(report.cases)]
    lines += ["", "## Layouts by hand", "", "Time and memory of a device.", "", *_baselines(report.cases), ""]
    lines += ["## Collectives of the plans", ""]
    lines += [f"- {cell.name}: {', '.join(cell.plan.score.collectives) or 'none'}" for cell in cells if cell.plan.score]
    return "\n".join([*lines, "", _METHOD, "", _provenance(report), ""])


def _style(cell: Cell) -> str | None:
    return "red" if not cell.won else None if cell.fits else "yellow"


def _row(cell: Cell) -> dict[str, str]:
    """A line of the table, by its columns."""
    plan, limit = cell.plan, cell.plan.limit_bytes
    ours, best = plan.score, cell.best.score if cell.best else None
    arguments = cell.arguments_error
    return {
        "model": cell.case.model,
        "mesh": cell.case.mesh,
        "limit": plan.limit,
        "time": seconds_of(ours.seconds) if ours else "no plan" if plan.refused else "failed",
        "memory": size_of(ours.memory) if ours else "–",
        "of limit": f"{ours.memory / limit:.1%}" if ours and limit else "–",
        "best by hand": cell.best.name if cell.best else "none fits",
        "its time": seconds_of(best.seconds) if best else "–",
        "its memory": size_of(best.memory) if best else "–",
        "ratio": "–" if cell.ratio is None else f"{cell.ratio:.3f}×",
        "planned in": "–" if plan.planning is None else f"{plan.planning:.1f} s",
        "arguments": "–" if arguments is None else "exact" if arguments == 0 else f"{arguments:+,d} B",
        "peak": "–" if cell.memory_error is None else f"{cell.memory_error:+.0%}",
        "bytes sent": "–" if cell.wire_error is None else f"{cell.wire_error:+.0%}",
    }


def _asides(cases: Sequence[Case]) -> list[str]:
    """Yield what is not in the table: failures, missing layouts, unknown numbers, models trained in another size."""
    found: dict[str, list[str]] = {}
    for case in cases:
        for text in _asides_of(case):
            found.setdefault(text, []).append(f"{case.model} on {case.mesh}")
    return [f"{', '.join(names)}: {text}" for text, names in found.items()]


def _asides_of(case: Case) -> Iterator[str]:
    if case.failure:
        yield case.failure
    for plan in case.plans:
        if plan.score is None:
            yield f"{plan.limit}: {'no plan' if plan.refused else 'failed'}: {plan.reason}"
        yield from _left_open(plan.limit, plan.score)
    for attempt in case.baselines:
        if attempt.score is None:
            yield f"{attempt.name}: {attempt.reason}"
        yield from _left_open(attempt.name, attempt.score)
    if case.training and (said := case.training.reason or case.training.note):
        yield f"training: {said}"


def _left_open(name: str, score: Score | None) -> Iterator[str]:
    for sentence in score.unknown if score else ():
        yield f"{name}: {sentence}"


def _sentence(verdict: Verdict) -> str:
    outcome = {True: "met", False: "MISSED", None: "not judged"}[verdict.met]
    return f"{outcome}: {verdict.target}: {verdict.reached}"


def _provenance(report: Report) -> str:
    machine = report.machine
    versions = ", ".join(f"{name} {machine['versions'][name]}" for name in ("jax", "jaxlib") if name in machine["versions"])
    commit = machine["commit"] or "unknown"
    return (
        f"{machine['date']}, {report.seconds / 60:.1f} minutes on {machine['usable_cores']} cores of {machine['cpu']}; "
        f"Python {machine['python']}, {versions}; penstock {machine['penstock']}, commit {commit}; {known_faults(machine)}"
    )


def _baselines(cases: Sequence[Case]) -> list[str]:
    names = list(dict.fromkeys(attempt.name for case in cases for attempt in case.baselines))
    rows = []
    for case in cases:
        scores = {attempt.name: attempt.score for attempt in case.baselines}
        row = {"model": case.model, "mesh": case.mesh}
        row |= {name: _both(scores[name]) if name in scores else "" for name in names}
        rows.append(row | {"losses differ by": _difference(case.training), "took": f"{case.seconds:.0f} s"})
    return _table(rows)


def _both(score: Score | None) -> str:
    return f"{seconds_of(score.seconds)}, {size_of(score.memory)}" if score else "–"


def _difference(training: Training | None) -> str:
    if training is None:
        return ""
    return "–" if training.difference is None else f"{training.difference:.1e} ({training.limit})"


def _table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    columns = list(rows[0]) if rows else []
    rule = ["---" if place < 2 else "---:" for place in range(len(columns))]
    cells = [columns, rule, *([row[column] for column in columns] for row in rows)]
    return [f"| {' | '.join(text.replace('|', chr(92) + '|') for text in line)} |" for line in cells]
