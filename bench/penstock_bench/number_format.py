"""Format numbers for all reports: on the terminal, in Markdown and on the page."""

from __future__ import annotations


def number(value: float) -> str:
    """Format a number with four significant digits; never round digits before the decimal point.

    >>> number(1234567.0), number(99.999), number(0.01), number(1.5e15)
    ('1,234,567', '100.0', '0.01000', '1.5e+15')
    """
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e12:
        return f"{value:.4g}"
    # 999.95 and more round to 1,000, which needs a thousands separator.
    if size >= 999.95:
        return f"{value:,.0f}"
    return f"{value:#.4g}"


def times(ratio: float | None) -> str:
    """Format a ratio with "×"; return a dash for None.

    >>> times(0.98765), times(None)
    ('0.9877×', '–')
    """
    return "–" if ratio is None else f"{number(ratio)}×"
