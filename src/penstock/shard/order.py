"""Which of several mesh axes that shard one dimension comes first.

Sharded over (a, b), a dimension is cut into blocks over a, and each of them over b. To gather b, or to cut over b, moves
blocks within those of a; to gather a alone moves everything. So, of axes that meet in a dimension, that which stays while the
other comes and goes has to be the first, and all dimensions that arrays go between have to agree.
"""

from __future__ import annotations

import itertools

from penstock.shard.graph import Graph
from penstock.shard.layout import Links
from penstock.shard.search import Assignment

Order = dict[tuple[int, int], tuple[int, ...]]
"""Of (node, slot) the numbers of the mesh axes, major first."""


def axis_orders(graph: Graph, links: Links, assignment: Assignment) -> Order:
    """For each dimension in which several axes meet, the order that moves the fewest bytes for nothing."""
    parent: dict[tuple[int, int], tuple[int, int]] = {}

    def find(each: tuple[int, int]) -> tuple[int, int]:
        while parent.setdefault(each, each) != each:
            parent[each] = parent[parent[each]]
            each = parent[each]
        return each

    pairs = []
    for edge in graph.edges:
        for a, b in zip(edge.source, edge.target, strict=True):
            if a is not None and b is not None:
                one, other = (edge.a, a), (edge.b, b)
                parent[find(one)] = find(other)
                before, after = assignment[edge.a][a], assignment[edge.b][b]
                if before and after and before != after:
                    pairs.append((one, before, after, edge.bytes * edge.count))
    wasted: dict[tuple[int, int], dict[tuple[int, ...], float]] = {}
    orders = list(itertools.permutations(range(len(links.sizes))))
    for slot, before, after, size in pairs:
        costs = wasted.setdefault(find(slot), dict.fromkeys(orders, 0.0))
        for order in orders:
            if not _nested(order, before, after):
                costs[order] += size
    prescribed = _prescribed(graph, links)
    for slot, given in prescribed.items():
        # Others that go there follow, if they are not told otherwise.
        costs = wasted.setdefault(find(slot), dict.fromkeys(orders, 0.0))
        for order in orders:
            if [axis for axis in order if axis in given] != list(given):
                costs[order] += float("inf")
    chosen = {root: min(orders, key=lambda order: costs[order]) for root, costs in wasted.items()}
    return {slot: chosen.get(find(slot), orders[0]) for slot in list(parent)} | prescribed


def _prescribed(graph: Graph, links: Links) -> Order:
    """The dimensions for which several axes are prescribed, in that order."""
    return {
        (number, slot): tuple(links.names.index(axis) for axis in entry)
        for number, node in enumerate(graph.nodes)
        for slot, entry in enumerate(node.fixed or ())
        if entry and len(entry) > 1
    }


def _nested(order: tuple[int, ...], before: int, after: int) -> bool:
    """Whether of two sets of axes one is the beginning of the other."""
    first = [axis for axis in order if before >> axis & 1]
    second = [axis for axis in order if after >> axis & 1]
    shorter = min(len(first), len(second))
    return first[:shorter] == second[:shorter]
