"""Minimize a sum of cost tables over many discrete variables: bucket elimination (R. Dechter, Artificial Intelligence 113, 1999).

In: the cost of each state of each variable, and of each pair of states of two variables. Out: one state for each variable, so
that the total cost is the least.

Variables are eliminated one after another. To eliminate a variable, all tables that contain it are added, and its cheapest state
is noted for each joint state of its neighbours. The minimum becomes a new table of the neighbours. The method is exact. Its work
grows linearly with the number of variables, and exponentially with the width of the elimination order. Training steps are chains
with a few hubs, so that the width is small. Where a table would become too large, the variable with the most neighbours keeps its
current state.

The order depends on the numbers of states and on which pairs have tables, not on the costs. A search eliminates the same
variables many times at other costs, so orders are kept.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_LARGEST_TABLE = 1 << 18
"""Entries of the largest table that may be built."""
_ORDERS = 64
"""The number of orders that are kept."""


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
    states = tuple(map(len, unary))
    order = _find_order(states, tuple(pairs), largest)
    tables: list[np.ndarray] = [*unary, *pairs.values()]
    chosen = [0] * len(unary)
    choices: list[np.ndarray] = []
    for step in order:
        if step.keeps:
            state = current[step.variable]
            choices.append(np.array(state))
            tables += [np.take(tables[number], state, axis=axis) for number, axis in step.fixed]
            continue
        total: np.ndarray | None = None
        for number, axes, shape in step.tables:
            each = (tables[number] if axes is None else tables[number].transpose(axes)).reshape(shape)
            total = each if total is None else total + each
        assert total is not None  # each variable has a table of its own
        choices.append(total.argmin(axis=-1))
        tables.append(total.min(axis=-1))
    for step, best in zip(reversed(order), reversed(choices), strict=True):
        chosen[step.variable] = int(best if step.keeps else best[tuple(chosen[each] for each in step.neighbours)])
    return chosen


@dataclass(frozen=True)
class _Step:
    """The elimination of one variable.

    Attributes:
      variable: the variable.
      neighbours: the variables that share a table with it.
      tables: the tables that contain it, its own first: the number, the order of axes (None if it stays), and the shape with one
        axis for each neighbour and the last for the variable.
      keeps: whether the variable keeps its current state.
      fixed: pairs (number of a table that contains it, axis of the variable), if it keeps its state.
    """

    variable: int
    neighbours: tuple[int, ...]
    tables: tuple[tuple[int, tuple[int, ...] | None, tuple[int, ...]], ...]
    keeps: bool = False
    fixed: tuple[tuple[int, int], ...] = ()


@functools.lru_cache(maxsize=_ORDERS)
def _find_order(states: tuple[int, ...], pairs: tuple[tuple[int, int], ...], largest: int) -> tuple[_Step, ...]:
    """Return the order in which variables are eliminated: the one with the fewest joint states of its neighbours is next.

    Tables are numbered: first those of each variable alone, then those of the pairs, then those that steps make, in order.

    Args:
      states: the number of states of each variable.
      pairs: the pairs of variables that have a table.
      largest: the number of entries of the largest table that may be built.
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
            fixed = [(number, scope) for number, scope in take(hub) if len(scope) > 1]
            steps.append(_keeping(hub, fixed))
            for _, scope in fixed:
                add(tuple(each for each in scope if each != hub))
            left.discard(hub)
        else:
            touched = neighbours(variable)
            order = tuple(sorted(touched))
            steps.append(_Step(variable, order, tuple(_aligned(*each, (*order, variable), states) for each in take(variable))))
            add(order)
            left.discard(variable)
        for each in touched & left:
            heapq.heappush(queue, (width(each), each))
    return tuple(steps)


def _keeping(hub: int, fixed: Sequence[tuple[int, tuple[int, ...]]]) -> _Step:
    """Return the step in which a variable keeps its current state."""
    return _Step(hub, (), (), keeps=True, fixed=tuple((number, scope.index(hub)) for number, scope in fixed))


def _aligned(
    number: int, scope: tuple[int, ...], axes: tuple[int, ...], states: tuple[int, ...]
) -> tuple[int, tuple[int, ...] | None, tuple[int, ...]]:
    """Return how a table of some variables is added to one with an axis for each of others too."""
    at = {variable: axis for axis, variable in enumerate(axes)}
    by_axis = tuple(sorted(range(len(scope)), key=lambda each: at[scope[each]]))
    shape = tuple(states[variable] if variable in scope else 1 for variable in axes)
    return number, None if by_axis == tuple(range(len(scope))) else by_axis, shape
