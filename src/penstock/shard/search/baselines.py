"""Plans that everybody knows: data parallelism, and fully sharded data parallelism. To compare with, and to start from."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.shard.graph.batch_dims import find_batch_dims
from penstock.shard.search.problem import Assignment, Problem


def data_parallel(problem: Problem, batch: Iterable[int]) -> Assignment:
    """Every mesh axis shards the batch, wherever there is one; everything else is on all devices."""
    batch_dims = find_batch_dims(problem.graph, batch)
    assignment = problem.start()
    for node, candidates in batch_dims.items():
        if problem.graph.nodes[node].fixed is not None:
            continue
        layout, sizes = [0] * len(problem.graph.nodes[node].sizes), problem.graph.nodes[node].sizes
        for axis, n in enumerate(problem.links.sizes):
            # The first slot that has room: in B against B, one of the two.
            for dim in sorted(candidates):
                if sizes[dim] > 1 and sizes[dim] % (n * problem.links.shards(layout[dim])) == 0:
                    layout[dim] |= 1 << axis
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
    batch_dims = find_batch_dims(problem.graph, batch)
    for edge in problem.graph.edges:
        if edge.kind == "broadcast" and edge.a in sharded and edge.b not in batch_dims and any(assignment[edge.a]):
            layout = [0] * len(problem.graph.nodes[edge.b].sizes)
            for a, b in zip(edge.source, edge.target, strict=True):
                if a is not None and b is not None and problem.graph.nodes[edge.b].sizes[b] % n == 0:
                    layout[b] = assignment[edge.a][a]
            assignment[edge.b] = tuple(layout)
    return assignment
