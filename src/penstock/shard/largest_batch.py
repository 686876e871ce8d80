"""Find the largest batch of a step that fits, and how fast smaller ones are, without running anything."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from penstock._bytes import counted, format_bytes
from penstock.errors import CompileError, CompilerMemoryError, PlanError
from penstock.shard.compiler import choose_compiler
from penstock.shard.fitting import NO_BATCH
from penstock.shard.hlo.analysis import Measured
from penstock.shard.memory import warn_unchecked
from penstock.shard.mesh.explicit_axes import automatic_axes
from penstock.shard.plan import Plan
from penstock.shard.planning import UNLIMITED, Options, plan_traced, trace_with
from penstock.shard.trace.step import TracedStep
from penstock.shard.wording import format_seconds

_NEARLY = 0.03
"""The search ends if the next larger batch is known not to fit, and is larger by at most this fraction."""
_COMPILATIONS = 6
"""The most plans that are compiled, unless the compiler refuses all of them."""
_MARGIN = 0.98
"""Factor on a corrected limit."""
_PAYS = 0.01
"""A batch is not made larger if it then runs in more parts, and trains faster by less than this fraction a row."""


@dataclass(frozen=True)
class BatchSize:
    """A batch size with its plan.

    Attributes:
      rows: the rows of the batch.
      plan: the fastest plan that was found for it.
    """

    rows: int
    plan: Plan

    @property
    def rows_per_second(self) -> float:
        """Return the rows that all devices together train in a second, by the predicted time of a step."""
        return self.rows / self.plan.cost.seconds

    @property
    def memory(self) -> float:
        """Return the bytes that one device needs, by the compiler's figures if the plan was compiled."""
        return self.plan.cost.memory.total if self.plan.checked is None else self.plan.checked.memory


@dataclass(frozen=True)
class BatchSizes:
    """Batch sizes that fit, in order. `print` shows them as a table.

    Attributes:
      sizes: the batch sizes with their plans. All but the last are by prediction.
      refused: the rows of the smallest batch that was found not to fit; None if none was.
    """

    sizes: tuple[BatchSize, ...]
    refused: int | None

    @property
    def largest(self) -> BatchSize:
        """Return the largest batch that fits."""
        return self.sizes[-1]

    def __str__(self) -> str:
        lines = [f"{'rows':>9}  {'a step':>9}  {'rows a second':>13}  {'a device':>9}  parts"]
        for each in self.sizes:
            figures = f"{each.rows:>9,}  {format_seconds(each.plan.cost.seconds):>9}  {each.rows_per_second:>13,.0f}"
            lines.append(f"{figures}  {format_bytes(each.memory):>9}  {each.plan.rewriting.microbatches:>5}")
        if self.refused is not None:
            lines.append(f"{self.refused:>9,}  does not fit")
        return "\n".join(lines)


def largest_batch(
    step: Callable,
    /,
    *args: Any,
    mesh: Any = None,
    devices: Any = None,
    hardware: Any = None,
    memory: int | str | None = None,
    constraints: Any = None,
    roles: Any = None,
    check: bool | str | None = None,
    remat: str | None = None,
    microbatches: int | str | None = None,
    **kwargs: Any,
) -> BatchSizes:
    """Find the largest batch for which a plan fits the memory. Nothing is run or allocated.

    Batches of twice and half the rows are planned, then batches between the largest that fits and the next. The largest is
    compiled. If its program needs more or less memory than predicted, the search is repeated with a corrected limit: at most six
    plans are compiled, unless none of them fits.

    Args:
      step, *args, **kwargs: as for `plan`. The leaves with the role "batch" get other numbers of rows, in their first dimension,
        in the proportions that they have. All batches divide over the devices if the given one does.
      mesh, devices, hardware, memory, constraints, roles, check, remat, microbatches: as for `plan`. With microbatches="auto",
        a batch may be of any size, so the search ends where larger ones only run in more parts.

    Returns:
      The batch sizes, with their plans and predicted times. `sizes.largest.plan` is the plan of the largest.

    Raises:
      PlanError: no batch fits.
      ValueError: no argument has the role "batch", or as for `plan`.
      TypeError, CompileError: as for `plan`.

    Examples:
      >>> import jax
      >>> def step(w, x):
      ...     return jax.tree.map(lambda w, g: w - g, w, jax.grad(lambda w: ((x @ w) ** 2).mean())(w))
      >>> w, x = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((32, 64), "float32")
      >>> sizes = ps.largest_batch(step, w, x, mesh={"data": 2}, hardware="tpu-v5e", memory="1MiB", check=False)
      >>> sizes.largest.rows > 1024
      True
    """
    options = Options(mesh, devices, hardware, memory, constraints, roles, check, remat, microbatches)
    with automatic_axes():
        return _Search(trace_with(options, step, args, kwargs), options).run()


class _NotTracedError(ValueError):
    """A step cannot be traced with some number of rows."""


