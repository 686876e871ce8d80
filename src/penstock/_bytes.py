"""Write numbers of bytes and of things as text, and read bytes from text such as "16GiB"."""

from __future__ import annotations

import re

from penstock._arguments import brief


def format_bytes(number: float) -> str:
    """Return a number of bytes as text, in units of powers of 1024.

    >>> format_bytes(1.5 * 2**30)
    '1.5 GiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.3g} {unit}" if number < 1000 else f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.3g} TiB" if number < 1000 else f"{number:.0f} TiB"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number of things as text. Name a plural that does more than add an "s".

    >>> counted(1, "file"), counted(1000, "file")
    ('1 file', '1,000 files')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def parse_bytes(memory: int | float | str, name: str = "memory") -> int:
    """Return the bytes, rounded down, of a number or of text such as "16GiB" or "500 MB". Errors call the argument `name`.

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
            raise ValueError(f"{name}={memory!r} is not a number of bytes; write it as 17179869184, '16GiB' or '16GB'")
        number = float(match[1]) * units[match[2].lower()]
    else:
        try:
            number = float(memory)
        except (TypeError, ValueError, OverflowError):
            raise TypeError(f"{name}={brief(memory)} is not a number of bytes nor a text such as '16GiB'") from None
    if isinstance(memory, bool) or not 1 <= number < float("inf"):
        raise ValueError(f"{name}={memory!r}: a limit is at least 1 byte")
    return int(number)
