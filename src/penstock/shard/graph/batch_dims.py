"""Find the batch dimensions of a graph: all that edges connect with the first dimension of a batch input.

A step that accumulates gradients splits its batch, [B] → [microbatches, rows], and loops over the microbatches. Then the rows of
a microbatch are the batch dimension from there on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from penstock.shard.graph.decisions import Graph


def find_batch_dims(graph: Graph, batch: Iterable[int]) -> dict[int, list[int]]:
    """Return, for each node, the dimensions reachable from the first dimension of the batch inputs.

    If the first dimension of an input is replicated where the input is used, the next dimension counts instead. An example is a
    dimension over which a loop accumulates gradients. The same holds for the parts into which a reshape splits a batch dimension.

    Args:
      graph: the decisions.
      batch: indices of the nodes of the batch inputs.
    """
    components = graph.components
    found = {components[node, first_shardable_dim(graph, node)] for node in batch if graph.nodes[node].sizes}
    looped: set[tuple[int, int]] = set()
    size = -1
    while size != len(found):  # a part may be split again
        size = len(found)
        for factor, ((node, major), following) in graph.splits.items():
            if components[factor] in found and graph.nodes[node].sizes[major] == 1:
                found.add(components[following])
                looped.add(factor)
    dims: dict[int, list[int]] = {}
    for (node, dim), component in components.items():
        if component in found and (node, dim) not in looped:
            dims.setdefault(node, []).append(dim)
    return dims


def find_state_work(graph: Graph, batch: Iterable[int], batch_dims: Mapping[int, Sequence[int]]) -> set[int]:
    """Return the nodes that update or cast the state: those that no batch reaches, and elementwise operations on new state.

    State with a batch dimension, such as that of a recurrent network, does not count. Without a batch, none does.

    Args:
      graph: the decisions.
      batch: indices of the nodes of the batch inputs.
      batch_dims: the batch dimensions of each node that has some (`find_batch_dims`).
    """
    queue = list(batch)
    reached = set(queue)
    following: dict[int, list[int]] = {}
    for edge in graph.edges:
        if edge.kind != "store":
            following.setdefault(edge.a, []).append(edge.b)
    while queue:
        for node in following.get(queue.pop(), ()):
            if node not in reached:
                reached.add(node)
                queue.append(node)
    stored = {edge.a for edge in graph.edges if edge.kind == "store" and graph.nodes[edge.a].kind == "group"}
    return (stored | (set(range(len(graph.nodes))) - reached)) - set(batch_dims) if batch_dims else set()


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
