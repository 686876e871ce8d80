"""Read the arguments of a call as one tuple, and call a step with such a tuple.

`jax.jit` takes shardings for positional arguments only. So the tuple has the positional arguments, then the keyword arguments.
A keyword argument that the step also takes by position is positional here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from penstock.shard.trace.modules import (
    Shared,
    has_variables,
    put_shared_back,
    take_shared_out,
    written_arguments,
)
from penstock.shard.trace.static_leaves import mark_static, unmark_static


@dataclass(frozen=True)
class CallForm:
    """How a tuple of arguments is passed to a step.

    Attributes:
      keywords: the names of the last arguments, which are passed by keyword.
      shared: the places of Flax NNX variables that the arguments have more than once.
    """

    keywords: tuple[str, ...] = ()
    shared: Shared = ()

    def call(
        self, step: Callable, values: tuple, names: tuple[str, ...], read_only: frozenset[int]
    ) -> tuple[Any, dict[int, Any]]:
        """Call a step, and return its result and the arguments to which it wrote.

        Args:
          step: the step.
          values: its arguments, as `read_call` returns them.
          names: their names, for errors.
          read_only: indices of arguments that are not returned.

        Returns:
          The result, in which what is not an array of an Equinox module is marked as static, and index → argument after the call,
          for each argument that holds Flax NNX objects which the step changed.
        """
        before = tuple(jax.tree_util.tree_flatten(value) if has_variables(value) else None for value in values)
        values = unmark_static(put_shared_back(values, self.shared))
        positional = len(values) - len(self.keywords)
        result = mark_static(step(*values[:positional], **dict(zip(self.keywords, values[positional:], strict=True))))
        if not any(before):
            return result, {}
        after, _ = take_shared_out(mark_static(values))
        return result, {index: after[index] for index in written_arguments(before, after, names) if index not in read_only}


def read_call(step: Callable, args: tuple, kwargs: Mapping[str, Any]) -> tuple[CallForm, tuple]:
    """Return the form of a call, and all its arguments as one tuple.

    It has each Flax NNX variable once, and what is not an array of an Equinox module is marked as static.

    Args:
      step: the step.
      args: its positional arguments.
      kwargs: its keyword arguments.

    Raises:
      TypeError: the step takes no such keyword argument, or takes it by position as well.
    """
    keywords: tuple[str, ...] = ()
    if kwargs:
        parameters = _parameters(step)
        if parameters:
            bound = inspect.Signature(parameters).bind_partial(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        order = {parameter.name: index for index, parameter in enumerate(parameters)}
        keywords = tuple(sorted(kwargs, key=lambda name: (order.get(name, len(order)), name)))
    values, shared = take_shared_out(mark_static((*args, *(kwargs[name] for name in keywords))))
    return CallForm(keywords, shared), values


def argument_names(step: Callable, form: CallForm, count: int) -> tuple[str, ...]:
    """Return the names of the arguments of a call; a positional argument without a name has its number.

    Args:
      step: the step.
      form: the form of the call.
      count: the number of arguments.
    """
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in _parameters(step) if parameter.kind in positional]
    first = count - len(form.keywords)
    return (*(names[index] if index < len(names) else str(index) for index in range(first)), *form.keywords)


def refuse_option_names(step: Callable, args: tuple, kwargs: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Refuse a call of `ps.plan` that gives an argument of the step by the name of an option of `ps.plan`.

    Args:
      step: the step.
      args, kwargs: its arguments.
      options: the options of `ps.plan`.

    Raises:
      TypeError: the step needs an argument that has the name of an option, or such an option holds arrays. Or a keyword argument
        is neither an option nor a parameter of the step.
    """
    parameters = _parameters(step)
    if not parameters:
        return
    try:
        given = inspect.Signature(parameters).bind_partial(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(
            f"the step {error}; keyword arguments of ps.plan are those of the step, or the options {', '.join(options)}"
        ) from None
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in parameters:
        if parameter.name not in options or parameter.name in given or parameter.kind in variadic:
            continue
        needed = parameter.default is parameter.empty
        if needed or any(map(_is_array, jax.tree_util.tree_leaves(options[parameter.name]))):
            raise TypeError(
                f"the step has a parameter {parameter.name!r}, which is also an option of ps.plan, so its argument cannot be "
                "given by that name: give it by position, or plan a function with another name for it"
            )


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) or (isinstance(leaf, np.ndarray) and leaf.dtype != object)


def _parameters(step: Callable) -> list[inspect.Parameter]:
    """Return the parameters of a function; [] if they are unknown."""
    try:
        return list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):
        return []
