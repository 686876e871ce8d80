"""Choose the compiler that decides whether a plan fits its memory limit, and compile for devices that need not be present.

A plan for TPUs is judged by the TPU compiler, and a plan for GPUs by the GPU compiler, for which no such device has to be
present. The CPU compiler needs up to several times the memory for the same plan. `compile_plans` compiles in this process for its
devices. For virtual CPU devices or a topology, it exports the program, which `measure_exported` compiles in `compile_worker`
processes, several at once.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from penstock._atomic_write import replace as replace_file
from penstock.errors import CompileError, CompilerFailedError, CompilerMemoryError
from penstock.shard.hlo.analysis import Measured, compile_error, measure
from penstock.shard.hlo.topologies import (
    OWN_HARDWARE,
    Topology,
    default_topology,
    describe_missing_compiler,
    examples,
    find_topology,
    topologies_of,
)
from penstock.shard.jit import abstract_arguments, jit_flat
from penstock.shard.mesh.explicit_axes import automatic_axes
from penstock.shard.mesh.hardware import DATASHEETS
from penstock.shard.mesh.shapes import abstract_mesh, concrete_mesh, describe_mesh, describe_uneven_slices, inner_sizes
from penstock.shard.record import PlanRecord
from penstock.shard.trace.step import TracedStep

_CPU_EXCESS = 7
"""How many times the memory of the TPU compiler the CPU compiler needs at most, for the same plan.

Measured on steps of the zoo (`penstock bench shard`) on 8 devices, with JAX 0.12 and libtpu 0.0.52: 1.2 to 1.7 times for the MLP
and the two towers, 2.8 to 3 for the ViT and the mixture of experts, 4 to 4.5 for GPT-2 and Llama, 6.5 for the LSTM. Such small
steps also keep arrays in the vector memory of the TPU, which the compiler does not count."""

_TIMEOUT = 1800.0
"""Seconds after which a compiler in another process has failed. A TPU compiler takes seconds to a few minutes."""

_AT_ONCE = 4
"""The most processes that compile at once: each takes up to some GiB of memory."""

_SHOWN_FROM = 2.0
"""Seconds after which progress is shown."""

FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Options of XLA:CPU that skip LLVM's expensive passes. The optimised HLO, which is all that penstock reads, does not change."""

COMPILING = "penstock compiles"
"""The line in the log of a process after which all lines are about the program that it compiles."""

