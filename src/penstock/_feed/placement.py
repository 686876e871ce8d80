"""Put a batch on the devices: check it, transfer it, and run the transform on the device.

A host batch and the target `to` go in; a pytree of `jax.Array`s comes out.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from penstock._jax import thread_settings
from penstock.data.tree import Batch, describe_array, is_numeric, leaves_with_names

To = Any  # None, a jax.Device, a Sharding, a pytree of these that is a prefix of the batch, or a Plan

Context = contextlib.AbstractContextManager[object]

_NO_CONTEXT = contextlib.nullcontext()

# From this number of bytes on, the copy takes longer than the Python code of a call of `device_put`.
_LARGE = 2 << 20

_REMEMBERED = 256  # signatures, so that batches that never repeat a shape cannot fill the memory


class Placed(NamedTuple):
    """A batch on its devices.

    Attributes:
      batch: a pytree of `jax.Array`s.
      bytes: size of the host batch.
      change: how its shapes or dtypes differ from those of the batch before; "" if they do not.
    """

    batch: Batch
    bytes: int
    change: str


class BatchPlacement(Protocol):
    """An object that puts host batches on devices. One thread at a time may call it."""

    def __call__(self, batch: Batch) -> Placed:
        """Put a batch on its devices."""
        ...

    def context(self) -> Context:
        """Return the context in which a new thread places batches."""
        ...

    def consumer_context(self) -> Context | None:
        """Return the context in which the consumer's thread places batches; None if it must not."""
        ...

    def check_rows(self, batch_sizes: Sequence[int]) -> None:
        """Raise ValueError if global batches of one of these sizes cannot be placed."""
        ...


@dataclass
class _Signature:
    """The checked properties of batches of one structure with the same shapes and dtypes.

    Attributes:
      seen: whether a batch with this signature was placed before.
    """

    leaves: dict[str, str]  # name → "uint8[128,28,28,1]"
    structure: Any
    bytes: int
    on_host: bool  # all leaves are NumPy arrays
    seen: bool = False


