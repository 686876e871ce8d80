"""Convert times and layouts to text, and write sentences about unknown costs for predictions and for compiled programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def format_seconds(number: float) -> str:
    """Return a number of seconds as text, in s, ms or µs.

    >>> format_seconds(0.0012)
    '1.2 ms'
    """
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number / 1e-6:.3g} µs"


def format_share(part: float, whole: float) -> str:
    """Return a part of a whole as text, in percent.

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


_MOST_NAMES = 4
"""The most operations that a sentence names."""

_CONSEQUENCE = "the true FLOPs, bytes sent and time are unknown"


def format_type(array: Any) -> str:
    """Return dtype and shape, as `float32[16, 32]`."""
    return f"{array.dtype}{list(array.shape)}"


def about_loops(count: int) -> tuple[str, ...]:
    """Return a sentence that loops of unknown length count once; () if there are none.

    Such a loop is always reported, even if one iteration costs little, because it may run any number of times.
    """
    if not count:
        return ()
    loops = "1 loop of unknown length counts once" if count == 1 else f"{count} loops of unknown length count once each"
    return (f"{loops}: {_CONSEQUENCE}",)


def about_operations(names: Mapping[str, int], counted: str) -> tuple[str, ...]:
    """Return a sentence that names the most frequent operations of unknown cost; () if there are none.

    Args:
      names: the number of operations by name.
      counted: the cost that is assumed for each of them, in words, such as "nothing".
    """
    count = sum(names.values())
    if not count:
        return ()
    by_frequency = sorted(names, key=lambda name: (-names[name], name))
    listed = [f"{names[name]} × {name}" if names[name] > 1 else name for name in by_frequency[:_MOST_NAMES]]
    listed += [f"{len(by_frequency) - _MOST_NAMES} other kinds"] if len(by_frequency) > _MOST_NAMES else []
    operations = "1 operation of unknown cost counts" if count == 1 else f"{count} operations of unknown cost count"
    return (f"{operations} {counted} ({', '.join(listed)}): {_CONSEQUENCE}",)


def about_collectives(guessed: int) -> tuple[str, ...]:
    """Return a sentence about collectives whose kind, all-reduce or reduce-scatter, was guessed by size; () if none was."""
    if not guessed:
        return ()
    collectives = "1 collective is an all-reduce" if guessed == 1 else f"{guessed} collectives are all-reduces"
    other = "a reduce-scatter" if guessed == 1 else "reduce-scatters"
    return (f"unknown whether {collectives} or {other}, taken by size: the true bytes sent and time are unknown",)
