"""Host batch → device batch, where Keras would have it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from keras.src.backend.common import global_state
from keras.src.distribution import distribution_lib
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from keras.src.utils.rng_utils import GLOBAL_RANDOM_SEED

from penstock.data.tree import Batch, leaves_with_names
from penstock.feed.place import Context, Placed, Placement
from penstock.keras._aligned import aligned

# What Keras keeps for each thread, and data that is made with layers of Keras or `keras.random` depends on.
_SHARED = (distribution_lib.GLOBAL_ATTRIBUTE_NAME, "dtype_policy", GLOBAL_RANDOM_SEED, GLOBAL_SEED_GENERATOR)

_REMEMBERED = 256  # signatures of batches


class _Layout(NamedTuple):
    names: tuple[str, ...]
    placement: Placement


class KerasPlacement:
    """Puts batches where Keras's own iterator would: on the default device, or where the distribution says.

    Layouts are worked out once for each structure and set of shapes. On a CPU without a distribution Keras hands its functions
    the host arrays, and so it does here; the copy that JAX would make of them at the call is made before: see `aligned`.

    Made on the thread that calls `fit`, whose settings of Keras it takes along: the distribution, the dtype policy, and the seed
    generator of `keras.random`.
    """

    def __init__(self) -> None:
        self._distribution = distribution_lib.distribution()
        self._default = Placement(None, None)
        self._layouts: dict[Hashable, _Layout] = {}
        self._on_host = jax.default_backend() == "cpu"
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

    def __call__(self, batch: Batch) -> Placed:
        if self._distribution is not None:
            return self._distribute(batch, self._distribution)
        if self._on_host:
            batch = aligned(batch)
            return Placed(batch, sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree_util.tree_leaves(batch)), "")
        return self._default(batch)._replace(change="")  # a shorter last batch is a matter of course for Keras

    def _distribute(self, batch: Batch, distribution: Any) -> Placed:
        leaves, treedef = jax.tree_util.tree_flatten(batch)
        key = (treedef, *[leaf.shape for leaf in leaves])
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _REMEMBERED:
                self._layouts.clear()
            layout = self._layouts[key] = _lay_out(batch, distribution.get_data_layout)
        placed = layout.placement(dict(zip(layout.names, leaves, strict=True)))
        leaves = [placed.batch[name] for name in layout.names]
        return Placed(jax.tree_util.tree_unflatten(treedef, leaves), placed.bytes, "")


def _lay_out(batch: Batch, get_layout: Callable[[tuple[int, ...]], Any]) -> _Layout:
    """By name, as leaves may be None, which is no place."""
    named = leaves_with_names(batch)
    shardings = {name: get_layout(leaf.shape).backend_layout for name, leaf in named}
    return _Layout(tuple(shardings), Placement(shardings, None))
