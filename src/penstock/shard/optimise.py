"""The search for a plan within a memory limit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.shard.search import Assignment, Problem

_ROUNDS = 12
_STEEPEST = 14
_BISECTIONS = 4


@dataclass(frozen=True)
class Candidate:
    """A plan that was found: its decisions, seconds of a step, and bytes of a device."""

    assignment: Assignment
    seconds: float
    memory: float


def optimise(problem: Problem, limit: float, starts: Sequence[Assignment]) -> list[Candidate]:
    """Plans, the best first: those within the limit by their time, then the others by their memory.

    The price of a byte at the fullest time is zero at first, and then raised fourfold until a plan fits; between the last two
    prices it is bisected. With each price the players take turns: a plan is found for the average of the prices that were
    asked so far, and the price is put on the time at which that plan needs most (fictitious play, G. Brown 1951).

    Args:
      problem: what is searched.
      limit: bytes of a device.
      starts: assignments to start from, beside that of nothing sharded.
    """
    found: dict[tuple, Candidate] = {}

    def add(assignments: Iterator[Assignment]) -> bool:
        fits = False
        for assignment in assignments:
            key = tuple(assignment)
            if key not in found:
                found[key] = Candidate(assignment, problem.seconds(assignment), problem.memory(assignment)[0])
            fits = fits or found[key].memory <= limit
        return fits

    begin = [problem.start(), *starts]
    add(iter(starts))
    fits = add(descend(problem, begin, 0.0))
    if not _best(found, limit) or not fits:
        cheapest = min(found.values(), key=lambda each: each.seconds)
        price = cheapest.seconds / max(cheapest.memory, 1.0) / 4
        low = 0.0
        for _ in range(_STEEPEST):
            if add(descend(problem, [*starts, *_nearest(found, limit)], price)):
                break
            low, price = price, price * 4
        for _ in range(_BISECTIONS):
            middle = (low + price) / 2
            if add(descend(problem, _nearest(found, limit), middle)):
                price = middle
            else:
                low = middle
    return sorted(found.values(), key=lambda each: (each.memory > limit, each.seconds if each.memory <= limit else each.memory))


def _best(found: dict[tuple, Candidate], limit: float) -> list[Candidate]:
    return sorted((each for each in found.values() if each.memory <= limit), key=lambda each: each.seconds)[:1]


def _nearest(found: dict[tuple, Candidate], limit: float) -> list[Assignment]:
    """To go on from: the fastest plan that fits, and the smallest of all."""
    smallest = min(found.values(), key=lambda each: each.memory)
    return [each.assignment for each in (*_best(found, limit), smallest)]


def descend(problem: Problem, starts: Sequence[Assignment], price: float) -> Iterator[Assignment]:
    """Improve one mesh axis after the other, in each order, from each start, until a round brings nothing.

    Args:
      price: seconds that a byte of peak memory costs.
    """
    axes = range(len(problem.links.sizes))
    for start, order in itertools.product(starts, itertools.permutations(axes)):
        assignment, peaks = start, []
        best, stale = float("inf"), 0
        for _ in range(_ROUNDS):
            prices = np.zeros(problem.lives.steps)
            if price:
                peaks.append(problem.memory(assignment)[1])
                np.add.at(prices, peaks, price / len(peaks))
            for axis in order:
                assignment = problem.improve(assignment, axis, prices)
            yield assignment
            value = problem.seconds(assignment) + price * (problem.memory(assignment)[0] if price else 0.0)
            stale = 0 if value < best * (1 - 1e-9) else stale + 1
            best = min(best, value)
            if stale >= (2 if price else 1):
                break
