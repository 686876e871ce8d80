"""List the mesh shapes to plan for: the mesh that the user gives, or the shapes that a number of devices allows.

A *shape* maps the names of mesh axes to their sizes, in order. If the planner chooses it, the mesh has one to three axes: first
those that only the `Hardware` names, such as "node", then data, model and fsdp. `axis_names.py` renames the axes of the plan.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from penstock._arguments import brief

_AXIS_NAMES = (("data",), ("data", "model"), ("data", "fsdp", "model"))
"""The names of one, two and three axes in the search."""
_MOST_SHAPES = 12
"""The most sets of axis sizes that are searched."""
_MOST_ORDERS = 24
"""The most meshes that are searched: sets of sizes, each in all its orders over the axes that differ."""


def abstract_mesh(shape: Mapping[str, int]) -> AbstractMesh:
    """Return a mesh without devices, with automatic axes."""
    return AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def concrete_mesh(shape: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """Return a mesh of devices, with automatic axes.

    Args:
      devices: the devices in the order of the mesh; None takes the first of this process, in the order of `jax.make_mesh`.

    Raises:
      ValueError: this process has too few devices.
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
    """Return a mesh shape as text.

    >>> describe_mesh({"data": 2, "model": 4})
    'data 2 × model 4'
    """
    return " × ".join(f"{name} {size}" for name, size in shape.items())


def candidate_shapes(
    mesh: Any, devices: Any, constrained_axes: Collection[str] = (), machine_axes: Mapping[str, int | None] | None = None
) -> tuple[list[dict[str, int]], list[Any] | None]:
    """Return the mesh shapes to plan for, and the devices if they are given.

    Args:
      mesh: a `Mesh`, an `AbstractMesh`, a dict of axis sizes, or None to search shapes of one to three axes.
      devices: a number of devices, a list of devices, or None for all devices of this process.
      constrained_axes: axes that the user's constraints name. A searched mesh has them if their names are searched.
      machine_axes: axes that the hardware names, with their sizes, or None where it gives none. A searched mesh has them all.

    Returns:
      The shapes, and the list of devices or None.

    Raises:
      TypeError: `mesh` is not a mesh, or `devices` are neither a number nor devices.
      ValueError: a mesh has no devices, more than three axes, devices other than `devices`, or not the axes of the hardware.

    >>> candidate_shapes(None, 4)
    ([{'data': 4}, {'data': 2, 'model': 2}], None)
    >>> candidate_shapes(None, 8, machine_axes={"node": 2})
    ([{'node': 2, 'data': 4}, {'node': 2, 'data': 2, 'model': 2}], None)
    """
    given, count = None, None
    if _is_integer(devices):
        count = int(devices)
    elif devices is not None:
        given = list(devices) if isinstance(devices, Iterable) else [devices]
        if not all(hasattr(device, "device_kind") for device in given):
            raise TypeError(f"devices={brief(devices)} is not a number of devices nor a list of devices such as jax.devices()")
        refuse_repeated(given)
        count = len(given)
    if count is not None and count < 1:
        raise ValueError(f"devices={brief(devices)}: a plan needs at least one device")
    if mesh is None:
        if count is None:
            count = jax.device_count()
        return list(_factorisations(count, constrained_axes, machine_axes or {})), given
    shape = _read_shape(mesh)
    if count is not None and math.prod(shape.values()) != count:
        raise ValueError(
            f"mesh {describe_mesh(shape)} has {math.prod(shape.values())} devices, and devices={count} were given; "
            f"a mesh of {count} is {' or '.join(map(describe_mesh, list(_factorisations(count))[:3]))}"
        )
    if isinstance(mesh, Mesh):
        own = list(mesh.devices.flat)
        if given is not None and given != own:
            raise ValueError(
                f"mesh {describe_mesh(shape)} is of the devices {_device_ids(own)} in this order, and devices= are "
                f"{_device_ids(given)}: leave devices out, or give the mesh as a dict of sizes, {shape!r}"
            )
        given = own
    return [shape], given


