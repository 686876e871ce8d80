"""Let comparisons of a report borrow strength from each other to estimate how much rounds scatter.

A comparison of live variants has few rounds, so the variance of its rounds is itself badly known. Student's test with three or
five degrees of freedom then requires a huge difference. But a report has dozens of comparisons on the same machine. Smyth (2004,
"Linear models and empirical Bayes methods for assessing differential expression", sections 4 to 6) takes their variances as draws
from one scaled inverse chi-squared distribution, estimates it from all of them, and combines it with each one's own
variance: a *moderated* t-test. If the variances of the comparisons differ much, the prior counts little, and the test is
Student's.

Comparisons of one workload are not independent: they have the baseline's processes in common, so their variances are similar even
if others are not. If the baseline is what scatters, all of them together know no more than one. So a moderated comparison has no
more degrees of freedom than one comparison of each workload has together. In a report of one workload nothing is moderated.

In: comparisons with the standard error and the degrees of freedom of their own rounds. Out: the same with moderated ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy import optimize, special

from penstock_bench.statistics import LEVEL, Comparison

_CERTAIN = 1e4  # degrees of freedom, where all variances are alike
FEWEST = 6  # comparisons from which the distribution of their variances is estimated


def moderate(comparisons: Sequence[Comparison], workloads: Sequence[int]) -> list[Comparison]:
    """Return comparisons with moderated errors, intervals and p-values.

    Comparisons that have no degrees of freedom, or an error of 0, stay as they are; so do all of them if they are few.

    Args:
      comparisons: of a report.
      workloads: for each comparison, the number of its workload.
    """
    used = [one for one in comparisons if one.freedom is not None and one.error]
    independent: dict[int, float] = {}
    for workload, one in zip(workloads, comparisons, strict=True):
        independent[workload] = max(independent.get(workload, 0), one.freedom or 0)
    if len(used) < FEWEST:
        return list(comparisons)
    prior, most = _prior(used), sum(independent.values())
    return [_moderated(one, prior, most) if one.freedom is not None and one.error else one for one in comparisons]


def _prior(used: Sequence[Comparison]) -> tuple[float, float]:
    """Return the degrees of freedom and the variance of the prior, by the moments of the logarithms of the variances.

    The variance is of one round: the squared error times the number of rounds.
    """
    freedoms = np.array([one.freedom for one in used], float)
    logs = np.array([math.log(one.error**2 * one.pairs) for one in used if one.error])
    centred = logs - special.digamma(freedoms / 2) + np.log(freedoms / 2)
    beyond = float(centred.var(ddof=1) - special.polygamma(1, freedoms / 2).mean())
    freedom = _CERTAIN if beyond <= 0 else min(2 * _inverse_trigamma(beyond), _CERTAIN)
    variance = math.exp(float(centred.mean()) + float(special.digamma(freedom / 2)) - math.log(freedom / 2))
    return freedom, variance


def _inverse_trigamma(value: float) -> float:
    """Return x > 0 with trigamma(x) = value."""
    return float(optimize.brentq(lambda x: float(special.polygamma(1, x)) - value, 1e-6, 1e8))


def _moderated(one: Comparison, prior: tuple[float, float], most: float) -> Comparison:
    """Combine a comparison's own variance with the prior's; the sum has at most so many degrees of freedom."""
    assert one.error is not None
    assert one.freedom is not None
    assert one.ratio is not None
    of_prior = min(prior[0], max(0.0, most - one.freedom))
    freedom = one.freedom + of_prior
    variance = (one.freedom * one.error**2 * one.pairs + of_prior * prior[1]) / freedom
    error, center = math.sqrt(variance / one.pairs), math.log(one.ratio)
    half = -float(special.stdtrit(freedom, LEVEL / 2)) * error
    p = 2 * float(special.stdtr(freedom, -abs(center) / error))
    return replace(one, low=math.exp(center - half), high=math.exp(center + half), p=p, error=error, freedom=freedom)
