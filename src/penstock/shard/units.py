"""Convert sizes, times and layouts to text, and read sizes from text."""

from __future__ import annotations

import re


def format_bytes(number: float) -> str:
    """Return a number of bytes as text, in units of powers of 1024.

    Args:
      number: bytes.

    >>> format_bytes(1.5 * 2**30)
    '1.5 GiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.3g} {unit}" if number < 1000 else f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.3g} TiB" if number < 1000 else f"{number:.0f} TiB"


def format_seconds(number: float) -> str:
    """Return a number of seconds as text, in s, ms or µs.

    Args:
      number: seconds.

    >>> format_seconds(0.0012)
    '1.2 ms'
    """
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number / 1e-6:.3g} µs"


def format_spec(spec: tuple[tuple[str, ...], ...]) -> str:
    """Return a layout as text, without the dimensions at its end that are not sharded.

    Args:
      spec: for each dimension, the mesh axes that shard it.

    >>> format_spec(((), ("data", "model"), ()))
    "P(None, ('data', 'model'))"
    >>> format_spec(((), ()))
    'replicated'
    """
    entries = [entry[0] if len(entry) == 1 else entry or None for entry in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return f"P({', '.join(map(repr, entries))})" if entries else "replicated"


def parse_bytes(memory: int | float | str) -> int:
    """Read a number of bytes.

    Args:
      memory: a number, or text such as "16GiB" or "500 MB".

    Returns:
      The bytes, rounded down.

    Raises:
      TypeError: it is neither a number nor text.
      ValueError: the text has another form, or the size is less than one byte.

    >>> parse_bytes("16GiB")
    17179869184
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
