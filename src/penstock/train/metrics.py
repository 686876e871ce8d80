"""Sum the metrics of steps on the devices, and give their means to the loggers, interval by interval.

A *metric* is a scalar, of which the mean over the steps is reported, or a `Mean`, whose totals and counts are added up. *Totals*
are such sums over an interval. The program of a training step updates them on the devices, so the loop need not wait for numbers.
`Intervals` fetches the totals of an interval when the next one has ended, and gives a `Point` to each *logger*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from penstock.data.tree import Batch, describe, describe_array
from penstock.errors import NonfiniteError, StepError
from penstock.feed import Feed
from penstock.train.goodput import Goodput, Meter
from penstock.train.state import describe_leaves, named_leaves


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


@dataclass(frozen=True)
class Point:
    """An event of a run, for loggers.

    Attributes:
      kind: "begin" is the first point. "train" has the metrics of the steps since the train point before, and is given one
        interval late. "evaluation" has the metrics of an evaluation. "end" is the last point, also after an error.
      step: number of steps done; of "begin" the step from which the run continues.
      steps: number of steps of the run; None if it ends with its feed.
      metrics: name → value. Names of an evaluation's metrics begin with "val_".
      speed: of "train", the steps that ended per second, without the time of evaluations, saves and loggers.
      input_wait: of "train", the share of that time, 0 to 1, for which the devices starved for the next batch.
      text: of "end", a sentence.
      goodput: of "end", where the time of the run went.
    """

    kind: Literal["begin", "train", "evaluation", "end"]
    step: int
    steps: int | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    speed: float | None = None
    input_wait: float | None = None
    text: str = ""
    goodput: Goodput | None = None


Logger = Callable[[Point], None]


def numbers(point: Point) -> dict[str, float]:
    """Return all numbers of a train or evaluation point by name."""
    more = {"steps_per_second": point.speed, "input_wait": point.input_wait}
    return {**point.metrics, **{name: value for name, value in more.items() if value is not None}}


Nonfinite = Literal["stop", "skip", "ignore"]
_MOST_SKIPPED = 100  # steps in a row after which a training that skips them ends


class Intervals:
    """The metrics of a run, interval by interval.

    Args:
      zero: the totals of no steps, on the devices.
      step: number of steps done.
      steps: number of steps of the run.
      feed, meter: measure the time.
      loggers: get the points.
      nonfinite: see `fit`.
      last_good: returns how an error names the last good checkpoint, and its step.
      unlogged: the result of `unlogged` when the run was saved; None for a new run.

    Attributes:
      totals: the sums since the last log point. The loop replaces them after each step.
    """

    def __init__(
        self,
        zero: Totals,
        step: int,
        steps: int | None,
        feed: Feed,
        meter: Meter,
        loggers: Sequence[Logger],
        nonfinite: Nonfinite,
        last_good: Callable[[], tuple[str, int | None]],
        unlogged: Mapping[str, Any] | None,
    ):
        self.totals, self._zero = zero, zero
        self.begin = step  # of the current interval
        self._steps, self._feed, self._meter, self._loggers = steps, feed, meter, loggers
        self._nonfinite, self._last_good = nonfinite, last_good
        self._pending: _Pending | None = None
        self._seconds = self._starved = 0.0
        self._ended = step  # number of steps that had ended when the current interval began
        self._run = 0  # steps in a row that were left out
        if unlogged is not None and set(unlogged["current"]["sums"]) == set(zero.sums):
            self._restore(unlogged)

    def _restore(self, saved: Mapping[str, Any]) -> None:
        """Continue with the metrics that were not logged yet when the run was saved."""
        shardings = jax.tree.map(lambda total: total.sharding, self._zero)
        self.totals = jax.device_put(_from_json(saved["current"]), shardings)
        self.begin, self._run = saved["begin"], saved["run"]
        self._seconds, self._starved, self._ended = -saved["seconds"], -saved["starved"], saved["ended"]
        if (pending := saved["pending"]) is not None:
            self._pending = _Pending(**{**pending, "totals": jax.device_put(_from_json(pending["totals"]), shardings)})

    def end(self, step: int, ended: int) -> None:
        """End an interval, and log the one before. Raise NonfiniteError if that one is not finite.

        Args:
          step: number of steps that were dispatched.
          ended: number of them that the devices have finished.
        """
        if step == self.begin:
            return
        starved, seconds = self._feed.stats().starved, self._meter.loop
        jax.tree.map(lambda total: total.copy_to_host_async(), self.totals)
        before, since = self._pending, self._seconds
        took = seconds - since, starved - self._starved
        self._pending = _Pending(self.begin, step, self.totals, self._ended, ended, *took)
        self.totals, self.begin, self._seconds, self._starved, self._ended = self._zero, step, seconds, starved, ended
        self._meter.reached(step, starved)
        if before:
            self._log(before, since)

    def flush(self) -> None:
        """Log the interval that has ended last, and wait for its metrics. Raise NonfiniteError if it is not finite."""
        before, self._pending = self._pending, None
        if before:
            self._log(before, self._seconds)

    def unlogged(self) -> Callable[[], dict[str, Any]]:
        """Return a function that returns the metrics not logged yet, as of now, as JSON. Another thread may call it.

        It raises NonfiniteError as `end` does.
        """
        pending, begin, totals, run = self._pending, self.begin, self.totals, self._run
        unread = [(pending.begin, pending.totals)] if pending else []
        unread.append((begin, totals))
        seconds, starved, ended = self._meter.loop - self._seconds, self._feed.stats().starved - self._starved, self._ended

        def fetch() -> dict[str, Any]:
            before = run
            for first, sums in unread:
                interval = read(sums)
                self._check(interval, first, before)
                before = _in_a_row(before, interval)
            return {
                "pending": {**pending._asdict(), "totals": _as_json(pending.totals)} if pending else None,
                "current": _as_json(totals),
                **{"begin": begin, "run": run, "ended": ended, "seconds": seconds, "starved": starved},
            }

        return fetch

    def log(self, point: Point) -> None:
        """Give a point to the loggers, in process 0. All of them get it, also if one has an error: it does not come again."""
        if jax.process_index() != 0:
            return
        errors = []
        with self._meter.clock.time("log"):
            for logger in self._loggers:
                try:
                    logger(point)
                except Exception as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    def _check(self, interval: Interval, begin: int, run: int) -> None:
        """Raise NonfiniteError if the interval after `begin` steps is not finite; `run` bad steps in a row were before it."""
        if self._nonfinite == "ignore" or interval.first_bad is None:
            return
        step = begin + interval.first_bad
        good, checkpoint = self._last_good()
        if self._nonfinite == "stop":
            bad = [name for name, value in interval.metrics.items() if not abs(value) < float("inf")]
            raise NonfiniteError(
                f"{', '.join(bad)} is not finite at step {step:,} (counted from 0): {good}. Look for the cause there, or leave "
                "such steps out with nonfinite='skip'",
                step,
                checkpoint,
            )
        run = _in_a_row(run, interval)
        if run >= _MOST_SKIPPED:
            raise NonfiniteError(
                f"the last {run:,} steps were all left out because they were not finite, since step "
                f"{begin + interval.steps - run:,} (counted from 0): {good}",
                step,
                checkpoint,
            )

    def _log(self, pending: _Pending, since: float) -> None:
        """Log an interval, whose last step was dispatched `since` seconds after the begin of the loop."""
        interval = read(pending.totals)
        ended, seconds = pending.ended, pending.seconds
        if ended == pending.ended_before:  # its steps were all in flight when it was over, and have ended now
            ended, seconds = pending.end, seconds + self._meter.loop - since
        self._check(interval, pending.begin, self._run)
        self._run = _in_a_row(self._run, interval)
        metrics = interval.metrics if self._nonfinite != "skip" else {**interval.metrics, "skipped": float(interval.skipped)}
        self.log(
            Point(
                "train",
                pending.end,
                self._steps,
                metrics,
                speed=(ended - pending.ended_before) / seconds if seconds > 0 else None,
                # A feed may take back what it has estimated, so that an interval could have less than none.
                input_wait=min(1.0, max(0.0, pending.starved / pending.seconds)) if pending.seconds > 0 else None,
            )
        )


class _Pending(NamedTuple):
    """An interval whose metrics the devices may not have computed yet."""

    begin: int
    end: int
    totals: Totals
    ended_before: int  # number of steps that had ended when `begin` steps were dispatched
    ended: int  # number of steps that had ended when `end` steps were dispatched
    seconds: float  # between these two moments
    starved: float  # seconds for which the devices had no batch


def _in_a_row(before: int, interval: Interval) -> int:
    """Return the number of bad steps in a row, up to the end of an interval."""
    return before + interval.run if interval.run == interval.steps else interval.run


# The programs.


def training_program(step: Callable, nonfinite: Nonfinite, name: str) -> Callable[[Any, Totals, Batch], tuple[Any, Totals]]:
    """Return the function (state, totals, batch) → (state, totals) of a step. It is to be jitted.

    It is traced again for batches of another shape, and then checks the result of the step again. With nonfinite="skip", a step
    has no effect if one of its metrics is not finite, or if it would make a finite value of the state nonfinite.
    """

    def train(state: Any, totals: Totals, batch: Batch) -> tuple[Any, Totals]:
        new, metrics = _checked(step(state, batch), state, name)
        if set(metrics) != set(totals.sums):
            raise StepError(
                f"{name} returned the metrics {', '.join(metrics) or 'none'} for a batch with other shapes than the first, for "
                f"which it returned {', '.join(totals.sums) or 'none'}"
            )
        finite = _are_finite(metrics) if nonfinite != "ignore" else jnp.bool_(True)
        if nonfinite == "skip":
            finite = jnp.logical_and(finite, _stays_finite(state, new))
            new = jax.tree.map(lambda old, value: jnp.where(finite, value, old), state, new)
        return new, _add(totals, metrics, finite, skip=nonfinite == "skip")

    return train


def evaluation_program(step: Callable) -> Callable[[Any, Totals, Batch], Totals]:
    """Return the function (state, totals, batch) → totals of an evaluation step. It is to be jitted."""

    def evaluate(state: Any, totals: Totals, batch: Batch) -> Totals:
        return _add(totals, step(state, batch), jnp.bool_(True), skip=False)

    return evaluate


def count_nonfinite(state: Any) -> Mapping[str, Any]:
    """Return the number of values of each floating-point leaf that are not finite. It is to be jitted."""
    return {name: jnp.sum(~jnp.isfinite(leaf), dtype=jnp.int32) for name, leaf in named_leaves(state).items() if _is_float(leaf)}


def check_step(step: Callable, state: Any, batch: Batch) -> tuple[Any, dict[str, Any]]:
    """Trace a step, and return the abstract state and metrics that it returns.

    Args:
      state, batch: arrays or abstract arrays.

    Raises:
      StepError: it does not return a pair, or a state of another structure, shapes or dtypes. The message lists the leaves.
      TypeError, ValueError: a metric is not a scalar.
    """
    if isinstance(step, jax.stages.Compiled):
        raise StepError("step is a compiled program, to which nothing can be added: give the function, or jax.jit of it")
    return _checked(jax.eval_shape(step, state, batch), state, name_of(step))


def check_evaluation(step: Callable, state: Any, batch: Batch) -> dict[str, Any]:
    """Trace an evaluation step with abstract arguments, and return its metrics if they are a dict of scalars."""
    metrics = jax.eval_shape(step, state, batch)
    _check_metrics(metrics, name_of(step))
    return dict(metrics)


def name_of(step: Callable) -> str:
    """Return the name by which errors call a step."""
    return getattr(step, "__name__", type(step).__name__)


def _checked(result: Any, state: Any, name: str) -> tuple[Any, dict[str, Any]]:
    """Check the result of a step, see `check_step`, and return the state and the metrics in it."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise StepError(f"{name} returned {_kind(result)}: a step returns a pair, (state, metrics)")
    new, metrics = result
    _check_metrics(metrics, name)
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


