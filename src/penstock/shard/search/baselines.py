"""Plans that everybody knows: data parallelism, and fully sharded data parallelism. To compare with, and to start from."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.shard.graph.decisions import Graph, connect_dims
from penstock.shard.search.problem import Assignment, Problem


def find_batch_dims(graph: Graph, batch: Iterable[int]) -> dict[int, list[int]]:
    """Of each node the slots that are the batch dimension: those that the first dimension of some inputs leads to.

    A dimension that has to stay whole where the input is used, as that over which a loop accumulates gradients, is passed over.

    Args:
      graph: the decisions.
      batch: nodes of the inputs.
    """
    together = connect_dims(graph)
    wanted = {together[node, first_shardable_dim(graph, node)] for node in batch if graph.nodes[node].sizes}
    found: dict[int, list[int]] = {}
    for (node, slot), of in together.items():
        if of in wanted:
            found.setdefault(node, []).append(slot)
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


def data_parallel(problem: Problem, batch: Iterable[int]) -> Assignment:
    """Every mesh axis shards the batch, wherever there is one; everything else is on all devices."""
    slots = find_batch_dims(problem.graph, batch)
    assignment = problem.start()
    for node, candidates in slots.items():
        if problem.graph.nodes[node].fixed is not None:
            continue
        layout, sizes = [0] * len(problem.graph.nodes[node].sizes), problem.graph.nodes[node].sizes
        for axis, n in enumerate(problem.links.sizes):
            # The first slot that has room: in B against B, one of the two.
            for slot in sorted(candidates):
                if sizes[slot] > 1 and sizes[slot] % (n * problem.links.shards(layout[slot])) == 0:
                    layout[slot] |= 1 << axis
                    break
        assignment[node] = tuple(layout)
    return assignment


def fully_sharded(problem: Problem, batch: Iterable[int], kept: Iterable[int]) -> Assignment:
    """Data parallelism, with all that is kept sharded over all axes along its largest dimension that divides, gathered for use.

    Args:
      problem: what is searched.
      batch: nodes of the inputs that are a batch.
      kept: nodes of those that are not: state, and frozen weights.
    """
    batch = list(batch)
    assignment = data_parallel(problem, batch)
    everything = (1 << len(problem.links.sizes)) - 1
    n = problem.links.shards(everything)
    sharded = dict.fromkeys(kept)
    for leaf in sharded:
        node = problem.graph.nodes[leaf]
        dims = [dim for dim, size in enumerate(node.sizes) if size % n == 0]
        if node.fixed is None and dims:
            largest = max(dims, key=lambda dim: node.sizes[dim])
            assignment[leaf] = tuple(everything if dim == largest else 0 for dim in range(len(node.sizes)))
    # What only updates the state is computed where the state is stored.
    slots = find_batch_dims(problem.graph, batch)
    for edge in problem.graph.edges:
        if edge.kind == "spread" and edge.a in sharded and edge.b not in slots and any(assignment[edge.a]):
            layout = [0] * len(problem.graph.nodes[edge.b].sizes)
            for a, b in zip(edge.source, edge.target, strict=True):
                if a is not None and b is not None and problem.graph.nodes[edge.b].sizes[b] % n == 0:
                    layout[b] = assignment[edge.a][a]
            assignment[edge.b] = tuple(layout)
    return assignment
