"""Build a Keras model from shapes: a function that makes a model goes in, the model without values comes out.

The function is run as JAX traces one, so that initializers and all other operations allocate nothing. Afterwards, the counters of
Keras's names and the generators of seeds are as they were, so that the same function makes the same model again, with values.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

from penstock.keras._trace_errors import NEED_VALUES

_NAMES = "object_name_uids"
"""The attribute of Keras's global state that counts the names of each kind of layer."""


def build_from_shapes(build: Callable[[], Any], sample: Any) -> Any:
    """Return the model that a function makes, built for a batch, with its optimizer and metrics. Its variables have no values.

    Args:
      build: returns the model.
      sample: shapes and dtypes of a batch.

    Raises:
      TypeError: the result is not a model, or the function needs values that it does not have here.
    """
    import keras

    made: list[Any] = []

    def trace() -> None:
        model = build()
        if not isinstance(model, keras.Model):
            raise TypeError(f"build() returned {type(model).__name__}, and a keras.Model is needed")
        complete(model, sample)
        made.append(model)

    with _unchanged_names_and_seeds():
        try:
            jax.eval_shape(trace)
        except NEED_VALUES as error:
            raise TypeError(
                "build() computes with values of variables or arrays, and it is run from shapes, where there are none. Leave "
                "out what needs values, such as loading weights or adapt(), or make the model in scope(), for fit to plan it"
            ) from error
    return made[0]


def complete(model: Any, sample: Any) -> None:
    """Build what is not built of a model, its loss, metrics and optimizer, as `fit` does at its first batch.

    Args:
      model: the model.
      sample: shapes and dtypes of a batch.
    """
    from keras.src import tree
    from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight

    if model.compiled:
        model._symbolic_build(data_batch=sample)
    elif not model.built:
        import keras

        x, _, _ = unpack_x_y_sample_weight(sample)
        inputs = tree.map_structure(lambda leaf: keras.KerasTensor(leaf.shape, keras.backend.standardize_dtype(leaf.dtype)), x)
        keras.src.backend.compute_output_spec(model, inputs)


@contextlib.contextmanager
def _unchanged_names_and_seeds() -> Iterator[None]:
    """Restore what making a model changes outside of it: counters of names, and generators of seeds."""
    names = copy.deepcopy(global_state.get_global_attribute(_NAMES))
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    seed = None if generator is None else generator.state._value
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        global_state.set_global_attribute(_NAMES, names)
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
        if generator is not None:
            generator.state._value = seed
        random.setstate(python)
        np.random.set_state(numpy)
