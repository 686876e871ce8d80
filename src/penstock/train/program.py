"""The program of a training step: a user's step goes in; a jitted function that also adds up metrics on the devices comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from penstock.data.tree import Batch, describe
from penstock.train.leaves import describe_leaves, named_leaves
from penstock.train.metrics import Totals, add, are_finite, check_metrics

Nonfinite = Literal["stop", "skip", "ignore"]


class StepError(TypeError):
    """The error raised before training if a step does not return (state, metrics), with a state like the one it was given."""


def check_step(step: Callable, state: Any, batch: Batch) -> tuple[Any, dict[str, Any]]:
    """Trace a step with abstract arguments.

    Args:
      step: the user's step.
      state, batch: arrays or abstract arrays.

    Returns:
      The state and the metrics that it returns, with abstract arrays.

    Raises:
      StepError: it does not return a pair, or a state of another structure, shapes or dtypes. The message lists the leaves.
      TypeError, ValueError: a metric is not a scalar.
    """
    if isinstance(step, jax.stages.Compiled):
        raise StepError("step is a compiled program, to which nothing can be added: give the function, or jax.jit of it")
    return _checked(jax.eval_shape(step, state, batch), state, name_of(step))


def name_of(step: Callable) -> str:
    """Return the name by which errors call a step."""
    return getattr(step, "__name__", type(step).__name__)


def _checked(result: Any, state: Any, name: str) -> tuple[Any, dict[str, Any]]:
    """Return the state and the metrics that a step has returned, if they are as they should be; see `check_step`."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise StepError(f"{name} returned {_kind(result)}: a step returns a pair, (state, metrics)")
    new, metrics = result
    check_metrics(metrics, name)
    before, after = describe_leaves(named_leaves(state)), describe_leaves(named_leaves(new))
    differing = [leaf for leaf in {**before, **after} if before.get(leaf) != after.get(leaf)]
    if differing:
        rows = "\n".join(f"  {leaf}: {before.get(leaf, 'not there')} → {after.get(leaf, 'not there')}" for leaf in differing[:20])
        more = f"\n  … and {len(differing) - 20:,} more" if len(differing) > 20 else ""
        raise StepError(
            f"{name} returned a state with other leaves than it was given, so the next step could not take it (given → "
            f"returned):\n{rows}{more}\nReturn each leaf with its shape and dtype: cast with .astype, and update the same keys"
        )
    given, returned = str(jax.tree.structure(state)), str(jax.tree.structure(new))
    if given != returned:
        raise StepError(f"{name} returned a state with another structure than it was given: {returned} instead of {given}")
    return new, dict(metrics)


def training_program(step: Callable, nonfinite: Nonfinite, name: str) -> Callable[[Any, Totals, Batch], tuple[Any, Totals]]:
    """Return the function (state, totals, batch) → (state, totals) of a step. It is to be jitted.

    It is traced again for batches of another shape, and checks then what the step returns for those.

    With nonfinite="skip", a step has no effect if one of its metrics is not finite, or if a value of the state was finite and
    would not be so any more.
    """

    def train(state: Any, totals: Totals, batch: Batch) -> tuple[Any, Totals]:
        new, metrics = _checked(step(state, batch), state, name)
        if set(metrics) != set(totals.sums):
            raise StepError(
                f"{name} returned the metrics {', '.join(metrics) or 'none'} for a batch with other shapes than the first, for "
                f"which it returned {', '.join(totals.sums) or 'none'}"
            )
        finite = are_finite(metrics) if nonfinite != "ignore" else jnp.bool_(True)
        if nonfinite == "skip":
            finite = jnp.logical_and(finite, _stays_finite(state, new))
            new = jax.tree.map(lambda old, value: jnp.where(finite, value, old), state, new)
        return new, add(totals, metrics, finite, skip=nonfinite == "skip")

    return train


def evaluation_program(step: Callable) -> Callable[[Any, Totals, Batch], Totals]:
    """Return the function (state, totals, batch) → totals of an evaluation step. It is to be jitted."""

    def evaluate(state: Any, totals: Totals, batch: Batch) -> Totals:
        return add(totals, step(state, batch), jnp.bool_(True), skip=False)

    return evaluate


def check_evaluation(step: Callable, state: Any, batch: Batch) -> dict[str, Any]:
    """Trace an evaluation step with abstract arguments, and return its metrics.

    Raises:
      TypeError, ValueError: it does not return a dict of scalars.
    """
    metrics = jax.eval_shape(step, state, batch)
    check_metrics(metrics, name_of(step))
    return dict(metrics)


def count_nonfinite(state: Any) -> Mapping[str, Any]:
    """Return the number of values of each floating-point leaf that are not finite. It is to be jitted."""
    return {name: jnp.sum(~jnp.isfinite(leaf), dtype=jnp.int32) for name, leaf in named_leaves(state).items() if _is_float(leaf)}


def _stays_finite(old: Any, new: Any) -> Any:
    checks = [
        jnp.all(jnp.isfinite(value) | ~jnp.isfinite(before))
        for before, value in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
        if _is_float(value)
    ]
    return jnp.all(jnp.stack(checks)) if checks else jnp.bool_(True)


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _kind(result: Any) -> str:
    if isinstance(result, tuple):
        return f"a tuple of {len(result)}"
    return f"{type(result).__name__} ({describe(result)[:200]})" if jax.tree.leaves(result) else type(result).__name__
