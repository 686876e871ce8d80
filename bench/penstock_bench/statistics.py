"""Compare the runs of two variants: ratio, confidence interval, p-value, and the smallest difference that could be shown.

The unit is the *run*: a fresh process, which gives one number. All steps of a run share its memory layout and the load of the
machine. So ten thousand steps are still one observation for predicting the next run. Runs of the same round are compared with
each other, because the machine was in the same state. A *pair* is the logarithm of their ratio. `docs/measuring.md` gives the
reasons for each choice, and `bench/tests/test_statistics.py` checks the claimed properties.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import special

# With fewer pairs, nothing is judged. All n pairs lie on one side of the true value with probability 1 / 2^(n-1). A bootstrap
# interval stays within the pairs, so with n < 6 it cannot contain the true value in 95 % of benchmarks.
FEWEST_PAIRS = 6
LEVEL = 0.05  # the level of the tests, and 1 minus the confidence of intervals
POWER = 0.8  # the probability with which the "smallest difference that would have been shown" is shown

_TRIM = 0.2  # share of the pairs that is trimmed at each end: Yuen's and Wilcox's choice
_DRAWS = 400_000
_RESAMPLES = 20_000


@dataclass(frozen=True)
class Comparison:
    """The comparison of two variants' runs. It is not corrected for the number of comparisons.

    Attributes:
      pairs: the number of rounds in which both have a positive number. "Fewer pairs than are judged" below is fewer than
        `FEWEST_PAIRS`, or for variants that took turns fewer than `levels.FEWEST_ROUNDS`.
      ratio: the first variant's number over the second's; None without a pair.
      low, high: the 95 % confidence interval of the ratio; None with fewer pairs than are judged.
      p: the two-sided p-value of "no difference"; None with fewer pairs than are judged.
      error: the standard error of the logarithm of the ratio; None with fewer pairs than are judged.
      freedom: the degrees of freedom of Student's test; None where Yuen's test was used.
      turns: the number of turns in all rounds; 0 if the variants did not take turns.
    """

    pairs: int
    ratio: float | None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    error: float | None = None
    freedom: float | None = None
    turns: int = 0

    def may_be(self, ratio: float) -> bool:
        """Tell whether the interval contains the ratio, or there is no interval."""
        return self.low is None or self.high is None or self.low <= ratio <= self.high

    def detectable(self, level: float, by_interval: bool) -> float | None:
        """Return the smallest ratio > 1 that would have been called different in 8 of 10 benchmarks as noisy as this one.

        Args:
          level: the significance level of the test.
          by_interval: whether the interval must exclude 1, too.

        Returns:
          None with fewer pairs than are judged.
        """
        if self.error is None or self.low is None or self.high is None:
            return None
        if self.freedom is not None:
            to_pass_the_test, to_be_that_far = _detectable_by_student(self.freedom, level)
        else:
            to_pass_the_test, to_be_that_far = _detectable(self.pairs, level)
        half = (math.log(self.high) - math.log(self.low)) / 2 if by_interval else 0.0
        return _exp(max(to_pass_the_test * self.error, half + to_be_that_far * self.error))


def typical(steps: Sequence[float]) -> float:
    """Return the median of a run's steps without the first and the last tenth of them.

    Raises:
      ValueError: there are no steps.
    """
    if not steps:
        raise ValueError("no step was timed")
    edge = len(steps) // 10
    return float(np.median(steps[edge : len(steps) - edge]))


def compare(ours: Sequence[float], theirs: Sequence[float]) -> Comparison:
    """Compare the runs of two variants, paired by their index: runs with the same index are of the same round.

    The ratio is the 20 % trimmed mean of the pairs' logarithms, so a fifth of the pairs at each end may be outliers. The
    interval is the percentile bootstrap over pairs, with percentiles that are expanded for small samples (Hesterberg 2015,
    "What Teachers Should Know About the Bootstrap", section 3.3). The test is Yuen's (1974) and Tukey and
    McLaughlin's (1963) for a trimmed mean, with the simulated null distribution of its statistic (`_null`).

    Args:
      ours, theirs: one number for each round. A pair with a number that is not positive is left out.
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
    """Return p-values corrected for their number by Holm (1979), which bounds the probability of any false positive.

    The smallest of n is multiplied by n, the next one by n - 1, and so on. A corrected value is never smaller than the one
    before it, and never greater than 1.
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
    """Return the trimmed mean over the last axis, which is sorted."""
    pairs = logs.shape[-1]
    return logs[..., _cut(pairs) : pairs - _cut(pairs)].mean(axis=-1)


def _standard_error(logs: np.ndarray) -> np.ndarray:
    """Return the trimmed mean's standard error over the last axis, which is sorted: from the winsorized variance."""
    pairs = logs.shape[-1]
    cut = _cut(pairs)
    winsorized = np.clip(logs, logs[..., cut, None], logs[..., pairs - cut - 1, None])
    return winsorized.std(axis=-1, ddof=1) / ((1 - 2 * cut / pairs) * math.sqrt(pairs))


