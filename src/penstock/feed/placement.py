"""Put a host batch on its devices: check that it fits the target `to`, transfer it, and run the transform there."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from penstock._arguments import brief
from penstock._jax import thread_settings
from penstock.data.collate import MASK
from penstock.data.order.rows import Rows, local_parts, mesh_axes
from penstock.data.tree import Batch, describe_array, is_key, is_numeric, leaves_with_names
from penstock.feed.replicas import ReplicaCheck, replicas

To = Any  # None, a jax.Device, a Sharding, a pytree of these that is a prefix of the batch, or a Plan
Replicated = Literal["refuse", "check"]

Context = contextlib.AbstractContextManager[object]

_NO_CONTEXT = contextlib.nullcontext()

# From this number of bytes on, the copy takes longer than the Python code of a call of `device_put`, which copies on a thread of
# JAX. A jitted function copies its arguments before it returns.
_LARGE = 8 << 20

_REMEMBERED = 256  # signatures, so that batches that never repeat a shape cannot fill the memory


class Placed(NamedTuple):
    """A batch on its devices.

    Attributes:
      batch: a pytree of `jax.Array`s.
      bytes: size of the host batch.
      change: how its shapes or dtypes differ from the batch before; "" if they do not.
    """

    batch: Batch
    bytes: int
    change: str


class BatchPlacement(Protocol):
    """An object that puts host batches on devices. One thread at a time may call it."""

    def __call__(self, batch: Batch) -> Placed:
        """Put a batch on its devices."""

    def context(self) -> Context:
        """Return the context in which a new thread places batches."""

    def consumer_context(self) -> Context | None:
        """Return the context in which the consumer's thread places batches; None if it must not."""

    def check_rows(self, batch_sizes: Sequence[int]) -> None:
        """Raise ValueError if global batches of one of these sizes cannot be placed."""

    def shardings_over_processes(self) -> list[Sharding]:
        """Return the shardings of all leaves if one is over the devices of several processes; [] if none is."""

    def expect(self, rows: Rows | None, name: str) -> ReplicaCheck | None:
        """Note the rows that host batches have, if the shardings are over several processes. To be called before a batch.

        Args:
          rows: the rows of global batches that this process reads; None if the batches bring the rows of this process.
          name: name of the iterable, for errors.

        Returns:
          The comparison with other processes, whose `end` the feed must call; None if there is none.

        Raises:
          ValueError: the batches bring rows that several processes need to bring alike.
        """


@dataclass
class _Signature:
    """The checked properties of batches of one structure with the same shapes and dtypes."""

    leaves: dict[str, str]  # name → "uint8[128,28,28,1]"
    structure: Any
    bytes: int
    on_host: bool  # all leaves are NumPy arrays
    seen: bool = False  # a batch with this signature was placed before


