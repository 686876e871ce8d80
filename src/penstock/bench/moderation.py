"""Let comparisons of a report borrow strength from each other to estimate how much rounds scatter.

A comparison of live variants has few rounds, so the variance of its rounds is itself badly known, and Student's test with three
or five degrees of freedom asks for a huge difference. But a report has dozens of comparisons on the same machine. Smyth (2004,
"Linear models and empirical Bayes methods for assessing differential expression", sections 4 to 6) takes their variances as
draws from one scaled inverse chi-squared distribution, estimates it from all of them, and combines it with each one's own
variance: a *moderated* t-test. If the variances of the comparisons differ much, the prior counts little, and the test is
Student's.

In: comparisons with the standard error and the degrees of freedom of their own rounds. Out: the same with moderated ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy import optimize, special

from penstock.bench.statistics import LEVEL, Comparison

FEWEST = 6  # comparisons from which the distribution of their variances is estimated


def moderate(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return comparisons with moderated errors, intervals and p-values.

    Comparisons that have no degrees of freedom, or an error of 0, stay as they are; so do all of them if they are few.
    """
    used = [one for one in comparisons if one.freedom is not None and one.error]
    prior = _prior(used) if len(used) >= FEWEST else None
    return [_moderated(one, prior) if prior and one.freedom is not None and one.error else one for one in comparisons]


def _prior(used: Sequence[Comparison]) -> tuple[float, float]:
    """Return the degrees of freedom and the variance of the prior, by the moments of the logarithms of the variances.

    The variance is that of one round: the squared error times the number of rounds.
    """
    freedoms = np.array([one.freedom for one in used], float)
    logs = np.array([math.log(one.error**2 * one.pairs) for one in used if one.error])
    centred = logs - special.digamma(freedoms / 2) + np.log(freedoms / 2)
    beyond = float(centred.var(ddof=1) - special.polygamma(1, freedoms / 2).mean())
    most = float(freedoms.sum())  # the prior cannot know more than all comparisons together
    freedom = most if beyond <= 0 else min(2 * _inverse_trigamma(beyond), most)
    variance = math.exp(float(centred.mean()) + float(special.digamma(freedom / 2)) - math.log(freedom / 2))
    return freedom, variance


def _inverse_trigamma(value: float) -> float:
    """Return x > 0 with trigamma(x) = value."""
    return float(optimize.brentq(lambda x: float(special.polygamma(1, x)) - value, 1e-6, 1e8))


def _moderated(one: Comparison, prior: tuple[float, float]) -> Comparison:
    assert one.error is not None
    assert one.freedom is not None
    assert one.ratio is not None
    freedom = one.freedom + prior[0]
    variance = (one.freedom * one.error**2 * one.pairs + prior[0] * prior[1]) / freedom
    error, center = math.sqrt(variance / one.pairs), math.log(one.ratio)
    half = -float(special.stdtrit(freedom, LEVEL / 2)) * error
    p = 2 * float(special.stdtr(freedom, -abs(center) / error))
    return replace(one, low=math.exp(center - half), high=math.exp(center + half), p=p, error=error, freedom=freedom)