class Placement:
    """A function that puts host batches on the devices `to` and runs `transform` there. One thread at a time may call it.

    There are three ways, the fastest first (18, 79 and 165 µs for two leaves on a CPU):

    - NumPy leaves with a transform, or for one device, become the arguments of a jitted function: the transform or the identity.
      The identity is compiled for a signature when it comes a second time, so shapes that never repeat compile nothing.
    - Other batches go through `jax.device_put`, and then through the jitted transform.
    - If other processes hold some of the devices, `jax.make_array_from_process_local_data` puts the rows of this process on its
      own devices.

    In all cases, JAX may read the host arrays after the call has returned. On a CPU it may use their memory as the memory of the
    device. So the producer of a host batch must not write to it again.

    Args:
      to: see `feed`.
      transform: a function from batch to batch; None for no transform.

    Raises:
      TypeError: `to` is not a device, a sharding, a pytree of these or a plan.
      ValueError: a transform is given, and `to` has different devices for different leaves.
    """

    _new_thread: Any = None  # JAX's settings on a new thread, as the latest new thread had them

    def __init__(self, to: To, transform: Callable[[Batch], Batch] | None):
        self._to = _shardings(to)
        shardings = jax.tree_util.tree_leaves(self._to)
        self._several_processes = not all(s.is_fully_addressable for s in shardings)
        devices = set[Any]().union(*(s.device_set for s in shardings))
        self._one_device = len(devices) <= 1 and all(map(_in_default_memory, shardings))
        if transform and any(sharding.device_set != shardings[0].device_set for sharding in shardings):
            raise ValueError(
                f"to={to!r} puts leaves on different devices, where no one program, such as transform, can take them together: "
                "leave out transform, or give all leaves the same devices"
            )
        self._transform = transform and self._jit(transform)
        self._signatures: dict[Hashable, _Signature] = {}
        self._last: _Signature | None = None
        self._x64 = _config("jax_enable_x64")

    @functools.cached_property
    def _identity(self) -> Callable[[Batch], Batch]:
        return self._jit(_same, out_shardings=self._to)

    def _jit(self, fn: Callable[[Batch], Batch], **out: Any) -> Callable[[Batch], Batch]:
        if self._to is None or self._several_processes:
            return jax.jit(fn)
        return jax.jit(fn, in_shardings=(self._to,), **out)

    def context(self) -> Context:
        """Return the context in which a new thread places batches, and note the JAX settings of that thread."""
        Placement._new_thread = thread_settings()
        return self._context()

    def _context(self) -> Context:
        # The user asked for this transfer, so a transfer guard against implicit transfers does not apply.
        same_x64 = _config("jax_enable_x64") == self._x64
        if same_x64 and _config("jax_transfer_guard_host_to_device") in (None, "allow"):
            return _NO_CONTEXT  # because entering `_Settings` costs as much as placing a small batch
        return _Settings(self._x64)

    def consumer_context(self) -> Context | None:
        """Return the context in which the consumer's thread places batches.

        Returns:
          None if its JAX settings differ from those of a new thread, because a batch placed there could then be different.
        """
        settings = thread_settings()
        return self._context() if settings is not None and settings == Placement._new_thread else None

    def check_rows(self, batch_sizes: Sequence[int]) -> None:
        """Raise ValueError if global batches of one of these sizes do not divide over the first dimension."""
        for name, sharding in leaves_with_names(self._to):
            for rows in batch_sizes:
                parts, axes = _partitions(sharding)
                if parts and rows % parts[0]:
                    raise ValueError(
                        f"global batches of {rows} records do not divide over {axes[0]} of `to`"
                        f"{'' if name == 'batch' else f' for {name!r}'}: use a batch_size that is a multiple of {parts[0]}"
                        + ("" if rows == batch_sizes[0] else ", or remainder='drop' or 'pad'")
                    )

    def __call__(self, batch: Batch) -> Placed:
        """Check a host batch and put it on its devices.

        Raises:
          TypeError: a leaf has a dtype that no device can hold.
          ValueError: a leaf does not divide over its sharding; `to` is not a prefix of the batch.
        """
        leaves, treedef = jax.tree_util.tree_flatten(batch)
        key = (treedef, *[(x.shape, x.dtype, type(x)) for x in leaves])
        signature = self._signatures.get(key)
        if signature is None:
            if len(self._signatures) >= _REMEMBERED:
                self._signatures.clear()
            signature = self._signatures[key] = self._checked(batch, treedef)
        change = ""
        if signature is not self._last:
            change = _difference(self._last, signature) if self._last else ""
            self._last = signature
        return Placed(self._place(batch, signature), signature.bytes, change)

    def _place(self, batch: Batch, signature: _Signature) -> Batch:
        seen, signature.seen = signature.seen, True
        if _config("jax_disable_jit"):  # for debugging; a jitted function would then return its host arrays
            batch = self._put(batch)
            return self._transform(batch) if self._transform else batch
        if signature.on_host and not self._several_processes:
            if self._transform:
                return self._transform(batch)
            if self._one_device and seen and signature.bytes < _LARGE:
                return self._identity(batch)
        batch = self._put(batch)
        return self._transform(batch) if self._transform else batch

    def _put(self, batch: Batch) -> Batch:
        if not self._several_processes:
            return jax.device_put(batch, self._to)
        return _map_prefix(jax.make_array_from_process_local_data, self._to, batch)

    def _checked(self, batch: Batch, structure: Any) -> _Signature:
        """Check dtypes and shapes of the first batch with a signature."""
        named = leaves_with_names(batch)
        for name, leaf in named:
            if not is_numeric(leaf.dtype):
                raise TypeError(
                    f"leaf {name!r} is {describe_array(leaf)}, and no device holds {leaf.dtype}: turn it into numbers, or "
                    "leave it out of the batch, in the transform of the Loader or where the batch is made"
                )
        if self._to is not None:
            targets = jax.tree_util.tree_leaves(_map_prefix(lambda sharding, leaf: sharding, self._to, batch))
            for (name, leaf), sharding in zip(named, targets, strict=True):
                _check_divides(name, leaf.shape, sharding)
        return _Signature(
            leaves={name: describe_array(leaf) for name, leaf in named},
            structure=structure,
            bytes=sum(leaf.nbytes for _, leaf in named),
            on_host=all(isinstance(leaf, np.ndarray) for _, leaf in named),
        )


class _Settings(contextlib.ExitStack):
    """The JAX settings under which batches are placed. It may be entered repeatedly."""

    def __init__(self, x64: bool):
        super().__init__()
        self._x64 = x64

    def __enter__(self) -> _Settings:
        self.enter_context(jax.enable_x64(self._x64))
        self.enter_context(jax.transfer_guard_host_to_device("allow"))
        return self


