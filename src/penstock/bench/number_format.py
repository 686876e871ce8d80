"""Format numbers as every report writes them: on the terminal, in Markdown and on the page."""

from __future__ import annotations


def number(value: float) -> str:
    """Return a number with four significant digits, and all digits left of the point.

    >>> number(1234567.0), number(99.999), number(0.01), number(1.5e15)
    ('1,234,567', '100.0', '0.01000', '1.5e+15')
    """
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e12:
        return f"{value:.4g}"
    # From here on, four digits round to a thousand, which has its separator.
    if size >= 999.95:
        return f"{value:,.0f}"
    return f"{value:#.4g}"


def times(ratio: float | None) -> str:
    """Return a ratio with its sign; a dash where there is none.

    >>> times(0.98765), times(None)
    ('0.9877×', '–')
    """
    return "–" if ratio is None else f"{number(ratio)}×"
