"""Compare two live variants from pairs at two levels: turns within rounds, and rounds.

All turns of a round share its processes, and a process differs permanently from its twin, by a per cent or two. So a hundred
turns of one round are one observation for predicting the next start. Each round gives one number, the location of its turns' log
ratios. The interval and the test are Student's over the rounds' numbers. Their scatter includes both levels. For rounds of equal
length, a mixed model with a random effect for the round gives the same. `docs/measuring.md` shows which intervals cover the
truth.

The rules for turns were fixed before any data, and do not depend on who is faster:

- A turn weighs less, the more of the machine others used during it: `1 / (1 + (share / 5 %)²)`.
- The location is Huber's M-estimator (1964), with a scale that all rounds share. A disturbed turn moves it by no more than a turn
  at 1.345 standard deviations.
- The reference kernel around the blocks is a control variate. The difference of its log ratio from its median over all turns,
  times a slope from all rounds, is subtracted. This is done only if it lowers the variance within rounds by a tenth or more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import special

from penstock_bench.live_pairs import RoundPairs
from penstock_bench.repetition import deviation
from penstock_bench.statistics import LEVEL, Comparison

FEWEST_ROUNDS = 4  # below, Student's interval is too wide to tell anything, and nothing is judged

_DISTURBED = 0.05  # share of the machine
_HUBER = 1.345  # 95 % efficiency at the normal distribution (Huber 1981)
_ITERATIONS = 50
_WORTH = 0.1  # share of the variance that a control variate must remove
_FEWEST_TURNS = 20  # in all rounds together, to estimate a slope


def compare_rounds(rounds: Sequence[RoundPairs], again: Sequence[RoundPairs] = ()) -> Comparison:
    """Compare two variants that took turns.

    Args:
      rounds: the pairs of a variant and the baseline.
      again: the pairs of the same variant and the baseline's second process, which is the control's. A round's number is then the
        mean of the locations of both, which scatters less. (The location of ratios to the mean of both processes would be
        biased: the distribution of times is skewed, and the larger side of a ratio would be clipped more.)

    Returns:
      The comparison, with one pair for each round.
    """
    if not rounds:
        return Comparison(0, None)
    second = {one.round: number for one, number in zip(again, locations(again) if again else (), strict=True)}
    numbers = np.array(
        [(number + second.get(one.round, number)) / 2 for one, number in zip(rounds, locations(rounds), strict=True)]
    )
    turns, count = sum(len(one.logs) for one in rounds), len(rounds)
    center = float(np.mean(numbers))
    if count < FEWEST_ROUNDS:
        return Comparison(count, math.exp(center), turns=turns)
    error = float(np.std(numbers, ddof=1)) / math.sqrt(count)
    half = -float(special.stdtrit(count - 1, LEVEL / 2)) * error
    alike = 1.0 if center == 0 else 0.0  # where all rounds agree exactly
    p = 2 * float(special.stdtr(count - 1, -abs(center) / error)) if error else alike
    return Comparison(
        count, math.exp(center), math.exp(center - half), math.exp(center + half), p, error, freedom=count - 1, turns=turns
    )


def locations(rounds: Sequence[RoundPairs]) -> np.ndarray:
    """Return each round's log ratio, [rounds]: Huber's location of its turns, after the control variate."""
    weights = [1 / (1 + (one.others / _DISTURBED) ** 2) for one in rounds]
    logs = _controlled(rounds, weights)
    medians = [_weighted_median(of_round, weight) for of_round, weight in zip(logs, weights, strict=True)]
    scale = deviation([of_round - median for of_round, median in zip(logs, medians, strict=True)])
    return np.array(
        [_huber(of_round, weight, median, scale) for of_round, weight, median in zip(logs, weights, medians, strict=True)]
    )


def _controlled(rounds: Sequence[RoundPairs], weights: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the log ratios minus what the reference kernel explains of them, where it explains enough."""
    logs = [one.logs for one in rounds]
    references = [one.references for one in rounds]
    if not all(np.isfinite(one).all() for one in references) or sum(map(len, logs)) < _FEWEST_TURNS:
        return logs
    # Within rounds, so that the slope is of the machine's changes from turn to turn, and robust: on clipped values.
    y = np.concatenate([_clipped(one - np.median(one)) for one in logs])
    x = np.concatenate([_clipped(one - np.median(one)) for one in references])
    w = np.concatenate(weights)
    if (power := float(w @ x**2)) == 0 or not (w @ y**2) > 0:  # all turns are alike
        return logs
    slope = float(w @ (x * y)) / power
    freedom = len(y) - len(rounds)
    explained = 1 - float(w @ (y - slope * x) ** 2) / (freedom - 1) / (float(w @ y**2) / freedom)
    if explained < _WORTH:
        return logs
    # From the middle of all turns: a variant that always slows the kernel down (it may leave cold caches) gains nothing by it.
    middle = _weighted_median(np.concatenate(references), w)
    return [of_round - slope * (reference - middle) for of_round, reference in zip(logs, references, strict=True)]


def _clipped(values: np.ndarray) -> np.ndarray:
    """Return centred values, cut at three standard deviations."""
    most = 3 * 1.4826 * float(np.median(np.abs(values)))
    return np.clip(values, -most, most)


def _weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    """Return the value at which half of the weight lies on each side; the middle of two where it falls between them."""
    order = np.argsort(values)
    below = np.cumsum(weights[order]) / weights.sum()
    first = int(np.searchsorted(below, 0.5 - 1e-12))
    last = int(np.searchsorted(below, 0.5 + 1e-12))
    return float(values[order][first] + values[order][min(last, len(values) - 1)]) / 2


def _huber(values: np.ndarray, weights: np.ndarray, start: float, scale: float) -> float:
    """Return Huber's location by iteratively reweighted means."""
    center = start
    if scale == 0:
        return center
    for _ in range(_ITERATIONS):
        far = np.maximum(np.abs(values - center) / scale / _HUBER, 1.0)
        moved = float(np.average(values, weights=weights / far))
        if abs(moved - center) < 1e-9:
            break
        center = moved
    return center