def _same(batch: Batch) -> Batch:  # one function for all feeds, so that JAX compiles it once
    return batch


def _shardings(to: To) -> Any:
    """Replace each device in `to` by a sharding, and a plan by its shardings.

    None becomes `jax.default_device` of the calling thread, if that is set.
    """
    if to is None:
        to = _config("jax_default_device")
        if not isinstance(to, jax.Device):
            return None
    to = getattr(to, "batch_shardings", to)  # of a Plan
    if isinstance(to, str) or not jax.tree_util.tree_leaves(to):
        raise TypeError(
            f"to={to!r} is no place for a batch: give None, a jax.Device, a Sharding, a pytree of Shardings or a Plan"
        )

    def sharding(leaf: Any) -> Sharding:
        if isinstance(leaf, jax.Device):
            return SingleDeviceSharding(leaf)
        if isinstance(leaf, Sharding):
            return leaf
        raise TypeError(f"to={to!r} holds {leaf!r}, which is neither a jax.Device nor a Sharding")

    return jax.tree.map(sharding, to, is_leaf=lambda leaf: leaf is None)


def _config(name: str) -> Any:
    """Return a JAX setting of this thread."""
    return getattr(jax.config, name)


def _in_default_memory(sharding: Sharding) -> bool:
    device: Any = next(iter(sharding.device_set))
    return sharding.memory_kind in (None, device.default_memory().kind)


def _map_prefix(fn: Callable[[Sharding, Any], Any], to: Any, batch: Batch) -> Any:
    """Map `fn(sharding, leaf)` over a batch. `to` is a prefix of the batch."""
    try:
        return jax.tree.map(lambda sharding, part: jax.tree.map(lambda leaf: fn(sharding, leaf), part), to, batch)
    except ValueError as error:
        raise ValueError(
            f"`to` has the structure {jax.tree_util.tree_structure(to)}, which is no prefix of the batch's: "
            f"{jax.tree_util.tree_structure(batch)}"
        ) from error


def _partitions(sharding: Sharding) -> tuple[list[int], list[str]]:
    """Return the number of parts of each leading dimension, and a description of the mesh axes that shard it."""
    if not isinstance(sharding, NamedSharding):
        return [], []
    parts, words = [], []
    for axes in sharding.spec:
        names = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
        parts.append(math.prod(sharding.mesh.shape[name] for name in names))
        words.append("mesh axis " + " × ".join(f"{name!r} (size {sharding.mesh.shape[name]})" for name in names))
    return parts, words


def _check_divides(name: str, shape: tuple[int, ...], sharding: Sharding) -> None:
    """Raise ValueError if a leaf does not divide over its sharding."""
    parts, words = _partitions(sharding)
    # With several processes, `shape` is that of the rows of this process. So the record dimension, which is the first sharded
    # one, has only the parts of this process.
    if parts and not sharding.is_fully_addressable:
        records = next((dimension for dimension, n in enumerate(parts) if n > 1), 0)
        parts[records] = max(1, parts[records] // jax.process_count())
    if len(parts) > len(shape):
        raise ValueError(
            f"leaf {name!r} has {len(shape)} dimensions, too few for {sharding} of `to`: give `to` as a pytree with a "
            "Sharding for each leaf"
        )
    for dimension, (size, n, axes) in enumerate(zip(shape, parts, words, strict=False)):
        if size % n:
            raise ValueError(
                f"leaf {name!r} of shape {shape} does not divide: dimension {dimension} has size {size}, and {axes} needs "
                f"a multiple of {n}" + ("; use such a batch size, or remainder='drop' or 'pad'" if dimension == 0 else "")
            )


def _difference(last: _Signature, now: _Signature) -> str:
    """Describe the difference that makes a jitted function compile again; "" if there is none."""
    names = [name for name in {**last.leaves, **now.leaves} if last.leaves.get(name) != now.leaves.get(name)]
    if not names and last.structure != now.structure:
        return f"the structure was {last.structure} and is {now.structure}"
    return ", ".join(
        f"leaf {name!r} was {last.leaves.get(name, 'absent')} and is {now.leaves.get(name, 'absent')}" for name in names
    )
