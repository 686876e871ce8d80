"""List the mesh shapes to plan for: the mesh that the user gives, or the shapes that a number of devices allows.

A *shape* maps the names of mesh axes to their sizes, in order. If the planner chooses it, the mesh has one to three axes: data,
model and fsdp. `axis_names.py` renames the axes of the plan. Devices of several domains (`Hardware.domain`) are numbered domain
by domain, and each axis of a searched mesh is within the domains, or across them, or the only one.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
      devices: the devices in the order of the mesh; None takes the first of this process, in the order of `order_devices`.

    Raises:
      ValueError: this process has too few devices, or the mesh does not divide into their slices.
    """
    needed = math.prod(shape.values())
    if devices is None:
        present = jax.devices()
        if len(present) < needed:
            raise ValueError(
                f"the plan is for {needed} devices ({describe_mesh(shape)}); this process has {len(present)} "
                f"({present[0].platform}): run it where they are, or on CPU set jax_num_cpu_devices before JAX starts"
            )
        devices = order_devices(shape, present[:needed])
    import numpy as np

    return Mesh(np.array(devices).reshape(tuple(shape.values())), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def order_devices(shape: Mapping[str, int], devices: Sequence[Any]) -> Any:
    """Return devices as an array of the shape of a mesh, in the order of `jax.make_mesh`; TPUs of several slices slice by slice.

    Raises:
      ValueError: the mesh does not divide into the slices.
    """
    import numpy as np
    from jax.experimental import mesh_utils

    slices: dict[int, list[Any]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", 0) if device.platform == "tpu" else 0, []).append(device)
    sizes, size = tuple(shape.values()), len(devices) // len(slices)
    inner = inner_sizes(sizes, size)
    if inner is None or {len(each) for each in slices.values()} != {size}:
        raise ValueError(describe_uneven_slices(shape, len(slices), size))
    # An axis may be a part of a physical axis, as with 8 × 2 devices of "v5e:4x4".
    arrays = [mesh_utils.create_device_mesh(inner, each, allow_split_physical_axes=True) for each in slices.values()]
    return np.stack(arrays).reshape(sizes)


def describe_uneven_slices(shape: Mapping[str, int], slices: int, size: int) -> str:
    """Return the error for a mesh that slices of a size cut unevenly."""
    return (
        f"mesh {describe_mesh(shape)} does not divide into {slices} slices of {size} devices: the product of the sizes of its "
        "last axes has to divide that number, or to be a multiple of it"
    )


def inner_sizes(sizes: Sequence[int], domain: int) -> tuple[int, ...] | None:
    """Return how much of each mesh axis is in one domain; None if domains cut the mesh unevenly. Devices are numbered row by row.

    >>> inner_sizes((2, 8), 8), inner_sizes((4, 4), 8), inner_sizes((16,), 8), inner_sizes((4, 6), 8)
    ((1, 8), (2, 4), (8,), None)
    """
    inner: list[int] = []
    for size in reversed(sizes):
        inner.append(math.gcd(size, domain // math.prod(inner)))
    own = tuple(reversed(inner))
    cut = next((axis for axis in reversed(range(len(sizes))) if own[axis] < sizes[axis]), 0)  # the last that is not in one domain
    return own if math.prod(own) == domain and math.prod(own[:cut]) == 1 else None


def describe_mesh(shape: Mapping[str, int]) -> str:
    """Return a mesh shape as text.

    >>> describe_mesh({"data": 2, "model": 4})
    'data 2 × model 4'
    """
    return " × ".join(f"{name} {size}" for name, size in shape.items())


def candidate_shapes(
    mesh: Any, devices: Any, constrained_axes: Collection[str] = (), domain_of: Callable[[int], int] = lambda devices: 0
) -> tuple[list[dict[str, int]], list[Any] | None]:
    """Return the mesh shapes to plan for, and the devices if they are given.

    Args:
      mesh: a `Mesh`, an `AbstractMesh`, a dict of axis sizes, or None to search shapes of one to three axes.
      devices: a number of devices, a list of devices, or None for all devices of this process.
      constrained_axes: axes that the user's constraints name. A searched mesh has them if their names are searched.
      domain_of: returns how many of a number of devices are in one domain; 0 if all are.

    Returns:
      The shapes, and the list of devices or None.

    Raises:
      TypeError: `mesh` is not a mesh, or `devices` are neither a number nor devices.
      ValueError: a mesh has no devices, more than three axes, or devices other than `devices`.

    >>> candidate_shapes(None, 4)
    ([{'data': 4}, {'data': 2, 'model': 2}], None)
    >>> candidate_shapes(None, 8, domain_of=lambda devices: 4)
    ([{'data': 8}, {'data': 2, 'model': 4}, {'data': 2, 'fsdp': 2, 'model': 2}], None)
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
        return list(_factorisations(count, constrained_axes, domain_of(count))), given
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


def keep_with_axes(shapes: list[dict[str, int]], constrained_axes: Collection[str]) -> list[dict[str, int]]:
    """Return the shapes that have all axes that the user's constraints name, or raise ValueError if none has."""
    kept = [shape for shape in shapes if set(constrained_axes) <= set(shape)]
    if not kept:
        other = min((axis for axis in constrained_axes if axis not in _AXIS_NAMES[-1]), key=str)
        raise ValueError(
            f"constraints name the mesh axis {other!r}, and the axes of a mesh that is searched are "
            f"{', '.join(_AXIS_NAMES[-1])}: use these, or give mesh= with axes of your own, as "
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


def _factorisations(count: int, constrained_axes: Collection[str] = (), domain: int = 0) -> Iterator[dict[str, int]]:
    """Yield the mesh shapes of a number of devices, with few axes first.

    Equivalent axes have ascending sizes, so that the last is the largest. Axes that constraints name are not equivalent to the
    others, and take each of the sizes. Neither are axes within the domains to axes across them.
    """
    name_sets = [axes for axes in _AXIS_NAMES if set(constrained_axes) <= set(axes)] or _AXIS_NAMES
    found = [(axes, sizes) for axes in name_sets for sizes in _ascending_factors(count, len(axes))]
    if not found:  # The count has too few factors for the axes that the mesh must have: allow axes of size 1.
        found = [(name_sets[0], sizes) for sizes in _ascending_factors(count, len(name_sets[0]), 1)]
    orders = {each: list(dict.fromkeys(itertools.permutations(each[1]))) for each in found}
    if domain:
        aligned = {each: [order for order in found if _is_aligned(order, domain)] for each, found in orders.items()}
        orders = {each: found for each, found in aligned.items() if found} or orders
    shapes = (
        dict(zip(axes, order, strict=True))
        for axes, sizes in itertools.islice(orders, _MOST_SHAPES)
        for order in orders[axes, sizes]
        if _is_ascending(axes, order, constrained_axes, domain)
    )
    return itertools.islice(shapes, _MOST_ORDERS)


def _is_aligned(sizes: Sequence[int], domain: int) -> bool:
    """Return whether each axis is within the domains or across them, or the only one."""
    return len(sizes) == 1 or any(math.prod(sizes[axis:]) == domain for axis in range(len(sizes)))


def _is_ascending(axes: Sequence[str], sizes: Sequence[int], constrained_axes: Collection[str], domain: int) -> bool:
    """Return whether the sizes of equivalent axes ascend: of those within the domains, and of those across them."""
    across = [bool(domain) and math.prod(sizes[axis + 1 :]) >= domain for axis in range(len(sizes))]
    sides = [
        [size for axis, size, far in zip(axes, sizes, across, strict=True) if far is side and axis not in constrained_axes]
        for side in (True, False)
    ]
    return all(side == sorted(side) for side in sides)


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
