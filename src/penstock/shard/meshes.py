"""What a user says of a mesh, and the meshes that a number of devices allows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

_NAMES = {1: ("data",), 2: ("data", "model"), 3: ("data", "fsdp", "model")}
_MOST_SHAPES = 12


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
                f"the plan is for {needed} devices ({describe(shape)}); this process has {len(present)} ({present[0].platform}): "
                "run it where they are, or on CPU set jax_num_cpu_devices before JAX starts"
            )
        return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=types, devices=present[:needed])
    import numpy as np

    return Mesh(np.array(devices).reshape(tuple(shape.values())), tuple(shape), axis_types=types)


def describe(shape: Mapping[str, int]) -> str:
    """ "data 2 × model 4" """
    return " × ".join(f"{name} {size}" for name, size in shape.items())


def shapes_of(mesh: Any, devices: Any) -> tuple[list[dict[str, int]], list[Any] | None]:
    """The shapes of mesh to plan for, and the devices, if they were given.

    Args:
      mesh: a `Mesh`, an `AbstractMesh`, a dict of axis sizes, or None.
      devices: a number of devices, or devices, or None. Without a mesh, its shape is left to the planner: one to three axes.

    Raises:
      TypeError, ValueError: it is no mesh, has no devices, more than three axes, or not as many devices as were given.
    """
    given, count = None, None
    if _whole(devices):
        count = int(devices)
    elif devices is not None:
        given = list(devices) if isinstance(devices, Iterable) else [devices]
        if not all(hasattr(each, "device_kind") for each in given):
            raise TypeError(f"devices={devices!r} is no number of devices, and no list of devices such as jax.devices()")
        count = len(given)
    if count is not None and count < 1:
        raise ValueError(f"devices={devices!r}: a plan needs at least one device")
    if mesh is None:
        if count is None:
            count = jax.device_count()
        return list(_factorisations(count)), given
    shape = _shape(mesh)
    if isinstance(mesh, Mesh):
        given = list(mesh.devices.flat) if given is None else given
    if count is not None and math.prod(shape.values()) != count:
        raise ValueError(
            f"mesh {describe(shape)} has {math.prod(shape.values())} devices, and devices={count} were given; "
            f"a mesh of {count} is {' or '.join(describe(each) for each in list(_factorisations(count))[:3])}"
        )
    return [shape], given


def agreeing(shapes: list[dict[str, int]], named: Iterable[dict[str, int]], searched: bool) -> list[dict[str, int]]:
    """Of the shapes to plan for, the one of the mesh that the step itself names; all of them where it names none.

    Args:
      shapes: to plan for.
      named: shapes of the meshes that are named inside of the step.
      searched: whether the shape is left to the planner.

    Raises:
      ValueError: the step names another mesh.
    """
    for inner in named:
        same = [shape for shape in shapes if list(shape.items()) == list(inner.items())]
        if not same and searched and math.prod(inner.values()) == math.prod(shapes[0].values()) and 1 <= len(inner) <= 3:
            same = [inner]
        if not same:
            raise ValueError(
                f"the step itself lays something out on mesh {describe(inner)} (with_sharding_constraint or shard_map), and the "
                f"plan is for {' or '.join(describe(shape) for shape in shapes[:3])}: plan with mesh={inner!r}, or take it out"
            )
        shapes, searched = same, False
    return shapes


def _shape(mesh: Any) -> dict[str, int]:
    if isinstance(mesh, (Mesh, AbstractMesh)):
        shape = dict(mesh.shape)
    elif isinstance(mesh, Mapping):
        shape = {name: int(size) if _whole(size) else size for name, size in mesh.items()}
    else:
        raise TypeError(
            f"mesh={mesh!r} is no jax.sharding.Mesh, AbstractMesh or dict of axis sizes such as {{'data': 2, 'model': 4}}"
        )
    for name, size in shape.items():
        if not isinstance(name, str) or not _whole(size) or size < 1:
            raise ValueError(f"mesh axis {name!r} has size {size!r}; names are strings and sizes whole numbers of at least 1")
    if not 1 <= len(shape) <= 3:
        raise ValueError(f"mesh {describe(shape) or '{}'} has {len(shape)} axes; a plan is made for one, two or three")
    return shape


def _whole(number: Any) -> bool:
    """Whether it is a whole number, of Python or NumPy."""
    return isinstance(number, Integral) and not isinstance(number, bool)


def _factorisations(count: int) -> Iterator[dict[str, int]]:
    """Meshes of a number of devices: one axis, then two and three, the sizes rising, so that the last axis is the largest."""
    shapes: list[tuple[int, ...]] = [(count,)]
    shapes += [(a, count // a) for a in range(2, math.isqrt(count) + 1) if count % a == 0]
    triples: list[tuple[int, ...]] = [
        (a, b, count // a // b) for a in range(2, count) for b in range(a, count) if count % (a * b) == 0 and b <= count // a // b
    ]
    # Of many, those whose sizes are closest.
    shapes += sorted(triples, key=lambda sizes: sizes[-1] / sizes[0])[: max(0, _MOST_SHAPES - len(shapes))]
    for sizes in shapes[:_MOST_SHAPES]:
        yield dict(zip(_NAMES[len(sizes)], sizes, strict=True))
