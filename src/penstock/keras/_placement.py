"""Put batches on the devices where Keras would put them.

A host batch, or an `Execution` of several batches, goes in; the item that Keras takes comes out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Sharding
from keras.src import tree
from keras.src.backend.common import global_state
from keras.src.distribution import distribution_lib
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from keras.src.utils.rng_utils import GLOBAL_RANDOM_SEED

from penstock.data.order.rows import Rows
from penstock.data.tree import Batch, leaves_with_names
from penstock.feed.placement import Context, Placed, Placement
from penstock.keras._aligned import aligned
from penstock.keras._execution import Execution, assemble
from penstock.keras.versions import behaviour

# Settings that Keras keeps for each thread. Data that is made with layers of Keras or with `keras.random` depends on them.
_SHARED = (distribution_lib.GLOBAL_ATTRIBUTE_NAME, "dtype_policy", GLOBAL_RANDOM_SEED, GLOBAL_SEED_GENERATOR)

_REMEMBERED = 256  # signatures of batches


class _Layout(NamedTuple):
    """The placement of batches with one structure and one set of shapes.

    Attributes:
      names: names of the leaves.
      placement: places a dict of leaves by name.
    """

    names: tuple[str, ...]
    placement: Placement


class KerasPlacement:
    """A placement of batches where Keras's own iterator would put them: on the default device, or as the distribution says.

    The layout is computed once for each structure and set of shapes. On a CPU without a distribution, some versions of Keras pass
    host arrays to their functions. For these the arrays stay on the host, and only the copy that JAX would make in the call is
    made before it: see `aligned`. An `Execution` becomes a `KerasItem` for all its steps.

    It is made on the thread that calls `fit`, and takes Keras's settings of this thread to the thread that reads: the
    distribution, the dtype policy, and the seed generator of `keras.random`.

    Args:
      steps: number of batches in a complete `Execution`.
    """

    def __init__(self, steps: int = 1) -> None:
        self._steps = steps
        self._distribution = distribution_lib.distribution()
        self._default = Placement(None, None)
        self._layouts: dict[Hashable, _Layout] = {}
        self._rows: Rows | None = None
        self._on_host = jax.default_backend() == "cpu" and not behaviour().on_device
        self._state: dict[str, Any] = {}

    def take_settings(self) -> None:
        """Note the Keras settings of this thread. To be called before a new thread starts."""
        self._state = {name: global_state.get_global_attribute(name) for name in _SHARED}

    def leave_settings(self) -> None:
        """Give this thread the seed generator that the other thread made. To be called after that thread has ended."""
        generator = self._state.get(GLOBAL_SEED_GENERATOR)
        if generator is not None and global_state.get_global_attribute(GLOBAL_SEED_GENERATOR) is None:
            global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)

    def check_rows(self, batch_sizes: Sequence[int]) -> None:
        """Check nothing: the layout depends on the shapes, so each batch is checked by itself."""

    def shardings_over_processes(self) -> list[Sharding]:
        """Return the sharding of the rows if it is over the devices of several processes; [] if not."""
        if self._distribution is None:
            return []
        sharding = _layout(self._distribution, (1,)).backend_layout
        return [] if sharding.is_fully_addressable else [sharding]

    def expect(self, rows: Rows | None, name: str) -> None:
        """Note the rows that host batches have: those that a Loader read, or those that each process gives Keras."""
        self._rows = rows

    @contextlib.contextmanager
    def context(self) -> Iterator[object]:
        """Enter the JAX and Keras settings on a new thread."""
        for name, value in self._state.items():
            global_state.set_global_attribute(name, value)
        with self._default.context():
            try:
                yield None
            finally:
                generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
                if generator is not None:  # a thread that makes batches may have one, a thread that only places them has none
                    self._state[GLOBAL_SEED_GENERATOR] = generator

    def consumer_context(self) -> Context | None:
        """Return the context in which the consumer's thread places batches; None if it must not."""
        return self._default.consumer_context()

    def __call__(self, batch: Batch | Execution) -> Placed:
        """Put a batch or an execution on its devices."""
        if isinstance(batch, Execution):
            return self._place_execution(batch)
        return self._place_batch(batch, stacked=False)

    def _place_execution(self, execution: Execution) -> Placed:
        nbytes = 0

        def place(batch: Batch, stacked: bool) -> Batch:
            nonlocal nbytes
            placed = self._place_batch(batch, stacked)
            nbytes += placed.bytes
            return placed.batch

        item = assemble(execution, self._steps, place)
        return Placed(item, nbytes, "")

    def _place_batch(self, batch: Batch, stacked: bool) -> Placed:
        if self._on_host and self._distribution is None:
            batch = aligned(batch)
            return Placed(batch, sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree_util.tree_leaves(batch)), "")
        distribution = self._distribution
        placed = self._default(batch) if distribution is None else self._distribute(batch, distribution, stacked)
        # JAX sorts the keys of dicts, but a model that runs eagerly may depend on their order.
        ordered = tree.map_structure(lambda _, leaf: leaf, batch, placed.batch, none_is_leaf=False)
        return Placed(ordered, placed.bytes, "")  # no `change`: a shorter last batch is normal for Keras

    def _distribute(self, batch: Batch, distribution: Any, stacked: bool) -> Placed:
        leaves, treedef = jax.tree_util.tree_flatten(batch)
        key = (stacked, treedef, *[leaf.shape for leaf in leaves])
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _REMEMBERED:
                self._layouts.clear()
            layout = self._layouts[key] = _make_layout(batch, stacked, distribution, self._rows)
        placed = layout.placement(dict(zip(layout.names, leaves, strict=True)))
        leaves = [placed.batch[name] for name in layout.names]
        return Placed(jax.tree_util.tree_unflatten(treedef, leaves), placed.bytes, "")


def _make_layout(batch: Batch, stacked: bool, distribution: Any, rows: Rows | None) -> _Layout:
    """Return the layout of a batch. Leaves go by name, because a pytree of shardings cannot have None for a leaf that is None."""
    named, layout = leaves_with_names(batch), _stacked_layout if stacked else _layout
    shardings = {name: layout(distribution, leaf.shape).backend_layout for name, leaf in named}
    placement = Placement(shardings, None, row_dim=int(stacked))
    if rows is not None:
        placement.expect(rows, "the Loader")
    return _Layout(tuple(shardings), placement)


def _layout(distribution: Any, shape: tuple[int, ...]) -> Any:
    return distribution.get_data_layout(shape)


def _stacked_layout(distribution: Any, shape: tuple[int, ...]) -> Any:
    """Return the layout of [steps, B, ...], in which the dimension of steps is not sharded."""
    layout = distribution.get_data_layout(shape[1:])
    return distribution_lib.TensorLayout((None, *layout.axes), layout.device_mesh)
