"""Sentences on what the numbers of a step leave open: a prediction and a compiled program say it in the same words."""

from __future__ import annotations

from collections.abc import Mapping

_MOST = 4
"""Names in a sentence."""

_NUMBERS = "the true FLOPs, bytes sent and time are unknown"


def about_loops(count: int) -> tuple[str, ...]:
    """Say that loops count once because nothing tells how often they run.

    A loop is named however little a turn of it does: its length may be anything. A loop that is known to run once is not.
    """
    if not count:
        return ()
    loops = "1 loop of unknown length counts once" if count == 1 else f"{count} loops of unknown length count once each"
    return (f"{loops}: {_NUMBERS}",)


def about_operations(names: Mapping[str, int], counted: str) -> tuple[str, ...]:
    """Say which operations have an unknown cost.

    Args:
      names: name of an operation → how many there are.
      counted: what each counts: "nothing".
    """
    count = sum(names.values())
    if not count:
        return ()
    most = sorted(names, key=lambda name: (-names[name], name))
    said = [f"{names[name]} × {name}" if names[name] > 1 else name for name in most[:_MOST]]
    said += [f"{len(most) - _MOST} other kinds"] if len(most) > _MOST else []
    operations = "1 operation of unknown cost counts" if count == 1 else f"{count} operations of unknown cost count"
    return (f"{operations} {counted} ({', '.join(said)}): {_NUMBERS}",)


def about_collectives(guessed: int) -> tuple[str, ...]:
    """Say that collectives were taken for one kind or the other by the size of what is kept of them."""
    if not guessed:
        return ()
    collectives = "1 collective is an all-reduce" if guessed == 1 else f"{guessed} collectives are all-reduces"
    other = "a reduce-scatter" if guessed == 1 else "reduce-scatters"
    return (f"unknown whether {collectives} or {other}, taken by size: the true bytes sent and time are unknown",)
