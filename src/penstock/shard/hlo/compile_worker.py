"""The process in which `measure_exported` compiles: `python -m penstock.shard.hlo.compile_worker FOLDER TOPOLOGY PROGRAM…`."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from penstock.shard.errors import CompileError
from penstock.shard.hlo.analysis import Measured, measure
from penstock.shard.hlo.compile_exported import write_result
from penstock.shard.mesh.shapes import describe_mesh

_Meshes = Callable[[Mapping[str, int]], Mesh]


def main(folder: Path, topology: str, positions: list[int]) -> None:
    """Compile FOLDER/7.program and so on, in that order, each to FOLDER/7.json."""
    programs = {position: _read(folder / f"{position}.program") for position in positions}
    # float64 arguments stay what they are; of the program itself nothing is traced here.
    jax.config.update("jax_enable_x64", True)  # JAX's own, as below
    if not topology:
        most = max(math.prod(header["mesh"].values()) for header, _ in programs.values())
        jax.config.update("jax_num_cpu_devices", most)
    for position, (header, serialised) in programs.items():
        result: Measured | CompileError
        try:
            result = _measured(header, serialised, topology)
        except Exception as error:  # whatever it is, the caller gets it as the result of this program
            result = CompileError(str(error) if isinstance(error, CompileError) else f"{type(error).__name__}: {error}")
        write_result(folder, position, result)


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    header, serialised = path.read_bytes().split(b"\n", 1)
    return json.loads(header), serialised


def _measured(header: Mapping[str, Any], serialised: bytes, topology: str) -> Measured:
    wanted = "tpu" if topology else "cpu"
    if header["platform"] != wanted:
        raise CompileError(
            f"the program was exported for {header['platform']}, and is to be compiled for {topology or 'virtual CPU devices'}: "
            f'export it with platform="{wanted}"'
        )
    sizes: dict[str, int] = header["mesh"]
    mesh = _tpus(sizes, topology) if topology else _cpus(sizes)
    lowered = _lower(jax.export.deserialize(bytearray(serialised)), mesh, header["donated"])
    start = time.perf_counter()
    compiled = lowered.compile()
    return measure(compiled, sizes, seconds_to_compile=time.perf_counter() - start)


def _cpus(sizes: Mapping[str, int]) -> Mesh:
    shape, names = tuple(sizes.values()), tuple(sizes)
    auto = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, names, axis_types=auto, devices=jax.devices()[: math.prod(shape)])


def _tpus(sizes: Mapping[str, int], name: str) -> Mesh:
    from jax.experimental import topologies

    # On TPUs, JAX drives the two cores of a v4 chip as one device. Unless told, the compiler takes them for two; of no other
    # kind does it have to be told, and most have no such configuration.
    chips = {"chip_config_name": "megacore"} if re.match(r"(tpu )?v4\b", name, re.IGNORECASE) else {}
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=name, **chips)
    except RuntimeError as error:
        if "not installed" not in str(error):
            raise CompileError(f'topology "{name}": {error}') from None
        raise CompileError(f'topology "{name}" needs the TPU compiler, which is not here: pip install libtpu') from None
    needed = math.prod(sizes.values())
    if len(topology.devices) != needed:
        raise CompileError(
            f"topology {name} has {len(topology.devices)} devices, and the mesh {describe_mesh(sizes)} needs {needed}: "
            f"name a topology of {needed} devices"
        )
    return topologies.make_mesh(topology, tuple(sizes.values()), tuple(sizes))


def _lower(exported: jax.export.Exported, mesh: Mesh, donated: list[int]) -> Any:
    """The exported function with the arguments that it uses, each where it lay and donated if it was."""
    avals = exported.in_avals
    # jit leaves out what a function does not use, and so must this one: they would be arguments of the program.
    # Keys of random numbers stay, as they cannot be made of zeros.
    used = set(exported.module_kept_var_idx) | {
        position for position, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    }
    kept = sorted(used)
    shardings = list(exported.in_shardings_jax(mesh))
    if not any(shardings):  # nothing else would say which devices
        everywhere = NamedSharding(mesh, PartitionSpec())
        shardings = [everywhere] * len(shardings)

    def function(*given: Any) -> list[Any]:
        values = dict(zip(kept, given, strict=True))
        leaves = [
            values[position] if position in used else jnp.zeros(aval.shape, aval.dtype) for position, aval in enumerate(avals)
        ]
        arguments, keywords = jax.tree.unflatten(exported.in_tree, leaves)
        return jax.tree.leaves(exported.call(*arguments, **keywords))

    abstract = [jax.ShapeDtypeStruct(avals[each].shape, avals[each].dtype, sharding=shardings[each]) for each in kept]
    jitted = jax.jit(
        function,
        out_shardings=list(exported.out_shardings_jax(mesh)),
        donate_argnums=[position for position, each in enumerate(kept) if each in donated],
    )
    return jitted.lower(*abstract)


def _end_with_parent() -> None:
    os.read(0, 1)  # not sys.stdin, whose lock a waiting thread would hold when the interpreter ends
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    main(Path(sys.argv[1]), sys.argv[2], [int(position) for position in sys.argv[3:]])
