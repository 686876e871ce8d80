"""Compile a plan, and compare the compiler's figures with the prediction.

In: a plan record, its step, and the devices or a TPU topology. Out: `Verified`: memory, FLOPs and collectives, predicted and
compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from penstock._bytes import format_bytes
from penstock.shard.errors import CompileError
from penstock.shard.hlo.analysis import Measured, measure
from penstock.shard.hlo.compile_exported import export_program, measure_exported
from penstock.shard.jit import abstract_arguments, jit_flat
from penstock.shard.mesh.shapes import abstract_mesh, concrete_mesh
from penstock.shard.record import PlanRecord
from penstock.shard.search.cost import Cost
from penstock.shard.trace.step import TracedStep

FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Options of XLA:CPU that skip LLVM's expensive passes. The optimised HLO, which is all that penstock reads, does not change."""


@dataclass(frozen=True)
class Verified:
    """The predicted cost of a plan and the compiler's figures, of one device.

    Attributes:
      predicted: the cost that the plan predicts.
      measured: the compiler's figures.
      where: what it was compiled for, in words.
      limit: bytes that one device may hold.

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
    where: str
    limit: int

    @property
    def fits(self) -> bool:
        """Return whether the compiled program fits the memory limit."""
        return self.measured.memory <= self.limit

    def __str__(self) -> str:
        cost, measured = self.predicted, self.measured
        rows = [
            ("arguments", format_bytes(cost.memory.arguments), format_bytes(measured.arguments)),
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
        lines = [f"compiled for {self.where}", f"{'per device':<{width}}{'predicted':>14}{'compiler':>14}"]
        lines += [f"{name:<{width}}{predicted:>14}{figure:>14}" for name, predicted, figure in rows]
        lines += [f"predicted: {sentence}" for sentence in cost.unknown]
        lines += [f"compiler: {sentence}" for sentence in measured.unknown]
        lines.append(f"memory limit {format_bytes(self.limit)}: {'kept' if self.fits else 'NOT KEPT'}")
        return "\n".join(lines)


def _count_and_bytes(entry: tuple[float, float] | None) -> str:
    """Return the number of collectives and their bytes on wire as text; a dash if there are none."""
    return "–" if entry is None else f"{entry[0]:.0f}× {format_bytes(entry[1])}"


def verify(plan: PlanRecord, traced: TracedStep | None, devices: Sequence[Any] | None, topology: str | None) -> Verified:
    """Compile a plan, and return the compiler's figures beside the prediction.

    Args:
      plan, traced, devices, topology: as in `compile_plan`.

    Raises:
      ValueError, TypeError, CompileError: as in `compile_plan`.
    """
    measured, where = compile_plan(plan, traced, devices, topology)
    return Verified(plan.cost, measured, where, plan.limit)


def compile_plan(
    plan: PlanRecord, traced: TracedStep | None, devices: Sequence[Any] | None = None, topology: str | None = None
) -> tuple[Measured, str]:
    """Return the compiler's figures for a plan, and what it was compiled for.

    Args:
      plan: the layouts.
      traced: the step; None if the plan was loaded.
      devices: the devices of the mesh, in order; None takes those that are present.
      topology: a TPU topology, as "v5e:2x4". None compiles for the devices, or for virtual CPU devices in another process if
        there are too few.

    Raises:
      ValueError: the plan was loaded, and is not bound to its step.
      TypeError: the topology is not a string.
      CompileError: the step does not compile.
    """
    if traced is None:
        raise ValueError("this plan was loaded from a file and has no step to compile; plan.bind(step, *args) first")
    if topology is not None and not isinstance(topology, str):
        raise TypeError(
            f"topology={topology!r}: a topology is text, as 'v5e:2x4'; None compiles for the devices that are present"
        )
    try:
        if topology is None and (devices is not None or jax.device_count() >= plan.device_count):
            return _compile_for_devices(plan, traced, devices)
        return _compile_in_worker(plan, traced, topology)
    except (CompileError, ImportError):
        raise
    except Exception as error:  # lowering fails for operations that the platform lacks, or that need certain devices
        raise CompileError(f"{type(error).__name__}: {error}") from error


def _compile_for_devices(plan: PlanRecord, traced: TracedStep, devices: Sequence[Any] | None) -> tuple[Measured, str]:
    """Compile in this process, for its devices, and return the figures and the platform."""
    mesh = concrete_mesh(plan.mesh_shape, devices)
    lowered = jit_flat(plan, traced, mesh).lower(*abstract_arguments(plan, traced, mesh))
    compiled = lowered.compile(FAST_COMPILE if jax.default_backend() == "cpu" else None)
    return measure(compiled, plan.mesh_shape), f"{plan.device_count} of this process's devices ({jax.default_backend()})"


def _compile_in_worker(plan: PlanRecord, traced: TracedStep, topology: str | None) -> tuple[Measured, str]:
    """Compile in another process, for virtual CPU devices or for TPUs, and return the figures and the platform."""
    mesh = abstract_mesh(plan.mesh_shape)
    platform = "cpu" if topology is None else "tpu"
    arguments = abstract_arguments(plan, traced, mesh)
    program = export_program(jit_flat(plan, traced, mesh), *arguments, mesh=plan.mesh_shape, platform=platform)
    (result,) = measure_exported([program], topology=topology)
    if isinstance(result, CompileError):
        raise result
    return result, f"{plan.device_count} virtual CPU devices" if topology is None else f"TPU topology {topology}"