class Placement:
    """A function that puts host batches on the devices `to` and runs `transform` there. One thread at a time may call it.

    There are three ways, the fastest first (18, 79 and 165 µs for two leaves on a CPU):

    - NumPy leaves with a transform, or for one device, become the arguments of a jitted function: the transform or the identity.
      The identity is compiled for a signature when it comes a second time, so shapes that never repeat compile nothing.
    - Other batches go through `jax.device_put`, and then through the jitted transform.
    - If other processes hold some of the devices, each process puts the shards of its own devices there. A Loader has read the
      rows for them (`expect`). Other batches bring the rows of this process, for `jax.make_array_from_process_local_data`.

    In all cases, JAX may read the host arrays after the call has returned. On a CPU it may use their memory as the memory of the
    device. So the producer of a host batch must not write to it again.

    Args:
      to, transform, replicated: see `feed`.
      row_dim: the dimension of the rows in each leaf.

    Raises:
      TypeError: `to` is not a device, a sharding, a pytree of these or a plan.
      ValueError: a transform is given, and `to` has different devices for different leaves.
    """

    _new_thread: Any = None  # JAX's settings on a new thread, as the latest new thread had them

    def __init__(self, to: To, transform: Callable[[Batch], Batch] | None, replicated: Replicated = "refuse", row_dim: int = 0):
        self._given_to, self._to = to, _shardings_of(to)
        self._replicated, self._row_dim = replicated, row_dim
        self._rows: Rows | None = None
        self._replica_check: ReplicaCheck | None = None
        shardings = jax.tree_util.tree_leaves(self._to)
        self._several_processes = not all(s.is_fully_addressable for s in shardings)
        devices = set[Any]().union(*(s.device_set for s in shardings))
        self._one_device = len(devices) <= 1 and all(map(_in_default_memory, shardings))
        if transform and any(sharding.device_set != shardings[0].device_set for sharding in shardings):
            raise ValueError(
                f"to={to!r} puts leaves on different devices, where no one program, such as transform, can take them together: "
                "leave out transform, or give all leaves the same devices"
            )
        self._given_transform = transform
        self._mask = _mask_sharding(to, self._to, row_dim)
        # A plan may move placed batches to the mesh of `jax.set_mesh`, as its `put` does. That holds for one thread: the one that
        # creates the feed, which runs this. Batches are placed by another thread, where no mesh is set.
        self._after_placement = to.after_placement() if hasattr(to, "after_placement") else None
        self._signatures: dict[Hashable, _Signature] = {}
        self._last: _Signature | None = None
        self._x64 = _setting("jax_enable_x64")

    def renewed(self) -> Placement:
        """Return a placement with the same arguments, for another feed."""
        return Placement(self._given_to, self._given_transform, self._replicated, self._row_dim)

    @functools.cached_property
    def _transform(self) -> Callable[[Batch], Batch] | None:
        return self._given_transform and self._jit(self._given_transform)

    @functools.cached_property
    def _identity(self) -> Callable[[Batch], Batch]:
        # JAX first transfers the host arrays to buffers. As these are donated, they become the result without another copy.
        if self._to is None:
            return jax.jit(_same, donate_argnums=0)
        return jax.jit(_same, in_shardings=(self._to,), out_shardings=self._to, donate_argnums=0)

    def _jit(self, fn: Callable[[Batch], Batch]) -> Callable[[Batch], Batch]:
        if self._to is None or self._several_processes:
            return jax.jit(fn)
        return jax.jit(fn, in_shardings=(self._to,))

    def context(self) -> Context:
        """Return the context in which a new thread places batches, and note the JAX settings of that thread."""
        Placement._new_thread = thread_settings()
        return self._context()

    def _context(self) -> Context:
        # The user asked for this transfer, so a transfer guard against implicit transfers does not apply.
        same_x64 = _setting("jax_enable_x64") == self._x64
        if same_x64 and _setting("jax_transfer_guard_host_to_device") in (None, "allow"):
            return _NO_CONTEXT  # because entering `_settings` costs as much as placing a small batch
        return _settings(self._x64)

    def consumer_context(self) -> Context | None:
        """Return the context in which the consumer's thread places batches.

        It is None if the JAX settings of the two threads differ, because a batch placed there could then be different.
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

    def shardings_over_processes(self) -> list[Sharding]:
        """Return the shardings of all leaves if one is over the devices of several processes; [] if none is."""
        return jax.tree_util.tree_leaves(self._to) if self._several_processes else []

    def expect(self, rows: Rows | None, name: str) -> ReplicaCheck | None:
        """Note the rows that host batches have. See `BatchPlacement`."""
        self._rows = rows
        if rows is not None or not self._several_processes:
            return None
        shardings = self.shardings_over_processes()
        group = sorted({process for sharding in shardings for process in replicas(sharding)})
        if group and self._replicated == "refuse":
            raise ValueError(
                f"`to` replicates rows over processes {group}, and {name} brings rows of its own in each of them: they would "
                "claim to be the same. Feed a ps.Loader, which reads the rows that each process needs; or shard the batch over "
                "all processes; or, if each process brings the same rows, feed(..., replicated='check') compares them"
            )
        self._replica_check = ReplicaCheck(shardings) if group else None
        return self._replica_check

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
        placed = self._place(batch, signature)
        if self._after_placement is not None:
            placed = self._after_placement(placed)
        return Placed(placed, signature.bytes, change)

    def _place(self, batch: Batch, signature: _Signature) -> Batch:
        seen, signature.seen = signature.seen, True
        # With "jax_disable_jit", for debugging, a jitted function would return its host arrays.
        if signature.on_host and not self._several_processes and not _setting("jax_disable_jit"):
            if self._transform:
                return self._transform(batch)
            if self._one_device and seen and signature.bytes < _LARGE:
                return self._identity(batch)
        batch = self._put(batch)
        return self._transform(batch) if self._transform else batch

    def _put(self, batch: Batch) -> Batch:
        if not self._several_processes:
            return jax.device_put(batch, self._to)
        if self._replica_check:
            self._replica_check([(name, sharding, leaf) for (name, leaf), sharding in self._with_shardings(batch)])
        return _map_prefix(self._global_array, self._to, batch)

    def _global_array(self, sharding: Sharding, leaf: Any) -> jax.Array:
        """Put the shards of this process on its devices, as a part of a global array."""
        if is_key(leaf):  # JAX makes no global array of keys, but of their integers
            integers = self._global_array(sharding, np.asarray(jax.random.key_data(leaf)))
            return jax.random.wrap_key_data(integers, impl=jax.random.key_impl(leaf))
        if self._rows is None:
            return jax.make_array_from_process_local_data(sharding, leaf)
        if sharding.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        dim, own, shape = self._row_dim, self._rows, self._global_shape(leaf.shape)

        def shard(part: Any) -> np.ndarray:
            return leaf[(*part[:dim], own.local(shape[dim], part[dim]), *part[dim + 1 :])]

        return jax.make_array_from_callback(shape, sharding, shard)

    def _global_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the global leaf, of which this process has a part of this shape."""
        assert self._rows is not None
        dim = self._row_dim
        rows = self._rows.global_rows(shape[dim])
        if rows is None:
            raise ValueError(f"a leaf of shape {shape} has another number of rows than this process reads of any batch")
        return (*shape[:dim], rows, *shape[dim + 1 :])

    def _with_shardings(self, batch: Batch) -> Iterator[tuple[tuple[str, Any], Sharding]]:
        """Yield the name and the value of each leaf, with its sharding."""
        shardings = jax.tree_util.tree_leaves(_map_prefix(lambda sharding, leaf: sharding, self._to, batch))
        return zip(leaves_with_names(batch), shardings, strict=True)

    def _checked(self, batch: Batch, structure: Any) -> _Signature:
        """Check dtypes and shapes of the first batch with a signature."""
        if self._mask is not None and isinstance(batch, dict) and MASK in batch:
            self._to, self._mask = {**self._to, MASK: self._mask}, None
        named = leaves_with_names(batch)
        for name, leaf in named:
            if not is_numeric(leaf.dtype):
                remedy = "cast it to float64 or complex128" if leaf.dtype.kind in "fc" else "turn it into numbers"
                raise TypeError(
                    f"leaf {name!r} is {describe_array(leaf)}, and no device holds {leaf.dtype}: {remedy}, or "
                    "leave it out of the batch, in the transform of the Loader or where the batch is made"
                )
        if self._to is not None:
            for (name, leaf), sharding in self._with_shardings(batch):
                shape = leaf.shape if self._rows is None else self._global_shape(leaf.shape)
                _check_divides(name, shape, sharding, local=self._rows is None and not sharding.is_fully_addressable)
        return _Signature(
            leaves={name: describe_array(leaf) for name, leaf in named},
            structure=structure,
            bytes=sum(leaf.nbytes for _, leaf in named),
            on_host=all(isinstance(leaf, np.ndarray) for _, leaf in named),
        )


