"""What a user says of a mesh, and the meshes that a number of devices allows."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

_NAMES = (("data",), ("data", "model"), ("data", "fsdp", "model"))
"""Of the axes of a mesh that is searched."""
_MOST_SHAPES = 12
_MOST_ORDERS = 24
"""Of these shapes, with their sizes on this axis and on that."""


def abstract_mesh(shape: Mapping[str, int]) -> AbstractMesh:
    """A mesh of no devices in particular."""
    return AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def concrete_mesh(shape: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of devices: of the given ones in their order, or of the first that this process sees, arranged as JAX thinks best.

    Raises:
      ValueError: there are too few.
    """
    needed = math.prod(shape.values())
    types = (AxisType.Auto,) * len(shape)
    if devices is None:
        present = jax.devices()
        if len(present) < needed:
            raise ValueError(
                f"the plan is for {needed} devices ({describe_mesh(shape)}); this process has {len(present)} "
                f"({present[0].platform}): run it where they are, or on CPU set jax_num_cpu_devices before JAX starts"
            )
        return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=types, devices=present[:needed])
    import numpy as np

    return Mesh(np.array(devices).reshape(tuple(shape.values())), tuple(shape), axis_types=types)


def describe_mesh(shape: Mapping[str, int]) -> str:
    """ "data 2 × model 4" """
    return " × ".join(f"{name} {size}" for name, size in shape.items())


def candidate_shapes(
    mesh: Any, devices: Any, constrained_axes: Collection[str] = (), distinct_axes: Collection[str] = ()
) -> tuple[list[dict[str, int]], list[Any] | None]:
    """The shapes of mesh to plan for, and the devices, if they were given.

    Args:
      mesh: a `Mesh`, an `AbstractMesh`, a dict of axis sizes, or None.
      devices: a number of devices, or devices, or None. Without a mesh, its shape is left to the planner: one to three axes.
      pinned: axes that pinned layouts name: a mesh that is searched has them, if they are among its names.
      told: axes that otherwise differ from others, as in their links.

    Raises:
      TypeError, ValueError: it is no mesh, has no devices, more than three axes, or other devices than were given.
    """
    given, count = None, None
    if _is_integer(devices):
        count = int(devices)
    elif devices is not None:
        given = list(devices) if isinstance(devices, Iterable) else [devices]
        if not all(hasattr(each, "device_kind") for each in given):
            raise TypeError(f"devices={devices!r} is no number of devices, and no list of devices such as jax.devices()")
        twice = [each for each, times in Counter(given).items() if times > 1]
        if twice:
            raise ValueError(f"devices has {twice[0]} twice; each device of a mesh is another one")
        count = len(given)
    if count is not None and count < 1:
        raise ValueError(f"devices={devices!r}: a plan needs at least one device")
    if mesh is None:
        if count is None:
            count = jax.device_count()
        return list(_factorisations(count, constrained_axes, distinct_axes)), given
    shape = _shape(mesh)
    if count is not None and math.prod(shape.values()) != count:
        raise ValueError(
            f"mesh {describe_mesh(shape)} has {math.prod(shape.values())} devices, and devices={count} were given; "
            f"a mesh of {count} is {' or '.join(describe_mesh(each) for each in list(_factorisations(count))[:3])}"
        )
    if isinstance(mesh, Mesh):
        own = list(mesh.devices.flat)
        if given is not None and given != own:
            raise ValueError(
                f"mesh {describe_mesh(shape)} is of the devices {_listed(own)} in this order, and devices= are {_listed(given)}: "
                f"leave devices out, or give the mesh as a dict of sizes, {shape!r}"
            )
        given = own
    return [shape], given


def keep_with_axes(shapes: list[dict[str, int]], constrained_axes: Collection[str]) -> list[dict[str, int]]:
    """Of the shapes of a mesh that is searched, those that have the axes that pinned layouts name.

    Raises:
      ValueError: none has.
    """
    having = [shape for shape in shapes if set(constrained_axes) <= set(shape)]
    if not having:
        other = min((axis for axis in constrained_axes if axis not in _NAMES[-1]), key=str)
        raise ValueError(
            f"constraints name the mesh axis {other!r}, and the axes of a mesh that is searched are {', '.join(_NAMES[-1])}: "
            f"use these, or give mesh= with axes of your own, as mesh={{{other!r}: {math.prod(shapes[0].values())}}}"
        )
    return having


