"""Fold repeated layers, so that they share their decisions.

Nodes with equal neighbourhoods, up to a number of edges away, get one decision. The method is colour refinement (B. Weisfeiler
and A. Leman, 1968). A stack of equal layers has one decision for each position in a layer, and the same weight of all layers
has one layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.shard.graph.decisions import Edge, Graph

_REFINEMENT_ROUNDS = 24
"""The radius of a neighbourhood, in edges: about one layer of a transformer. A chain of equal matrix products folds only in its
middle, as two products in sequence may need different layouts (column-parallel, then row-parallel)."""


@dataclass(frozen=True)
class Bundle:
    """Equal edges between the same two classes of nodes.

    Attributes:
      edge: one of them.
      a, b: the classes.
      edges: indices of all of them.
    """

    edge: Edge
    a: int
    b: int
    edges: np.ndarray


@dataclass(frozen=True)
class FoldedGraph:
    """A graph whose equivalent nodes are grouped into classes, which have one decision each.

    Attributes:
      of_node: for each node, its class.
      first: for each class, the index of its first node.
      bundles: the edges between classes.
    """

    of_node: np.ndarray
    first: np.ndarray
    bundles: tuple[Bundle, ...]


def fold_layers(graph: Graph) -> FoldedGraph:
    """Return the graph with equivalent nodes grouped.

    Args:
      graph: the decisions.
    """
    colours = _number_values([(node.kind, node.sizes, node.work, node.fixed) for node in graph.nodes])
    kinds = _number_values(
        [
            (edge.source, edge.target, edge.partial, edge.bytes, edge.count, edge.kind, edge.position, edge.reduced)
            for edge in graph.edges
        ]
    )
    for _ in range(_REFINEMENT_ROUNDS):
        neighbours: list[list[tuple[int, int, int]]] = [[] for _ in graph.nodes]
        for edge, kind in zip(graph.edges, kinds, strict=True):
            neighbours[edge.a].append((kind, 0, colours[edge.b]))
            neighbours[edge.b].append((kind, 1, colours[edge.a]))
        refined = _number_values([(colour, tuple(sorted(nearby))) for colour, nearby in zip(colours, neighbours, strict=True)])
        if max(refined, default=0) == max(colours, default=0):
            break
        colours = refined
    of_node = np.array(colours, dtype=np.int64)
    first = np.full(of_node.max(initial=-1) + 1, -1)
    for node in range(len(of_node) - 1, -1, -1):
        first[of_node[node]] = node
    bundles: dict[tuple, list[int]] = {}
    for number, edge in enumerate(graph.edges):
        bundles.setdefault((int(of_node[edge.a]), int(of_node[edge.b]), kinds[number]), []).append(number)
    return FoldedGraph(
        of_node, first, tuple(Bundle(graph.edges[edges[0]], a, b, np.array(edges)) for (a, b, _), edges in bundles.items())
    )


def _number_values(values: list) -> list[int]:
    """Return a number for each value: equal values have equal numbers, in the order of their first occurrence."""
    numbers: dict = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]