def _check_metrics(metrics: Any, of: str) -> None:
    """Raise TypeError or ValueError if the abstract metrics of a function are no dict from names to scalars or `Mean`s."""
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise TypeError(
            f"{of} returned {_kind(metrics)} as its metrics: return a dict from names to scalars, such as "
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
            if not any(jnp.issubdtype(dtype, kind) for kind in (np.integer, np.floating, np.bool_)):
                raise TypeError(f"{label} has the dtype {dtype}: a metric is a real number")


def _kind(result: Any) -> str:
    if isinstance(result, tuple):
        return f"a tuple of {len(result)}"
    if hasattr(result, "dtype"):
        return describe_array(result)
    return f"{type(result).__name__} ({describe(result)[:200]})" if jax.tree.leaves(result) else type(result).__name__


def _are_finite(metrics: Mapping[str, Any]) -> Any:
    """Return whether all metrics are finite, as a bool scalar on the device."""
    leaves = jax.tree.leaves(metrics)
    return jnp.all(jnp.stack([jnp.isfinite(jnp.asarray(leaf, jnp.float32)) for leaf in leaves])) if leaves else jnp.bool_(True)


def _stays_finite(old: Any, new: Any) -> Any:
    checks = [
        jnp.all(jnp.isfinite(value) | ~jnp.isfinite(before))
        for before, value in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
        if _is_float(value)
    ]
    return jnp.all(jnp.stack(checks)) if checks else jnp.bool_(True)


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


# The totals.
_LOW = (1 << 12) - 1  # of 32 bits, 20 are left, and float32 holds 24
_NEVER = np.iinfo(np.int32).max


class Totals(NamedTuple):
    """Sums over the steps of an interval, as scalars on the devices.

    A step is bad if one of its metrics is not finite, or if it is left out by nonfinite="skip". `sums` has two sums for each
    name, float32[4]: (total, rest of the total, count, rest of the count). See `_plus`. The other fields are int32.
    """

    sums: dict[str, Any]
    steps: Any
    first: Any  # number of the first bad step, from 0; the largest int32 if there was none
    skipped: Any  # number of bad steps that were left out
    run: Any  # number of bad steps in a row, up to the last step


def zero(metrics: Mapping[str, Any]) -> Totals:
    """Return the totals of no steps, as NumPy scalars, for metrics of the given names."""
    return Totals({name: np.zeros(4, np.float32) for name in metrics}, np.int32(0), np.int32(_NEVER), np.int32(0), np.int32(0))


def _add(totals: Totals, metrics: Mapping[str, Any], finite: Any, skip: bool) -> Totals:
    """Add the metrics of a step, inside of a jitted function. With `skip`, leave out a step that is not finite, bool []."""
    sums = {}
    for name, value in metrics.items():
        total, count = value if isinstance(value, Mean) else (value, 1)
        parts = _split(total), _split(count)
        if skip:
            parts = jax.tree.map(lambda part: jnp.where(finite, part, 0), parts)
        before = totals.sums[name]
        sums[name] = jnp.stack([*_plus(before[0], before[1], parts[0]), *_plus(before[2], before[3], parts[1])])
    bad = jnp.logical_not(finite).astype(jnp.int32)
    return Totals(
        sums,
        totals.steps + 1,
        jnp.minimum(totals.first, jnp.where(finite, _NEVER, totals.steps)),
        totals.skipped + bad if skip else totals.skipped,
        (totals.run + 1) * bad,
    )


def _plus(total: Any, rest: Any, parts: tuple[Any, ...]) -> tuple[Any, Any]:
    """Add float32 numbers to a sum of two float32, of which `rest` is what `total` has no digits for.

    The error of an addition is exact (TwoSum, Knuth, The Art of Computer Programming, volume 2, 4.2.2), and the pair has 48 bits
    (Dekker 1971). So the mean of a million steps is as precise as one float32, and sums of whole numbers are exact up to 2**48.
    XLA keeps the order of additions of floating-point numbers.
    """
    for part in parts:
        added = total + part
        taken = added - total
        rest = jnp.where(jnp.isfinite(added), rest + ((total - (added - taken)) + (part - taken)), 0)
        total = added + rest
        rest = rest - (total - added)
    return total, rest


def _split(value: Any) -> tuple[Any, ...]:
    """Return float32 numbers whose sum is a number. For an integer, the sum is exact up to 36 bits."""
    value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.integer) or value.dtype.itemsize < 4:
        return (value.astype(jnp.float32),)
    low = value & _LOW
    return (value - low).astype(jnp.float32), low.astype(jnp.float32)