_WITHOUT_TPU = {
    # The compilers need no device, and a device that is present may be in use.
    "JAX_PLATFORMS": "cpu",
    # Otherwise libtpu asks the network's metadata server for the TPU of this machine.
    "TPU_SKIP_MDS_QUERY": "1",
    # Otherwise libtpu lets only one process run at a time, to protect a TPU that is not used here.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclass(frozen=True)
class Compiler:
    """The compiler that decides whether plans fit, if there is one.

    Attributes:
      name: the compiler and its devices, in words; "" if nothing is compiled.
      compile: returns the compiler's figures for each of some plans, or its error; None if nothing is compiled.
      platform: the platform that it compiles for: "tpu", "gpu" or "cpu".
      remark: why nothing is compiled, or by how much the figures differ from the plan's own devices; "" if neither.
    """

    name: str
    compile: Callable[[Sequence[PlanRecord]], list[Measured | CompileError]] | None
    platform: str
    remark: str = ""


def read_check(check: Any) -> Topology | None:
    """Return the topology that the argument `check` names; None if it names none.

    Raises:
      TypeError: it is not None, a bool or a string.
      ValueError: there is no topology of that name; the message has names that work.
    """
    if check is None or isinstance(check, bool):
        return None
    if not isinstance(check, str):
        raise TypeError(f"check={check!r}: give True, False, None, or a topology as text, such as 'v5e:2x4' or 'h100:8'")
    return find_topology(check)


def hardware_of(topology: Topology) -> str:
    """Return the name of the hardware that plans for a topology are for, if the user gives none.

    Raises:
      ValueError: the chip of the topology has no datasheet.
    """
    if topology.hardware is None:
        raise ValueError(
            f'check="{topology.name}" needs {OWN_HARDWARE}, as there is no datasheet of {topology.chip} here; topologies that '
            f"need none: {', '.join(examples())}"
        )
    return topology.hardware


def match_topology(topology: Topology, mesh_shape: dict[str, int], hardware: str) -> None:
    """Check that a plan can be compiled for a topology, and run there.

    Raises:
      ValueError: it has another number of devices than the mesh, or its chip is not the hardware.
      CompileError: its compiler is not installed.
    """
    check_topology(topology, mesh_shape)
    if hardware in DATASHEETS and hardware != topology.hardware:
        same = default_topology(hardware, topology.devices)
        instead = f'check="{same.name}"' if same else "check=True"
        other = f'hardware="{topology.hardware}"' if topology.hardware else OWN_HARDWARE
        raise ValueError(
            f'check="{topology.name}" compiles for {topology.hardware or topology.chip}, and the plan is for hardware {hardware}'
            f": give {instead}, or {other}"
        )
    if missing := describe_missing_compiler(topology):
        raise CompileError(f'check="{topology.name}": {missing}')


def choose_compiler(
    check: bool | str | None, hardware: str, count: int, traced: TracedStep, devices: Sequence[Any] | None
) -> Compiler:
    """Return the compiler that decides whether plans fit.

    It compiles for the topology if `check` is one, and else for the devices of this process if these are of the right kind. If
    they are not, plans for TPUs and GPUs are compiled for a topology of as many devices. Without its compiler, they are compiled
    for CPUs if `check` is True, and not at all if it is None.
    """

    def using(topology: Topology | None, remark: str = "") -> Compiler:
        name = describe_compiler(count, devices, topology)
        here = _platform(devices) if has_devices(count, devices) else "cpu"
        platform = topology.platform if topology is not None else here
        if remark and platform == "cpu":
            remark += f"; the CPU compiler needs up to {_CPU_EXCESS} times the memory for the same plan"
        return Compiler(name, lambda plans: compile_plans(plans, traced, devices, topology), platform, remark)

    if check is False:
        return Compiler("", None, _platform(devices), "check=False compiles nothing")
    if isinstance(check, str):
        return using(find_topology(check))
    wanted = "tpu" if hardware.startswith("tpu-") else "gpu" if hardware in DATASHEETS else None
    if wanted is None or (_platform(devices) == wanted and has_devices(count, devices)):
        return using(None)
    topology = default_topology(hardware, count)
    missing = f"no topology of {hardware} has {count} devices" if topology is None else describe_missing_compiler(topology)
    if not missing:
        return using(topology)
    return using(None, missing) if check else Compiler("", None, wanted, missing)


def _platform(devices: Sequence[Any] | None) -> str:
    """Return the platform of the given devices, or of the default device."""
    name = devices[0].platform if devices else jax.default_backend()
    return name if name in ("cpu", "tpu") else "gpu"


def describe_excess_of_cpu(hardware: str, compiled_for: str) -> str:
    """Return the end of a sentence about the excess memory of the CPU compiler; "" if a plan was compiled for its hardware."""
    if hardware not in DATASHEETS or "CPU compiler" not in compiled_for:
        return ""
    return f"; it needs up to {_CPU_EXCESS} times the memory of the {'TPU' if hardware.startswith('tpu-') else 'GPU'} compiler"


# Compile a plan.


def compile_plan(
    plan: PlanRecord, traced: TracedStep | None, devices: Sequence[Any] | None = None, topology: Topology | None = None
) -> Measured:
    """Return the compiler's figures for a plan. Arguments and errors are the same as for `compile_plans`.

    Raises:
      CompileError: the step does not compile, or the compiler is not installed.
      CompilerFailedError: the compiler gave no answer: it is in use, crashed, was killed, or took too long.
    """
    (result,) = compile_plans([plan], traced, devices, topology)
    if isinstance(result, CompileError):
        raise result
    return result


def compile_plans(
    plans: Sequence[PlanRecord],
    traced: TracedStep | None,
    devices: Sequence[Any] | None = None,
    topology: Topology | None = None,
) -> list[Measured | CompileError]:
    """Return, for each plan, the compiler's figures, or its error. On a terminal it shows progress.

    Args:
      plans: plans of one step, for as many devices each.
      traced: the step; None if the plans were loaded.
      devices: the devices of the mesh, in order; None takes those that are present.
      topology: the devices to compile for, which need not be present. None compiles for `devices`, or for virtual CPU devices in
        other processes if there are too few.

    Raises:
      ValueError: the plans were loaded and are not bound to their step, or the topology has another number of devices.
    """
    if traced is None:
        raise ValueError("this plan was loaded from a file and has no step to compile; plan.bind(step, *args) first")
    if topology is not None:
        for plan in plans:
            check_topology(topology, plan.mesh_shape)
    where = describe_compiler(plans[0].device_count, devices, topology)
    found: dict[int, Measured | CompileError] = {}
    programs: dict[int, bytes] = {}
    with shown(f"compiling with {where}" if len(plans) == 1 else f"compiling {len(plans)} plans with {where}"):
        for at, plan in enumerate(plans):
            here = topology is None and has_devices(plan.device_count, devices) and not _may_abort(plan, devices)
            try:
                if here:
                    found[at] = _compile_for_devices(plan, traced, devices)
                else:
                    programs[at] = _export(plan, traced, topology)
            except CompileError as error:
                found[at] = error
            except ImportError:
                raise
            except Exception as error:  # lowering fails for operations that the platform lacks, or that need certain devices
                found[at] = compile_error(f"{type(error).__name__}: {error}")
        results = measure_exported(
            list(programs.values()), topology=None if topology is None else topology.name, timeout=_TIMEOUT
        )
    found |= dict(zip(programs, results, strict=True))
    constants = traced.constant_bytes
    return [
        replace(each, compiled_for=where, constants=constants) if isinstance(each, Measured) else each
        for _, each in sorted(found.items())
    ]


def check_topology(topology: Topology, mesh_shape: dict[str, int]) -> None:
    """Check that a topology has as many devices as a mesh, and that the mesh divides into its slices.

    Raises:
      ValueError: it has not, and the message names topologies that have; or the mesh does not divide.
    """
    needed = math.prod(mesh_shape.values())
    if topology.devices != needed:
        same = default_topology(topology.chip, needed)
        names = dict.fromkeys((*([same.name] if same else []), *topologies_of(needed)))
        raise ValueError(
            f"topology {topology.name} has {topology.devices} devices, and the mesh {describe_mesh(mesh_shape)} needs {needed}; "
            f"topologies of {needed}: {', '.join(names) or 'none'}"
        )
    size = needed // topology.domains
    if topology.platform == "tpu" and inner_sizes(tuple(mesh_shape.values()), size) is None:
        raise ValueError(f"topology {topology.name}: {describe_uneven_slices(mesh_shape, topology.domains, size)}")


def has_devices(count: int, devices: Sequence[Any] | None) -> bool:
    """Return whether the devices are given, or this process has enough of them."""
    return devices is not None or jax.device_count() >= count


def _may_abort(plan: PlanRecord, devices: Sequence[Any] | None) -> bool:
    """Return whether XLA may abort the process that compiles a plan.

    On CPUs, its partitioner does so for some layouts of grouped convolutions that it chooses itself.
    """
    return plan.left_to_compiler and _platform(devices) == "cpu"


def describe_compiler(count: int, devices: Sequence[Any] | None, topology: Topology | None) -> str:
    """Return the compiler that `compile_plan` uses, and its devices, in words."""
    if topology is not None:
        return str(topology)
    if not has_devices(count, devices):
        return f"the CPU compiler for {count} virtual devices"
    platform = devices[0].platform if devices else jax.default_backend()
    return f"the {platform.upper()} compiler for {count} of this process's devices"


def _compile_for_devices(plan: PlanRecord, traced: TracedStep, devices: Sequence[Any] | None) -> Measured:
    """Compile in this process, for its devices."""
    start = time.perf_counter()
    mesh = concrete_mesh(plan.mesh_shape, devices)
    with automatic_axes(mesh):
        lowered = jit_flat(plan, traced, mesh).lower(*abstract_arguments(plan, traced, mesh))
    compiled = lowered.compile(FAST_COMPILE if mesh.devices.flat[0].platform == "cpu" else None)
    return measure(compiled, plan.mesh_shape, seconds_to_compile=time.perf_counter() - start)


def _export(plan: PlanRecord, traced: TracedStep, topology: Topology | None) -> bytes:
    """Export a plan's program for `measure_exported`, for virtual CPU devices or for a topology."""
    mesh, platform = abstract_mesh(plan.mesh_shape), "cpu" if topology is None else topology.platform
    arguments = abstract_arguments(plan, traced, mesh)
    with automatic_axes(mesh):
        return export_program(jit_flat(plan, traced, mesh), *arguments, mesh=plan.mesh_shape, platform=platform)


@contextlib.contextmanager
def shown(what: str) -> Iterator[None]:
    """Show a line on standard error with what the body does and the elapsed time, and remove it at the end.

    Nothing is shown if standard error is not a terminal, or if the body takes less than two seconds.
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
        if not ended.wait(_SHOWN_FROM):
            display.start()

    waiting = threading.Thread(target=show_if_slow, name="penstock-progress", daemon=True)
    waiting.start()
    try:
        yield
    finally:
        ended.set()
        waiting.join()
        display.stop()


# Compile exported programs in other processes.


def export_program(jitted: Any, *arguments: Any, mesh: Mapping[str, int], platform: str = "cpu") -> bytes:
    """Serialize a jitted function for `measure_exported`. The devices of the mesh need not be present.

    The bytes are a line of JSON, followed by the bytes of `jax.export`, which contain the shardings but not the donation. The
    line has the mesh, the platform and the positions of the donated arguments.

    Args:
      jitted: the result of `jax.jit`. Its `compiler_options` are not exported.
      arguments: trees of `jax.ShapeDtypeStruct`, with shardings on an `AbstractMesh` (or a `Mesh`) of `mesh`, whose axes have
        type `Auto`.
      mesh: sizes of the mesh axes, in order.
      platform: "cpu", or "tpu" or "gpu" for a topology.
    """
    import jax.export

    traced = jitted.trace(*arguments)
    donated = [position for position, leaf in enumerate(jax.tree.leaves(traced.args_info)) if leaf.donated]
    header = {"mesh": dict(mesh), "donated": donated, "platform": platform}
    exported = jax.export.export(jitted, platforms=["cuda" if platform == "gpu" else platform])(*arguments)
    return json.dumps(header).encode() + b"\n" + bytes(exported.serialize())


def measure_exported(
    programs: Sequence[bytes], *, topology: str | None = None, timeout: float | None = None
) -> list[Measured | CompileError]:
    """Compile programs in other processes, and return the compiler's figures for each.

    They have as many virtual CPU devices as the meshes need, or the compiler for the topology. This process needs neither. Up to
    four programs are compiled at once, but no more than this process has cores.

    Args:
      programs: results of `export_program`.
      topology: a topology, whose devices need not be present (`penstock.shard.hlo.topologies.find_topology`): "v5e:2x4" has 8
        chips, and "h100:8" 8 GPUs. It needs `pip install "penstock[tpu]"` or `"penstock[gpu-compiler]"`. None compiles for
        virtual CPU devices.
      timeout: the seconds after which a process is ended, and its programs have failed. None sets no limit.

    Returns:
      For each program, in order, the compiler's figures, or the error if it could not be compiled: a `CompilerFailedError` if
      the compiler gave no answer.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-") as name:
        folder = Path(name)
        for position, program in enumerate(programs):
            (folder / f"{position}.program").write_bytes(program)
        width = min(_AT_ONCE, len(programs), _cores())
        shares = [list(range(len(programs)))[at::width] for at in range(width)]
        while shares:  # a crash of the compiler ends its process; a new one compiles the remaining programs
            shares = _run_workers(folder, shares, topology, timeout)
        return [read_result(folder / f"{position}.json") for position in range(len(programs))]


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run_workers(folder: Path, shares: Sequence[Sequence[int]], topology: str | None, timeout: float | None) -> list[list[int]]:
    """Compile each share of the programs in a process of its own, and return the programs of each share to try again."""
    workers: list[subprocess.Popen[bytes]] = []
    end = None if timeout is None else time.monotonic() + timeout
    try:
        for share in shares:
            workers.append(_start(folder, share, topology))
        for worker, share in zip(workers, shares, strict=True):
            try:
                worker.wait(None if end is None else max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                for position in share:
                    if not (folder / f"{position}.json").exists():
                        write_result(folder, position, CompilerFailedError(f"the compiler gave no answer in {timeout:,.0f} s"))
    finally:
        for worker in workers:
            _kill(worker)
    left = [_unfinished(folder, share, worker.returncode) for worker, share in zip(workers, shares, strict=True)]
    return list(filter(None, left))


def _start(folder: Path, positions: Sequence[int], topology: str | None) -> subprocess.Popen[bytes]:
    """Start a process that compiles some of the programs."""
    root = str(Path(__file__).parents[2])  # so that the worker imports the same penstock, installed or not
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), root]))
    environment = {**os.environ, "PYTHONPATH": path, **_WITHOUT_TPU}
    # -P: nothing is imported from the current folder.
    command = [sys.executable, "-P", "-m", "penstock.shard.compile_worker", str(folder), topology or "", *map(str, positions)]
    with _log_of(folder, positions).open("wb") as log:
        # It gets its own session, so that killing the process group also ends its children. It exits when its standard input
        # is closed, in case this process is killed.
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True)


