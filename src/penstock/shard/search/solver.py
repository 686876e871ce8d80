"""The search for a plan within a memory limit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.shard.search.problem import Assignment, Problem

_DESCENT_ROUNDS = 6
_PRICE_STEPS = 14
_BISECTIONS = 3
_STUCK_STEPS = 2
_BASELINE_BONUS = 0.98
"""A plan that everybody knows is taken for this much better than it is predicted to be: a stranger one has to be worth it."""
_SLOWDOWN = 1.5
"""By how much the plan that is taken may be slower than the fastest, for computing and sending less; it is never slower than one
that everybody knows.

The seconds of a step are an upper bound: compilers fuse operations, combine collectives and hide latency. What is computed and
sent is a lower one. So far apart are the two that a plan is weighed by both, their product.
"""


@dataclass(frozen=True)
class Candidate:
    """A plan that was found.

    Attributes:
      assignment: its decisions.
      seconds: of a step.
      bare: seconds of FLOPs at the peak and of bytes over the links, and of nothing else.
      memory: bytes of a device.
      fullest: the operation at which it holds them.
    """

    assignment: Assignment
    seconds: float
    ideal_seconds: float
    memory: float
    peak_op: int

    @property
    def objective(self) -> float:
        """By which plans are compared; see `_SLOWER`."""
        return self.seconds * self.ideal_seconds


def solve(problem: Problem, overlapped: Problem, limit: float, starts: Sequence[Assignment]) -> Candidate:
    """The best plan within the limit; where none keeps it, the smallest.

    The price of a byte at the fullest time is zero at first, and then raised fourfold until a plan fits; between the last two
    prices it is bisected. With each price the players take turns: a plan is found for the average of the prices that were
    asked so far, and the price is put on the time at which that plan needs most (fictitious play, G. Brown 1951).

    Args:
      problem: what is searched.
      hidden: the same on hardware that hides most of memory's traffic and of latency: a second place to look for plans.
      limit: bytes of a device.
      starts: plans that everybody knows, to start from, beside that of nothing sharded.
    """
    found: dict[tuple, Candidate] = {}

    def evaluate(assignment: Assignment) -> Candidate:
        key = tuple(assignment)
        if key not in found:
            seconds, ideal_seconds = problem.seconds(assignment), problem.ideal_seconds(assignment)
            found[key] = Candidate(assignment, seconds, ideal_seconds, *problem.memory(assignment))
        return found[key]

    def some_fit(starts: Iterable[Assignment], price: float, of: Problem = problem) -> bool:
        """Search at a price."""
        return min(each.memory for each in descend(of, starts, price, evaluate)) <= limit

    def best_at(price: float) -> list[Assignment]:
        return [min(found.values(), key=lambda each: each.seconds + price * each.memory).assignment]

    baselines = [evaluate(start) for start in starts]
    price = 0.0
    some_fit([problem.start(), *starts], price)
    fastest = min(found.values(), key=lambda each: each.seconds)
    if fastest.memory > limit:
        low, price = 0.0, fastest.seconds / max(fastest.memory, 1.0) / 4
        smallest, stuck = min(each.memory for each in found.values()), 0
        for step in range(_PRICE_STEPS):
            fits = some_fit([*best_at(price), *(starts if step == 0 else ())], price)
            if fits:
                break
            # What a higher price does not make smaller no price will.
            before, smallest = smallest, min(each.memory for each in found.values())
            dear = price * fastest.memory > max(each.seconds for each in found.values())
            stuck = stuck + 1 if dear and smallest > 0.995 * before else 0
            if stuck == _STUCK_STEPS:
                break
            low, price = price, price * 4
        for _ in range(_BISECTIONS if fits else 0):
            middle = (low + price) / 2
            if some_fit(best_at(middle), middle):
                price = middle
            else:
                low = middle
    if any(each.memory <= limit for each in found.values()):
        some_fit([*best_at(price), problem.start()], price, overlapped)
    return choose(list(found.values()), baselines, limit)


def choose(found: Sequence[Candidate], baselines: Sequence[Candidate], limit: float) -> Candidate:
    """The candidate within the limit whose time and score have the least product; where none is, the smallest.

    What everybody knows is a bound to both: no plan is put before one of these that computes and sends less, whatever it saves
    in memory traffic, or that is faster, whatever it saves in sending.
    """
    fitting = [each for each in found if each.memory <= limit]
    if not fitting:
        return min(found, key=lambda each: each.memory)
    baselines_within = [each for each in baselines if each.memory <= limit]
    least = min((each.ideal_seconds for each in baselines_within), default=float("inf"))
    bounded = [each for each in fitting if each.ideal_seconds <= least * (1 + 1e-9)] or fitting

    def bonus(each: Candidate) -> float:
        return _BASELINE_BONUS if each in baselines_within else 1.0

    quickest = min(each.seconds * bonus(each) for each in bounded)
    slowest = max(quickest, min([quickest * _SLOWDOWN, *(each.seconds for each in baselines_within)]))
    near_fastest = [each for each in bounded if each.seconds * bonus(each) <= slowest]
    return min(near_fastest, key=lambda each: (each.objective * bonus(each), each.seconds))


def descend(
    problem: Problem, starts: Iterable[Assignment], price: float, evaluate: Callable[[Assignment], Candidate]
) -> Iterator[Candidate]:
    """Improve one mesh axis after the other, in each order that makes a difference, until a round brings nothing.

    Args:
      problem: what is searched.
      starts: assignments, from each of which it is done.
      price: seconds that a byte of peak memory costs.
      weigh: what an assignment takes.
    """
    links = problem.links
    orders = {
        tuple((links.sizes[axis], links.bandwidth[axis]) for axis in order): order
        for order in itertools.permutations(reversed(range(len(links.sizes))))
    }
    for start, order in itertools.product(starts, orders.values()):
        assignment, peaks = start, []
        best, stale = float("inf"), 0
        for _ in range(_DESCENT_ROUNDS):
            prices = np.zeros(problem.live_ranges.steps)
            if price:
                peaks.append(evaluate(assignment).peak_op)
                np.add.at(prices, peaks, price / len(peaks))
            for axis in order:
                assignment = problem.improve(assignment, axis, prices)
            candidate = evaluate(assignment)
            yield candidate
            value = candidate.seconds + price * candidate.memory
            stale = 0 if value < best * (1 - 1e-9) else stale + 1
            best = min(best, value)
            if stale >= (2 if price else 1):
                break
