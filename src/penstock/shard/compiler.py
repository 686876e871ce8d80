"""Choose the compiler that decides whether a plan fits its memory limit.

In: the `check` of `ps.plan`, the hardware and the devices. Out: a `Compiler`. A plan for TPUs is judged by the TPU compiler, for
which no TPU has to be present. The CPU compiler needs up to several times the memory for the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from penstock.shard.compile_plan import check_topology, compile_plan, describe_compiler, has_devices
from penstock.shard.errors import CompileError
from penstock.shard.hlo.analysis import Measured
from penstock.shard.hlo.topologies import (
    OWN_HARDWARE,
    Topology,
    default_topology,
    examples,
    find_topology,
    tpu_compiler_is_installed,
)
from penstock.shard.mesh.datasheets import DATASHEETS
from penstock.shard.record import PlanRecord
from penstock.shard.trace.step import TracedStep

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
