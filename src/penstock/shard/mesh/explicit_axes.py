"""Plan and run steps where `jax.set_mesh` has explicit axes, or a mesh of other devices.

With explicit axes (`jax.sharding.AxisType.Explicit`), the type of an array says how it is sharded. A plan decides this itself, so
a planned step runs on the same devices in a mesh with automatic axes. Arrays change from one mesh to the other without a copy.
JAX compiles for the devices of the surrounding mesh only, so a plan for other devices is compiled and run without it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from penstock.errors import ExplicitAxesError

_INSIDE = (
    "a plan is made or used inside of jax.jit or scan, on a mesh with explicit axes: do it outside, or make the mesh with "
    "axis_types=(jax.sharding.AxisType.Auto, ...)"
)

_PRESCRIBED = re.compile(
    r"axis names that are of type Auto"  # reshard and out_sharding of a PartitionSpec
    r"|context mesh .* should match"  # the same of a sharding on the mesh itself, where `jax.set_mesh` has explicit axes
    r"|can only refer to Auto axes",  # with_sharding_constraint of such a sharding
    re.IGNORECASE,
)
"""Messages of JAX about a layout that can only be prescribed where axes are explicit."""


def has_explicit_axes(mesh: Any) -> bool:
    """Return whether a mesh, concrete or abstract, has explicit axes."""
    return AxisType.Explicit in mesh.axis_types


@contextlib.contextmanager
def automatic_axes(mesh: Any = None) -> Iterator[Any]:
    """Enter a context in which no axis is explicit, and yield the mesh of `jax.set_mesh` if it has explicit axes, or None.

    Args:
      mesh: the mesh of a plan that is compiled or used in the context, concrete or abstract. If `jax.set_mesh` has other devices
        or axes, its mesh is left.

    Raises:
      ExplicitAxesError: the mesh has explicit axes, and something is traced; or the step, which is traced in this context,
        prescribes a layout of explicit axes.
    """
    try:
        with _automatic_context(mesh) as surrounding:
            yield surrounding
    except ExplicitAxesError:
        raise
    except ValueError as error:
        if _PRESCRIBED.search(str(error)):
            raise ExplicitAxesError(_describe_prescribed(str(error))) from error
        raise


@contextlib.contextmanager
def _automatic_context(mesh: Any) -> Iterator[Any]:
    """Enter the context of `automatic_axes`, and yield its mesh."""
    context = jax.sharding.get_abstract_mesh()
    explicit = has_explicit_axes(context)
    if not explicit and (mesh is None or context.empty):
        yield None
        return
    try:
        surrounding = jax.sharding.get_mesh()
    except ValueError:  # something is traced
        if explicit:
            raise ExplicitAxesError(_INSIDE) from None
        yield None
        return
    if mesh is not None and not (isinstance(mesh, Mesh) and _same(surrounding, mesh)):
        # A step may name axes of its surrounding mesh in a `PartitionSpec`, and then the plan has these axes too.
        same_axes = isinstance(mesh, Mesh) and context.shape == mesh.shape
        with jax.set_mesh(mesh if same_axes else Mesh(np.empty((), object), ())):
            yield surrounding if explicit else None
    elif explicit:
        with jax.sharding.use_abstract_mesh(context.update(axis_types=(AxisType.Auto,) * len(context.axis_names))):
            yield surrounding
    else:
        yield None


def _describe_prescribed(said: str) -> str:
    """Describe, from a message of JAX, that a step prescribes a layout of explicit axes."""
    function = re.search(r"passed to (\.?\w+(?:\.\w+)*)", said)
    source = re.search(r"at source:\s+(\S+)", said)
    where = (f" in {function[1]}" if function else "") + (f" at {source[1]}" if source else "")
    return (
        f"the step prescribes a layout of explicit axes{where}, and a plan chooses the layouts itself, with automatic axes: "
        "remove reshard, out_sharding and shardings on a mesh with explicit axes from the step. If a layout has to be, give it "
        "by jax.lax.with_sharding_constraint with a PartitionSpec, or by constraints= if it is of an argument"
    )


def to_automatic(tree: Any) -> Any:
    """Return a tree whose arrays, or `jax.ShapeDtypeStruct`, are on meshes with automatic axes, in the same memory.

    Other leaves stay as they are.

    Raises:
      ExplicitAxesError: an array is traced, so that its type cannot change.
    """
    return jax.tree_util.tree_map(_automatic, tree)


def refuse_explicit(tree: Any) -> None:
    """Raise `ExplicitAxesError` if a traced array is on a mesh with explicit axes."""
    for leaf in jax.tree_util.tree_leaves(tree):
        if isinstance(leaf, jax.Array) and has_explicit_axes(jax.typeof(leaf).sharding.mesh):
            raise ExplicitAxesError(_INSIDE)


def to_explicit(tree: Any, mesh: Mesh) -> Any:
    """Return a tree whose arrays are on a mesh with explicit axes, in the same memory.

    Arrays on a mesh with other devices or axes stay as they are.
    """

    def explicit(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh) or not _same(sharding.mesh, mesh):
            return leaf
        return jax.device_put(leaf, NamedSharding(mesh, sharding.spec))

    return jax.tree_util.tree_map(explicit, tree)


def _automatic(leaf: Any) -> Any:
    """Return one leaf on a mesh with automatic axes."""
    if isinstance(leaf, jax.core.Tracer):
        refuse_explicit(leaf)
        return leaf
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not has_explicit_axes(sharding.mesh):
        return leaf
    mesh = sharding.mesh
    types = (AxisType.Auto,) * len(mesh.axis_names)
    converted = NamedSharding(
        Mesh(mesh.devices, mesh.axis_names, axis_types=types) if isinstance(mesh, Mesh) else mesh.update(axis_types=types),
        sharding.spec,
    )
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=converted, weak_type=leaf.weak_type)
    return jax.device_put(leaf, converted)


def _same(mesh: Mesh, other: Mesh) -> bool:
    """Return whether two meshes have the same devices and axes, of any types."""
    return (
        mesh.axis_names == other.axis_names and mesh.shape == other.shape and list(mesh.devices.flat) == list(other.devices.flat)
    )
