"""The cheapest joint choice of many small decisions of which each depends on few others.

Decisions are eliminated one after another: all tables that a decision occurs in are added, its cheapest state for each
combination of its neighbours' is noted, and a table of the neighbours takes their place (bucket elimination; R. Dechter,
Artificial Intelligence 113, 1999). It is exact. Its work grows with the number of decisions, and exponentially only with how
entangled they are; training steps are chains with a few hubs. Where a table would become too large, the decision with the
most neighbours keeps the state it has.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

_LARGEST_TABLE = 1 << 18
"""Entries of the largest table that is made."""


def bucket_eliminate(
    unary: Sequence[np.ndarray],
    pairs: Mapping[tuple[int, int], np.ndarray],
    current: Sequence[int],
    largest: int = _LARGEST_TABLE,
) -> list[int]:
    """Choose a state for each decision.

    Args:
      unary: of each decision, the cost of each state [states].
      pairs: of two decisions (a < b), the cost of each two states [states of a, states of b].
      current: a state of each, taken where a decision is too entangled to be decided.
      largest: entries of the largest table that may be made.

    Returns:
      the states: those of least total cost, or if some had to keep theirs, of least cost given those.
    """
    tables = _Tables(unary, pairs)
    trail: list[tuple[int, tuple[int, ...], np.ndarray]] = []
    chosen: dict[int, int] = {}
    eliminated: set[int] = set()
    queue = [(tables.width(variable), variable) for variable in range(len(unary)) if tables.tables_of[variable]]
    heapq.heapify(queue)
    while queue:
        width, variable = heapq.heappop(queue)
        if variable in eliminated:
            continue
        actual = tables.width(variable)
        if actual > width:  # it was queued before a neighbour brought it others
            heapq.heappush(queue, (actual, variable))
            continue
        if tables.tables_of[variable] and actual * tables.states(variable) > largest:
            hub = tables.most_neighbours()
            chosen[hub] = current[hub]
            eliminated.add(hub)
            touched = tuple({*tables.neighbours(hub), variable} - {hub})
            tables.fix(hub, current[hub])
        else:
            eliminated.add(variable)
            touched, best = tables.eliminate(variable)
            trail.append((variable, touched, best))
        for each in touched:
            heapq.heappush(queue, (tables.width(each), each))
    for variable in range(len(unary)):
        if variable not in eliminated:  # nothing else depends on it
            chosen[variable] = int(np.argmin(tables.own[variable]))
    for variable, order, best in reversed(trail):
        chosen[variable] = int(best[tuple(chosen[each] for each in order)])
    return [chosen[variable] for variable in range(len(unary))]


class _Tables:
    """Costs of joint states of some decisions each, with one axis per decision.

    Attributes:
      own: of each decision, the cost of each state by itself.
      holding: of each decision, the numbers of the tables that it occurs in.
    """

    def __init__(self, unary: Sequence[np.ndarray], pairs: Mapping[tuple[int, int], np.ndarray]):
        self.own = [np.asarray(each, dtype=np.float64).copy() for each in unary]
        self.tables_of: list[set[int]] = [set() for _ in unary]
        self._tables: dict[int, tuple[tuple[int, ...], np.ndarray]] = {}
        self._made = itertools.count()
        for (a, b), table in pairs.items():
            if self.states(a) == 1:
                self.own[b] += table[0]
            elif self.states(b) == 1:
                self.own[a] += table[:, 0]
            else:
                self._add((a, b), table)

    def states(self, variable: int) -> int:
        return len(self.own[variable])

    def neighbours(self, variable: int) -> set[int]:
        return {other for number in self.tables_of[variable] for other in self._tables[number][0]} - {variable}

    def width(self, variable: int) -> int:
        """How many joint states the neighbours have."""
        return math.prod(self.states(other) for other in self.neighbours(variable))

    def most_neighbours(self) -> int:
        return max(
            (each for each in range(len(self.own)) if self.tables_of[each]), key=lambda each: (len(self.neighbours(each)), -each)
        )

    def fix(self, variable: int, state: int) -> None:
        """Give a decision a state, and take it out of all tables."""
        for variables, table in self._take(variable):
            rest = tuple(each for each in variables if each != variable)
            self._add(rest, np.take(table, state, axis=variables.index(variable)))

    def eliminate(self, variable: int) -> tuple[tuple[int, ...], np.ndarray]:
        """Take a decision out: its neighbours, and its cheapest state for each joint state of theirs."""
        order = tuple(sorted(self.neighbours(variable)))
        axis_of = {each: at for at, each in enumerate((*order, variable))}
        total = self.own[variable].reshape((1,) * len(order) + (-1,))
        for variables, table in self._take(variable):
            by_axis = sorted(range(len(variables)), key=lambda at: axis_of[variables[at]])
            shape = [1] * (len(order) + 1)
            for each in variables:
                shape[axis_of[each]] = self.states(each)
            total = total + np.transpose(table, by_axis).reshape(shape)
        if order:
            self._add(order, total.min(axis=-1))
        return order, np.argmin(total, axis=-1)

    def _add(self, variables: tuple[int, ...], table: np.ndarray) -> None:
        if len(variables) == 1:
            self.own[variables[0]] = self.own[variables[0]] + table
        elif variables:
            number = next(self._made)
            self._tables[number] = (variables, table)
            for variable in variables:
                self.tables_of[variable].add(number)

    def _take(self, variable: int) -> list[tuple[tuple[int, ...], np.ndarray]]:
        """The tables that a decision occurs in; they are gone then."""
        taken = []
        for number in sorted(self.tables_of[variable]):
            variables, table = self._tables.pop(number)
            for each in variables:
                self.tables_of[each].discard(number)
            taken.append((variables, table))
        return taken