def _log_of(folder: Path, positions: Sequence[int]) -> Path:
    """Return the file with the output of the process that compiles these programs."""
    return folder / f"{positions[0]}.log"


def _kill(worker: subprocess.Popen[bytes]) -> None:
    """Kill a worker and its children, if it still runs, and close its input."""
    if worker.poll() is None:
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
        else:
            worker.kill()
        worker.wait()
    if worker.stdin is not None:
        worker.stdin.close()


def _unfinished(folder: Path, positions: Sequence[int], status: int) -> list[int]:
    """Return the programs to try again after a process has ended.

    The program that a crashed process was compiling fails, with the end of the log in its error. So do all programs without a
    result if the process exited with an error.
    """
    missing = [position for position in positions if not (folder / f"{position}.json").exists()]
    crashed = status < 0
    log = _log_of(folder, positions).read_text(errors="replace").rpartition(COMPILING)[2][-2000:].strip()
    error = CompilerFailedError(f"the process that compiled it {_describe_end(status)}\n{log}".strip())
    for position in missing[:1] if crashed else missing:
        write_result(folder, position, error)
    return missing[1:] if crashed else []


def _describe_end(status: int) -> str:
    """Return how a process ended without a result, and what to do, as the end of a sentence."""
    if status >= 0:
        return f"ended with status {status}"
    if status == -signal.SIGKILL:
        return f"was killed (signal {-status}), perhaps because the machine ran out of memory: free some, and plan again"
    if status in (-signal.SIGINT, -signal.SIGTERM):
        return f"was ended from outside (signal {-status}): plan again"
    return (
        f"crashed (signal {-status}), which is a fault of the compiler: plan again, and if it crashes again, use another "
        "version of jaxlib, or of libtpu if it compiles for a TPU"
    )


def write_result(folder: Path, position: int | str, result: Measured | CompileError) -> None:
    """Write a result atomically, because the process may be killed at any time."""
    if isinstance(result, Measured):
        text = result.to_json()
    else:
        needed = {"needed": result.needed} if isinstance(result, CompilerMemoryError) else {}
        text = json.dumps({"error": str(result), "kind": type(result).__name__, **needed})
    replace_file(folder / f"{position}.json", text)


def read_result(path: Path) -> Measured | CompileError:
    """Read a result that `write_result` wrote."""
    text = path.read_text()
    read = json.loads(text)
    if "error" not in read:
        return Measured.from_json(text)
    if read["kind"] == CompilerMemoryError.__name__:
        return CompilerMemoryError(read["error"], read["needed"])
    return (CompilerFailedError if read["kind"] == CompilerFailedError.__name__ else CompileError)(read["error"])
