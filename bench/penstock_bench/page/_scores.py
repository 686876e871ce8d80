"""Show a scored workload on the page, from its JSON: tables, targets with the variants that missed them, and notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.page import Cell, Column, Content, Markup, of_text, table, tag


def score_tables(workload: Mapping[str, Any]) -> Content:
    """Return the tables of a scored workload, and the notes on the limits of its scores."""
    notes = [tag("li", note) for note in workload["score_notes"]]
    return [[_table(each) for each in workload["tables"]], [tag("h3", "Notes"), tag("ul", notes)] if notes else None]


def target_list(targets: Sequence[Mapping[str, Any]]) -> Markup:
    """Return the targets of a workload as a list, each with the variants that missed it."""
    return tag("ul", [tag("li", target["text"], _misses(target["misses"])) for target in targets])


def target_count(targets: Sequence[Mapping[str, Any]]) -> str:
    """Say how many of the targets that could be judged were met.

    >>> target_count([{"met": True}, {"met": False}, {"met": None}])
    '1 of 2 targets met, 1 not judged.'
    """
    judged = [target["met"] for target in targets if target["met"] is not None]
    rest = len(targets) - len(judged)
    return f"{sum(judged)} of {len(judged)} targets met{f', {rest} not judged' if rest else ''}."


def _misses(misses: Sequence[str]) -> Content:
    if not misses:
        return None
    listed = tag("ul", [tag("li", miss) for miss in misses])
    return tag("details", tag("summary", f"Beyond the bound: {len(misses)}"), listed)


def _table(written: Mapping[str, Any]) -> Markup:
    """Return a table that the reader can sort by any column; columns of numbers are sorted by value."""
    columns = [Column(name, numeric) for name, numeric in zip(written["columns"], written["numeric"], strict=True)]
    rows = [
        [_number(cell) if column.numeric else of_text(cell) for cell, column in zip(row, columns, strict=True)]
        for row in written["cells"]
    ]
    return table(written["title"], columns, rows, sortable=True)


def _number(text: str) -> Cell:
    """Return a cell that is sorted by its number; a dash has no number and comes last."""
    return Cell(text, None if text == "–" else float(text.replace(",", "")))