def match_step_meshes(
    shapes: list[dict[str, int]], given: list[Any] | None, named: Iterable[Any], searched: bool
) -> tuple[list[dict[str, int]], list[Any] | None]:
    """Of the shapes to plan for, the one of the mesh that the step itself names, and its devices; all, where it names none.

    Args:
      shapes: to plan for.
      given: the devices to plan for, if they are given.
      named: the meshes that are named inside of the step.
      searched: whether the shape is left to the planner.

    Raises:
      ValueError: the step names another mesh, or one of other devices or in another order: a program has one order of devices.
    """
    for mesh in named:
        inner = dict(mesh.shape)
        same = [shape for shape in shapes if list(shape.items()) == list(inner.items())]
        if not same and searched and math.prod(inner.values()) == math.prod(shapes[0].values()) and 1 <= len(inner) <= 3:
            same = [inner]
        if not same:
            raise ValueError(
                f"the step itself lays something out on mesh {describe_mesh(inner)} (with_sharding_constraint or shard_map), and "
                f"the plan is for {' or '.join(map(describe_mesh, shapes[:3]))}: plan with mesh={inner!r}, or take it out"
            )
        shapes, searched = same, False
        if isinstance(mesh, Mesh):
            own = list(mesh.devices.flat)
            if given is not None and given != own:
                raise ValueError(
                    f"the step itself lays something out on a mesh of the devices {_listed(own)} (with_sharding_constraint or "
                    f"shard_map), and another mesh, or devices=, has {_listed(given)}; a program has one order of devices: plan "
                    "with the step's mesh, mesh=, and without devices=, and name one mesh in all of the step"
                )
            given = own
    return shapes, given


def _listed(devices: Sequence[Any]) -> str:
    return ", ".join(str(each.id) for each in devices)


def _shape(mesh: Any) -> dict[str, int]:
    if isinstance(mesh, (Mesh, AbstractMesh)):
        shape = dict(mesh.shape)
    elif isinstance(mesh, Mapping):
        shape = {name: int(size) if _is_integer(size) else size for name, size in mesh.items()}
    else:
        raise TypeError(
            f"mesh={mesh!r} is no jax.sharding.Mesh, AbstractMesh or dict of axis sizes such as {{'data': 2, 'model': 4}}"
        )
    for name, size in shape.items():
        if not isinstance(name, str) or not _is_integer(size) or size < 1:
            raise ValueError(f"mesh axis {name!r} has size {size!r}; names are strings and sizes whole numbers of at least 1")
    if not 1 <= len(shape) <= 3:
        raise ValueError(f"mesh {describe_mesh(shape) or '{}'} has {len(shape)} axes; a plan is made for one, two or three")
    return shape


def _is_integer(number: Any) -> bool:
    """Whether it is a whole number, of Python or NumPy."""
    return isinstance(number, Integral) and not isinstance(number, bool)


def _factorisations(
    count: int, constrained_axes: Collection[str] = (), distinct_axes: Collection[str] = ()
) -> Iterator[dict[str, int]]:
    """Meshes of a number of devices: one axis, then two and three.

    Where nothing tells axes apart, the sizes rise, so that the last axis is the largest. An axis that is told apart from others,
    by a layout or its links, has each of the sizes in turn.
    """
    names = [each for each in _NAMES if set(constrained_axes) <= set(each)] or list(_NAMES)
    shapes = [sizes for each in names for sizes in _ascending_factors(count, len(each))]
    if not shapes:  # It has too few factors for the axes that it should have.
        shapes = _ascending_factors(count, len(names[0]), 1)
    orders: Iterator[dict[str, int]] = (
        dict(zip(axes, order, strict=True))
        for sizes in shapes[:_MOST_SHAPES]
        for axes in (_NAMES[len(sizes) - 1],)
        for order in dict.fromkeys(itertools.permutations(sizes))
        if _is_ascending(
            [size for axis, size in zip(axes, order, strict=True) if axis not in constrained_axes and axis not in distinct_axes]
        )
    )
    return itertools.islice(orders, _MOST_ORDERS)


def _ascending_factors(count: int, axes: int, least: int = 2) -> list[tuple[int, ...]]:
    """The ways to write a number as a product of so many numbers that rise; those first that are closest, if three."""
    if axes == 1:
        return [(count,)] if count >= least else []
    found = [
        (first, *rest)
        for first in range(least, math.isqrt(count) + 1)
        if count % first == 0
        for rest in _ascending_factors(count // first, axes - 1, first)
    ]
    return sorted(found, key=lambda sizes: sizes[-1] / sizes[0]) if axes == 3 else found


def _is_ascending(sizes: Sequence[int]) -> bool:
    return list(sizes) == sorted(sizes)