class Interval(NamedTuple):
    """The metrics of an interval, on the host. See `Totals`."""

    metrics: dict[str, float]  # see `_mean`
    steps: int
    first_bad: int | None  # number of the first bad step; None if there was none
    skipped: int
    run: int


def read(totals: Totals) -> Interval:
    """Fetch totals from the devices, and wait for them if necessary."""
    sums, steps, first, skipped, run = jax.device_get(totals)
    return Interval(
        {name: _mean(*map(float, parts)) for name, parts in sums.items()},
        int(steps),
        None if first == _NEVER else int(first),
        int(skipped),
        int(run),
    )


def _mean(total: float, rest: float, count: float, rest_of_count: float) -> float:
    """Return the mean; NaN if there is nothing to take a mean of. An infinite total has no rest."""
    count += rest_of_count
    return (total + rest if math.isfinite(total) else total) / count if count else math.nan


def _as_json(totals: Totals) -> dict[str, Any]:
    """Fetch totals from the devices, as JSON from which `_from_json` makes the same ones."""
    fetched = jax.device_get(totals)
    sums = {name: [float(part) for part in parts] for name, parts in fetched.sums.items()}
    return {"sums": sums, **{name: int(getattr(fetched, name)) for name in ("steps", "first", "skipped", "run")}}


def _from_json(saved: Mapping[str, Any]) -> Totals:
    """Return totals as NumPy scalars."""
    sums = {name: np.array(parts, np.float32) for name, parts in saved["sums"].items()}
    return Totals(sums, *(np.int32(saved[name]) for name in ("steps", "first", "skipped", "run")))
