"""Compare a plan with its compiled program: memory, FLOPs, collectives, and the results of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from penstock._bytes import format_bytes
from penstock.data.tree import is_key
from penstock.errors import CompileError
from penstock.shard.apply.sharding_constraints import insert_constraints
from penstock.shard.compiler import compile_plan
from penstock.shard.hlo.analysis import Measured
from penstock.shard.hlo.topologies import find_topology
from penstock.shard.record import PlanRecord
from penstock.shard.search.costs import Cost
from penstock.shard.trace.step import TracedStep
from penstock.shard.wording import format_seconds


@dataclass(frozen=True)
class Verified:
    """The predicted cost of a plan and the compiler's figures, for one device.

    Attributes:
      predicted: the cost that the plan predicts.
      measured: the compiler's figures.
      limit: bytes that one device may hold.
      baselines: the same for each baseline that was compiled too, or the error that the compiler raised.
      difference: the largest difference between the results of the step as written and as planned (`largest_difference`); None
        if they did not run.

    Examples:
      >>> import jax
      >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
      >>> plan = ps.plan(lambda x: x @ x, x, mesh={"data": 1}, hardware="tpu-v5e", check=False)
      >>> verified = plan.verify()
      >>> verified.fits
      True
      >>> verified.measured.flops
      1024.0
    """

    predicted: Cost
    measured: Measured
    limit: int
    baselines: Mapping[str, Verified | CompileError] = field(default_factory=dict)
    difference: float | None = None

    @property
    def fits(self) -> bool:
        """Return whether the compiled program fits the memory limit."""
        return self.measured.memory <= self.limit

    def __str__(self) -> str:
        cost, measured = self.predicted, self.measured
        rows = [
            ("arguments", format_bytes(cost.memory.arguments), format_bytes(measured.arguments)),
            *([("constants", *[format_bytes(measured.constants)] * 2)] if measured.constants else []),
            ("peak memory", format_bytes(cost.memory.total), format_bytes(measured.memory)),
            ("FLOPs", f"{cost.flops:.3g}", f"{measured.flops:.3g}"),
            ("bytes sent", format_bytes(cost.bytes_on_wire), format_bytes(measured.bytes_on_wire)),
        ]
        planned = {(each.kind, each.axes): (each.count, each.bytes_on_wire) for each in cost.collectives}
        compiled: dict[tuple[str, tuple[str, ...]], tuple[float, float]] = {}
        guessed = {(each.kind, each.axes) for each in measured.collectives if each.guessed}
        for each in measured.collectives:
            count, bytes_on_wire = compiled.get((each.kind, each.axes), (0.0, 0.0))
            compiled[each.kind, each.axes] = (count + each.count, bytes_on_wire + each.count * each.bytes_on_wire)

        def largest_bytes(key: tuple[str, tuple[str, ...]]) -> float:
            return max(planned.get(key, (0, 0))[1], compiled.get(key, (0, 0))[1])

        for key in sorted({*planned, *compiled}, key=lambda key: -largest_bytes(key)):
            name = f"{key[0]} over {', '.join(key[1]) or 'a part of an axis'}{' (guessed)' if key in guessed else ''}"
            rows.append((name, _count_and_bytes(planned.get(key)), _count_and_bytes(compiled.get(key))))
        width = max(34, *(len(name) for name, _, _ in rows))
        lines = [
            f"compiled by {self.measured.compiled_for} in {format_seconds(self.measured.seconds_to_compile)}",
            f"{'per device':<{width}}{'predicted':>14}{'compiler':>14}",
        ]
        lines += [f"{name:<{width}}{predicted:>14}{figure:>14}" for name, predicted, figure in rows]
        lines += [f"predicted: {sentence}" for sentence in cost.unknown]
        lines += [f"compiler: {sentence}" for sentence in measured.unknown]
        lines.append(f"memory limit {format_bytes(self.limit)}: {'kept' if self.fits else 'NOT KEPT'}")
        if self.difference is not None:
            lines.append(f"results: within {self.difference:.1e} of the step as written")
        return "\n".join([*lines, *(_baseline_table(self) if self.baselines else ())])


def _count_and_bytes(entry: tuple[float, float] | None) -> str:
    """Return the number of collectives and their bytes on wire as text; a dash if there are none."""
    return "–" if entry is None else f"{entry[0]:.0f}× {format_bytes(entry[1])}"


def verify(
    plan: PlanRecord,
    traced: TracedStep | None,
    devices: Sequence[Any] | None,
    topology: str | None,
    baselines: Mapping[str, PlanRecord],
) -> Verified:
    """Compile a plan, and return the compiler's figures beside the prediction.

    Args:
      plan, traced, devices: as in `compile_plan`.
      topology: the name of a topology; None compiles for the devices, or for virtual CPU devices.
      baselines: the baselines to compile too.

    Raises:
      TypeError: the topology is not a string.
      ValueError: there is no such topology, or as in `compile_plan`.
      CompileError: as in `compile_plan`.
    """
    if topology is not None and not isinstance(topology, str):
        raise TypeError(
            f"topology={topology!r}: a topology is text, as 'v5e:2x4'; None compiles for the devices that are present"
        )
    found = None if topology is None else find_topology(topology)

    def compiled(record: PlanRecord) -> Verified:
        return Verified(record.cost, compile_plan(record, traced, devices, found), record.limit)

    def attempted(record: PlanRecord) -> Verified | CompileError:
        try:
            return compiled(record)
        except CompileError as error:
            return error

    return replace(compiled(plan), baselines={name: attempted(record) for name, record in baselines.items()})


def compare_results(plan: PlanRecord, traced: TracedStep, mesh: Any, leaves: Sequence[Any]) -> float:
    """Run a step as it was written and as planned, and return `Verified.difference`.

    Args:
      mesh: the mesh of the plan.
      leaves: the leaves of the arguments, on the mesh with the shardings of the plan.
    """
    planned = insert_constraints(traced.rewritten(plan.rewriting), plan.sharding_constraints, mesh)
    runs = [[_numbers(each) for each in jax.jit(step)(*leaves)] for step in (jaxpr_as_fun(traced.closed), planned)]
    return largest_difference(*runs)


def _numbers(result: jax.Array) -> np.ndarray:
    """Return an array on the host; keys of random numbers as integers."""
    return np.asarray(jax.random.key_data(result) if is_key(result) else result)


def largest_difference(expected: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> float:
    """Return by how much a number differs at most, as a fraction of the largest finite number that is expected in its array.

    It is infinite if this is zero, and NaN if numbers differ that are not finite.

    >>> largest_difference([np.array([1.0, 4.0])], [np.array([1.0, 3.0])])
    0.25
    """
    each = [_difference(*pair) for pair in zip(expected, found, strict=True)]
    return float(np.max(each, initial=0.0))  # NaN if one of them is


def _difference(expected: np.ndarray, found: np.ndarray) -> float:
    kind = np.complex128 if np.iscomplexobj(expected) else np.float64
    expected, found = expected.astype(kind), found.astype(kind)
    differs = ~((expected == found) | (np.isnan(expected) & np.isnan(found)))
    if not differs.any():
        return 0.0
    if not np.isfinite([expected[differs], found[differs]]).all():
        return float("nan")
    scale = np.abs(expected[np.isfinite(expected)]).max()
    return float(np.abs(found[differs] - expected[differs]).max() / scale) if scale else float("inf")


def _baseline_table(plan: Verified) -> list[str]:
    """Return a table of the plan and its baselines: the predicted figures, then the compiler's."""
    table = [("baselines: predicted, compiler", "memory", "FLOPs", "sent")]
    for name, each in (("this plan", plan), *plan.baselines.items()):
        if isinstance(each, Verified):
            cost, measured = each.predicted, each.measured
            cells = (
                f"{format_bytes(cost.memory.total)}, {format_bytes(measured.memory)}{'' if each.fits else ' (over the limit)'}",
                f"{cost.flops:.3g}, {measured.flops:.3g}",
                f"{format_bytes(cost.bytes_on_wire)}, {format_bytes(measured.bytes_on_wire)}",
            )
        else:
            cells = (f"does not compile: {' '.join(str(each).split())[:80]}", "", "")
        table.append((f"  {name}", *cells))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
