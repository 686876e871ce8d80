"""Choose the order of mesh axes in each dimension that several of them shard.

In: the decision graph and an assignment. Out: an order of mesh axes for each dimension of each node, major first.

A dimension sharded over (a, b) is split into blocks over a, and each block over b. An all-gather over b moves data only within
the blocks of a. An all-gather over a alone moves all data. So if one axis is added or removed, the other has to come first. All
dimensions that are connected by edges use the same order. An all-to-all that moves several axes from one dimension to another
needs the same order in both: otherwise the array is permuted once more.
"""

from __future__ import annotations

import itertools

from penstock.shard.graph.decisions import Graph
from penstock.shard.mesh.resharding import MeshLinks
from penstock.shard.search.cost_model import Assignment

_AGREEMENT_ROUNDS = 4
"""The most rounds in which the orders of dimensions that exchange axes are matched to each other."""

Order = dict[tuple[int, int], tuple[int, ...]]
"""(node, dimension) → indices of the mesh axes, major first."""


def axis_orders(graph: Graph, links: MeshLinks, assignment: Assignment) -> Order:
    """Find the order of mesh axes in each dimension, so that the fewest bytes are moved only because of the order.

    Args:
      graph: the decisions.
      links: the mesh.
      assignment: the layout of each node.

    Returns:
      The order of all mesh axes for each (node, dimension). The user's order is kept where constraints give one.
    """
    dimension = graph.components
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
    # Among equally good orders, one for all dimensions: a sum over several axes can only be scattered in its own order of axes.
    preferred = min(orders, key=lambda order: sum(costs[order] for costs in wasted.values()))
    orders = [preferred, *(order for order in orders if order != preferred)]
    fixed_orders = _fixed_orders(graph, links)
    for dim, given in fixed_orders.items():
        # The user's order also holds for all connected dimensions that have no constraint of their own.
        costs = wasted.setdefault(dimension[dim], dict.fromkeys(orders, 0.0))
        for order in orders:
            if [axis for axis in order if axis in given] != list(given):
                costs[order] += float("inf")
    exchanged_pairs = [(dimension[one], dimension[other], moved, size) for one, other, moved, size in exchanged]
    chosen = _agree(wasted, [each for each in exchanged_pairs if each[0] != each[1]], orders)
    return {dim: chosen.get(number, orders[0]) for dim, number in dimension.items()} | fixed_orders


def _agree(
    wasted: dict[int, dict[tuple[int, ...], float]],
    exchanged_pairs: list[tuple[int, int, int, float]],
    orders: list[tuple[int, ...]],
) -> dict[int, tuple[int, ...]]:
    """Choose the best order of each set of connected dimensions, given the orders of the others, until nothing changes.

    Args:
      wasted: bytes that are moved only because of an order, for each set of connected dimensions and each order.
      exchanged_pairs: (one set, another set, bits of the axes that an all-to-all moves between them, bytes).
      orders: all orders of the mesh axes.
    """
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
    """Return the orders that the user's constraints give, where they name several axes for one dimension."""
    return {
        (number, dim): tuple(links.names.index(axis) for axis in entry)
        for number, node in enumerate(graph.nodes)
        for dim, entry in enumerate(node.fixed or ())
        if entry and len(entry) > 1
    }


def _nested(order: tuple[int, ...], before: int, after: int) -> bool:
    """Return whether one set of axes, in this order, is a prefix of the other."""
    first, second = _in_order(order, before), _in_order(order, after)
    shorter = min(len(first), len(second))
    return first[:shorter] == second[:shorter]


def _in_order(order: tuple[int, ...], axes: int) -> list[int]:
    """Return the indices of a set of axes, given as bits, in an order."""
    return [axis for axis in order if axes >> axis & 1]
