"""Make table cells that hold numbers."""

from __future__ import annotations

from penstock.page import Cell
from penstock_bench.number_format import number


def of_number(value: float | None, text: str | None = None) -> Cell:
    """Return a number's cell; without a text, it shows four significant digits."""
    if text is None:
        text = "–" if value is None else number(value)
    return Cell(text, value)
