"""Minimize a sum of cost tables over many discrete variables: bucket elimination (R. Dechter, Artificial Intelligence 113, 1999).

Variables are eliminated one after another. To eliminate a variable, all tables that contain it are added, and the minimum over
its states becomes a new table of its neighbours. Then states are chosen in the opposite order: for each variable the cheapest,
given the states of its neighbours. The method is exact. Its work grows linearly with the number of variables, and exponentially
with the width of the elimination order. Training steps are chains with a few hubs, so that the width is small. Where a table
would become too large, the variable with the most neighbours keeps its current state.

The order depends on the numbers of states and on which pairs have tables, not on the costs. A search eliminates the same
variables many times at other costs, so orders are kept.
"""

from __future__ import annotations

import functools
import heapq
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_LARGEST_TABLE = 1 << 18
"""Entries of the largest table that may be built."""
_ORDERS = 64
"""The number of orders that are kept."""
_NO_TABLE = np.zeros(0)


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
      current: a state for each variable; a variable keeps it if its table would be too large.
      largest: the number of entries of the largest table that may be built.

    Returns:
      The state of each variable. The total cost is the least possible, given the variables that had to keep their state.

    >>> agree = np.array([[0.0, 3.0], [3.0, 0.0]])
    >>> bucket_eliminate([np.array([0.0, 1.0]), np.array([2.0, 0.0])], {(0, 1): agree}, [0, 0])
    [1, 1]
    """
    states = tuple(map(len, unary))
    order = _find_order(states, tuple(pairs), largest)
    tables: list[np.ndarray] = [*unary, *pairs.values()]
    totals: list[np.ndarray] = []
    for step in order:
        if step.keeps:
            tables += [tables[use.number].take(current[step.variable], axis=use.axis) for use in step.tables]
            totals.append(_NO_TABLE)
        else:
            total = _add_tables(step, tables)
            totals.append(total)
            tables.append(np.minimum.reduce(total))
        for use in step.tables:
            tables[use.number] = _NO_TABLE  # nothing reads it again
    chosen: list[Any] = list(current)
    for step, total in zip(reversed(order), reversed(totals), strict=True):
        if not step.keeps:
            chosen[step.variable] = slice(None)
            chosen[step.variable] = int(total[step.index(chosen)].argmin())
    return chosen


def find_kept(states: Sequence[int], pairs: Sequence[tuple[int, int]], largest: int = _LARGEST_TABLE) -> list[int]:
    """Return the variables that keep their current state, because a table would be too large."""
    return [step.variable for step in _find_order(tuple(states), tuple(pairs), largest) if step.keeps]


@dataclass(frozen=True)
class _Use:
    """A table in the elimination of one of its variables.

    Attributes:
      scope: its variables, in the order of its axes.
      axis: the axis of the variable that is eliminated.
      axes: the order of axes in which it is added to the other tables; None if it does not change.
      shape: its shape then, with the variable first, and one axis for each neighbour of the variable; None if unchanged.
    """

    number: int
    scope: tuple[int, ...]
    axis: int
    axes: tuple[int, ...] | None
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class _Step:
    """The elimination of one variable.

    Attributes:
      tables: the tables that contain the variable, its own first; without its own if it keeps its state.
      index: returns the index into the sum of the tables, given the states of all variables.
      entries: the number of entries of the sum.
      keeps: whether the variable keeps its current state.
    """

    variable: int
    tables: tuple[_Use, ...]
    index: Callable[[Sequence[Any]], Any]
    entries: int
    keeps: bool = False


def _add_tables(step: _Step, tables: Sequence[np.ndarray]) -> np.ndarray:
    """Return the sum of the tables that contain a variable, with the variable as the first axis."""
    total, owned = _NO_TABLE, False
    for use in step.tables:
        table = tables[use.number]
        if use.axes is not None:
            table = table.transpose(use.axes)
        if use.shape is not None:
            table = table.reshape(use.shape)
        if total is _NO_TABLE:
            total = table
        elif owned and total.size == step.entries:
            total += table
        else:
            total, owned = total + table, True
    return total


@functools.lru_cache(maxsize=_ORDERS)
def _find_order(states: tuple[int, ...], pairs: tuple[tuple[int, int], ...], largest: int) -> tuple[_Step, ...]:
    """Return the order of elimination: the variable with the fewest joint states of its neighbours is next.

    Tables are numbered: first the tables of each variable alone, then of the pairs, then the tables that steps make, in order.
    """
    scopes: dict[int, tuple[int, ...]] = {variable: (variable,) for variable in range(len(states))}
    scopes |= {len(states) + number: pair for number, pair in enumerate(pairs)}
    made = len(scopes)
    tables_of: list[set[int]] = [set() for _ in states]
    for number, scope in scopes.items():
        for variable in scope:
            tables_of[variable].add(number)

    def neighbours(variable: int) -> set[int]:
        return {other for number in tables_of[variable] for other in scopes[number]} - {variable}

    def width(variable: int) -> int:
        return math.prod(states[other] for other in neighbours(variable))

    def take(variable: int) -> list[tuple[int, tuple[int, ...]]]:
        taken = [(number, scopes.pop(number)) for number in sorted(tables_of[variable])]
        for number, scope in taken:
            for each in scope:
                tables_of[each].discard(number)
        return taken

    def add(scope: tuple[int, ...]) -> None:
        nonlocal made
        if scope:
            scopes[made] = scope
            for variable in scope:
                tables_of[variable].add(made)
        made += 1

    steps: list[_Step] = []
    left = set(range(len(states)))
    queue = [(width(variable), variable) for variable in left]
    heapq.heapify(queue)
    while queue:
        before, variable = heapq.heappop(queue)
        if variable not in left:
            continue
        actual = width(variable)
        if actual > before:  # an elimination has given it more neighbours since it was queued
            heapq.heappush(queue, (actual, variable))
            continue
        if actual * states[variable] > largest and actual > 1:
            hub = max(left, key=lambda each: (len(neighbours(each)), -each))
            touched = neighbours(hub) | {variable}
            uses = tuple(_use(number, scope, scope, hub, states) for number, scope in take(hub) if len(scope) > 1)
            steps.append(_Step(hub, uses, operator.itemgetter(hub), 0, keeps=True))
            for use in uses:
                add(tuple(each for each in use.scope if each != hub))
            left.discard(hub)
        else:
            touched = neighbours(variable)
            taken = take(variable)
            # The largest table keeps its order of axes, because adding a transposed table takes much longer.
            kept = max((scope for _, scope in taken), key=lambda scope: math.prod(states[each] for each in scope))
            order = tuple(dict.fromkeys(each for each in (*kept, *sorted(touched)) if each != variable))
            uses = tuple(_use(*each, order, variable, states) for each in taken)
            steps.append(_Step(variable, uses, operator.itemgetter(variable, *order), actual * states[variable]))
            add(order)
            left.discard(variable)
        for each in touched & left:
            heapq.heappush(queue, (width(each), each))
    return tuple(steps)


def _use(number: int, scope: tuple[int, ...], neighbours: tuple[int, ...], variable: int, states: tuple[int, ...]) -> _Use:
    """Return how a table is added to the other tables of a variable that is eliminated."""
    order = (variable, *(each for each in neighbours if each != variable))
    at = {each: axis for axis, each in enumerate(order)}
    axes = tuple(sorted(range(len(scope)), key=lambda axis: at[scope[axis]]))
    shape = tuple(states[each] if each in scope else 1 for each in order)
    reordered, widened = axes != tuple(range(len(scope))), len(scope) < len(order)
    return _Use(number, scope, scope.index(variable), axes if reordered else None, shape if widened else None)
