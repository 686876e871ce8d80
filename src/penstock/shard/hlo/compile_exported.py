"""Compile programs in other processes: for virtual CPU devices, or for TPUs that are not present.

In: a jitted step on abstract arguments, which `export_program` serializes. Out: the compiler's figures, which `measure_exported`
reads from the `compile_worker` processes that it starts.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import penstock
from penstock.errors import CompileError, CompilerFailedError, CompilerMemoryError
from penstock.shard.hlo.analysis import Measured

FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Options of XLA:CPU that skip LLVM's expensive passes. The optimised HLO, which is all that penstock reads, does not change."""

COMPILING = "penstock compiles"
"""The line in the log of a process after which all is about the program that it compiles."""

_WITHOUT_TPU = {
    # The compilers need no device, and a device that is present may be in use.
    "JAX_PLATFORMS": "cpu",
    # Otherwise libtpu asks the network's metadata server for the TPU of this machine.
    "TPU_SKIP_MDS_QUERY": "1",
    # Otherwise libtpu lets only one process run at a time, to protect a TPU that is not used here.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def export_program(jitted: Any, *arguments: Any, mesh: Mapping[str, int], platform: str = "cpu") -> bytes:
    """Serialize a jitted function for `measure_exported`. The devices of the mesh need not be present.

    The bytes are a line of JSON with the mesh, the platform and the positions of the donated arguments, followed by the bytes of
    `jax.export`. Those contain the shardings. They do not preserve donation, so the line records it.

    Args:
      jitted: the result of `jax.jit`. Its `compiler_options` are not exported.
      arguments: trees of `jax.ShapeDtypeStruct`, with shardings on an `AbstractMesh` (or a `Mesh`) of `mesh`, whose axes have
        type `Auto`.
      mesh: sizes of the mesh axes, in order.
      platform: "cpu", or "tpu" for a topology.
    """
    import jax
    import jax.export

    traced = jitted.trace(*arguments)
    donated = [position for position, leaf in enumerate(jax.tree.leaves(traced.args_info)) if leaf.donated]
    header = {"mesh": dict(mesh), "donated": donated, "platform": platform}
    exported = jax.export.export(jitted, platforms=[platform])(*arguments)
    return json.dumps(header).encode() + b"\n" + bytes(exported.serialize())


def measure_exported(
    programs: Sequence[bytes], *, topology: str | None = None, processes: int = 1, timeout: float | None = None
) -> list[Measured | CompileError]:
    """Compile programs in other processes, and return the compiler's figures for each.

    The processes have as many virtual CPU devices as the meshes need, or the TPU compiler. This process needs neither.

    Args:
      programs: results of `export_program`.
      topology: a TPU topology, as `jax.experimental.topologies` names it: "v5e:2x4" has 8 chips. It needs `pip install libtpu`,
        and no TPU. None compiles for virtual CPU devices.
      processes: the number of processes that share the programs.
      timeout: the seconds after which a process is ended, and its programs have failed. None waits for as long as it takes.

    Returns:
      For each program, in order, the compiler's figures, or the error if it could not be compiled: a `CompilerFailedError` if
      the compiler gave no answer.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-") as name:
        folder = Path(name)
        for position, program in enumerate(programs):
            (folder / f"{position}.program").write_bytes(program)
        left = list(range(len(programs)))
        while left:  # if the compiler crashes, so does its process; the remaining programs go to a new one
            shares = [share for share in (left[first::processes] for first in range(processes)) if share]
            left = sorted(position for share in _run_workers(folder, shares, topology, timeout) for position in share)
        return [read_result(folder / f"{position}.json") for position in range(len(programs))]


def _run_workers(folder: Path, shares: Sequence[Sequence[int]], topology: str | None, timeout: float | None) -> list[list[int]]:
    """Run a process for each share of the programs, and return the programs that have to be tried again."""
    workers = []
    latest = None if timeout is None else time.monotonic() + timeout
    try:
        for share in shares:
            workers.append(_start(folder, share, topology))
        for worker in workers:
            worker.wait(None if latest is None else max(0.0, latest - time.monotonic()))
    except subprocess.TimeoutExpired:
        for position in itertools.chain.from_iterable(shares):
            if not (folder / f"{position}.json").exists():
                write_result(folder, position, CompilerFailedError(f"the compiler gave no answer in {timeout:,.0f} s"))
    finally:
        for worker in workers:
            _kill(worker)
    return [_undone(folder, share, worker.returncode) for share, worker in zip(shares, workers, strict=True)]


def _start(folder: Path, share: Sequence[int], topology: str | None) -> subprocess.Popen[bytes]:
    """Start a process that compiles some of the programs."""
    root = str(Path(penstock.__file__).parents[1])  # so that the worker imports the same penstock, installed or not
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), root])),
        **_WITHOUT_TPU,
    }
    # -P: nothing is imported from the current folder.
    command = [sys.executable, "-P", "-m", "penstock.shard.hlo.compile_worker", str(folder), topology or "", *map(str, share)]
    with (folder / f"{share[0]}.log").open("wb") as log:
        # It gets its own session, so that killing the process group also ends its children. It exits when its standard input
        # is closed, in case this process is killed.
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True)


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


def _undone(folder: Path, share: Sequence[int], status: int) -> list[int]:
    """Return the programs to try again after a process has ended.

    If the process crashed, the error of the program that it was compiling has the end of its log. If it exited with an error,
    this holds for all programs without a result.
    """
    missing = [position for position in share if not (folder / f"{position}.json").exists()]
    crashed = status < 0
    log = (folder / f"{share[0]}.log").read_text(errors="replace").rpartition(COMPILING)[2][-2000:].strip()
    for position in missing[:1] if crashed else missing:
        write_result(
            folder, position, CompilerFailedError(f"the process that compiled it {_describe_end(status)}\n{log}".strip())
        )
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
    """Write a result atomically, as the process may be killed at any time.

    Args:
      folder: where the results go.
      position: number of the program, or another name.
      result: the figures, or the error.
    """
    if isinstance(result, Measured):
        text = result.to_json()
    else:
        needed = {"needed": result.needed} if isinstance(result, CompilerMemoryError) else {}
        text = json.dumps({"error": str(result), "kind": type(result).__name__, **needed})
    part = folder / f"{position}.part"
    part.write_text(text)
    part.replace(folder / f"{position}.json")


def read_result(path: Path) -> Measured | CompileError:
    """Read a result that `write_result` wrote.

    Args:
      path: the file.
    """
    text = path.read_text()
    read = json.loads(text)
    if "error" not in read:
        return Measured.from_json(text)
    if read["kind"] == CompilerMemoryError.__name__:
        return CompilerMemoryError(read["error"], read["needed"])
    return (CompilerFailedError if read["kind"] == CompilerFailedError.__name__ else CompileError)(read["error"])
