"""Variables of Keras: create and assign them in shards, give them layouts, and name their values.

*Values.* Keras creates a variable of less than 250 MB unsharded on the default device, and then shards it; likewise for loaded
values. Here the initializer runs in a jitted function with a sharded result, and a host array is sharded on the host.

*Layouts.* Before there is a plan, an array is sharded over all devices, along as many of its dimensions as that takes: its
*provisional layout*. So it is nowhere replicated, and no larger on a device than under any plan.

*Names* are paths of variables such as "model/dense/kernel". Keras numbers the layers of a process ("dense_3"), so that a model
that is made a second time has other paths. These numbers are left out, and variables that then have the same name are counted.
"""

from __future__ import annotations

import ctypes
import functools
import math
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from keras.src.backend.common.stateless_scope import StatelessScope, in_stateless_scope
from keras.src.distribution.distribution_lib import DEFAULT_BATCH_DIM_NAME, DeviceMesh, TensorLayout

from penstock.shard.mesh.shapes import concrete_mesh

# Values in shards.

_KEPT = 512  # compiled initializers
_SEED = 16  # elements of a constant that may be a seed
_TRIM = 8 << 20  # bytes of replaced values after which freed memory is returned to the system
_LARGE = 1 << 20  # bytes
_NOTHING = np.zeros((), np.float32)

_compiled: dict[Any, Any] = {}


def create(initializer: Callable, shape: Sequence[int], dtype: str, sharding: Sharding) -> jax.Array:
    """Return the value that an initializer, a function of a shape and a dtype, gives a variable, created in shards.

    An initializer that cannot be traced, or draws from a generator that it changes, runs by itself; its result is then sharded.
    """
    call = functools.partial(initializer, tuple(shape), dtype=dtype)
    scope = StatelessScope(initialize_variables=False)
    concrete: list[Any] = []

    def traced() -> Any:
        result = call()
        if not isinstance(result, jax.core.Tracer):  # an array of NumPy, which a second call might not give again
            concrete.append(result)
        return result

    try:
        with scope:
            closed = jax.make_jaxpr(traced)()
    except Exception:  # raised again below, if it is the initializer's
        return put(call(), dtype, sharding)
    if scope.state_mapping:
        return put(call(), dtype, sharding)
    if concrete:
        return put(concrete[0], dtype, sharding)
    # The seeds are constants of the program. As arguments, they leave one program for all variables of a shape and a kind.
    constants = list(closed.consts)
    program = jax.jit(_evaluated(closed.jaxpr), out_shardings=sharding)
    if not (any(np.size(each) > _SEED for each in constants) or _has_inner_constants(closed.jaxpr)):
        key = (str(closed.jaxpr), sharding)
        if key not in _compiled and len(_compiled) >= _KEPT:
            _compiled.clear()
        program = _compiled.setdefault(key, program)
    return put(program(*constants), dtype, sharding)


def _has_inner_constants(program: Any) -> bool:
    """Return whether a program has arrays in it that its text leaves out: literals, constants of nested programs, callbacks."""
    for equation in program.eqns:
        if "callback" in equation.primitive.name or any(np.size(getattr(atom, "val", 0)) > 1 for atom in equation.invars):
            return True
        for value in filter(_is_program, jax.tree_util.tree_leaves(list(equation.params.values()), is_leaf=_is_program)):
            if len(getattr(value, "consts", ())) or _has_inner_constants(value):
                return True
    return False


def _is_program(value: Any) -> bool:
    return hasattr(value, "eqns")


def _evaluated(jaxpr: Any) -> Callable[..., Any]:
    """Return a function from the constants of a jaxpr without arguments to its only result."""

    def initialize(*constants: Any) -> Any:
        (result,) = jax.core.eval_jaxpr(jaxpr, constants)
        return result

    return initialize


def put(value: Any, dtype: str | None, sharding: Sharding) -> jax.Array:
    """Place an array of any kind that Keras takes in a layout. Each device gets only its shard of a host array.

    A dtype of None keeps the array's own.
    """
    if isinstance(value, jax.Array) and not _is_of_this_process(value, sharding):
        value = value if dtype is None or value.dtype == dtype else value.astype(dtype)
        return value if value.sharding == sharding else jax.device_put(value, sharding)
    value = host_array(value, dtype)
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    # `device_put` would compare the values of all processes, by a program that may block one that runs at the same time.
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _is_of_this_process(value: jax.Array, sharding: Sharding) -> bool:
    """Return whether an array is on devices of this process alone, and its layout is not."""
    return value.is_fully_addressable and not sharding.is_fully_addressable


def assigns_by_shards(value: Any, sharding: Sharding) -> bool:
    """Return whether `replace`, and not Keras, assigns a converted value to a variable with this layout."""
    return isinstance(value, np.ndarray) or (isinstance(value, jax.Array) and _is_of_this_process(value, sharding))