def refuse_repeated(devices: Sequence[Any]) -> None:
    """Raise ValueError if a device is in a list twice."""
    repeated = [device for device, times in Counter(devices).items() if times > 1]
    if repeated:
        raise ValueError(f"devices has {repeated[0]} twice; each device of a mesh is another one")


def check_machine_axes(shapes: Sequence[Mapping[str, int]], machine_axes: Mapping[str, int | None]) -> None:
    """Raise ValueError if a mesh lacks an axis that the hardware names, or has another size than the hardware gives it."""
    for shape in shapes:
        missing = [axis for axis in machine_axes if axis not in shape]
        if missing:
            raise ValueError(
                f"the hardware names the mesh {'axis' if len(missing) == 1 else 'axes'} {', '.join(map(repr, missing))} "
                f"(axis_bandwidth, axis_latency or axis_size), and the mesh is {describe_mesh(shape)}, with the axes "
                f"{', '.join(map(repr, shape))}: give both the same names"
            )
        for axis, size in machine_axes.items():
            if size not in (None, shape[axis]):
                raise ValueError(
                    f"the hardware has axis_size {size} for the mesh axis {axis!r}, and the mesh is {describe_mesh(shape)}: "
                    "make them equal"
                )


def keep_with_axes(
    shapes: list[dict[str, int]], constrained_axes: Collection[str], machine_axes: Collection[str] = ()
) -> list[dict[str, int]]:
    """Return the shapes that have all axes that the user's constraints name, or raise ValueError if none has."""
    kept = [shape for shape in shapes if set(constrained_axes) <= set(shape)]
    if not kept:
        named = (*_own_axes(machine_axes), *_AXIS_NAMES[-1])
        other = min((axis for axis in constrained_axes if axis not in named), key=str, default="")
        if not other:
            raise ValueError(
                f"a mesh has at most three axes, and constraints and hardware name "
                f"{', '.join(sorted({*constrained_axes, *machine_axes}))}: give mesh= with fewer"
            )
        raise ValueError(
            f"constraints name the mesh axis {other!r}, and the axes of a mesh that is searched are "
            f"{', '.join(named)}: use these, or give mesh= with axes of your own, as "
            f"mesh={{{other!r}: {math.prod(shapes[0].values())}}}"
        )
    return kept