class _Search:
    """The search for the largest batch of a step."""

    def __init__(self, traced: TracedStep, options: Options):
        self._traced, self._options = traced, options
        first = plan_traced(traced, options.by_prediction(memory=UNLIMITED, remat=None, microbatches=None))
        self._limit = options.limit
        self._batch, self._given = traced.find_batch([leaf.role for leaf in first.inputs])
        if not self._given:
            raise ValueError(NO_BATCH)
        parts = options.microbatches if isinstance(options.microbatches, int) else 1
        self._grain = math.lcm(math.gcd(self._given, first.device_count), parts)
        self._predicted: dict[tuple[int, int], Plan] = {}  # by rows and bytes
        self._too_large: set[tuple[int, int]] = set()

    def run(self) -> BatchSizes:
        """Return the batch sizes that fit. The largest is compiled, if `check` allows it."""
        while True:
            try:
                return self._run()
            except _NotTracedError:
                if self._given % (2 * self._grain):
                    raise
                self._grain *= 2  # the step may need rows in groups

    def _run(self) -> BatchSizes:
        within, allowed, larger = self._limit, math.inf, list[int | None]()
        best: BatchSize | None = None
        for _ in range(_COMPILATIONS):
            rows, not_predicted = self._largest(within)
            if best is not None and rows <= best.rows:
                break
            if (rows, within) not in self._predicted:
                break  # the smallest batch is not predicted to fit
            plan = self._predicted[rows, within]
            measured = self._compile(plan)
            if measured is None:
                best = BatchSize(rows, plan)
                larger.append(not_predicted)
                break
            needed = measured.memory if isinstance(measured, Measured) else measured.needed or 2 * self._limit
            corrected = min(allowed, _MARGIN * plan.cost.memory.total * self._limit / max(needed, 1))
            if isinstance(measured, Measured) and needed <= self._limit:
                best = BatchSize(rows, replace(plan, checked=measured))
                larger.append(not_predicted)
                if corrected <= within:
                    break
            else:
                larger.append(rows)
                allowed = corrected
            within = int(corrected)
        if best is None:
            rows = self._grain
            best = BatchSize(rows, self._plan(rows, self._options))
            if best.plan.cost.memory.total > self._limit and best.plan.checked is None:
                raise PlanError(
                    f"no batch of {counted(rows, 'row')} or more is predicted to fit {format_bytes(self._limit)}: "
                    f"the step needs {format_bytes(best.memory)}"
                )
        smaller = {rows: plan for (rows, _), plan in self._predicted.items() if rows < best.rows}
        doubled = [rows for rows in sorted(smaller) if math.log2(rows / self._start).is_integer()]
        sizes = [BatchSize(rows, smaller[rows]) for rows in doubled]
        return BatchSizes((*sizes, best), min((rows for rows in larger if rows and rows > best.rows), default=None))

    def _compile(self, plan: Plan) -> Measured | CompilerMemoryError | None:
        """Return the compiler's figures for a plan, or that it needs too much memory; None if it is not compiled.

        Raises:
          CompileError: the plan does not compile, and `check` asks for it.
        """
        check = self._options.check
        if check is False:
            return None
        assert plan.traced is not None
        compiler = choose_compiler(check, plan.hardware, plan.device_count, plan.traced, plan.devices)
        if compiler.compile is None:
            warn_unchecked(plan, compiler.remark)
            return None
        (found,) = compiler.compile([plan])
        if not isinstance(found, CompileError) or isinstance(found, CompilerMemoryError):
            return found
        if check:
            raise found
        warn_unchecked(plan, str(found))
        return None

    @property
    def _start(self) -> int:
        """Return the rows of the first batch that is tried."""
        return max(1, self._given // self._grain) * self._grain

    def _largest(self, within: int) -> tuple[int, int | None]:
        """Return the rows of the largest batch that is predicted to fit some bytes, and of the smallest that is not.

        If none is, return the smallest batch.
        """
        low, high = self._start, None
        while not self._fits(low, within):
            if low <= self._grain:
                return low, high
            low, high = max(self._grain, low // 2 // self._grain * self._grain), low
        while high is None:
            if self._fits(2 * low, within) and not self._only_in_more_parts(low, 2 * low, within):
                low *= 2
            else:
                high = 2 * low
        endless = self._fits(high, within)  # in parts, so the largest is searched that does not run in more
        while high - low > max(self._grain, _NEARLY * low):
            middle = (low + high) // 2 // self._grain * self._grain
            larger = self._fits(middle, within) and not (endless and self._only_in_more_parts(low, middle, within))
            low, high = (middle, high) if larger else (low, middle)
        return low, None if endless else high

    def _only_in_more_parts(self, rows: int, larger: int, within: int) -> bool:
        """Return whether a larger batch trains no faster a row, in more parts."""
        one, two = (BatchSize(each, self._predicted[each, within]) for each in (rows, larger))
        in_parts = two.plan.rewriting.microbatches > one.plan.rewriting.microbatches
        return in_parts and two.rows_per_second < (1 + _PAYS) * one.rows_per_second

    def _fits(self, rows: int, within: int) -> bool:
        """Return whether a batch is predicted to fit some bytes."""
        key = rows, within
        if key not in self._predicted and key not in self._too_large:
            self._too_large.add(key)
            with contextlib.suppress(PlanError):
                plan = self._plan(rows, self._options.by_prediction(memory=within))
                if plan.cost.memory.total <= within:
                    self._predicted[key] = plan
        return key in self._predicted

    def _plan(self, rows: int, options: Options) -> Plan:
        """Plan the step with a number of rows."""
        factor = Fraction(rows, self._given)
        try:
            step = self._traced if factor == 1 else self._traced.resized(self._batch, factor)
        except Exception as error:
            raise _NotTracedError(f"the step cannot be traced with {counted(rows, 'row')}: {error}") from error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return plan_traced(step, options)
