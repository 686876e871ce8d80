"""Which of several mesh axes that shard one dimension comes first.

Sharded over (a, b), a dimension is cut into blocks over a, and each of them over b. To gather b, or to cut over b, moves
blocks within those of a; to gather a alone moves everything. So, of axes that meet in a dimension, that which stays while the
other comes and goes has to be the first, and all dimensions that arrays go between have to agree. So have two dimensions of an
array, where an all-to-all takes several axes from one to the other: in another order, all of it is moved once more.
"""

from __future__ import annotations

import itertools

from penstock.shard.graph.decisions import Graph, connect_dims
from penstock.shard.mesh.resharding import MeshLinks
from penstock.shard.search.problem import Assignment

_AGREEMENT_ROUNDS = 4

Order = dict[tuple[int, int], tuple[int, ...]]
"""Of (node, slot) the numbers of the mesh axes, major first."""


def axis_orders(graph: Graph, links: MeshLinks, assignment: Assignment) -> Order:
    """For each dimension in which several axes meet, the order that moves the fewest bytes for nothing."""
    dimension = connect_dims(graph)
    pairs, exchanged = [], []
    for edge in graph.edges:
        exchanged += [
            ((edge.a, a), (edge.b, b), moved, edge.bytes * edge.count)
            for at, a in enumerate(edge.source)
            for to, b in enumerate(edge.target)
            if at != to and a is not None and b is not None
            if (moved := assignment[edge.a][a] & assignment[edge.b][b]) & (moved - 1)  # more than one axis
        ]
        for a, b in zip(edge.source, edge.target, strict=True):
            if a is not None and b is not None:
                before, after = assignment[edge.a][a], assignment[edge.b][b]
                if before and after and before != after:
                    pairs.append(((edge.a, a), before, after, edge.bytes * edge.count))
    wasted: dict[int, dict[tuple[int, ...], float]] = {}
    orders = list(itertools.permutations(range(len(links.sizes))))
    for dim, before, after, size in pairs:
        costs = wasted.setdefault(dimension[dim], dict.fromkeys(orders, 0.0))
        for order in orders:
            if not _nested(order, before, after):
                costs[order] += size
    fixed_orders = _fixed_orders(graph, links)
    for dim, given in fixed_orders.items():
        # Others that go there follow, if they are not told otherwise.
        costs = wasted.setdefault(dimension[dim], dict.fromkeys(orders, 0.0))
        for order in orders:
            if [axis for axis in order if axis in given] != list(given):
                costs[order] += float("inf")
    exchanged_pairs = [(dimension[one], dimension[other], moved, size) for one, other, moved, size in exchanged]
    chosen = _agreed(wasted, [each for each in exchanged_pairs if each[0] != each[1]], orders)
    return {dim: chosen.get(number, orders[0]) for dim, number in dimension.items()} | fixed_orders


def _agreed(
    wasted: dict[int, dict[tuple[int, ...], float]],
    exchanged_pairs: list[tuple[int, int, int, float]],
    orders: list[tuple[int, ...]],
) -> dict[int, tuple[int, ...]]:
    """The best order of each, given those of the others that axes go to, in turn until nothing changes."""
    partners: dict[int, list[tuple[int, int, float]]] = {}
    for one, other, moved, size in exchanged_pairs:
        partners.setdefault(one, []).append((other, moved, size))
        partners.setdefault(other, []).append((one, moved, size))
    free = dict.fromkeys(orders, 0.0)
    chosen = {root: min(orders, key=wasted.get(root, free).__getitem__) for root in {**wasted, **partners}}

    def cost(root: int, order: tuple[int, ...]) -> float:
        return wasted.get(root, free)[order] + sum(
            size for other, moved, size in partners.get(root, ()) if _in_order(order, moved) != _in_order(chosen[other], moved)
        )

    for _ in range(_AGREEMENT_ROUNDS):
        before = dict(chosen)
        for root in chosen:
            chosen[root] = min(orders, key=lambda order: (cost(root, order), order != chosen[root]))
        if chosen == before:
            break
    return chosen


def _fixed_orders(graph: Graph, links: MeshLinks) -> Order:
    """The dimensions for which several axes are prescribed, in that order."""
    return {
        (number, dim): tuple(links.names.index(axis) for axis in entry)
        for number, node in enumerate(graph.nodes)
        for dim, entry in enumerate(node.fixed or ())
        if entry and len(entry) > 1
    }


def _nested(order: tuple[int, ...], before: int, after: int) -> bool:
    """Whether of two sets of axes one is the beginning of the other."""
    first, second = _in_order(order, before), _in_order(order, after)
    shorter = min(len(first), len(second))
    return first[:shorter] == second[:shorter]


def _in_order(order: tuple[int, ...], axes: int) -> list[int]:
    """Some axes, in an order."""
    return [axis for axis in order if axes >> axis & 1]
