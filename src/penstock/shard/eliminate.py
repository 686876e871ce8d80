"""The cheapest joint choice of many small decisions of which each depends on few others.

Decisions are eliminated one after another: all tables that a decision occurs in are added, its cheapest state for each
combination of its neighbours' is noted, and a table of the neighbours takes their place (bucket elimination; R. Dechter,
Artificial Intelligence 113, 1999). It is exact. Its work grows with the number of decisions, and exponentially only with how
entangled they are; training steps are chains with a few hubs. Where a table would become too large, the decision with the
most neighbours keeps the state it has.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import numpy as np

_LARGEST = 1 << 18
"""Entries of the largest table that is made."""


def cheapest(
    unary: Sequence[np.ndarray], pairs: Mapping[tuple[int, int], np.ndarray], current: Sequence[int], largest: int = _LARGEST
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
    chosen: list[int | None] = [None] * len(unary)
    tables: dict[int, tuple[tuple[int, ...], np.ndarray]] = {}
    holding: list[set[int]] = [set() for _ in unary]

    def add(variables: tuple[int, ...], table: np.ndarray) -> None:
        number = add.counter = add.counter + 1  # type: ignore[attr-defined]
        tables[number] = (variables, table)
        for variable in variables:
            holding[variable].add(number)

    add.counter = 0  # type: ignore[attr-defined]
    base = [np.asarray(each, dtype=np.float64).copy() for each in unary]
    for (a, b), table in pairs.items():
        if len(base[a]) == 1:
            base[b] += table[0]
        elif len(base[b]) == 1:
            base[a] += table[:, 0]
        else:
            add((a, b), table)

    def neighbours(variable: int) -> set[int]:
        return {other for number in holding[variable] for other in tables[number][0]} - {variable}

    def width(variable: int) -> int:
        size = 1
        for other in neighbours(variable):
            size *= len(base[other])
        return size

    trail: list[tuple[int, tuple[int, ...], np.ndarray]] = []
    queue = [(width(variable), variable) for variable in range(len(unary))]
    heapq.heapify(queue)
    while queue:
        size, variable = heapq.heappop(queue)
        if chosen[variable] is not None:
            continue
        actual = width(variable)
        if actual > size:
            heapq.heappush(queue, (actual, variable))
            continue
        if actual > 1 and actual * len(base[variable]) > largest:
            hub = max((each for each in range(len(unary)) if holding[each]), key=lambda each: (len(neighbours(each)), -each))
            chosen[hub] = current[hub]
            touched = neighbours(hub)
            for number in list(holding[hub]):
                variables, table = tables.pop(number)
                for each in variables:
                    holding[each].discard(number)
                rest = tuple(each for each in variables if each != hub)
                sliced = np.take(table, current[hub], axis=variables.index(hub))
                if len(rest) == 1:
                    base[rest[0]] = base[rest[0]] + sliced
                elif rest:
                    add(rest, sliced)
            for each in (*touched, variable):
                if chosen[each] is None:
                    heapq.heappush(queue, (width(each), each))
            continue
        order = tuple(sorted(neighbours(variable)))
        place = {each: at for at, each in enumerate((*order, variable))}
        total = base[variable].reshape((1,) * len(order) + (-1,))
        for number in list(holding[variable]):
            variables, table = tables.pop(number)
            for each in variables:
                holding[each].discard(number)
            by_place = sorted(range(len(variables)), key=lambda at: place[variables[at]])
            shape = [1] * (len(order) + 1)
            for each in variables:
                shape[place[each]] = len(base[each])
            total = total + np.transpose(table, by_place).reshape(shape)
        best = np.argmin(total, axis=-1)
        trail.append((variable, order, best))
        chosen[variable] = -1
        least = np.take_along_axis(total, best[..., None], axis=-1)[..., 0]
        if len(order) == 1:
            base[order[0]] = base[order[0]] + least
        elif order:
            add(order, least)
        for each in order:
            heapq.heappush(queue, (width(each), each))
    for variable, order, best in reversed(trail):
        chosen[variable] = int(best[tuple(chosen[each] for each in order)])
    return [int(each) for each in chosen]  # type: ignore[arg-type]
