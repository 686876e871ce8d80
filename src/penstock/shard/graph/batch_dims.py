"""Find the batch dimensions of a graph: all that edges connect with the first dimension of a batch input."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.shard.graph.decisions import Graph


def find_batch_dims(graph: Graph, batch: Iterable[int]) -> dict[int, list[int]]:
    """Return, for each node, the dimensions reachable from the first dimension of the batch inputs.

    If the first dimension of an input is replicated where the input is used, the next dimension counts instead. An example is a
    dimension over which a loop accumulates gradients.

    Args:
      graph: the decisions.
      batch: indices of the nodes of the batch inputs.
    """
    components = graph.components
    batch_components = {components[node, first_shardable_dim(graph, node)] for node in batch if graph.nodes[node].sizes}
    dims: dict[int, list[int]] = {}
    for (node, dim), component in components.items():
        if component in batch_components:
            dims.setdefault(node, []).append(dim)
    return dims


def first_shardable_dim(graph: Graph, leaf: int) -> int:
    """Return the first dimension of an input that may be sharded where the input is used; 0 if there is none.

    Args:
      graph: the decisions.
      leaf: index of the node of the input.
    """
    replicated = {
        a
        for edge in graph.edges
        if edge.kind == "use" and edge.a == leaf
        for a, b in zip(edge.source, edge.target, strict=True)
        if a is not None and (b is None or graph.nodes[edge.b].sizes[b] == 1)
    }
    return next((dim for dim in range(len(graph.nodes[leaf].sizes)) if dim not in replicated), 0)
