"""Search for the best assignment within a memory limit.

In: a search problem, a limit in bytes, and baselines to start from. Out: the best candidate. Coordinate descent over the mesh
axes improves an assignment at a given price of memory, which is raised until a plan fits. Fictitious play (G. Brown, 1951) finds
the operations at which memory gets a price.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.shard.search.problem import Assignment, Problem

_DESCENT_ROUNDS = 6
"""The most rounds over all mesh axes from one start."""
_PRICE_STEPS = 14
"""How often the price of memory is raised at most."""
_BISECTIONS = 3
"""Bisections between the last price at which no plan fits and the first at which one does."""
_STUCK_STEPS = 2
"""The search gives up after this many price steps that find no plan of less memory."""
_BASELINE_BONUS = 0.98
"""Factor on the predicted time of a baseline: a less familiar plan is chosen only if it is better by more than 2 %."""
_SLOWDOWN = 1.5
"""A plan may be predicted slower than the fastest by this factor, if it computes and sends less. It never exceeds a baseline.

The predicted seconds are an upper bound: compilers fuse operations, combine collectives and hide latency. The ideal seconds are a
lower bound. The two bounds are far apart, so plans are compared by their product.
"""


@dataclass(frozen=True)
class Candidate:
    """An assignment with its predicted cost.

    Attributes:
      assignment: the layout of each node.
      seconds: predicted seconds of one step.
      ideal_seconds: seconds of the FLOPs at the peak and of the bytes over the links, and of nothing else.
      memory: peak memory of one device, in bytes.
      peak_op: the operation at which the peak is reached.
    """

    assignment: Assignment
    seconds: float
    ideal_seconds: float
    memory: float
    peak_op: int

    @property
    def objective(self) -> float:
        """Return the value to minimize; `_SLOWDOWN` says why it is a product."""
        return self.seconds * self.ideal_seconds


def solve(problem: Problem, overlapped: Problem, limit: float, starts: Sequence[Assignment]) -> Candidate:
    """Find the best assignment within the memory limit, or the one of least memory if none fits.

    The price of a byte at the peak is zero at first. It is raised fourfold until a plan fits, and then bisected between the last
    two prices. At each price, two players take turns (fictitious play, G. Brown 1951). One finds the best plan for the average of
    all prices so far. The other puts the price on the operation at which that plan has its peak.

    Args:
      problem: the search problem.
      overlapped: the same problem on hardware that overlaps most HBM traffic and latency with compute; a second source of plans.
      limit: bytes that one device may hold.
      starts: baselines to start from, in addition to the assignment that shards nothing.

    Returns:
      The best candidate. Its memory exceeds the limit if no candidate fits.
    """
    candidates: dict[tuple, Candidate] = {}

    def evaluate(assignment: Assignment) -> Candidate:
        key = tuple(assignment)
        if key not in candidates:
            seconds, ideal_seconds = problem.seconds(assignment), problem.ideal_seconds(assignment)
            candidates[key] = Candidate(assignment, seconds, ideal_seconds, *problem.memory(assignment))
        return candidates[key]

    def search(starts: Iterable[Assignment], price: float, searched: Problem = problem) -> bool:
        """Search at a price of memory, and return whether one of the new candidates fits."""
        return min(each.memory for each in descend(searched, starts, price, evaluate)) <= limit

    def best_at(price: float) -> list[Assignment]:
        """Return the best candidate so far at a price, as a list of starts."""
        return [min(candidates.values(), key=lambda each: each.seconds + price * each.memory).assignment]

    baselines = [evaluate(start) for start in starts]
    price = 0.0
    search([problem.start(), *starts], price)
    fastest = min(candidates.values(), key=lambda each: each.seconds)
    if fastest.memory > limit:
        low, price = 0.0, fastest.seconds / max(fastest.memory, 1.0) / 4
        smallest, stuck = min(each.memory for each in candidates.values()), 0
        for step in range(_PRICE_STEPS):
            fits = search([*best_at(price), *(starts if step == 0 else ())], price)
            if fits:
                break
            # Once memory costs more than the whole step, a higher price does not find a smaller plan.
            before, smallest = smallest, min(each.memory for each in candidates.values())
            dominates = price * fastest.memory > max(each.seconds for each in candidates.values())
            stuck = stuck + 1 if dominates and smallest > 0.995 * before else 0
            if stuck == _STUCK_STEPS:
                break
            low, price = price, price * 4
        for _ in range(_BISECTIONS if fits else 0):
            middle = (low + price) / 2
            if search(best_at(middle), middle):
                price = middle
            else:
                low = middle
    if any(each.memory <= limit for each in candidates.values()):
        search([*best_at(price), problem.start()], price, overlapped)
    return choose(list(candidates.values()), baselines, limit)


def choose(candidates: Sequence[Candidate], baselines: Sequence[Candidate], limit: float) -> Candidate:
    """Return the candidate of least objective within the limit, or the one of least memory if none fits.

    A candidate is rejected if its ideal seconds exceed those of a baseline that fits, whatever it saves in HBM traffic.
    It is also rejected if it is slower than a baseline that fits, whatever it saves in bytes on wire.

    Args:
      candidates: all candidates, the baselines among them.
      baselines: the candidates of the baselines.
      limit: bytes that one device may hold.
    """
    fitting = [each for each in candidates if each.memory <= limit]
    if not fitting:
        return min(candidates, key=lambda each: each.memory)
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
    """Improve one mesh axis after the other until a round improves nothing, and yield the candidate after each round.

    This is done from each start and in each order of the axes. Orders that differ only in equal axes count as one.

    Args:
      problem: the search problem.
      starts: assignments to start from.
      price: seconds that one byte of peak memory costs.
      evaluate: returns the candidate of an assignment.
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