def host_array(value: Any, dtype: str | None) -> np.ndarray:
    """Return a value as a host array with the dtype that a JAX array has."""
    array = np.asarray(value)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype if dtype is None else dtype), copy=False)


def stays_on_host(value: Any) -> bool:
    """Return whether the value that a variable is created from or assigned shall stay on the host until its layout is known.

    Arrays of NumPy, h5py and PyTorch stay; numbers and lists are small.
    """
    return isinstance(value, np.ndarray) and value.ndim > 0 and not in_stateless_scope()


def replace(variable: Any, value: Any, sharding: Sharding) -> None:
    """Assign an array of the host, or of this process's devices, to a variable with this layout.

    The old value is dropped before the new one is placed, so that a file is loaded without both.
    """
    variable._value = None
    _trim_freed_memory(value.nbytes)
    variable._value = jax.block_until_ready(put(value, None, sharding))
    if value.nbytes >= _LARGE:
        jax.device_put(_NOTHING)  # JAX drops a host array when it gets the next one


class _Freed:
    """The bytes that were freed since memory was last returned to the system."""

    bytes = 0


def _trim_freed_memory(count: int) -> None:
    """Count freed bytes, and return freed memory to the system once they are `_TRIM`.

    glibc keeps what a thread frees for this thread, and other threads create the new shards: a process grew to 1.5 times the size
    of the preset of 610 MiB that it loaded. Other C libraries have no `malloc_trim`.
    """
    _Freed.bytes += count
    if _Freed.bytes >= _TRIM:
        _Freed.bytes = 0
        if (trim := _malloc_trim()) is not None:
            trim(0)


@functools.cache
def _malloc_trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


# Layouts.

_FEW = 64  # the number of elements from which an array is sharded before there is a plan

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
    """Return the sharding of a plan as a layout of Keras, on the same mesh, for an array of `rank` dimensions."""
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
    """Concatenate arrays of JAX [B, ...] with named shardings along B. Their meshes of the same devices may differ."""
    if len({part.sharding for part in parts}) > 1:
        shape = (math.gcd(*(part.shape[0] for part in parts)), *parts[0].shape[1:])
        sharding = rows_layout(shape, list(parts[0].sharding.mesh.devices.flat)).backend_layout
        parts = [jax.device_put(part, sharding) for part in parts]
    return jax.numpy.concatenate(parts)


class ProvisionalLayouts:
    """The layouts of variables for which there is no plan."""

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
    """Return whether an array is a JAX array with an equivalent sharding."""
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


# Names and values, between two steps.

ALL = ("model", "optimizer", "metrics")  # "model" includes its seed generators
_NUMBER = re.compile(r"_\d+(?=[_/]|$)")
_GROUPS = {  # of variables of Keras's trainer, in the order of its state, and their names in a checkpoint
    "trainable_variables": "model",
    "non_trainable_variables": "model",
    "optimizer_variables": "optimizer",
    "metrics_variables": "metrics",
}


def values(model: Any, of: Sequence[str] = ALL) -> dict[str, Any]:
    """Return the values of variables by name, in the groups `of` a model that is built and compiled.

    In the middle of an epoch they are not in the variables: Keras's trainer passes them from step to step, and donates them. It
    leaves the values after the last step in `_jax_state`, until `_jax_state_synced` says that the variables have them again. The
    last step may still run.
    """
    state = getattr(model, "_jax_state", None)
    if not state or model._jax_state_synced:
        return {name: variable.value for name, _, variable in _named(model, of)}
    return {name: state[group][number] for (name, (group, number), _) in _named(model, of)}


def abstract(model: Any, of: Sequence[str] = ALL) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape, the dtype and the sharding of each variable by name, between two steps."""
    found = values(model, of)
    return {name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding) for name, value in found.items()}


def assign(model: Any, arrays: Mapping[str, Any], of: Sequence[str] = ALL) -> None:
    """Give the variables of a model their values, by name, between two steps."""
    for name, _, variable in _named(model, of):
        variable.assign(arrays[name])


def _named(model: Any, of: Sequence[str]) -> Iterator[tuple[str, tuple[str, int], Any]]:
    """Yield each variable with its name, and its place in the state of the trainer: group and number."""
    seen: Counter[str] = Counter()
    for group, prefix in _GROUPS.items():
        if prefix not in of:
            continue
        for number, variable in enumerate(model.optimizer.variables if prefix == "optimizer" else getattr(model, group)):
            name = f"{prefix}/{_NUMBER.sub('', variable.path)}"
            seen[name] += 1
            yield (name if seen[name] == 1 else f"{name} ({seen[name]})"), (group, number), variable
