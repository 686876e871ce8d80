"""Decide how often to repeat at each level: how many turns in a round of live pairs.

A round costs the time to start the processes, and a turn the time of its blocks. The variance of a ratio's mean over R rounds of
n turns is (b + w / n) / R. Here, w is the variance of one turn's log ratio within a round, and b the variance of the rounds' own
log ratios (processes differ permanently). At a given total time it is smallest for n = sqrt(start / turn · w / b): Kalibera and
Jones, "Rigorous Benchmarking in Reasonable Time" (ISMM 2013), section 6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Before there are rounds to compare, two processes are assumed to differ permanently by this. On shared machines we saw 1.3 to
# 2.1 %. Later it counts as much as so many rounds: a few rounds may agree or differ by chance.
_USUAL_BETWEEN = 0.015
_COUNTS_AS = 4
_FEWEST = 3  # rounds from which the variance between them is estimated
_CLIP = 3.0  # standard deviations: a disturbed turn has little weight in a round's number (`levels.py`), so also here
LEAST_TURNS = 1  # every second round begins with the reverse of an order, so that drift cancels over two rounds of one turn, too
MOST_TURNS = 200


@dataclass(frozen=True)
class Variances:
    """The variances of log ratios of two variants, by level.

    Attributes:
      within: of one turn, within a round.
      between: of the rounds' own values, without what the turns add to it; None with fewer than 3 rounds, and where each has a
        single turn.
      rounds: the number of rounds.
    """

    within: float
    between: float | None
    rounds: int


@dataclass(frozen=True)
class Repetition:
    """How a workload's rounds are made, and why.

    Attributes:
      turns: the turns of the next round; one, or an even number, as each order is followed by its reverse.
      within, between: standard deviations of the log ratios, of the kind in `Variances`; the root of their mean over all
        comparisons of the workload. `between` is `assumed` with fewer than 3 rounds or where each has a single turn, and partly
        so with a few more.
      starting, turning: the seconds of a round's start and of a turn.
    """

    turns: int
    within: float
    between: float
    assumed: bool
    starting: float
    turning: float


def variances(rounds: Sequence[np.ndarray]) -> Variances | None:
    """Estimate the variances of one comparison from each round's log ratios, one for each turn.

    If no round has two turns, both levels make the rounds scatter. The usual difference between processes is then taken off.

    Returns:
      None if no round has two turns, and there are fewer than three.
    """
    if not any(len(logs) > 1 for logs in rounds):
        if len(rounds) < _FEWEST:
            return None
        logs = np.concatenate(list(rounds))
        both = deviation([logs - np.median(logs)])
        return Variances(max(both**2 - _USUAL_BETWEEN**2, 0.0), None, len(rounds))
    rounds = _clipped(rounds)
    several = [logs for logs in rounds if len(logs) > 1]
    within = sum(float(logs.var(ddof=1)) * (len(logs) - 1) for logs in several) / sum(len(logs) - 1 for logs in several)
    if len(rounds) < _FEWEST:
        return Variances(within, None, len(rounds))
    means = np.array([logs.mean() for logs in rounds])
    from_turns = float(np.mean([within / len(logs) for logs in rounds]))
    return Variances(within, max(float(means.var(ddof=1)) - from_turns, 0.0), len(rounds))


def _clipped(rounds: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the log ratios, cut at three standard deviations from their round's median."""
    medians = [float(np.median(logs)) for logs in rounds]
    most = _CLIP * deviation([logs - median for logs, median in zip(rounds, medians, strict=True)])
    return [np.clip(logs, median - most, median + most) for logs, median in zip(rounds, medians, strict=True)]


def deviation(centred: Sequence[np.ndarray]) -> float:
    """Return the standard deviation of turns around their round's median, from the median distance (MAD, of normal turns).

    A single turn is its round's median, and says nothing. Without others it is 0.

    Args:
      centred: for each round, the log ratios of its turns without their median.
    """
    several = [logs for logs in centred if len(logs) > 1]
    return 1.4826 * float(np.median(np.abs(np.concatenate(several)))) if several else 0.0


def repetition(found: Sequence[Variances], starting: float, turning: float) -> Repetition | None:
    """Return how a workload's next round is made best, for all its comparisons together.

    Args:
      found: the variances of each comparison.
      starting, turning: the seconds of a round's start and of a turn, so far.

    Returns:
      None if nothing is known yet.
    """
    if not found or turning <= 0:
        return None
    within = float(np.mean([one.within for one in found]))
    known = [one.between for one in found if one.between is not None]
    counted = max(one.rounds for one in found) if known else 0
    between = (_COUNTS_AS * _USUAL_BETWEEN**2 + counted * float(np.mean(known or [0.0]))) / (_COUNTS_AS + counted)
    best = math.sqrt(starting / turning * within / between)
    turns = min(max(2 * round(best / 2), LEAST_TURNS), MOST_TURNS)
    return Repetition(turns, math.sqrt(within), math.sqrt(between), not known, starting, turning)


def that_fit(wanted: Sequence[Repetition], rounds: int, seconds: float) -> list[int]:
    """Return the turns of each workload's next round, so that so many rounds of all workloads fit into the time.

    All get the same share of what they want. No workload gets fewer turns than `LEAST_TURNS`, even if that takes longer.
    """

    def cost(turns: Sequence[int]) -> float:
        return rounds * sum(one.starting + one.turning * count for one, count in zip(wanted, turns, strict=True))

    def share(part: float) -> list[int]:
        return [max(LEAST_TURNS, 2 * int(one.turns * part / 2)) for one in wanted]

    return share(next((part / 100 for part in range(100, 0, -1) if cost(share(part / 100)) <= seconds), 0.0))