@dataclass(frozen=True)
class _Null:
    """Simulated benchmarks of equal variants, whose pairs are normal with mean 0 and standard deviation 1.

    Attributes:
      centers, errors: trimmed means and their standard errors, [draws].
      sizes: |center| / error, sorted.
    """

    centers: np.ndarray
    errors: np.ndarray
    sizes: np.ndarray


@lru_cache(maxsize=8)  # 10 MB each
def _null(pairs: int) -> _Null:
    """Simulate the null distribution of Yuen's statistic.

    Textbooks approximate it by Student's t with `pairs - 2 cut - 1` degrees of freedom, which is too narrow by a tenth at
    ten pairs. If pairs have heavier tails than the normal distribution, the statistic is smaller.
    """
    rng = np.random.default_rng(0)
    centers, errors = np.empty(_DRAWS), np.empty(_DRAWS)
    for part in np.split(np.arange(_DRAWS), 8):  # for less memory
        logs = np.sort(rng.standard_normal((len(part), pairs)), axis=-1)
        centers[part], errors[part] = _trimmed_mean(logs), _standard_error(logs)
    return _Null(centers, errors, np.sort(np.abs(centers) / errors))


@lru_cache(maxsize=256)
def _detectable(pairs: int, level: float) -> tuple[float, float]:
    """Return two differences that are detected with probability `POWER`, in units of the typical standard error.

    Returns:
      The true difference at which the test is significant with that probability. And the distance of the true difference from
      any threshold at which the estimate is beyond the threshold with that probability.
    """
    null = _null(pairs)
    critical = np.quantile(null.sizes, 1 - level)
    needed = np.quantile(critical * null.errors - null.centers, POWER), np.quantile(null.centers, POWER)
    typical_error = np.median(null.errors)
    return float(needed[0] / typical_error), float(needed[1] / typical_error)


def _detectable_by_student(freedom: float, level: float) -> tuple[float, float]:
    """Return the same two differences as `_detectable`, for Student's test.

    The statistic of a true difference has a noncentral t distribution, whose noncentrality is the difference in standard errors.
    """
    critical = float(special.stdtrit(freedom, 1 - level / 2))
    needed = float(special.nctdtrinc(freedom, 1 - POWER, critical))
    return needed, float(special.stdtrit(freedom, POWER))


@lru_cache(maxsize=8)
def _resampling(pairs: int) -> np.ndarray:
    """Return the weight of each sorted pair in the trimmed mean of each resample, [resamples, pairs]."""
    rng = np.random.default_rng(0)  # the same runs give the same interval
    drawn = np.sort(rng.integers(0, pairs, (_RESAMPLES, pairs)), axis=-1)[:, _cut(pairs) : pairs - _cut(pairs)]
    weights = np.stack([(drawn == place).sum(axis=-1) for place in range(pairs)], axis=-1)
    return weights / drawn.shape[-1]


def _p_value(center: float, error: float, pairs: int) -> float:
    """Return the p-value: at least 1 / 400,001, as the null distribution has no more draws."""
    if error == 0:
        return 1.0 if center == 0 else 1 / (_DRAWS + 1)
    as_large = _DRAWS - int(np.searchsorted(_null(pairs).sizes, abs(center) / error, side="left"))
    return (1 + as_large) / (_DRAWS + 1)


def _bootstrap_interval(logs: np.ndarray) -> tuple[float, float]:
    pairs = len(logs)
    tail = float(special.ndtr(math.sqrt(pairs / (pairs - 1)) * special.stdtrit(pairs - 1, LEVEL / 2)))
    low, high = np.quantile(_resampling(pairs) @ logs, [tail, 1 - tail])
    return float(low), float(high)


def _exp(value: float) -> float:
    """Return `math.exp`, but for very large values, where it would overflow."""
    return math.exp(min(value, 690.0))
