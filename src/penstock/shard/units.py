"""Numbers in words."""

from __future__ import annotations


def format_bytes(number: float) -> str:
    """Bytes: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.3g} {unit}" if number < 1000 else f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.3g} TiB" if number < 1000 else f"{number:.0f} TiB"


def format_seconds(number: float) -> str:
    """Seconds: "1.2 ms"."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number / 1e-6:.3g} µs"


def format_spec(spec: tuple[tuple[str, ...], ...]) -> str:
    """A layout: "P(('data', 'model'), None)" without what is not needed; "whole" where nothing is sharded."""
    entries = [entry[0] if len(entry) == 1 else entry or None for entry in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return f"P({', '.join(map(repr, entries))})" if entries else "whole"
