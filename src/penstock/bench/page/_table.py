"""Cells of numbers as the report writes them."""

from __future__ import annotations

from penstock.bench.text import number
from penstock.page.table import Cell


def of_number(value: float | None, text: str | None = None) -> Cell:
    """A number's cell; without a text, four significant digits."""
    if text is None:
        text = "–" if value is None else number(value)
    return Cell(text, value)
