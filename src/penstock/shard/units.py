"""Sizes, times and layouts as text, and sizes read from text."""

from __future__ import annotations

import re


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
    """A layout: "P(('data', 'model'), None)" without what is not needed; "replicated" where nothing is sharded."""
    entries = [entry[0] if len(entry) == 1 else entry or None for entry in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return f"P({', '.join(map(repr, entries))})" if entries else "replicated"


def parse_bytes(memory: int | float | str) -> int:
    """Bytes, of a number or of text such as "16GiB", "500 MB".

    Raises:
      TypeError, ValueError: it is none of these, or less than a byte.
    """
    units = {"": 1, "b": 1} | {f"{prefix}b": 1000**n for n, prefix in enumerate("kmgt", 1)}
    units |= {f"{prefix}ib": 1024**n for n, prefix in enumerate("kmgt", 1)}
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", memory)
        if not match or match[2].lower() not in units or match[1].count(".") > 1 or match[1] == ".":
            raise ValueError(f"memory={memory!r} is no number of bytes; write it as 17179869184, '16GiB' or '16GB'")
        number = float(match[1]) * units[match[2].lower()]
    else:
        try:
            number = float(memory)
        except (TypeError, ValueError, OverflowError):
            raise TypeError(f"memory={memory!r} is no number of bytes, and no text such as '16GiB'") from None
    if isinstance(memory, bool) or not 1 <= number < float("inf"):
        raise ValueError(f"memory={memory!r}: a limit is at least 1 byte")
    return int(number)
