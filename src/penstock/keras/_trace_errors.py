"""Explain errors that a model raises while its step is traced to be planned: what a layer does that JAX cannot trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

NEED_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
)


@contextlib.contextmanager
def explained(step: Any) -> Iterator[None]:
    """Add to an error from tracing a step what it means for its user.

    Args:
      step: the `ModelStep`.

    Raises:
      TypeError: instead of an error of JAX about a value that a layer keeps or needs.
    """
    name, function = step.model.name, step.function
    try:
        yield
    except Exception as error:
        found = list(_causes(error))
        if any(isinstance(each, jax.errors.UnexpectedTracerError) for each in found):
            raise TypeError(
                f"a layer of {name!r} keeps a tensor from one call and uses it in another, which JAX cannot trace: return the "
                "tensor, or keep it in a variable made with self.add_weight(..., trainable=False) and assign it"
            ) from error
        if any(isinstance(each, NEED_VALUES) for each in found):
            raise TypeError(
                f"a layer of {name!r} needs the values of a tensor in Python, with float(), if, or NumPy, which JAX cannot "
                "trace: use keras.ops instead (keras.ops.cond for an if)"
            ) from error
        error.add_note(
            f"This happened while the function {function!r} of the model {name!r} was traced or compiled. If the model was "
            "changed after it was compiled (layers added, LoRA enabled, other layers trainable), compile it again."
        )
        raise


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that it comes from. Keras fails to add its own words to some errors of JAX, and raises another."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
