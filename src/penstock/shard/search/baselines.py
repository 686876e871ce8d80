"""Baselines: data parallelism, and fully sharded data parallelism (FSDP; ZeRO-3, arXiv:1910.02054).

In: a search problem, and the nodes of the batch inputs. Out: an assignment. The search starts from the baselines, and the text
of a plan compares with them.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.shard.graph.batch_dims import find_batch_dims
from penstock.shard.search.problem import Assignment, Problem


def data_parallel(problem: Problem, batch: Iterable[int]) -> Assignment:
    """Return the decisions of data parallelism: every mesh axis shards the batch, and everything else is replicated.

    Args:
      problem: the search problem.
      batch: nodes of the inputs that are a batch.
    """
    batch_dims = find_batch_dims(problem.graph, batch)
    assignment = problem.start()
    for node, candidates in batch_dims.items():
        if problem.graph.nodes[node].fixed is not None or node in problem.pinned:
            continue
        layout, sizes = [0] * len(problem.graph.nodes[node].sizes), problem.graph.nodes[node].sizes
        for axis, n in enumerate(problem.links.sizes):
            # The first dimension that the axes divide. If both dimensions are the batch, as in [B, B], only one is sharded.
            for dim in sorted(candidates):
                if sizes[dim] > 1 and sizes[dim] % (n * problem.links.shards(layout[dim])) == 0:
                    layout[dim] |= 1 << axis
                    break
        assignment[node] = tuple(layout)
    return assignment


def fully_sharded(problem: Problem, batch: Iterable[int], stored: Iterable[int]) -> Assignment:
    """Return the decisions of fully sharded data parallelism (FSDP).

    Each stored leaf is sharded over all mesh axes, along the largest dimension that they divide. It is gathered for use.

    Args:
      problem: the search problem.
      batch: nodes of the inputs that are a batch.
      stored: nodes of the other inputs: state and frozen weights.
    """
    batch = list(batch)
    assignment = data_parallel(problem, batch)
    everything = (1 << len(problem.links.sizes)) - 1
    n = problem.links.shards(everything)
    sharded = dict.fromkeys(stored)
    for leaf in sharded:
        node = problem.graph.nodes[leaf]
        dims = [dim for dim, size in enumerate(node.sizes) if size % n == 0]
        if node.fixed is None and dims:
            largest = max(dims, key=lambda dim: node.sizes[dim])
            assignment[leaf] = tuple(everything if dim == largest else 0 for dim in range(len(node.sizes)))
    # The update of the state runs in the storage layout of the state.
    batch_dims = find_batch_dims(problem.graph, batch)
    for edge in problem.graph.edges:
        if edge.kind == "broadcast" and edge.a in sharded and edge.b not in batch_dims and any(assignment[edge.a]):
            layout = [0] * len(problem.graph.nodes[edge.b].sizes)
            for a, b in zip(edge.source, edge.target, strict=True):
                if a is not None and b is not None and problem.graph.nodes[edge.b].sizes[b] % n == 0:
                    layout[b] = assignment[edge.a][a]
            assignment[edge.b] = tuple(layout)
    return assignment
