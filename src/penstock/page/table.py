"""Tables, whose rows a reader may sort by a column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.page.markup import Content, Markup, tag


@dataclass(frozen=True)
class Column:
    name: str
    numeric: bool = True


@dataclass(frozen=True)
class Cell:
    """What a cell shows, and what its row is sorted by: a number, a text, or None, which is after all else."""

    content: Content
    key: float | str | None


def of_text(text: str) -> Cell:
    return Cell(text, text)


def table(caption: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]], sortable: bool = False) -> Markup:
    """The table in a box that scrolls sideways; the first cell of a row is its header."""
    head = [_header(column, sortable) for column in columns]
    body = [tag("tr", [_cell(column, cell, not place) for place, (column, cell) in _placed(columns, row)]) for row in rows]
    whole = tag(
        "table",
        tag("caption", tag("span", caption)),
        tag("thead", tag("tr", head)),
        tag("tbody", body),
        class_="sortable" if sortable else None,
    )
    return tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _placed(columns: Sequence[Column], row: Sequence[Cell]) -> enumerate[tuple[Column, Cell]]:
    return enumerate(zip(columns, row, strict=True))


def _header(column: Column, sortable: bool) -> Markup:
    words = tag("button", column.name, type="button") if sortable else column.name
    return tag("th", words, scope="col", class_="number" if column.numeric else None)


def _cell(column: Column, cell: Cell, header: bool) -> Markup:
    return tag(
        "th" if header else "td",
        cell.content,
        scope="row" if header else None,
        class_="number" if column.numeric else None,
        data_key=cell.key,
    )
