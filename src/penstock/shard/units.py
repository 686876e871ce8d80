"""Convert times and layouts to text."""

from __future__ import annotations


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


def format_share(part: float, whole: float) -> str:
    """Return a part of a whole as text, in percent.

    Args:
      part, whole: numbers of one unit.

    >>> format_share(5, 16), format_share(1, 1000)
    ('31%', '<1%')
    """
    share = part / whole
    return f"{share:.0%}" if share >= 0.005 else "<1%"


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
