"""Lay out a workload's numbers as tables of text, for the terminal, Markdown and the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock_bench import wording
from penstock_bench.model import Metric
from penstock_bench.number_format import number, times
from penstock_bench.outcome import Outcome, Sample
from penstock_bench.verdict import Claim, Row, rows


@dataclass(frozen=True)
class Table:
    """A table of text; the first column names the rows.

    Attributes:
      title: the caption.
      columns: the headers.
      cells: the rows, with one text for each column.
      numeric: for each column, whether its cells are numbers.
      narrow: the number of columns that a terminal shows; the files have all columns.
    """

    title: str
    columns: Sequence[str]
    cells: Sequence[Sequence[str]]
    numeric: Sequence[bool]
    narrow: int


def timed_tables(outcome: Outcome, claims: Sequence[Claim]) -> list[Table]:
    """Return one table for each metric of a timed workload."""
    workload = outcome.workload
    made = []
    for metric in workload.metrics:
        columns = ["variant", metric.unit, "min – max"]
        if workload.baseline:
            columns += [f"vs {workload.baseline}", "95 % interval", "verdict"]
        if metric.ideal:
            columns.append(f"vs ideal {metric.ideal:g} {metric.unit}")
        cells = [_timed_cells(outcome, metric, row, claims) for row in rows(outcome, metric)]
        made.append(_table(wording.table_title(outcome, metric), columns, cells))
    return made


def parity_table(outcome: Outcome) -> Table:
    """Return the table of the differences between the variants' outputs and the reference's."""
    agreement = outcome.workload.agreement
    title = f"parity, before anything was timed: relative difference from {agreement.reference.name if agreement else '–'}"
    cells = [
        [p.variant, p.quantity, f"{p.difference:.2g}", f"{p.tolerance:g}", "yes" if p.agreed else "NO"] for p in outcome.parity
    ]
    return _table(title, ["variant", "quantity", "difference", "tolerance", "agrees"], cells)


def score_tables(outcome: Outcome) -> list[Table]:
    """Return the tables of a scored workload: one of all metrics with a row for each variant, then the tables of its remarks."""
    workload, samples = outcome.workload, outcome.samples
    # Prediction errors are the last columns: a terminal has no room for them, and their targets summarise them.
    first = [metric for metric in workload.metrics if metric.better != "zero"]
    last = [metric for metric in workload.metrics if metric.better == "zero"]
    more = list(dict.fromkeys(column for sample in samples for column in sample.remarks.columns))
    names = ["variant", *map(_heading, first), *more, *map(_heading, last)]
    cells = [
        [
            sample.variant,
            *(_score(sample, metric) for metric in first),
            *(sample.remarks.columns.get(column, "–") for column in more),
            *(_score(sample, metric) for metric in last),
        ]
        for sample in samples
    ]
    numeric = [False, *[True] * len(first), *[False] * len(more), *[True] * len(last)]
    title = workload.fill(workload.title, outcome.size)
    return [Table(title, names, cells, numeric, 1 + len(first) + bool(more)), *_remark_tables(samples)]


def _remark_tables(samples: Sequence[Sample]) -> list[Table]:
    """Return the tables of the remarks. Merge tables with the same title, and show equal rows once."""
    by_title: dict[str, dict[tuple[tuple[str, str], ...], None]] = {}
    for sample in samples:
        for title, table_rows in sample.remarks.tables.items():
            by_title.setdefault(title, {}).update({tuple(row.items()): None for row in table_rows})
    made = []
    for title, found in by_title.items():
        read = [dict(row) for row in found]
        columns = list(dict.fromkeys(column for row in read for column in row))
        cells = [[row.get(column, "") for column in columns] for row in read]
        made.append(Table(title, columns, cells, [False] * len(columns), len(columns)))
    return made


def _table(title: str, columns: Sequence[str], cells: Sequence[Sequence[str]]) -> Table:
    """Return a table whose columns hold numbers, except the first column."""
    return Table(title, columns, cells, [bool(index) for index in range(len(columns))], len(columns))


def _heading(metric: Metric) -> str:
    """Return the name of a metric's column."""
    return f"{metric.name} ({metric.unit})"


def _score(sample: Sample, metric: Metric) -> str:
    """Format a sample's number; an error always has a sign."""
    value = sample.values.get(metric.name)
    if value is None or not math.isfinite(value):
        return "–"
    return f"{'+' if metric.better == 'zero' and value > 0 else ''}{number(value)}"


def _timed_cells(outcome: Outcome, metric: Metric, row: Row, claims: Sequence[Claim]) -> list[str]:
    baseline = outcome.workload.baseline
    cells = [row.variant, number(row.median), f"{number(row.low)} – {number(row.high)}"]
    if baseline:
        found = [c for c in claims if (c.metric, c.variant, c.baseline) == (metric, row.variant, baseline) and not c.control]
        cells += _compared(found[0]) if found else ["1" if row.variant == baseline else "–", "", ""]
    if metric.ideal:
        cells.append(times(row.of_ideal))
    return cells


def _compared(claim: Claim) -> list[str]:
    low, high = claim.comparison.low, claim.comparison.high
    return [times(claim.comparison.ratio), "–" if low is None else f"{times(low)} – {times(high)}", claim.call]