def match_step_meshes(
    shapes: list[dict[str, int]], given: list[Any] | None, named: Iterable[Any], searched: bool
) -> tuple[list[dict[str, int]], list[Any] | None]:
    """Select the shapes and devices of the mesh that the step itself names; return both unchanged if it names none.

    Args:
      named: the meshes that `with_sharding_constraint` and `shard_map` name inside of the step.
      searched: whether the planner chooses the shape.

    Raises:
      ValueError: the step names a mesh of another shape, of other devices, or with another order of devices. A program can have
        only one order.
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
                    f"the step itself lays something out on a mesh of the devices {_device_ids(own)} (with_sharding_constraint "
                    f"or shard_map), and another mesh, or devices=, has {_device_ids(given)}; a program has one order of "
                    "devices: plan with the step's mesh, mesh=, and without devices=, and name one mesh in all of the step"
                )
            given = own
    return shapes, given


def _device_ids(devices: Sequence[Any]) -> str:
    return ", ".join(str(device.id) for device in devices)


def _read_shape(mesh: Any) -> dict[str, int]:
    """Return the shape of a mesh as the user gives it, after a check."""
    if isinstance(mesh, (Mesh, AbstractMesh)):
        shape = dict(mesh.shape)
    elif isinstance(mesh, Mapping):
        shape = {name: int(size) if _is_integer(size) else size for name, size in mesh.items()}
    else:
        raise TypeError(
            f"mesh={brief(mesh)} is not a jax.sharding.Mesh, AbstractMesh or dict of axis sizes such as {{'data': 2, 'model': 4}}"
        )
    for name, size in shape.items():
        if not isinstance(name, str) or not _is_integer(size) or size < 1:
            raise ValueError(f"mesh axis {name!r} has size {size!r}; names are strings and sizes whole numbers of at least 1")
    if not 1 <= len(shape) <= 3:
        raise ValueError(f"mesh {describe_mesh(shape) or '{}'} has {len(shape)} axes; a plan is made for one, two or three")
    return shape


def _is_integer(number: Any) -> bool:
    """Return whether a value is an integer of Python or NumPy, and not a bool."""
    return isinstance(number, Integral) and not isinstance(number, bool)


def _own_axes(machine_axes: Iterable[str]) -> tuple[str, ...]:
    """Return the axes that only the hardware names."""
    return tuple(axis for axis in machine_axes if axis not in _AXIS_NAMES[-1])


def _name_sets(constrained_axes: Collection[str], machine_axes: Collection[str]) -> list[tuple[str, ...]]:
    """Return the sets of axis names to search: the sets that have all axes that constraints and the hardware name.

    If there are none, only the hardware counts, and `keep_with_axes` reports the constraint that does not fit.
    """
    own = _own_axes(machine_axes)
    name_sets = [(*own, *axes) for axes in ((), *_AXIS_NAMES) if len(own) + len(axes) <= 3 and (axes or len(own) == 3)]
    name_sets = [axes for axes in name_sets if set(machine_axes) <= set(axes)]
    if not name_sets:
        raise ValueError(
            f"a mesh has at most three axes, and the hardware names {', '.join(machine_axes)} (axis_bandwidth, axis_latency or "
            f"axis_size), beside those that are searched, {', '.join(_AXIS_NAMES[-1])}: name fewer, or give mesh="
        )
    return [axes for axes in name_sets if set(constrained_axes) <= set(axes)] or name_sets


def _factorisations(
    count: int, constrained_axes: Collection[str] = (), machine_axes: Mapping[str, int | None] | None = None
) -> Iterator[dict[str, int]]:
    """Yield the mesh shapes of a number of devices, with few axes first.

    Equivalent axes have ascending sizes, so that the last is the largest. Axes that constraints or the hardware name are not
    equivalent to the others, and take each of the sizes, unless the hardware gives them one. Raise ValueError if the sizes that
    the hardware gives do not divide the number of devices, or it names too many axes.
    """
    machine_axes = machine_axes or {}
    fixed = {axis: size for axis, size in machine_axes.items() if size is not None}
    name_sets = _name_sets(constrained_axes, machine_axes)
    rest, left = divmod(count, math.prod(fixed.values()))
    if left:
        raise ValueError(f"{count} devices are not a multiple of the hardware's axis_size, {describe_mesh(fixed)}")
    searched = [(axes, tuple(axis for axis in axes if axis not in fixed)) for axes in name_sets]
    found = [(axes, free, sizes) for axes, free in searched for sizes in _ascending_factors(rest, len(free))]
    if not found:  # The count has too few factors for the axes that the mesh must have: allow axes of size 1.
        axes, free = next(((axes, free) for axes, free in searched if free), searched[0])
        found = [(axes, free, sizes) for sizes in _ascending_factors(rest, len(free), 1)]
    distinct = {*constrained_axes, *machine_axes}
    orders = (
        {axis: {**fixed, **dict(zip(free, order, strict=True))}[axis] for axis in axes}
        for axes, free, sizes in found[:_MOST_SHAPES]
        for order in dict.fromkeys(itertools.permutations(sizes))
        for equivalent in ([size for axis, size in zip(free, order, strict=True) if axis not in distinct],)
        if equivalent == sorted(equivalent)
    )
    return itertools.islice(orders, _MOST_ORDERS)


def _ascending_factors(count: int, axes: int, least: int = 2) -> list[tuple[int, ...]]:
    """Return the ways to write a number as a product of none to three ascending factors, from `least` on.

    Products of three factors are sorted by the ratio of the largest factor to the smallest.
    """
    if axes == 0:
        return [()] if count == 1 else []
    if axes == 1:
        return [(count,)] if count >= least else []
    products = [
        (first, *rest)
        for first in range(least, math.isqrt(count) + 1)
        if count % first == 0
        for rest in _ascending_factors(count // first, axes - 1, first)
    ]
    return sorted(products, key=lambda sizes: sizes[-1] / sizes[0]) if axes == 3 else products
