"""Describe a batch whose rows do not divide over the devices, so that data parallelism leaves devices idle."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.shard.graph.batch_dims import first_shardable_dim
from penstock.shard.search.mesh_search import PreparedMesh
from penstock.shard.trace.step import TracedStep


def describe_uneven_batch(prepared: Sequence[PreparedMesh], traced: TracedStep) -> str | None:
    """Return a sentence about a batch that does not divide over all devices, with the nearest sizes that do; None if it divides.

    Args:
      prepared: the meshes to search; each stores the batch by its rows over the axes that divide them.
      traced: the step.
    """
    devices = math.prod(prepared[0].mesh_shape.values())
    for index, role in enumerate(prepared[0].roles):
        leaf = traced.inputs[index]
        node = prepared[0].model.inputs[index]
        if role != "batch" or not leaf.shape or prepared[0].problem.graph.nodes[node].fixed is not None:
            continue
        dim = first_shardable_dim(prepared[0].problem.graph, node)
        rows = leaf.shape[dim]
        if rows % devices:
            used = max(each.problem.links.shards(each.problem.pinned[node][dim]) for each in prepared)
            sizes = nearest_sizes(rows, devices)
            count = f"the batch of {rows} rows" if rows > 1 else "the batch of one row"
            idle = f"shard it over only {used} of them, and the others" if used > 1 else "cannot shard it, and all devices"
            return (
                f"{count} ({leaf.path!r}, dimension {dim}) does not divide over {devices} devices: data parallelism and FSDP "
                f"{idle} compute the same. "
                f"The nearest {'size that divides is' if len(sizes) == 1 else 'sizes that divide are'} {' and '.join(sizes)}"
            )
    return None


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
