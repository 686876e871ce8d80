"""Differences between versions of Keras in what they do with the batches of an epoch. Other modules ask `behaviour()`.

|                              | Keras 3.15                                | Keras 3.16                                      |
|------------------------------|-------------------------------------------|-------------------------------------------------|
| its functions get, on a CPU  | NumPy arrays                              | arrays on the device                            |
| without a distribution       |                                           |                                                 |
| with `steps_per_execution=n` | the step is called n times, and takes a   | one batch is taken: n stacked [n, B, ...] for a |
|                              | batch each time                           | `lax.scan`; a `PartialBatchList` of fewer, or   |
|                              |                                           | of n whose shapes differ                        |
| a model that is not built    | takes a batch from the epoch iterator     | takes a batch from the data adapter             |
| `get_jax_iterator` of data   | has no arguments                          | has the argument `super_batch`, n or None       |
| arrays are shuffled          | by NumPy's global generator               | by the number of the epoch                      |
| running out of data          | always warns                              | warns if there is a `steps_per_epoch`           |

The last two and the third need nothing of us: there, Keras's own code runs on both.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from penstock._versions import KERAS, UnsupportedVersionError, keras_version, numbers, without_traceback


@dataclass(frozen=True)
class Behaviour:
    """The ways of one version of Keras with batches.

    Attributes:
      on_device: its functions get arrays on the device, where there is no distribution and the device is a CPU, too.
      stacks: of the batches of an execution of several steps it takes one stack, and not one after the other.
    """

    on_device: bool
    stacks: bool


_BEHAVIOURS: dict[tuple[int, ...], Behaviour] = {
    (3, 15): Behaviour(on_device=False, stacks=False),
    (3, 16): Behaviour(on_device=True, stacks=True),
}


def require_keras() -> str:
    """Return the version of Keras that an import gives, without importing it.

    Raises:
      UnsupportedVersionError: there is none, or one that penstock does not work with.
    """
    version = keras_version()
    if version is None:
        raise without_traceback(
            UnsupportedVersionError(f"penstock.keras needs {KERAS.works}, and there is no Keras: {KERAS.install}")
        )
    if version not in KERAS:
        raise without_traceback(KERAS.refuse(version))
    return version


@functools.cache
def behaviour() -> Behaviour:
    """Return what the Keras that is imported does.

    Raises:
      UnsupportedVersionError: it is not as releases of its number are, such as an early nightly.
    """
    version = require_keras()
    known = _BEHAVIOURS[numbers(version)[:2]]
    if Behaviour(on_device=not _places_for_distributions_only(), stacks=_partial_batch_list() is not None) != known:
        tested = next(one for one in KERAS.tested if numbers(one)[:2] == numbers(version)[:2])
        raise without_traceback(KERAS.refuse(version, f"whose trainer takes batches in another way than that of {tested}"))
    return known


def partial_batches(batches: Iterable[Any]) -> Any:
    """Return batches that Keras steps through one by one, as it takes them where it stacks others.

    Raises:
      TypeError: this Keras stacks nothing.
    """
    kind = _partial_batch_list()
    if kind is None:
        raise TypeError("this version of Keras takes batches one by one: there is no list of them to make")
    return kind(batches)


def is_partial(item: Any) -> bool:
    """Return whether that is what `partial_batches` makes."""
    kind = _partial_batch_list()
    return kind is not None and isinstance(item, kind)


def super_batches(batches: Iterator[Any], steps: int) -> Iterator[Any]:
    """Return the iterator over executions that Keras itself makes of an iterator over batches."""
    import jax
    from keras.src.trainers.data_adapters.data_adapter_utils import super_batch_iterator

    return super_batch_iterator(batches, steps, stack_fn=jax.numpy.stack)


def _partial_batch_list() -> Any:
    from keras.src.trainers.data_adapters import data_adapter_utils

    return getattr(data_adapter_utils, "PartialBatchList", None)


def _places_for_distributions_only() -> bool:
    """Return whether, on a CPU, batches without a distribution stay on the host: those with one have an iterator of their own."""
    from keras.src.backend.jax import trainer

    return hasattr(_keras_iterator(trainer), "_get_distributed_iterator")


def _keras_iterator(trainer: Any) -> Any:
    """Return Keras's own class, also while ours is in its place."""
    return next(kind for kind in trainer.JAXEpochIterator.__mro__ if kind.__module__ == trainer.__name__)
