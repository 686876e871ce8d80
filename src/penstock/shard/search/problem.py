"""The search problem: find the best use of one mesh axis, given how the other axes are used.

The memory limit enters as a price on each byte that is live at an operation; `solver.py` raises it until the plan fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.shard.graph.decisions import Bundle, Node
from penstock.shard.mesh.resharding import Layout, union, with_axes
from penstock.shard.search.bucket_elimination import bucket_eliminate, find_kept
from penstock.shard.search.costs import Assignment, CostModel, project

_STORAGE_PRICE = 1e-3
"""Cost of storing all inputs replicated, as a fraction of the compute seconds. It breaks ties in favour of less memory."""


class Problem:
    """The search problem of a step on one mesh. Its tables are cached, because a search solves it many times."""

    def __init__(self, costs: CostModel):
        self.costs = costs
        self._tables: dict = {}
        self._choices: dict = {}
        self._layouts: dict = {}
        self._unpriced: dict = {}
        kinds: dict[tuple, int] = {}
        self._bundle_kind = [kinds.setdefault(_cost_kind(bundle), len(kinds)) for bundle in self.costs.folded.bundles]
        total = sum(size for _, size in self.costs.stored)
        self._stored_sizes: dict[int, tuple[int, int]] = {}  # by class: bytes of the global array, and how many there are
        for node, size in self.costs.stored:
            number = self.costs.class_of[node]
            self._stored_sizes[number] = (size, self._stored_sizes.get(number, (0, 0))[1] + 1)
        self._storage_price = _STORAGE_PRICE * self.costs.compute_seconds(self.costs.start()) / total if total else 0.0

    def improve(self, assignment: Assignment, axis: int, prices: np.ndarray) -> Assignment:
        """Return the assignment with the best use of one mesh axis, given how the other axes are used.

        The result is exact, except where a table is too large (`bucket_eliminate`).

        Args:
          assignment: the current layouts. It keeps their use of the other axes.
          prices: for each operation, the seconds that one live byte costs [operations].
        """
        options = [self._options(number, assignment[node], axis) for number, node in enumerate(self.costs.first_of)]
        if prices.any():
            chosen, _ = self._decide(options, prices)
        else:
            # Descents from several starts, in several orders of axes, repeat the same problem.
            key = tuple([each.number for each in options])
            known = self._unpriced.get(key)
            if known is None or any(options[variable].current != known[0][variable] for variable in known[1]):
                known = self._unpriced[key] = self._decide(options, prices)
            chosen = known[0]
        layouts = [each.layouts[state] for each, state in zip(options, chosen, strict=True)]
        return [layouts[number] for number in self.costs.class_of]

    def _decide(self, options: Sequence[_Options], prices: np.ndarray) -> tuple[list[int], list[int]]:
        """Return the best option of each class of nodes, and the classes that had to keep their current layout."""
        own, reshard_prices = self._memory_prices(prices)
        everywhere = float(prices.sum()) + self._storage_price
        unary = [
            members * each.seconds + cost / each.shards + everywhere * each.stored
            for members, each, cost in zip(self.costs.members, options, own, strict=True)
        ]
        pairs: dict[tuple[int, int], np.ndarray] = {}
        for number, (bundle, price) in enumerate(zip(self.costs.folded.bundles, reshard_prices.tolist(), strict=True)):
            seconds, fraction = self._tables_of(number, options[bundle.a], options[bundle.b])
            if seconds is None:
                continue
            table = seconds + price * fraction if price else seconds
            if bundle.a == bundle.b:
                unary[bundle.a] = unary[bundle.a] + np.diagonal(table)
                continue
            key, table = ((bundle.a, bundle.b), table) if bundle.a < bundle.b else ((bundle.b, bundle.a), table.T)
            pairs[key] = pairs[key] + table if key in pairs else table
        chosen = bucket_eliminate(unary, pairs, [each.current for each in options])
        return chosen, find_kept(list(map(len, unary)), list(pairs))

    def _options(self, number: int, layout: Layout, axis: int) -> _Options:
        """Return the layouts of a class of nodes that differ from its current layout only in the use of one axis."""
        key = (number, layout, axis)
        if key not in self._choices:
            index, bit = self.costs.first_of[number], 1 << axis
            node, without = self.costs.graph.nodes[index], tuple(mask & ~bit for mask in layout)
            if index in self.costs.pinned or (node.fixed is not None and all(entry is not None for entry in node.fixed)):
                layouts = [layout]
            else:
                layouts = [
                    without if dim < 0 else with_axes(without, dim, bit) for dim in self._candidate_dims(node, without, axis)
                ]
            # Every one of these layouts leads to the same layouts.
            same = (number, tuple(layouts))
            if same not in self._choices:
                shards = np.array([self.costs.links.shards(union(each)) for each in layouts], dtype=np.float64)
                seconds = np.array([self.costs.node_seconds(index, each) for each in layouts], dtype=np.float64)
                size, count = self._stored_sizes.get(number, (0, 0))
                stored = np.array([count * self.costs.stored_bytes(index, size, each) if count else 0.0 for each in layouts])
                alike = self._layouts.setdefault(tuple(layouts), len(self._layouts))
                self._choices[same] = _Options(len(self._choices), alike, tuple(layouts), shards, seconds, stored)
            current = layouts.index(layout) if layout in layouts else 0
            self._choices[key] = replace(self._choices[same], current=current)
        return self._choices[key]

    def _memory_prices(self, prices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the price in seconds of the live arrays of each folded node, replicated, and of each bundle's copies."""
        live_ranges, folded = self.costs.live_ranges, self.costs.folded
        running = np.concatenate([[0.0], np.cumsum(prices)])
        cost = (running[live_ranges.end + 1] - running[live_ranges.start]) * live_ranges.bytes
        materialized = live_ranges.edge < 0
        of_class = folded.of_node[live_ranges.node[materialized]]
        own = np.bincount(of_class, cost[materialized], minlength=len(folded.first))
        of_bundle = self.costs.bundle_of[live_ranges.edge[~materialized]]
        return own, np.bincount(of_bundle, cost[~materialized], minlength=len(folded.bundles))

    def _candidate_dims(self, node: Node, without: Layout, axis: int) -> list[int]:
        """Return the dimensions of a node that the axis may shard; -1 stands for none of them."""
        if node.fixed is not None:
            given = [dim for dim, entry in enumerate(node.fixed) if entry and self.costs.links.names[axis] in entry]
            if given:
                return [given[0]]
        n = self.costs.links.sizes[axis]
        states = [-1]
        for dim, size in enumerate(node.sizes):
            open_ = node.fixed is None or node.fixed[dim] is None
            if open_ and size > 1 and size % (n * self.costs.links.shards(without[dim])) == 0:
                states.append(dim)
        return states

    def _tables_of(self, number: int, a: _Options, b: _Options) -> tuple[np.ndarray | None, np.ndarray]:
        """Return two tables over the layouts of both ends of a bundle of edges [layouts of a, layouts of b].

        The first holds the seconds of the collectives of all edges; None if all are zero. The second holds the fraction of the
        array that one device holds of the resharded copy.
        """
        key = (self._bundle_kind[number], a.alike, b.alike)
        if key not in self._tables:
            bundle = self.costs.folded.bundles[number]
            edge = bundle.edge
            seconds, fraction = np.zeros((2, len(a.layouts), len(b.layouts)))
            ends = [project(edge.target, target) for target in b.layouts]
            for row, source in enumerate(a.layouts):
                start = project(edge.source, source)
                partial = union(tuple(source[dim] for dim in edge.partial))
                for column, end in enumerate(ends):
                    reshard_steps = self.costs.links.reshard_steps(start, end, partial, edge.bytes)
                    if reshard_steps:
                        seconds[row, column] = len(bundle.edges) * self.costs.edge_seconds(edge, reshard_steps)
                        fraction[row, column] = 1 / self.costs.links.shards(union(start if edge.kind == "result" else end))
            self._tables[key] = (seconds, fraction) if seconds.any() else (None, fraction)
        return self._tables[key]


def _cost_kind(bundle: Bundle) -> tuple:
    """Return everything besides the layouts of both ends that determines the costs of a bundle of edges."""
    edge = bundle.edge
    array = edge.source, edge.target, edge.partial, edge.bytes
    return len(bundle.edges), *array, edge.count, edge.all_reduce_count, edge.behind, edge.late, edge.kind == "result"


@dataclass(frozen=True)
class _Options:
    """The layouts that a class of nodes may have.

    Attributes:
      number: equal for equal layouts of the same class.
      alike: equal for equal layouts of any class.
      layouts: the layouts.
      shards: the number of shards of each layout [layouts].
      seconds: the compute seconds of one node in each layout [layouts].
      stored: the bytes of all stored inputs of the class on one device, in each layout [layouts].
      current: the index of the current layout.
    """

    number: int
    alike: int
    layouts: tuple[Layout, ...]
    shards: np.ndarray
    seconds: np.ndarray
    stored: np.ndarray
    current: int = 0
