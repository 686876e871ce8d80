"""The differences between the supported versions of Keras in how they treat the batches of an epoch.

`behaviour()` returns those that matter to the other modules:

|                              | Keras 3.15                                | Keras 3.16                                      |
|------------------------------|-------------------------------------------|-------------------------------------------------|
| functions get, on a CPU      | NumPy arrays                              | arrays on the device                            |
| without a distribution       |                                           |                                                 |
| with `steps_per_execution=n` | the step is called n times, and takes a   | one item is taken: n batches stacked            |
|                              | batch each time                           | [n, B, ...] for a `lax.scan`; a                 |
|                              |                                           | `PartialBatchList` of fewer batches, or of n    |
|                              |                                           | batches with different shapes                   |
| a model that is not built    | takes a batch from the epoch iterator,    | takes a batch from the data adapter,            |
|                              | in `_symbolic_build`                      | in `_maybe_symbolic_build`                      |
| `get_jax_iterator` of data   | has no arguments                          | has the argument `super_batch`, n or None       |
| arrays are shuffled          | by NumPy's global generator               | by the number of the epoch                      |
| running out of data          | always warns                              | warns if there is a `steps_per_epoch`           |

The last two rows need no code of ours, because Keras's own code runs there in both versions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from penstock._versions import KERAS, keras_version, numbers, without_traceback
from penstock.errors import UnsupportedVersionError


@dataclass(frozen=True)
class Behaviour:
    """How one version of Keras treats batches.

    Attributes:
      on_device: whether its functions get arrays on the device also on a CPU without a distribution.
      stacks: whether it takes the batches of an execution of several steps as one stack, rather than one after the other.
    """

    on_device: bool
    stacks: bool


_BEHAVIOURS: dict[tuple[int, ...], Behaviour] = {
    (3, 15): Behaviour(on_device=False, stacks=False),
    (3, 16): Behaviour(on_device=True, stacks=True),
}


def require_keras() -> str:
    """Return the version of Keras that would be imported, without importing it.

    Raises:
      UnsupportedVersionError: there is no Keras, or penstock does not work with its version.
    """
    version = keras_version()
    if version is None:
        raise without_traceback(
            UnsupportedVersionError(f"penstock.keras needs {KERAS.works}, and there is no Keras: {KERAS.install}")
        )
    if version not in KERAS:
        raise without_traceback(KERAS.refuse(version))
    return version


def require_jax(what: str, otherwise: str) -> None:
    """Check that Keras can be used, and runs on JAX. Keras is imported.

    Args:
      what: the part of penstock that needs it, in the plural.
      otherwise: advice for another backend.

    Raises:
      UnsupportedVersionError: there is no Keras, or its version is unknown. Such a Keras is not imported, as its import may fail.
      RuntimeError: Keras runs on another backend.
    """
    require_keras()
    import keras

    if (backend := keras.backend.backend()) != "jax":
        raise RuntimeError(
            f"Keras runs on the backend {backend!r}, which has a training loop of its own; {what} are for JAX: set "
            f"KERAS_BACKEND=jax before Keras is imported, or {otherwise}"
        )
    behaviour()  # refuses a build that does not behave as its version number says, before anything is replaced


@functools.cache
def behaviour() -> Behaviour:
    """Return how the imported Keras treats batches.

    Raises:
      UnsupportedVersionError: it does not behave as releases of its version do. An early nightly is such a build.
    """
    version = require_keras()
    known = _BEHAVIOURS[numbers(version)[:2]]
    # Versions with an iterator of its own for batches with a distribution leave other batches on the host of a CPU.
    on_device = not hasattr(keras_iterator(), "_get_distributed_iterator")
    if Behaviour(on_device, stacks=_partial_batch_list() is not None) != known:
        tested = next(one for one in KERAS.tested if numbers(one)[:2] == numbers(version)[:2])
        raise without_traceback(KERAS.refuse(version, f"whose trainer takes batches in another way than {tested}"))
    return known


def build_method() -> tuple[type, str]:
    """Return the method with which `fit` and `evaluate` build a model from an epoch iterator: its class, and its name there."""
    import keras

    return next(
        (kind, name)
        for name in ("_maybe_symbolic_build", "_symbolic_build")
        for kind in keras.Model.__mro__
        if name in vars(kind)
    )


def partial_batches(batches: Iterable[Any]) -> Any:
    """Return the list type of Keras for batches that are not stacked and that it steps through one by one.

    Raises:
      TypeError: this version of Keras does not stack batches.
    """
    kind = _partial_batch_list()
    if kind is None:
        raise TypeError("this version of Keras takes batches one by one: there is no list of them to make")
    return kind(batches)


def is_partial(item: Any) -> bool:
    """Return whether an item is a result of `partial_batches`."""
    kind = _partial_batch_list()
    return kind is not None and isinstance(item, kind)


def super_batches(batches: Iterator[Any], steps: int) -> Iterator[Any]:
    """Return the iterator over executions of `steps` batches that Keras makes of an iterator over batches."""
    import jax
    from keras.src.trainers.data_adapters.data_adapter_utils import super_batch_iterator

    return super_batch_iterator(batches, steps, stack_fn=jax.numpy.stack)


def keras_iterator() -> Any:
    """Return Keras's own class of the epoch iterator, also while ours replaces it."""
    from keras.src.backend.jax import trainer

    return next(kind for kind in trainer.JAXEpochIterator.__mro__ if kind.__module__ == trainer.__name__)


def _partial_batch_list() -> Any:
    from keras.src.trainers.data_adapters import data_adapter_utils

    return getattr(data_adapter_utils, "PartialBatchList", None)
