"""Order the turns of live variants so that neither drift nor the block before favours a variant: Williams squares.

E. J. Williams, "Experimental designs balanced for the estimation of residual effects of treatments" (1949). In such a square each
variant has each place equally often, and follows each other variant equally often. For two variants it is AB, BA.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

_T = TypeVar("_T")


def williams(count: int) -> list[list[int]]:
    """Return the rows of a Williams square for so many variants, numbered from 0: `count` rows, or twice as many if it is odd."""
    first, low, high = [0], 1, count - 1
    while len(first) < count:  # 0, 1, n-1, 2, n-2, …: all differences between neighbours differ
        first.append(low)
        low += 1
        if len(first) < count:
            first.append(high)
            high -= 1
    rows = [[(place + shift) % count for place in first] for shift in range(count)]
    return rows + [row[::-1] for row in rows] if count % 2 else rows


def orders(runs: Sequence[_T], seed: str, backwards: bool = False) -> Iterator[list[_T]]:
    """Yield the order of turn after turn, without end. It depends only on the arguments.

    Each square has its own assignment of the variants to numbers, and a random row order in which each row is followed by the
    row that is most like its reverse: so a steady drift cancels over two turns, as in ABBA.

    Args:
      runs: what takes turns.
      seed: of the random choices.
      backwards: whether the second turn comes before the first, the fourth before the third, and so on.
    """
    rng = random.Random(seed)
    while True:
        names = list(runs)
        rng.shuffle(names)
        rows = williams(len(names))
        rng.shuffle(rows)
        while rows:
            pair = [rows.pop()]
            if rows:
                reverse = pair[0][::-1]
                pair.append(max(rows, key=lambda other: sum(a == b for a, b in zip(other, reverse, strict=True))))
                rows.remove(pair[1])
            for row in reversed(pair) if backwards else pair:
                yield [names[place] for place in row]
