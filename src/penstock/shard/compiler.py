"""Compile a plan: for the devices of this process, for virtual CPU devices, or for TPUs that are not present.

In: a plan record, its step, and the devices or a TPU topology. Out: `Measured`, the compiler's figures.

Choose the compiler that decides whether a plan fits its memory limit.

In: the `check` of `ps.plan`, the hardware and the devices. Out: a `Compiler`. A plan for TPUs is judged by the TPU compiler, for
which no TPU has to be present. The CPU compiler needs up to several times the memory for the same plan.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax

from penstock.errors import CompileError
from penstock.shard.hlo.analysis import Measured, compile_error, measure
from penstock.shard.hlo.compile_exported import FAST_COMPILE, export_program, measure_exported
from penstock.shard.hlo.topologies import (
    OWN_HARDWARE,
    Topology,
    default_topology,
    examples,
    find_topology,
    topologies_of,
    tpu_compiler_is_installed,
)
from penstock.shard.jit import abstract_arguments, jit_flat
from penstock.shard.mesh.hardware import DATASHEETS
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


_INSTALL = 'pip install "penstock[tpu]"'
_CPU_EXCESS = 7
"""How many times the memory of the TPU compiler the CPU compiler needs at most, for the same plan.

Measured on steps of the zoo (`penstock bench shard`) on 8 devices, with JAX 0.12 and libtpu 0.0.52: 1.2 to 1.7 times for the MLP
and the two towers, 2.8 to 3 for the ViT and the mixture of experts, 4 to 4.5 for GPT-2 and Llama, 6.5 for the LSTM. Such small
steps also keep arrays in the vector memory of the TPU, which the compiler does not count."""


@dataclass(frozen=True)
class Compiler:
    """The compiler that decides whether plans fit, if there is one.

    Attributes:
      name: the compiler and its devices, in words; "" if nothing is compiled.
      compile: returns the compiler's figures for a plan; None if nothing is compiled.
      platform: the platform that it compiles for: "tpu", "gpu" or "cpu".
      remark: why nothing is compiled, or by how much the figures differ from those of the plan's own devices; "" if neither.
    """

    name: str
    compile: Callable[[PlanRecord], Measured] | None
    platform: str
    remark: str = ""


def read_check(check: Any) -> Topology | None:
    """Return the topology that the argument `check` names; None if it names none.

    Args:
      check: the argument of `ps.plan`.

    Raises:
      TypeError: it is not None, a bool or a string.
      ValueError: there is no topology of that name; the message has names that work.
    """
    if check is None or isinstance(check, bool):
        return None
    if not isinstance(check, str):
        raise TypeError(f"check={check!r}: give True, False, None, or a TPU topology as text, such as 'v5e:2x4'")
    return find_topology(check)


def hardware_of(topology: Topology) -> str:
    """Return the name of the hardware that plans for a topology are for, if the user gives none.

    Args:
      topology: the topology.

    Raises:
      ValueError: there is no datasheet of its chip.
    """
    if topology.hardware is None:
        raise ValueError(
            f'check="{topology.name}" needs {OWN_HARDWARE}, as there is no datasheet of {topology.chip} here; topologies that '
            f"need none: {', '.join(examples())}"
        )
    return topology.hardware


def match_topology(topology: Topology, mesh_shape: dict[str, int], hardware: str) -> None:
    """Check that a plan can be compiled for a topology, and run there.

    Args:
      topology: the topology.
      mesh_shape: sizes of the mesh axes.
      hardware: the name of the hardware that the plan is for.

    Raises:
      ValueError: it has another number of devices than the mesh, or its chip is not the hardware.
      CompileError: the TPU compiler is not installed.
    """
    check_topology(topology.name, mesh_shape)
    if hardware in DATASHEETS and hardware != topology.hardware:
        same = default_topology(hardware.removeprefix("tpu-"), topology.devices)
        instead = f'check="{same.name}"' if same else "check=True"
        other = f'hardware="{topology.hardware}"' if topology.hardware else OWN_HARDWARE
        raise ValueError(
            f'check="{topology.name}" compiles for {topology.hardware or topology.chip}, and the plan is for hardware {hardware}'
            f": give {instead}, or {other}"
        )
    if not tpu_compiler_is_installed():
        raise CompileError(f'check="{topology.name}" needs the TPU compiler, which is not installed: {_INSTALL}')


def choose_compiler(
    check: bool | str | None, hardware: str, count: int, traced: TracedStep, devices: Sequence[Any] | None
) -> Compiler:
    """Return the compiler that decides whether plans fit.

    It is that of the topology if `check` is one, and else that of the devices of this process if these are of the right kind.
    If they are not, plans for TPUs are compiled for a topology of as many devices; without the TPU compiler they are compiled for
    CPUs if `check` is True, and not at all if it is None.

    Args:
      check: as in `ps.plan`.
      hardware: the name of the hardware that the plan is for.
      count: the number of devices.
      traced: the step.
      devices: the devices of the mesh, if they were given.
    """

    def using(topology: str | None, remark: str = "") -> Compiler:
        name = describe_compiler(count, devices, topology)
        platform = "tpu" if topology is not None else _platform(devices)
        return Compiler(name, lambda plan: compile_plan(plan, traced, devices, topology), platform, remark)

    if check is False:
        return Compiler("", None, _platform(devices), "check=False compiles nothing")
    if isinstance(check, str):
        return using(find_topology(check).name)
    wanted = "tpu" if hardware.startswith("tpu-") else "gpu" if hardware in DATASHEETS else None
    if wanted is None or (_platform(devices) == wanted and has_devices(count, devices)):
        return using(None)
    if wanted == "gpu":
        return using(None, "the compiler of the GPU is not here; that of the CPU can need several times its memory")
    topology = default_topology(hardware.removeprefix("tpu-"), count)
    if topology is not None and tpu_compiler_is_installed():
        return using(topology.name)
    missing = (
        f"no topology of the TPU compiler has {count} devices"
        if topology is None
        else f"the TPU compiler is not installed ({_INSTALL})"
    )
    if check:
        return using(None, f"{missing}; the CPU compiler needs up to {_CPU_EXCESS} times the memory for the same plan")
    return Compiler("", None, "tpu", missing)


def _platform(devices: Sequence[Any] | None) -> str:
    """Return the platform of the given devices, or of the default device."""
    name = devices[0].platform if devices else jax.default_backend()
    return name if name in ("cpu", "tpu") else "gpu"


def describe_excess_of_cpu(hardware: str, compiled_for: str) -> str:
    """Return a part of a sentence that says how the CPU compiler's figures differ from those of the hardware's own compiler.

    Args:
      hardware: the name of the hardware.
      compiled_for: what a plan was compiled for, in words.

    Returns:
      The words; "" if the plan was compiled for its hardware.
    """
    if hardware not in DATASHEETS or "CPU compiler" not in compiled_for:
        return ""
    return f"; it needs up to {_CPU_EXCESS} times the memory of the {'TPU' if hardware.startswith('tpu-') else 'GPU'} compiler"