@contextlib.contextmanager
def _settings(x64: bool) -> Iterator[None]:
    """Apply the JAX settings under which batches are placed."""
    with jax.enable_x64(x64), jax.transfer_guard_host_to_device("allow"):
        yield


def _same(batch: Batch) -> Batch:  # one function for all feeds, so that JAX compiles it once
    return batch


def _difference(last: _Signature, now: _Signature) -> str:
    """Describe the difference that makes a jitted function compile again; "" if there is none."""
    names = [name for name in {**last.leaves, **now.leaves} if last.leaves.get(name) != now.leaves.get(name)]
    if not names and last.structure != now.structure:
        return f"the structure was {last.structure} and is {now.structure}"
    return ", ".join(
        f"leaf {name!r} was {last.leaves.get(name, 'absent')} and is {now.leaves.get(name, 'absent')}" for name in names
    )


# The target `to`.


def _shardings_of(to: To) -> Any:
    """Replace each device in `to` by a sharding, and a plan by its shardings; None by `jax.default_device`, if that is set.

    Raise TypeError for any other `to`, and ValueError if a sharding has no device of this process.
    """
    if to is None:
        to = _setting("jax_default_device")
        if not isinstance(to, jax.Device):
            return None
    to = getattr(to, "batch_shardings", to)  # of a Plan
    if isinstance(to, str) or not jax.tree_util.tree_leaves(to):
        raise TypeError(
            f"to={brief(to)} is not a place for a batch: give None, a jax.Device, a Sharding, a pytree of Shardings or a Plan"
        )

    def sharding(leaf: Any) -> Sharding:
        if isinstance(leaf, jax.Device):
            leaf = SingleDeviceSharding(leaf)
        if not isinstance(leaf, Sharding):
            raise TypeError(f"to={brief(to)} holds {brief(leaf)}, which is neither a jax.Device nor a Sharding")
        if not leaf.addressable_devices:
            raise ValueError(
                f"to={brief(to)} has no device of process {jax.process_index()}, so this process cannot put a batch there: give "
                "a sharding over the devices of all processes (jax.devices()); or, for a batch of its own in each process, over "
                "jax.local_devices(); or feed in the processes that have the devices only"
            )
        return leaf

    return jax.tree.map(sharding, to, is_leaf=lambda leaf: leaf is None)


