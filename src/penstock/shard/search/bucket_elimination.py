"""Minimize a sum of cost tables over many discrete variables: bucket elimination (R. Dechter, Artificial Intelligence 113, 1999).

In: the cost of each state of each variable, and of each pair of states of two variables. Out: one state for each variable, so
that the total cost is the least.

Variables are eliminated one after another. To eliminate a variable, all tables that contain it are added, and its cheapest state
is noted for each joint state of its neighbours. The minimum becomes a new table of the neighbours. The method is exact. Its work
grows linearly with the number of variables, and exponentially with the width of the elimination order. Training steps are chains
with a few hubs, so that the width is small. Where a table would become too large, the variable with the most neighbours keeps its
current state.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

_LARGEST_TABLE = 1 << 18
"""Entries of the largest table that may be built."""


def bucket_eliminate(
    unary: Sequence[np.ndarray],
    pairs: Mapping[tuple[int, int], np.ndarray],
    current: Sequence[int],
    largest: int = _LARGEST_TABLE,
) -> list[int]:
    """Choose a state for each variable, so that the total cost is least.

    Args:
      unary: for each variable, the cost of each state [states].
      pairs: for two variables (a < b), the cost of each pair of states [states of a, states of b].
      current: a state for each variable, which a variable keeps if its table would be too large.
      largest: the number of entries of the largest table that may be built.

    Returns:
      The state of each variable. The total cost is the least possible, given the variables that had to keep their state.

    >>> agree = np.array([[0.0, 3.0], [3.0, 0.0]])
    >>> bucket_eliminate([np.array([0.0, 1.0]), np.array([2.0, 0.0])], {(0, 1): agree}, [0, 0])
    [1, 1]
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
        if actual > width:  # an elimination has given it more neighbours since it was queued
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
        if variable not in eliminated:  # it has no neighbours
            chosen[variable] = int(np.argmin(tables.own[variable]))
    for variable, order, best in reversed(trail):
        chosen[variable] = int(best[tuple(chosen[each] for each in order)])
    return [chosen[variable] for variable in range(len(unary))]


class _Tables:
    """Cost tables: each covers a few variables, with one array axis for each of them.

    Attributes:
      own: for each variable, the cost of each of its states alone.
      tables_of: for each variable, the numbers of the tables that contain it.
    """

    def __init__(self, unary: Sequence[np.ndarray], pairs: Mapping[tuple[int, int], np.ndarray]):
        self.own = [np.asarray(each, dtype=np.float64).copy() for each in unary]
        self.tables_of: list[set[int]] = [set() for _ in unary]
        self._tables: dict[int, tuple[tuple[int, ...], np.ndarray]] = {}
        self._numbers = itertools.count()
        for (a, b), table in pairs.items():
            if self.states(a) == 1:
                self.own[b] += table[0]
            elif self.states(b) == 1:
                self.own[a] += table[:, 0]
            else:
                self._add((a, b), table)

    def states(self, variable: int) -> int:
        """Return the number of states of a variable."""
        return len(self.own[variable])

    def neighbours(self, variable: int) -> set[int]:
        """Return the variables that share a table with this one."""
        return {other for number in self.tables_of[variable] for other in self._tables[number][0]} - {variable}

    def width(self, variable: int) -> int:
        """Return the number of joint states of the neighbours."""
        return math.prod(self.states(other) for other in self.neighbours(variable))

    def most_neighbours(self) -> int:
        """Return the variable with the most neighbours; the first of several."""
        return max(
            (each for each in range(len(self.own)) if self.tables_of[each]), key=lambda each: (len(self.neighbours(each)), -each)
        )

    def fix(self, variable: int, state: int) -> None:
        """Set the state of a variable, and remove the variable from all tables."""
        for variables, table in self._take(variable):
            rest = tuple(each for each in variables if each != variable)
            self._add(rest, np.take(table, state, axis=variables.index(variable)))

    def eliminate(self, variable: int) -> tuple[tuple[int, ...], np.ndarray]:
        """Eliminate a variable. Return its neighbours, and its cheapest state for each of their joint states."""
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
        """Add a table of some variables."""
        if len(variables) == 1:
            self.own[variables[0]] = self.own[variables[0]] + table
        elif variables:
            number = next(self._numbers)
            self._tables[number] = (variables, table)
            for variable in variables:
                self.tables_of[variable].add(number)

    def _take(self, variable: int) -> list[tuple[tuple[int, ...], np.ndarray]]:
        """Remove the tables that contain a variable, and return them."""
        taken = []
        for number in sorted(self.tables_of[variable]):
            variables, table = self._tables.pop(number)
            for each in variables:
                self.tables_of[each].discard(number)
            taken.append((variables, table))
        return taken
