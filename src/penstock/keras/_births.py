"""Create and assign variables of Keras so that each device gets only its shard.

In: an initializer or a host array, and the layout of a variable. Out: the value, sharded.

Keras creates a variable of less than 250 MB whole on the default device, and then shards it; values that are loaded take the same
way. Here the initializer runs in a jitted function whose result is sharded, and a host array is sharded on the host.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from keras.src.backend.common.stateless_scope import StatelessScope, in_stateless_scope

_KEPT = 512  # compiled initializers
_SEED = 16  # elements of a constant that may be a seed
_TRIM = 8 << 20
"""Bytes of replaced values after which freed memory is returned to the system."""
_LARGE = 1 << 20
_NOTHING = np.zeros((), np.float32)


def create(initializer: Callable, shape: Sequence[int], dtype: str, sharding: Sharding) -> jax.Array:
    """Return the value that an initializer gives a variable, created in shards.

    Args:
      initializer: a function of a shape and a dtype, as Keras calls it.
      shape, dtype: those of the variable.
      sharding: the layout.

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
    except Exception:  # whatever it is, it is raised again below if the initializer has it too
        return put(call(), dtype, sharding)
    if scope.state_mapping:
        return put(call(), dtype, sharding)
    if concrete:
        return put(concrete[0], dtype, sharding)
    # The seeds are constants of the program. As arguments, they leave one program for all variables of a shape and a kind.
    constants = list(closed.consts)
    if any(np.size(each) > _SEED for each in constants) or _has_inner_constants(closed.jaxpr):
        return put(jax.jit(_evaluated(closed.jaxpr), out_shardings=sharding)(*constants), dtype, sharding)
    key = (str(closed.jaxpr), sharding)
    if key not in _compiled:
        if len(_compiled) >= _KEPT:
            _compiled.clear()
        _compiled[key] = jax.jit(_evaluated(closed.jaxpr), out_shardings=sharding)
    return put(_compiled[key](*constants), dtype, sharding)


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


_compiled: dict[Any, Any] = {}


def _evaluated(jaxpr: Any) -> Callable[..., Any]:
    """Return a function from the constants of a jaxpr without arguments to its only result."""

    def initialize(*constants: Any) -> Any:
        (result,) = jax.core.eval_jaxpr(jaxpr, constants)
        return result

    return initialize


def put(value: Any, dtype: str | None, sharding: Sharding) -> jax.Array:
    """Return a value in a layout. A host array goes to each device as its shard, and is never whole on one.

    Args:
      value: an array, of any kind that Keras takes.
      dtype: the dtype of the variable; None keeps that of the value.
      sharding: the layout.
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
    """Return whether `replace` assigns a value to a variable, and not Keras.

    Args:
      value: a value that Keras has converted.
      sharding: the layout of the variable.
    """
    return isinstance(value, np.ndarray) or (isinstance(value, jax.Array) and _is_of_this_process(value, sharding))


def host_array(value: Any, dtype: str | None) -> np.ndarray:
    """Return a value as a host array with the dtype that a JAX array has."""
    array = np.asarray(value)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype if dtype is None else dtype), copy=False)


def stays_on_host(value: Any) -> bool:
    """Return whether Keras's variable shall keep a value on the host, until its layout is known.

    Args:
      value: what a variable is created from or assigned. Arrays of NumPy, h5py and PyTorch stay; numbers and lists are small.
    """
    return isinstance(value, np.ndarray) and value.ndim > 0 and not in_stateless_scope()


def replace(variable: Any, value: Any, sharding: Sharding) -> None:
    """Assign a host array to a variable. The old value goes before the new one comes, so that a file is loaded without both.

    Args:
      variable: the variable of Keras.
      value: an array with its shape and dtype, of the host or of this process's devices.
      sharding: its layout.
    """
    variable._value = None
    _trim_freed_memory(value.nbytes)
    variable._value = jax.block_until_ready(put(value, None, sharding))
    if value.nbytes >= _LARGE:
        jax.device_put(_NOTHING)  # JAX lets go of a host array when it takes the next one


class _Freed:
    """The bytes that were freed since memory was last returned to the system."""

    bytes = 0


def _trim_freed_memory(count: int) -> None:
    """Note that this many bytes were freed, and return freed memory to the system now and then.

    glibc keeps what a thread frees for this thread, and other threads create the new shards: a process grew to 1.5 times the size
    of the preset of 610 MiB that it loaded. Other C libraries have no `malloc_trim`.
    """
    _Freed.bytes += count
    if _Freed.bytes >= _TRIM:
        _Freed.bytes = 0
        trim = _malloc_trim()
        if trim is not None:
            trim(0)


@functools.cache
def _malloc_trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
