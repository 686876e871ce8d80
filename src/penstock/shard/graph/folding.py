"""Repeated layers share their decisions.

Nodes that cannot be told apart by what is around them, as far as a number of edges away, get one decision (colour refinement;
B. Weisfeiler and A. Leman, 1968). In a stack of layers it is one decision for each place in a layer: the same weights of all
layers are laid out alike, as nobody would want otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.shard.graph.decisions import Edge, Graph

_REFINEMENT_ROUNDS = 24
"""How far around a node is looked. It is about one layer of a transformer, so that a chain of equal products of matrices folds
only in its middle: there, two that follow each other may want to be laid out differently."""


@dataclass(frozen=True)
class Bundle:
    """Edges between the same classes that carry the same: one of them, and the numbers of all."""

    edge: Edge
    a: int
    b: int
    edges: np.ndarray


@dataclass(frozen=True)
class FoldedGraph:
    """A graph with alike nodes taken together.

    Attributes:
      of_node: the class of each node.
      first: of each class the number of its first node.
      bundles: the edges between classes.
    """

    of_node: np.ndarray
    first: np.ndarray
    bundles: tuple[Bundle, ...]


def fold_layers(graph: Graph) -> FoldedGraph:
    """Find alike nodes."""
    colours = _numbered([(node.kind, node.sizes, node.work, node.fixed) for node in graph.nodes])
    kinds = _numbered(
        [(edge.source, edge.target, edge.partial, edge.bytes, edge.count, edge.kind, edge.position) for edge in graph.edges]
    )
    for _ in range(_REFINEMENT_ROUNDS):
        around: list[list[tuple[int, int, int]]] = [[] for _ in graph.nodes]
        for edge, kind in zip(graph.edges, kinds, strict=True):
            around[edge.a].append((kind, 0, colours[edge.b]))
            around[edge.b].append((kind, 1, colours[edge.a]))
        refined = _numbered([(colour, tuple(sorted(each))) for colour, each in zip(colours, around, strict=True)])
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
        of_node, first, tuple(Bundle(graph.edges[some[0]], a, b, np.array(some)) for (a, b, _), some in bundles.items())
    )


def _numbered(values: list) -> list[int]:
    """Equal values get equal numbers, in the order in which they come."""
    numbers: dict = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]
