"""Define a plan as data: the mesh, the layout of each leaf, the sharding constraints inside of the step, and the predicted cost.

`plan.py` creates records. `jit.py`, `verify.py`, `memory.py`, `serialization.py` and `present/` read them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from penstock.shard.apply.sharding_constraints import ShardingConstraints, Spec
from penstock.shard.hlo.analysis import Measured
from penstock.shard.mesh.compiler_models import COMPILER_MODELS, tiled_bytes
from penstock.shard.search.costs import Cost, Proof
from penstock.shard.trace.rewriting import AS_WRITTEN, Rewriting

# Bytes of one key of each of JAX's random number generators.
_KEY_BYTES = {"key<fry>": 8, "key<rbg>": 16, "key<urbg>": 16}

# The fraction of the limit from which a predicted memory is near it. Few predictions are too low by a larger factor
# (`penstock bench shard`).
_NEAR_LIMIT = 0.6


def shards(spec: Spec | None, axis: str) -> bool:
    """Return whether a mesh axis shards a dimension of a layout."""
    return any(axis in entry for entry in spec or ())


@dataclass(frozen=True)
class LeafLayout:
    """The layout of one leaf of the arguments or results.

    Attributes:
      path: the path of the leaf, with the name of its argument first: "state/params/w".
      shape, dtype: of the global array.
      role: "parameters", "optimizer", "batch", "other", or "output".
      stored: the layout between steps.
      used: the layout at its first non-elementwise operation: a matrix product, a convolution or a lookup. None if there is
        none.
      weak: whether the dtype is weak, as for a Python number.
      slices: the number of slices that loops take of it, as of the stacked weights of all layers; 1 if they take none.

    Examples:
      >>> leaf = LeafLayout("params/w", (512, 64), "float32", "parameters", (("data",), ()), ((), ()))
      >>> leaf.partition_spec == PartitionSpec("data", None)
      True
      >>> leaf.bytes
      131072
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    role: str
    stored: Spec
    used: Spec | None
    weak: bool = False
    slices: int = 1

    @property
    def partition_spec(self) -> PartitionSpec:
        """Return the layout between steps as JAX writes it."""
        return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in self.stored))

    @property
    def bytes(self) -> int:
        """Return the bytes of the global array. A key of an unknown random number generator counts 8 bytes."""
        try:
            size = _KEY_BYTES.get(self.dtype) or jax.numpy.dtype(self.dtype).itemsize
        except TypeError:
            size = 8
        return size * math.prod(self.shape)

    def is_gathered_along(self, axis: str) -> bool:
        """Return whether a mesh axis shards the leaf between steps, and not where it is used."""
        return self.used is not None and shards(self.stored, axis) and not shards(self.used, axis)

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """Return the mesh axes that shard the leaf between steps."""
        return tuple(axis for entry in self.stored for axis in entry)


@dataclass(frozen=True)
class PlanRecord:
    """A plan as data.

    Attributes:
      mesh_shape: sizes of the mesh axes, in order.
      hardware: the name of the hardware that the plan was made for.
      platform: the platform whose compiler the predicted memory is for: "tpu", "gpu" or "cpu".
      limit: bytes that one device may hold.
      inputs, outputs: layouts of the leaves of the arguments and results.
      state: index of each output that replaces an input → index of that input.
      rewriting: what is changed in the step: parts of the batch that run one after the other, and values that are computed again.
      sharding_constraints: the layouts inside of the changed step.
      cost: the predicted cost of one step on one device.
      axis_work: the fractions of the compute, by mesh axis and by what the axis shards: "batch", "tensor" for another dimension,
        "state" for updates and casts of the state, or "idle" for nothing.
      baselines: the predicted cost of each baseline (`search/baselines.py`), on its own mesh if the mesh was searched.
      fingerprint: a hash of the step and of the signature of its arguments, without the numbers written in the step.
      numbers: a hash of these numbers. The plan fits a step with other numbers as well.
      checked: the compiler's figures, if the plan was compiled while it was made.
      compiler_failed: whether the plan was to be compiled while it was made, and the compiler gave no figures.
      padded: the predicted memory if a TPU pads all arrays that it may pad (`padding.py`), in bytes.
      proof: what the search proved of all layouts by the estimate; None for a plan that no search found.
      remarks: sentences about the plan, such as one about a batch that does not divide over the devices.
    """

    mesh_shape: dict[str, int]
    hardware: str
    platform: str
    limit: int
    inputs: tuple[LeafLayout, ...]
    outputs: tuple[LeafLayout, ...]
    state: dict[int, int]
    sharding_constraints: ShardingConstraints = field(repr=False)
    cost: Cost
    axis_work: dict[str, dict[str, float]]
    baselines: dict[str, Cost]
    fingerprint: str
    numbers: str = ""
    checked: Measured | None = None
    compiler_failed: bool = False
    padded: int = 0
    proof: Proof | None = None
    remarks: tuple[str, ...] = ()
    rewriting: Rewriting = AS_WRITTEN

    @property
    def device_count(self) -> int:
        """Return the number of devices of the mesh."""
        return math.prod(self.mesh_shape.values())

    @property
    def gap(self) -> float | None:
        """Return by which fraction a layout may be faster than the fastest that the search found, by the estimate.

        No layout is faster by more, which is proved. It is None if no search found the plan, or if nothing fits the limit.
        """
        return None if self.proof is None else self.proof.gap

    @property
    def left_to_compiler(self) -> bool:
        """Return whether the compiler chooses the layouts inside of the step (`memory.leave_to_compiler`)."""
        return bool(self.sharding_constraints.at_start)

    @property
    def unchecked(self) -> bool:
        """Return whether the plan lacks the compiler's figures, and is predicted near its limit or was to be compiled."""
        return self.checked is None and (self.compiler_failed or self.near_limit)

    @property
    def near_limit(self) -> bool:
        """Return whether the plan is predicted near its limit or above it, or may be if arrays are padded."""
        return max(self.cost.memory.total, self.padded) > _NEAR_LIMIT * self.limit


def local_bytes(leaf: LeafLayout, mesh_shape: Mapping[str, int], platform: str) -> float:
    """Return the bytes that one device of a platform stores of a leaf. TPUs pad arrays to tiles."""
    if not COMPILER_MODELS[platform].tiles:
        return leaf.bytes / math.prod(mesh_shape[axis] for axis in leaf.mesh_axes)
    shards = (math.prod(mesh_shape[axis] for axis in entry) for entry in leaf.stored)
    local = tuple(size // count for size, count in zip(leaf.shape, shards, strict=True))
    return tiled_bytes(local, leaf.bytes // math.prod(leaf.shape)) if math.prod(leaf.shape) else 0


def named_shardings(leaves: Sequence[LeafLayout], mesh: Any) -> list[NamedSharding]:
    """Return the sharding of each leaf between steps, on a `Mesh` or an `AbstractMesh`."""
    return [NamedSharding(mesh, leaf.partition_spec) for leaf in leaves]
