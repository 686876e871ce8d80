"""Find the dimensions of each node that the first dimension of the batch reaches."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.shard.graph.decisions import Graph, connect_dims


def find_batch_dims(graph: Graph, batch: Iterable[int]) -> dict[int, list[int]]:
    """Of each node the slots that are the batch dimension: those that the first dimension of some inputs leads to.

    A dimension that has to stay whole where the input is used, as that over which a loop accumulates gradients, is passed over.

    Args:
      graph: the decisions.
      batch: nodes of the inputs.
    """
    connected = connect_dims(graph)
    wanted = {connected[node, first_shardable_dim(graph, node)] for node in batch if graph.nodes[node].sizes}
    found: dict[int, list[int]] = {}
    for (node, dim), of in connected.items():
        if of in wanted:
            found.setdefault(node, []).append(dim)
    return found


def first_shardable_dim(graph: Graph, leaf: int) -> int:
    """The first dimension of an input that may be sharded where it is used; 0 if there is none."""
    closed = {
        a
        for edge in graph.edges
        if edge.kind == "use" and edge.a == leaf
        for a, b in zip(edge.source, edge.target, strict=True)
        if a is not None and (b is None or graph.nodes[edge.b].sizes[b] == 1)
    }
    return next((dim for dim in range(len(graph.nodes[leaf].sizes)) if dim not in closed), 0)
