"""Compile programs in processes of their own, with virtual CPU devices or for TPUs that are not here.

`export_program` makes bytes of a jitted step, `measure_exported` starts `compile_worker` on them and reads its results.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import penstock
from penstock.shard.errors import CompileError
from penstock.shard.hlo.analysis import Measured


def export_program(jitted: Any, *arguments: Any, mesh: Mapping[str, int], platform: str = "cpu") -> bytes:
    """A jitted function as a program for `measure_exported`. None of the devices of the mesh needs to be here.

    The bytes are a line of JSON, with the mesh, the platform and the positions of the donated arguments, and then what
    `jax.export` serialises, which has the shardings and, of donation, nothing that survives a call.

    Args:
      jitted: what `jax.jit` returns. Its `compiler_options` are left behind.
      arguments: trees of `jax.ShapeDtypeStruct`, their shardings on an `AbstractMesh` (or a `Mesh`) of `mesh`, with
        axes of type `Auto`.
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
    programs: Sequence[bytes], *, topology: str | None = None, processes: int = 1
) -> list[Measured | CompileError]:
    """Compile programs in processes of their own, and say what the compiler says of each.

    The processes have as many virtual CPU devices as the meshes ask for, or the TPU compiler; this one needs neither.

    Args:
      programs: of `export_program`.
      topology: of TPUs, as `jax.experimental.topologies` names them: "v5e:2x4" is 8 chips. Needs `pip install libtpu`,
        and no TPU. None compiles for virtual CPU devices.
      processes: that share the programs.

    Returns:
      For each program, in order, what it does, or the error for which it could not be compiled.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-") as name:
        folder = Path(name)
        for position, program in enumerate(programs):
            (folder / f"{position}.program").write_bytes(program)
        left = list(range(len(programs)))
        while left:  # a compiler that dies takes its process along, and the programs after go to another
            shares = [share for share in (left[first::processes] for first in range(processes)) if share]
            left = sorted(position for share in _compile(folder, shares, topology) for position in share)
        return [_result(folder / f"{position}.json") for position in range(len(programs))]


def _compile(folder: Path, shares: Sequence[Sequence[int]], topology: str | None) -> list[list[int]]:
    """Run a process for each share of the programs, and give back what they have left undone."""
    workers = []
    try:
        for share in shares:
            workers.append(_start(folder, share, topology))
        for worker in workers:
            worker.wait()
    finally:
        for worker in workers:
            _kill(worker)
    return [_undone(folder, share, worker.returncode) for share, worker in zip(shares, workers, strict=True)]


def _start(folder: Path, share: Sequence[int], topology: str | None) -> subprocess.Popen[bytes]:
    root = str(Path(penstock.__file__).parents[1])  # this penstock, however this process came by it
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), root])),
        # The compilers need no device, and one that is here may be in use.
        "JAX_PLATFORMS": "cpu",
        # libtpu looks for the TPU that it is on, over the network and in these variables.
        "TPU_SKIP_MDS_QUERY": "1",
        # It would be one process at a time otherwise, for the sake of a TPU that is not used.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    # -P: what lies in the current folder is not to be imported.
    command = [sys.executable, "-P", "-m", "penstock.shard.hlo.compile_worker", str(folder), topology or "", *map(str, share)]
    with (folder / f"{share[0]}.log").open("wb") as log:
        # In a session of its own, so that what it starts ends with it. It ends by itself when its standard input does,
        # should this process be killed.
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True)


def _kill(worker: subprocess.Popen[bytes]) -> None:
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
    """What to try again. The program at which the process died gets its last words; all do if it was no compiler's crash."""
    missing = [position for position in share if not (folder / f"{position}.json").exists()]
    crashed = status < 0
    end = f"signal {-status}" if crashed else f"status {status}"
    words = (folder / f"{share[0]}.log").read_text(errors="replace")[-2000:].strip()
    for position in missing[:1] if crashed else missing:
        write_result(folder, position, CompileError(f"the process that compiled it ended with {end}: {words}"))
    return missing[1:] if crashed else []


def write_result(folder: Path, position: int, result: Measured | CompileError) -> None:
    """Whole or not at all: its process may be killed."""
    text = result.to_json() if isinstance(result, Measured) else json.dumps({"error": str(result)})
    written = folder / f"{position}.part"
    written.write_text(text)
    written.replace(folder / f"{position}.json")


def _result(path: Path) -> Measured | CompileError:
    text = path.read_text()
    error = json.loads(text).get("error")
    return Measured.from_json(text) if error is None else CompileError(error)
