"""Make the pairs that are compared from the blocks of live variants: one pair for each turn."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from penstock_bench.outcome import Block


@dataclass(frozen=True)
class RoundPairs:
    """The pairs of two variants in one round; all arrays have one element for each turn, [turns].

    Attributes:
      round: the round's number.
      logs: the logarithm of the first variant's number over the second's.
      references: the same for the reference kernel around their blocks; NaN where it is not known.
      others: the larger share of the machine that others used during the two blocks; 0 where it is not known.
    """

    round: int
    logs: np.ndarray
    references: np.ndarray
    others: np.ndarray


def round_pairs(
    blocks: Sequence[Block], metric: str, ours: tuple[str, bool], theirs: tuple[str, bool], failed: Collection[str] = ()
) -> list[RoundPairs]:
    """Return the pairs of two processes, round by round. A turn in which one of them has no positive number is left out.

    Args:
      blocks: of one workload.
      metric: the metric's name.
      ours, theirs: each a variant's name, and whether it is the control's second process.
      failed: names of variants of which nothing counts.
    """
    if ours[0] in failed or theirs[0] in failed:
        return []
    turns: dict[int, dict[int, dict[tuple[str, bool], Block]]] = {}
    for block in blocks:
        seat = (block.variant, block.again)
        if block.metric == metric and seat in (ours, theirs) and block.value > 0:
            turns.setdefault(block.round, {}).setdefault(block.turn, {})[seat] = block
    made = []
    for number, of_round in sorted(turns.items()):
        both = [(turn[ours], turn[theirs]) for _, turn in sorted(of_round.items()) if len(turn) == 2]
        if both:
            made.append(
                RoundPairs(
                    number,
                    np.array([math.log(a.value / b.value) for a, b in both]),
                    np.array([math.log(a.reference / b.reference) if a.reference and b.reference else math.nan for a, b in both]),
                    np.array([max(a.others or 0.0, b.others or 0.0) for a, b in both]),
                )
            )
    return made
