"""What a benchmark's numbers say, and how sure that is.

The unit is the *run*: a fresh process, of which one number is kept. Steps within a run share its memory layout, its
neighbours on the machine and its luck, so ten thousand of them are still one observation of what the next run will do.
Runs of one round are compared with each other, as the machine was then; a *pair* is the logarithm of their ratio.
`docs/measuring.md` argues each choice, and `tests/bench/test_statistics.py` holds them to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import special, stats

# No fewer pairs are judged: all n of them lie on one side of the truth once in 2^(n-1) times, so no interval that stays
# within what was seen, as a bootstrap's does, can hold the truth 95 times of 100 where n < 6.
FEWEST_PAIRS = 6
LEVEL = 0.05  # of the tests, and 1 minus the confidence of intervals
POWER = 0.8  # with which the "smallest difference that would have been shown" would have been

_TRIM = 0.2  # of the pairs, at each end: Yuen's and Wilcox's choice
_DRAWS = 400_000
_RESAMPLES = 20_000


@dataclass(frozen=True)
class Comparison:
    """How two variants' runs compare.

    Attributes:
      pairs: rounds in which both have a positive number.
      ratio: the first's number over the second's; None without a pair.
      low, high: its 95 % confidence interval, of this comparison alone; None with fewer than `FEWEST_PAIRS`.
      p: two-sided, of there being no difference, of this comparison alone; None as well.
      error: standard error of the logarithm of the ratio; None as well.
    """

    pairs: int
    ratio: float | None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    error: float | None = None

    def detectable(self, comparisons: int) -> float | None:
        """The smallest ratio > 1 that would have been called different in 8 of 10 benchmarks as noisy as this one.

        Args:
          comparisons: in the report, at the strictest level of which (Holm's first) it would have to be found.
        """
        if self.error is None:
            return None
        assert self.low is not None and self.high is not None
        test = float(np.quantile(_null(self.pairs), 1 - LEVEL / max(comparisons, 1))) * self.error
        interval = (math.log(self.high) - math.log(self.low)) / 2
        beyond = float(stats.t.ppf(POWER, self.pairs - 2 * _cut(self.pairs) - 1)) * self.error
        return _exp(max(test, interval) + beyond)


def typical(steps: Sequence[float]) -> float:
    """The median of a run's steps, after the first and the last tenth of them are taken off.

    Raises:
      ValueError: there is no step.
    """
    if not steps:
        raise ValueError("no step was timed")
    edge = len(steps) // 10
    return float(np.median(steps[edge : len(steps) - edge]))


def compare(ours: Sequence[float], theirs: Sequence[float]) -> Comparison:
    """Compare the runs of two variants, which are paired by their place: those of one round.

    The ratio is the 20 % trimmed mean of the pairs' logarithms, so that one run in five at each end may be anything. The
    interval is the percentile bootstrap over pairs, with the percentiles moved apart for small samples (Hesterberg 2015,
    "What Teachers Should Know About the Bootstrap", section 3.3). The test is that of Yuen (1974) and Tukey and
    McLaughlin (1963) for a trimmed mean, with the distribution that its statistic really has for so many pairs.
    """
    positive = [(a, b) for a, b in zip(ours, theirs, strict=True) if a > 0 and b > 0 and math.isfinite(a) and math.isfinite(b)]
    if not positive:
        return Comparison(0, None)
    logs = np.sort([math.log(a) - math.log(b) for a, b in positive])
    center = float(_trimmed_mean(logs))
    if len(logs) < FEWEST_PAIRS:
        return Comparison(len(logs), _exp(center))
    low, high = _bootstrap_interval(logs)
    error = float(_standard_error(logs))
    return Comparison(len(logs), _exp(center), _exp(low), _exp(high), _p_value(center, error, len(logs)), error)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values for as many comparisons as there are: the chance of any false one among them stays below the level.

    Holm (1979): the smallest is multiplied by their number, the next by one less, and so on; none is smaller than one
    before it, nor greater than 1.
    """
    corrected = [1.0] * len(p_values)
    largest = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected


def _cut(pairs: int) -> int:
    return int(_TRIM * pairs)


def _trimmed_mean(logs: np.ndarray) -> np.ndarray:
    """Over the last axis, which is sorted."""
    pairs = logs.shape[-1]
    return logs[..., _cut(pairs) : pairs - _cut(pairs)].mean(axis=-1)


def _standard_error(logs: np.ndarray) -> np.ndarray:
    """Of the trimmed mean, over the last axis, which is sorted: from the winsorized variance."""
    pairs = logs.shape[-1]
    cut = _cut(pairs)
    winsorized = np.clip(logs, logs[..., cut, None], logs[..., pairs - cut - 1, None])
    return winsorized.std(axis=-1, ddof=1) / ((1 - 2 * cut / pairs) * math.sqrt(pairs))


@lru_cache(maxsize=128)
def _null(pairs: int) -> np.ndarray:
    """Sizes of Yuen's statistic where there is no difference and the noise is normal, sorted.

    Student's t with `pairs - 2 cut - 1` degrees of freedom, which is what books give for it, is too narrow by a tenth at
    ten pairs. Heavier tails than the normal's make the statistic smaller.
    """
    rng = np.random.default_rng(0)
    parts = []
    for _ in range(8):
        logs = np.sort(rng.standard_normal((_DRAWS // 8, pairs)), axis=-1)
        parts.append(np.abs(_trimmed_mean(logs) / _standard_error(logs)))
    return np.sort(np.concatenate(parts))


def _p_value(center: float, error: float, pairs: int) -> float:
    """At least 1 / 400,001: as much as the draws of the null distribution can tell."""
    if error == 0:
        return 1.0 if center == 0 else 1 / (_DRAWS + 1)
    null = _null(pairs)
    as_large = len(null) - int(np.searchsorted(null, abs(center) / error, side="left"))
    return (1 + as_large) / (len(null) + 1)


def _bootstrap_interval(logs: np.ndarray) -> tuple[float, float]:
    pairs = len(logs)
    tail = float(special.ndtr(math.sqrt(pairs / (pairs - 1)) * stats.t.ppf(LEVEL / 2, pairs - 1)))
    rng = np.random.default_rng(0)  # the same runs give the same interval
    centers = _trimmed_mean(np.sort(rng.choice(logs, (_RESAMPLES, pairs)), axis=-1))
    low, high = np.quantile(centers, [tail, 1 - tail])
    return float(low), float(high)


def _exp(value: float) -> float:
    """`math.exp`, which does not overflow: a ratio beyond 10^300 is one all the same."""
    return math.exp(min(value, 690.0))
