"""Describe a batch whose rows do not divide over the devices, so that data parallelism leaves devices idle."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from penstock.shard.graph.batch_dims import first_shardable_dim
from penstock.shard.search.mesh_search import PreparedMesh
from penstock.shard.trace.step import TracedStep


def describe_uneven_batch(prepared: Sequence[PreparedMesh], traced: TracedStep) -> str | None:
    """Return a sentence about a batch that does not divide over all devices, with the nearest sizes that do; None if it divides.

    Its rows are those that most of its leaves have.

    Args:
      prepared: the meshes to search; each stores the batch by its rows over the axes that divide them.
      traced: the step.
    """
    devices, graph = math.prod(prepared[0].mesh_shape.values()), prepared[0].problem.graph
    found: list[tuple[int, int, int]] = []  # the number of rows of each leaf of the batch, the leaf, and the dimension
    for index, role in enumerate(prepared[0].roles):
        node = prepared[0].model.inputs[index]
        if role == "batch" and traced.inputs[index].shape and graph.nodes[node].fixed is None:
            dim = first_shardable_dim(graph, node)
            found.append((traced.inputs[index].shape[dim], index, dim))
    if not found:
        return None
    sizes = Counter(rows for rows, _, _ in found)
    rows, index, dim = max(found, key=lambda leaf: sizes[leaf[0]])  # others may be tables that all rows share
    if rows % devices == 0:
        return None
    leaf, node = traced.inputs[index], prepared[0].model.inputs[index]
    used = max(each.problem.links.shards(each.problem.pinned[node][dim]) for each in prepared)
    nearest = nearest_sizes(rows, devices)
    count = f"the batch of {rows} rows" if rows > 1 else "the batch of one row"
    idle = f"shard it over only {used} of them, and the others" if used > 1 else "cannot shard it, and all devices"
    return (
        f"{count} ({leaf.path!r}, dimension {dim}) does not divide over {devices} devices: data parallelism and FSDP "
        f"{idle} compute the same. "
        f"The nearest {'size that divides is' if len(nearest) == 1 else 'sizes that divide are'} {' and '.join(nearest)}"
    )


def nearest_sizes(rows: int, devices: int) -> list[str]:
    """Return the nearest sizes of a batch that divide over the devices: the one below, if it is not 0, and the one above.

    Args:
      rows: a size that does not divide.
      devices: the number of devices.

    >>> nearest_sizes(30, 8), nearest_sizes(5, 8)
    (['24', '32'], ['8'])
    """
    below = rows - rows % devices
    return [str(size) for size in (below, below + devices) if size]
