"""Compile a plan: for the devices of this process, for virtual CPU devices, or for TPUs that are not present.

In: a plan record, its step, and the devices or a TPU topology. Out: `Measured`, the compiler's figures.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax

from penstock.shard.errors import CompileError, compile_error
from penstock.shard.hlo.analysis import Measured, measure
from penstock.shard.hlo.compile_exported import FAST_COMPILE, export_program, measure_exported
from penstock.shard.hlo.topologies import default_topology, find_topology, topologies_of
from penstock.shard.jit import abstract_arguments, jit_flat
from penstock.shard.mesh.shapes import abstract_mesh, concrete_mesh, describe_mesh
from penstock.shard.record import PlanRecord
from penstock.shard.trace.step import TracedStep

_PATIENCE = 1800.0
"""Seconds after which a compiler in another process has failed. A TPU compiler takes seconds to a few minutes."""


def compile_plan(
    plan: PlanRecord, traced: TracedStep | None, devices: Sequence[Any] | None = None, topology: str | None = None
) -> Measured:
    """Return the compiler's figures for a plan. On a terminal it shows progress.

    Args:
      plan: the layouts.
      traced: the step; None if the plan was loaded.
      devices: the devices of the mesh, in order; None takes those that are present.
      topology: a TPU topology, as "v5e:2x4". None compiles for the devices, or for virtual CPU devices in another process if
        there are too few.

    Raises:
      ValueError: the plan was loaded and is not bound to its step, there is no such topology, or it has another number of
        devices.
      TypeError: the topology is not a string.
      CompileError: the step does not compile.
      CompilerFailedError: the compiler gave no answer: it is in use, crashed, was killed, or took too long.
    """
    if traced is None:
        raise ValueError("this plan was loaded from a file and has no step to compile; plan.bind(step, *args) first")
    if topology is not None and not isinstance(topology, str):
        raise TypeError(
            f"topology={topology!r}: a topology is text, as 'v5e:2x4'; None compiles for the devices that are present"
        )
    if topology is not None:
        check_topology(topology, plan.mesh_shape)
    where = describe_compiler(plan.device_count, devices, topology)
    start = time.perf_counter()
    try:
        with shown(f"compiling with {where}"):
            if topology is None and has_devices(plan.device_count, devices) and not _may_abort(plan, devices):
                measured = _compile_for_devices(plan, traced, devices)
            else:
                measured = _compile_in_worker(plan, traced, topology)
    except (CompileError, ImportError):
        raise
    except Exception as error:  # lowering fails for operations that the platform lacks, or that need certain devices
        raise compile_error(f"{type(error).__name__}: {error}") from error
    return replace(measured, seconds_to_compile=time.perf_counter() - start, compiled_for=where)


def check_topology(topology: str, mesh_shape: dict[str, int]) -> None:
    """Check that a topology exists and has as many devices as a mesh.

    Args:
      topology: its name.
      mesh_shape: sizes of the mesh axes.

    Raises:
      ValueError: it does not; the message names topologies that do.
    """
    found, needed = find_topology(topology), math.prod(mesh_shape.values())
    if found.devices != needed:
        same = default_topology(found.chip, needed)
        names = dict.fromkeys((*([same.name] if same else []), *topologies_of(needed)))
        raise ValueError(
            f"topology {topology} has {found.devices} devices, and the mesh {describe_mesh(mesh_shape)} needs {needed}; "
            f"topologies of {needed}: {', '.join(names) or 'none'}"
        )


def has_devices(count: int, devices: Sequence[Any] | None) -> bool:
    """Return whether the devices are given, or this process has enough of them.

    Args:
      count: the number of devices of the mesh.
      devices: the devices, or None.
    """
    return devices is not None or jax.device_count() >= count


def _may_abort(plan: PlanRecord, devices: Sequence[Any] | None) -> bool:
    """Return whether XLA may abort the process that compiles a plan.

    On CPUs, its partitioner does so for some layouts of grouped convolutions that it chooses itself.
    """
    platform = devices[0].platform if devices else jax.default_backend()
    return plan.left_to_compiler and platform == "cpu"


def describe_compiler(count: int, devices: Sequence[Any] | None, topology: str | None) -> str:
    """Return the compiler that `compile_plan` uses, and its devices, in words.

    Args:
      count: the number of devices of the mesh.
      devices: the devices, or None.
      topology: a TPU topology, or None.
    """
    if topology is not None:
        return f"the TPU compiler for {topology}"
    if not has_devices(count, devices):
        return f"the CPU compiler for {count} virtual devices"
    platform = devices[0].platform if devices else jax.default_backend()
    return f"the {platform.upper()} compiler for {count} of this process's devices"


def _compile_for_devices(plan: PlanRecord, traced: TracedStep, devices: Sequence[Any] | None) -> Measured:
    """Compile in this process, for its devices."""
    mesh = concrete_mesh(plan.mesh_shape, devices)
    lowered = jit_flat(plan, traced, mesh).lower(*abstract_arguments(plan, traced, mesh))
    compiled = lowered.compile(FAST_COMPILE if mesh.devices.flat[0].platform == "cpu" else None)
    return measure(compiled, plan.mesh_shape)


def _compile_in_worker(plan: PlanRecord, traced: TracedStep, topology: str | None) -> Measured:
    """Compile in another process, for virtual CPU devices or for TPUs."""
    mesh = abstract_mesh(plan.mesh_shape)
    platform = "cpu" if topology is None else "tpu"
    arguments = abstract_arguments(plan, traced, mesh)
    program = export_program(jit_flat(plan, traced, mesh), *arguments, mesh=plan.mesh_shape, platform=platform)
    (result,) = measure_exported([program], topology=topology, timeout=_PATIENCE)
    if isinstance(result, CompileError):
        raise result
    return result


_SECONDS = 2.0
"""Nothing is shown of what takes less than this."""


@contextmanager
def shown(what: str) -> Iterator[None]:
    """Show a line with the elapsed time on standard error, if it is a terminal and the body takes more than two seconds.

    The line is gone afterwards.

    Args:
      what: what the body does, such as "compiling".
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    display = Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True)
    display.add_task(escape(what), total=None)
    ended = threading.Event()

    def show_if_slow() -> None:
        if not ended.wait(_SECONDS):
            display.start()

    waiting = threading.Thread(target=show_if_slow, name="penstock-progress", daemon=True)
    waiting.start()
    try:
        yield
    finally:
        ended.set()
        waiting.join()
        display.stop()
