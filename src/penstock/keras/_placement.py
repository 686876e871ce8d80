"""Host batch → device batch, where Keras would have it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from keras.src import tree
from keras.src.backend.common import global_state
from keras.src.distribution import distribution_lib
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from keras.src.utils.rng_utils import GLOBAL_RANDOM_SEED

from penstock._feed.placement import Context, Placed, Placement
from penstock.data.tree import Batch, leaves_with_names
from penstock.keras._aligned import aligned
from penstock.keras._execution import Execution, assemble
from penstock.keras._versions import behaviour

# What Keras keeps for each thread, and data that is made with layers of Keras or `keras.random` depends on.
_SHARED = (distribution_lib.GLOBAL_ATTRIBUTE_NAME, "dtype_policy", GLOBAL_RANDOM_SEED, GLOBAL_SEED_GENERATOR)

_REMEMBERED = 256  # signatures of batches


class _Layout(NamedTuple):
    names: tuple[str, ...]
    placement: Placement


class KerasPlacement:
    """Puts batches where Keras's own iterator would: on the default device, or where the distribution says.

    Layouts are worked out once for each structure and set of shapes. On a CPU without a distribution some versions of Keras
    hand their functions the host arrays, and so it does then; the copy that JAX would make of them at the call is made before:
    see `aligned`. An `Execution` becomes what Keras takes for all its steps, a `Ready`.

    Made on the thread that calls `fit`, whose settings of Keras it takes along: the distribution, the dtype policy, and the seed
    generator of `keras.random`.

    Args:
      steps: batches in an `Execution` that is whole.
    """

    def __init__(self, steps: int = 1) -> None:
        self._steps = steps
        self._distribution = distribution_lib.distribution()
        self._default = Placement(None, None)
        self._layouts: dict[Hashable, _Layout] = {}
        self._on_host = jax.default_backend() == "cpu" and not behaviour().on_device
        self._state: dict[str, Any] = {}

    def take_settings(self) -> None:
        """Take along the settings of this thread as they are now; before a new thread starts."""
        self._state = {name: global_state.get_global_attribute(name) for name in _SHARED}

    def leave_settings(self) -> None:
        """Give this thread the seed generator that the other made; after it ended."""
        made = self._state.get(GLOBAL_SEED_GENERATOR)
        if made is not None and global_state.get_global_attribute(GLOBAL_SEED_GENERATOR) is None:
            global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, made)

    def check_rows(self, batch_sizes: Sequence[int]) -> None:
        """Nothing: batches are checked one by one, as their shapes decide on their layouts."""

    @contextlib.contextmanager
    def context(self) -> Iterator[object]:
        """For a new thread."""
        for name, value in self._state.items():
            global_state.set_global_attribute(name, value)
        with self._default.context():
            try:
                yield None
            finally:
                made = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
                if made is not None:  # as by the thread that makes batches, and none that only places them
                    self._state[GLOBAL_SEED_GENERATOR] = made

    def consumer_context(self) -> Context | None:
        """For the consumer's thread; None if it may not place."""
        return self._default.consumer_context()

    def __call__(self, batch: Batch | Execution) -> Placed:
        if isinstance(batch, Execution):
            return self._execution(batch)
        return self._batch(batch, stacked=False)

    def _execution(self, execution: Execution) -> Placed:
        nbytes = 0

        def place(batch: Batch, stacked: bool) -> Batch:
            nonlocal nbytes
            placed = self._batch(batch, stacked)
            nbytes += placed.bytes
            return placed.batch

        ready = assemble(execution, self._steps, place)
        return Placed(ready, nbytes, "")

    def _batch(self, batch: Batch, stacked: bool) -> Placed:
        if self._on_host and self._distribution is None:
            batch = aligned(batch)
            return Placed(batch, sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree_util.tree_leaves(batch)), "")
        distribution = self._distribution
        placed = self._default(batch) if distribution is None else self._distribute(batch, distribution, stacked)
        # JAX sorts the keys of dicts, by whose order a model that runs eagerly may go.
        ordered = tree.map_structure(lambda _, leaf: leaf, batch, placed.batch, none_is_leaf=False)
        return Placed(ordered, placed.bytes, "")  # no change: a shorter last batch is a matter of course for Keras

    def _distribute(self, batch: Batch, distribution: Any, stacked: bool) -> Placed:
        leaves, treedef = jax.tree_util.tree_flatten(batch)
        key = (stacked, treedef, *[leaf.shape for leaf in leaves])
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _REMEMBERED:
                self._layouts.clear()
            layout = self._layouts[key] = _lay_out(batch, _stacked_layout if stacked else _layout, distribution)
        placed = layout.placement(dict(zip(layout.names, leaves, strict=True)))
        leaves = [placed.batch[name] for name in layout.names]
        return Placed(jax.tree_util.tree_unflatten(treedef, leaves), placed.bytes, "")


def _lay_out(batch: Batch, layout: Callable[[Any, tuple[int, ...]], Any], distribution: Any) -> _Layout:
    """By name, as leaves may be None, which is no place."""
    named = leaves_with_names(batch)
    shardings = {name: layout(distribution, leaf.shape).backend_layout for name, leaf in named}
    return _Layout(tuple(shardings), Placement(shardings, None))


def _layout(distribution: Any, shape: tuple[int, ...]) -> Any:
    return distribution.get_data_layout(shape)


def _stacked_layout(distribution: Any, shape: tuple[int, ...]) -> Any:
    """Return the layout of [steps, B, ...], where every device has its part of all the steps."""
    each = distribution.get_data_layout(shape[1:])
    return distribution_lib.TensorLayout((None, *each.axes), each.device_mesh)
