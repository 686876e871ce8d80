"""Metrics on the devices: what steps return goes in, their sums over an interval stay on the devices, and numbers come out later.

A metric is a scalar, of which the mean over the steps is reported, or a `Mean`, whose totals and counts are added up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from penstock.data.tree import describe_array


class Mean(NamedTuple):
    """A metric that is a ratio of two sums: `total` / `count`, both added up over steps or batches before they are divided.

    With it a mean over records is exact, also if batches have different numbers of them.

    Attributes:
      total: scalar, for example the sum of the losses of the records.
      count: scalar, for example the number of these records.

    Examples:
      >>> ps.Mean(total=6.0, count=4)
      Mean(total=6.0, count=4)
    """

    total: Any
    count: Any


class Totals(NamedTuple):
    """Sums over the steps of an interval, as scalars on the devices.

    Attributes:
      sums: name → (total, low, count), float32. Integers are added up in two parts, so that none of their digits is lost: `low`
        has their last 12 bits, and `total` all others.
      steps: number of steps, int32.
      first: number of the first step of the interval whose metrics were not finite, int32; as large as it gets if there was none.
      skipped: number of steps that were left out because they were not finite, int32.
      run: number of steps in a row that were left out, up to the last one, int32.
    """

    sums: dict[str, tuple[Any, Any, Any]]
    steps: Any
    first: Any
    skipped: Any
    run: Any


class Interval(NamedTuple):
    """The metrics of an interval, on the host.

    Attributes:
      metrics: the mean of each metric. NaN if there was nothing to take a mean of.
      steps: number of steps.
      first_bad: number of the first step in the interval, from 0, whose metrics were not finite; None if all were.
      skipped: number of steps that were left out.
      run: number of steps in a row that were left out, up to the end of the interval.
    """

    metrics: dict[str, float]
    steps: int
    first_bad: int | None
    skipped: int
    run: int


_LOW = (1 << 12) - 1  # of 32 bits, 20 are left, and float32 holds 24
_NEVER = np.iinfo(np.int32).max


def zero(metrics: Mapping[str, Any]) -> Totals:
    """Return the totals of no steps, as NumPy scalars, for metrics of the given names."""
    nothing = {name: (np.float32(0), np.float32(0), np.float32(0)) for name in metrics}
    return Totals(nothing, np.int32(0), np.int32(_NEVER), np.int32(0), np.int32(0))


def add(totals: Totals, metrics: Mapping[str, Any], finite: Any, skip: bool) -> Totals:
    """Add the metrics of a step, inside of a jitted function.

    Args:
      totals: the sums so far.
      metrics: what the step returned.
      finite: bool scalar, whether the step was finite.
      skip: whether a step that was not finite is left out of the sums.
    """
    sums = {}
    for name, value in metrics.items():
        total, count = value if isinstance(value, Mean) else (value, 1)
        parts = *_split(total), jnp.asarray(count, jnp.float32)
        if skip:
            parts = jax.tree.map(lambda part: jnp.where(finite, part, 0), parts)
        sums[name] = jax.tree.map(jnp.add, totals.sums[name], parts)
    bad = jnp.logical_not(finite).astype(jnp.int32)
    return Totals(
        sums,
        totals.steps + 1,
        jnp.minimum(totals.first, jnp.where(finite, _NEVER, totals.steps)),
        totals.skipped + bad if skip else totals.skipped,
        (totals.run + 1) * bad,
    )


def _split(value: Any) -> tuple[Any, Any]:
    """Return two float32 whose sum is a number: that of an integer is exact up to 36 bits."""
    value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.integer) or value.dtype.itemsize < 4:
        return value.astype(jnp.float32), jnp.float32(0)
    low = value & _LOW
    return (value - low).astype(jnp.float32), low.astype(jnp.float32)


def are_finite(metrics: Mapping[str, Any]) -> Any:
    """Return whether all metrics are finite, as a bool scalar on the device."""
    leaves = jax.tree.leaves(metrics)
    return jnp.all(jnp.stack([jnp.isfinite(jnp.asarray(leaf, jnp.float32)) for leaf in leaves])) if leaves else jnp.bool_(True)


def read(totals: Totals) -> Interval:
    """Fetch totals from the devices, and wait for them if necessary."""
    sums, steps, first, skipped, run = jax.device_get(totals)
    means = {
        name: (float(total) + float(low)) / float(count) if count else math.nan for name, (total, low, count) in sums.items()
    }
    return Interval(means, int(steps), None if first == _NEVER else int(first), int(skipped), int(run))


def as_json(totals: Totals) -> dict[str, Any]:
    """Fetch totals from the devices, as JSON from which `from_json` makes the same ones."""
    fetched = jax.device_get(totals)
    sums = {name: [float(part) for part in parts] for name, parts in fetched.sums.items()}
    return {"sums": sums, **{name: int(getattr(fetched, name)) for name in ("steps", "first", "skipped", "run")}}


def from_json(saved: Mapping[str, Any]) -> Totals:
    """Return totals as NumPy scalars."""
    sums = {name: (np.float32(total), np.float32(low), np.float32(count)) for name, (total, low, count) in saved["sums"].items()}
    return Totals(sums, *(np.int32(saved[name]) for name in ("steps", "first", "skipped", "run")))


def check_metrics(metrics: Any, of: str) -> None:
    """Check the abstract metrics that a function returns.

    Args:
      metrics: what it returns, with abstract arrays.
      of: names the function.

    Raises:
      TypeError, ValueError: they are not a dict from names to scalars or `Mean`s. The message names the metric.
    """
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise TypeError(
            f"{of} returned {type(metrics).__name__} as its metrics: return a dict from names to scalars, such as "
            "{'loss': loss}, and {} if there are none"
        )
    for name, value in metrics.items():
        parts = value._asdict() if isinstance(value, Mean) else {"": value}
        for part, leaf in parts.items():
            label = f"metric {name!r}" + (f", {part}," if part else "") + f" of {of}"
            if not hasattr(leaf, "shape") and not isinstance(leaf, (int, float)):
                raise TypeError(f"{label} is a {type(leaf).__name__}: a metric is a scalar, or ps.Mean(total, count)")
            if shape := tuple(np.shape(leaf)):
                raise ValueError(
                    f"{label} is {describe_array(leaf)}, and not a scalar: return its mean, or ps.Mean(total, count) of its sum "
                    f"and its {int(np.prod(shape)):,} values"
                )
            dtype = getattr(leaf, "dtype", np.dtype(type(leaf)))
            if not (jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)) or jnp.issubdtype(
                dtype, np.complexfloating
            ):
                raise TypeError(f"{label} has the dtype {dtype}: a metric is a real number")
