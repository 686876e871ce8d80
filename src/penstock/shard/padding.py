"""Bound the memory of a plan on TPUs, whose tiles pad arrays with short rows (`mesh/compiler_models.py`).

The prediction assumes that the compiler stores an array in the order of dimensions with the least padding. Lookups, sorts and
convolutions prescribe an order instead: their rows are rows of tiles. All arrays that elementwise operations connect with theirs
may then be padded, by up to 128 / (elements of a row), and arguments are copied into that order.
"""

from __future__ import annotations

import math

import jax
import numpy as np

from penstock.shard.mesh.compiler_models import padded_elements, tiled_bytes
from penstock.shard.search.costs import Assignment
from penstock.shard.search.solver import PreparedMesh

_ORDERED = ("gather", "scatter", "scatter-add", "scatter_add", "sort", "top_k", "conv_general_dilated")
"""Primitives whose arrays the TPU compiler stores in the order of their dimensions.

With rows of 16 to 64 elements, steps with these operations took up to 40 times the predicted memory; steps of products,
elementwise operations and cumulative sums took at most 1.5 times."""


def padded_memory(prepared: PreparedMesh, assignment: Assignment) -> int:
    """Return the peak memory of one device in bytes if all arrays that may be padded are; the prediction on other hardware."""
    costs, program, groups = prepared.costs, prepared.model.program, prepared.model.groups
    if not costs.compiler.tiles:
        return int(costs.memory(assignment)[0])
    group = costs.graph.group
    ordered = {
        group[value]
        for op in program.ops
        if op.primitive in _ORDERED
        for value in (*op.operands, *op.results)
        if value is not None and value in group and jax.numpy.issubdtype(program.values[value].dtype, jax.numpy.inexact)
    }

    def local_shape(value: int) -> tuple[int, ...]:
        layout = assignment[group[value]]
        masks = (0 if dim is None else layout[dim] for dim in groups.dims[value])
        shape = program.values[value].shape
        return tuple(max(1, size // costs.links.shards(mask)) for size, mask in zip(shape, masks, strict=True))

    factors = np.ones(len(program.values))
    copies = 0
    arguments = set(program.inputs)
    for value in arguments.union(costs.live_ranges.value.tolist()):
        array = program.values[value]
        if group.get(value) in ordered and array.bytes:
            local, size = local_shape(value), array.bytes // math.prod(array.shape)
            padded = size * padded_elements(local)
            factors[value] = padded / (size * math.prod(local))
            # An argument is stored with the least padding, and copied if the operation needs another order.
            if value in arguments and padded > tiled_bytes(local, size):
                copies += padded
    return copies + int(costs.memory(assignment, factors[costs.live_ranges.value])[0])
