"""HTML tables. The reader of a page may sort their rows by a column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.page.markup import Content, Markup, tag


@dataclass(frozen=True)
class Column:
    """The header of a column, and whether its cells are numbers."""

    name: str
    numeric: bool = True


@dataclass(frozen=True)
class Cell:
    """A cell.

    Attributes:
      content: what it shows.
      key: sort key of its row: a number or a text; None comes last.
    """

    content: Content
    key: float | str | None


def of_text(text: str) -> Cell:
    """Return a cell that shows a text and is sorted by it."""
    return Cell(text, text)


def table(caption: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]], sortable: bool = False) -> Markup:
    """Build a table in a box that scrolls sideways. The first cell of a row is its header."""
    head = [_header(column, sortable) for column in columns]
    body = [tag("tr", [_cell(column, cell, not index) for index, (column, cell) in _indexed(columns, row)]) for row in rows]
    element = tag(
        "table",
        tag("caption", tag("span", caption)),
        tag("thead", tag("tr", head)),
        tag("tbody", body),
        class_="sortable" if sortable else None,
    )
    return tag("div", element, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _indexed(columns: Sequence[Column], row: Sequence[Cell]) -> enumerate[tuple[Column, Cell]]:
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
