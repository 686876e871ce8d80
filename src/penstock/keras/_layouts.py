"""Layouts of Keras variables and batches: before there is a plan, and as a plan has them.

In: shapes, devices and the shardings of a plan. Out: Keras's `TensorLayout` and `DeviceMesh`.

Before there is a plan, an array is sharded over all devices, along as many of its dimensions as that takes: its *provisional
layout*. So it is nowhere whole, and no larger on a device than under any plan.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from keras.src.distribution.distribution_lib import DEFAULT_BATCH_DIM_NAME, DeviceMesh, TensorLayout

from penstock.shard.mesh.shapes import concrete_mesh

_FEW = 64
"""The number of elements from which an array is sharded before there is a plan."""

Entry = str | tuple[str, ...] | None


class PlannedLayout(TensorLayout):  # type: ignore[misc]  # Keras has no types
    """A `TensorLayout` that may shard one dimension over several mesh axes, as a plan does.

    Args:
      axes: for each dimension a mesh axis, a tuple of mesh axes, or None.
      device_mesh: the mesh of the plan.
      owner: the model whose training step's plan chose it. A layout without an owner gives way to such a plan.
    """

    def __init__(self, axes: Sequence[Entry], device_mesh: Any = None, owner: Any = None):
        self._owner = None if owner is None else weakref.ref(owner)
        super().__init__(axes, device_mesh)

    @property
    def owner(self) -> Any:
        """Return the model whose training step's plan chose the layout, as long as it lives; None if there is none."""
        return None if self._owner is None else self._owner()

    def _validate_axes(self) -> None:
        if self._device_mesh is None:
            return
        named = {axis for entry in self._axes for axis in (entry if isinstance(entry, tuple) else (entry,))} - {None}
        if unknown := named - set(self._device_mesh.axis_names):
            raise ValueError(
                f"the layout {self._axes} names the mesh axis {min(unknown)!r}, and the mesh has {self._device_mesh.axis_names}"
            )


def planned_layout(sharding: NamedSharding, mesh: DeviceMesh, rank: int, owner: Any) -> PlannedLayout:
    """Return the sharding of a plan as a layout of Keras.

    Args:
      sharding: on the mesh of the plan.
      mesh: the same mesh.
      rank: the number of dimensions of the array.
      owner: as in `PlannedLayout`.
    """
    entries = tuple(sharding.spec) + (None,) * (rank - len(sharding.spec))
    return PlannedLayout(entries, mesh, owner)


def keras_mesh(mesh: Mesh) -> DeviceMesh:
    """Return a mesh of JAX as a mesh of Keras."""
    made = DeviceMesh(tuple(mesh.devices.shape), list(mesh.axis_names), mesh.devices)
    made._backend_mesh = mesh
    return made


def rows_layout(shape: Sequence[int], devices: Sequence[Any]) -> TensorLayout:
    """Return the layout of a leaf of a batch: its rows are sharded over as many devices as divide them.

    Args:
      shape: [B, ...]; () for a number, which is replicated.
      devices: all devices, in the order of the plan's mesh.

    >>> rows_layout((6, 3), [f"cpu:{n}" for n in range(8)]).device_mesh.shape
    (2, 4)
    """
    count = len(devices)
    shards = math.gcd(shape[0], count) if shape else 1
    mesh = DeviceMesh((shards, count // shards), [DEFAULT_BATCH_DIM_NAME, "replica"], np.array(devices))
    return TensorLayout([DEFAULT_BATCH_DIM_NAME if dim == 0 else None for dim in range(len(shape))], mesh)


def concatenated(parts: Sequence[Any]) -> jax.Array:
    """Return arrays as one, along their rows. They may lie on different meshes of the same devices.

    Args:
      parts: arrays of JAX [B, ...] with named shardings; B may differ.
    """
    if len({part.sharding for part in parts}) > 1:
        shape = (math.gcd(*(part.shape[0] for part in parts)), *parts[0].shape[1:])
        sharding = rows_layout(shape, list(parts[0].sharding.mesh.devices.flat)).backend_layout
        parts = [jax.device_put(part, sharding) for part in parts]
    return jax.numpy.concatenate(parts)


class ProvisionalLayouts:
    """The layouts of variables for which there is no plan.

    Args:
      devices: the devices of JAX.
    """

    def __init__(self, devices: Sequence[Any]):
        sizes = {f"part{number}": factor for number, factor in enumerate(_prime_factors(len(devices)))}
        self._device_mesh = keras_mesh(concrete_mesh(sizes, devices))

    def of(self, shape: Sequence[int]) -> PlannedLayout:
        """Return the layout of an array: each prime factor of the number of devices shards the largest part that it divides.

        Arrays of a few numbers, such as the state of a generator of seeds, are replicated.

        >>> import jax
        >>> layout = ProvisionalLayouts(jax.devices()[:4]).of((6, 64))
        >>> layout.axes
        (None, ('part0', 'part1'))
        """
        if math.prod(shape) < _FEW:
            return PlannedLayout((None,) * len(shape), self._device_mesh)
        left = list(shape)
        entries: list[tuple[str, ...]] = [() for _ in shape]
        for name, factor in self._device_mesh.backend_mesh.shape.items():
            dim = max((dim for dim, size in enumerate(left) if size % factor == 0), key=lambda dim: left[dim], default=None)
            if dim is not None and left[dim]:
                left[dim] //= factor
                entries[dim] = (*entries[dim], name)
        return PlannedLayout([entry or None for entry in entries], self._device_mesh)


def is_in_layout(array: Any, sharding: NamedSharding) -> bool:
    """Return whether an array is a JAX array that lies as a sharding says."""
    return isinstance(array, jax.Array) and (array.sharding is sharding or array.sharding.is_equivalent_to(sharding, array.ndim))


def _prime_factors(number: int) -> list[int]:
    """Return the prime factors of a number, the largest first; [1] for 1."""
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors[::-1] or [1]
