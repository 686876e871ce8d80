"""What the compiler says of a plan, beside what was predicted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax

from penstock.shard import meshes
from penstock.shard.apply.sharding_constraints import insert_constraints
from penstock.shard.hlo.analysis import CompileError, Measured, export_program, measure, measure_exported
from penstock.shard.search.cost import Cost
from penstock.shard._planned import Plan, shardings_of
from penstock.shard.units import format_bytes

FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Options of XLA:CPU for a program that is looked at and not run: machine code is made in haste, and what is looked at stays."""


@dataclass(frozen=True)
class Verified:
    """Prediction and compiler, side by side, per device.

    Attributes:
      predicted: of the plan.
      measured: of the compiler.
      where: what it was compiled for.
      limit: bytes that a device may hold.
    """

    predicted: Cost
    measured: Measured
    where: str
    limit: int

    @property
    def fits(self) -> bool:
        """Whether the compiled program keeps the memory limit."""
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
        found: dict[tuple[str, tuple[str, ...]], tuple[float, float]] = {}
        guessed = {(each.kind, each.axes) for each in measured.collectives if each.guessed}
        for each in measured.collectives:
            count, bytes_on_wire = found.get((each.kind, each.axes), (0.0, 0.0))
            found[each.kind, each.axes] = (count + each.count, bytes_on_wire + each.count * each.bytes_on_wire)
        for key in sorted({*planned, *found}, key=lambda key: -max(planned.get(key, (0, 0))[1], found.get(key, (0, 0))[1])):
            name = f"{key[0]} over {', '.join(key[1]) or 'a part of an axis'}{' (guessed)' if key in guessed else ''}"
            rows.append((name, _of(planned.get(key)), _of(found.get(key))))
        width = max(34, *(len(name) for name, _, _ in rows))
        lines = [f"compiled for {self.where}", f"{'per device':<{width}}{'predicted':>14}{'compiler':>14}"]
        lines += [f"{name:<{width}}{predicted:>14}{found:>14}" for name, predicted, found in rows]
        lines += [f"predicted: {sentence}" for sentence in cost.unknown]
        lines += [f"compiler: {sentence}" for sentence in measured.unknown]
        lines.append(f"memory limit {format_bytes(self.limit)}: {'kept' if self.fits else 'NOT KEPT'}")
        return "\n".join(lines)


def _of(entry: tuple[float, float] | None) -> str:
    return "–" if entry is None else f"{entry[0]:.0f}× {format_bytes(entry[1])}"


def verify(plan: Plan, topology: str | None) -> Verified:
    """Compile a plan; see `Plan.verify`."""
    measured, where = compiled(plan, topology)
    return Verified(plan.cost, measured, where, plan.limit)


def compiled(plan: Plan, topology: str | None = None) -> tuple[Measured, str]:
    """What the compiler says of a plan, and for what it was compiled.

    Raises:
      ValueError: the plan was loaded, and is not bound to its step.
      TypeError: the topology is no text.
      CompileError: it does not compile.
    """
    if plan.traced is None:
        raise ValueError("this plan was loaded from a file and has no step to compile; plan.bind(step, *args) first")
    if topology is not None and not isinstance(topology, str):
        raise TypeError(f"topology={topology!r}: a topology is text, as 'v5e:2x4'; None compiles for what is here")
    try:
        return _compiled(plan, topology)
    except (CompileError, ImportError):
        raise
    except Exception as error:  # of lowering: an operation that this platform has not, or that wants its devices
        raise CompileError(f"{type(error).__name__}: {error}") from error


def _compiled(plan: Plan, topology: str | None) -> tuple[Measured, str]:
    needed = math.prod(plan.mesh_shape.values())
    if topology is None and (plan.devices is not None or jax.device_count() >= needed):
        lowered = lower(plan, meshes.concrete_mesh(plan.mesh_shape, plan.devices))
        options = FAST_COMPILE if jax.default_backend() == "cpu" else None
        return measure(lowered.compile(options), plan.mesh_shape), f"{needed} of this process's devices ({jax.default_backend()})"
    platform = "cpu" if topology is None else "tpu"
    mesh = meshes.abstract_mesh(plan.mesh_shape)
    program = export_program(_jitted(plan, mesh), *arguments(plan, mesh), mesh=plan.mesh_shape, platform=platform)
    (result,) = measure_exported([program], topology=topology)
    if isinstance(result, CompileError):
        raise result
    return result, f"{needed} virtual CPU devices" if topology is None else f"TPU topology {topology}"


def lower(plan: Plan, mesh: Any) -> Any:
    """The step as planned, lowered for a mesh, with the state donated."""
    return _jitted(plan, mesh).lower(*arguments(plan, mesh))


def arguments(plan: Plan, mesh: Any) -> list[jax.ShapeDtypeStruct]:
    """The flat arguments of the step, on a mesh."""
    assert plan.traced is not None
    return [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        for leaf, sharding in zip(plan.traced.inputs, shardings_of(plan.inputs, mesh), strict=True)
    ]


def _jitted(plan: Plan, mesh: Any) -> Any:
    """Of the flat arguments."""
    assert plan.traced is not None
    function = insert_constraints(plan.traced.closed, plan.sharding_constraints, mesh)
    return jax.jit(
        function,
        in_shardings=shardings_of(plan.inputs, mesh),
        out_shardings=shardings_of(plan.outputs, mesh),
        donate_argnums=tuple(sorted(set(plan.state.values()))),
        keep_unused=True,
    )
