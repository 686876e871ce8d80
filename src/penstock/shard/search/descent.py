"""Descend to fast layouts: find the best use of one mesh axis, given how the others are used, for one axis after the other.

It ignores the memory limit. Its plans are where the exact search begins (`exact.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from penstock.shard.search.bucket_elimination import bucket_eliminate, find_kept
from penstock.shard.search.layout_tables import LayoutTables, States

_ROUNDS = 6
"""The most rounds over all mesh axes from one start."""
_STORAGE_PRICE = 1e-3
"""Cost of storing all inputs replicated, as a fraction of the compute seconds. It breaks ties in favour of less memory."""


class Descent:
    """The descent on one mesh. It keeps the problems that it has solved, as several starts and orders of axes repeat them."""

    def __init__(self, tables: LayoutTables):
        self._tables = tables
        self._known: dict[tuple, States] = {}
        costs = tables.costs
        total = sum(size for _, size in costs.stored)
        price = _STORAGE_PRICE * costs.compute_seconds(costs.start()) / total if total else 0.0
        self._alone = [seconds + price * stored for seconds, stored in zip(tables.seconds, tables.stored, strict=True)]
        self._pairs = [pair.seconds for pair in tables.pairs]
        for shared in tables.shared:  # counted for each reader
            for bundle in shared.bundles:
                at = tables.pair_of[bundle]
                self._pairs[at] = self._pairs[at] + shared.times * tables.pairs[at].reshards[bundle].seconds

    def run(self, starts: Iterable[States], evaluate: Callable[[States], Any]) -> None:
        """Improve one mesh axis after the other until a round improves nothing, and evaluate the states after each round.

        This is done from each start and in each order of the axes. Orders that differ only in equal axes count as one.
        """
        links = self._tables.costs.links
        orders = {
            tuple((links.sizes[axis], links.speed("all-reduce", 1 << axis)) for axis in order): order
            for order in itertools.permutations(reversed(range(len(links.sizes))))
        }
        reached: set[tuple] = set()
        for states, order in itertools.product(starts, orders.values()):
            for _ in range(_ROUNDS):
                if (order, tuple(states)) in reached:
                    break  # nothing is better, or an earlier descent has continued from here
                reached.add((order, tuple(states)))
                for axis in order:
                    states = self.improve(states, axis)
                evaluate(states)

    def improve(self, states: Sequence[int], axis: int) -> States:
        """Return the states with the best use of one mesh axis, given how the other axes are used.

        The result is exact, except where a table is too large (`bucket_eliminate`), and that an array that several operations
        reshard to one layout is counted for each.
        """
        options = [self._tables.alike_but(number, axis)[state] for number, state in enumerate(states)]
        key = (axis, *[int(each[0]) for each in options])
        if key in self._known:
            return self._known[key]
        alone = [costs[each] for costs, each in zip(self._alone, options, strict=True)]
        pairs: dict[tuple[int, int], np.ndarray] = {}
        for pair, seconds in zip(self._tables.pairs, self._pairs, strict=True):
            table = seconds[np.ix_(pair.rows[options[pair.a]], pair.columns[options[pair.b]])]
            if table.any():
                pairs[pair.a, pair.b] = table
        current = [int(np.searchsorted(each, state)) for each, state in zip(options, states, strict=True)]
        chosen = bucket_eliminate(alone, pairs, current)
        found = [int(each[at]) for each, at in zip(options, chosen, strict=True)]
        if not find_kept([len(each) for each in options], list(pairs)):
            self._known[key] = found
        return found