def _mask_sharding(to: To, shardings: Any, row_dim: int) -> NamedSharding | None:
    """Return the sharding of the mask that a Loader with remainder="pad" adds, for a plan whose step does not take it.

    It is the sharding of the rows of the leaf that has them in most parts. It is None if `to` is not a plan of a dict batch, or
    if its `shardings` have a mask.
    """
    if not hasattr(to, "batch_shardings") or not isinstance(shardings, dict) or MASK in shardings or not shardings:
        return None
    leaves = jax.tree_util.tree_leaves(shardings)
    finest = max(leaves, key=lambda sharding: math.prod(_partitions(sharding)[0][: row_dim + 1]))
    return NamedSharding(finest.mesh, PartitionSpec(*finest.spec[: row_dim + 1]))


def _setting(name: str) -> Any:
    """Return a JAX setting of this thread."""
    return getattr(jax.config, name)


def _in_default_memory(sharding: Sharding) -> bool:
    """Tell whether a sharding is for the default memory of its devices."""
    device: Any = next(iter(sharding.device_set))
    return sharding.memory_kind in (None, device.default_memory().kind)


def _map_prefix(fn: Callable[[Sharding, Any], Any], to: Any, batch: Batch) -> Any:
    """Map `fn(sharding, leaf)` over a batch. `to` is a prefix of the batch."""
    try:
        return jax.tree.map(lambda sharding, part: jax.tree.map(lambda leaf: fn(sharding, leaf), part), to, batch)
    except ValueError:
        raise ValueError(
            f"`to` has the structure {brief(jax.tree_util.tree_structure(to))}, which is not a prefix of the batch's: "
            f"{brief(jax.tree_util.tree_structure(batch))}{_first_difference(to, batch)}"
        ) from None


def _first_difference(to: Any, batch: Batch) -> str:
    """Return a leaf that only one of two trees has, as the end of a sentence; "" if they have leaves of the same names."""
    in_to, in_batch = ([name for name, _ in leaves_with_names(tree)] for tree in (to, batch))
    more = [name for name in in_batch if not any(f"{name}/".startswith(f"{place}/") for place in in_to)]
    less = [name for name in in_to if not any(f"{leaf}/".startswith(f"{name}/") for leaf in in_batch)]
    if more:
        return f"; the batch has {more[0]!r}, which `to` lacks"
    return f"; `to` has {less[0]!r}, which the batch lacks" if less else ""


def _partitions(sharding: Sharding) -> tuple[list[int], list[str]]:
    """Return the number of parts of each leading dimension, and a description of the mesh axes that shard it."""
    if not isinstance(sharding, NamedSharding):
        return [], []
    parts, words = [], []
    for names in map(mesh_axes, sharding.spec):
        parts.append(math.prod(sharding.mesh.shape[name] for name in names))
        words.append("mesh axis " + " × ".join(f"{name!r} (size {sharding.mesh.shape[name]})" for name in names))
    return parts, words


def _check_divides(name: str, shape: tuple[int, ...], sharding: Sharding, local: bool) -> None:
    """Raise ValueError if a leaf does not divide over its sharding. A `local` shape is the one of this process's part."""
    parts, words = _partitions(sharding)
    if local:
        parts = [local_parts(sharding, dimension) for dimension in range(len(parts))]
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
