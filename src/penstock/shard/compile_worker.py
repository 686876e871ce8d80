"""Compile exported programs in this process: `python -m penstock.shard.compile_worker FOLDER TOPOLOGY PROGRAM…`.

Program 7 is FOLDER/7.program, which `export_program` wrote. Its result, the compiler's figures or an error, is written to
FOLDER/7.json. `measure_exported` starts these processes.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penstock.errors import CompileError
from penstock.shard.compiler import COMPILING, FAST_COMPILE, write_result
from penstock.shard.hlo.analysis import Measured, compile_error, measure
from penstock.shard.hlo.topologies import Topology, describe_missing_compiler, find_topology, gpu_target
from penstock.shard.mesh.shapes import concrete_mesh, describe_mesh, order_devices


def main(folder: Path, topology: str, positions: list[int]) -> None:
    """Compile programs, and write the result of each.

    Args:
      folder: the folder of the programs and the results.
      topology: the name of a topology; "" compiles for virtual CPU devices.
      positions: numbers of the programs, in the order in which to compile them.
    """
    programs = {position: _read(folder / f"{position}.program") for position in positions}
    # float64 arguments keep their dtype. The program itself is not traced here, so this does not change it.
    jax.config.update("jax_enable_x64", True)
    if not topology:
        most = max(math.prod(header["mesh"].values()) for header, _ in programs.values())
        jax.config.update("jax_num_cpu_devices", most)
    for position, (header, serialised) in programs.items():
        result: Measured | CompileError
        try:
            result = _compile_and_measure(header, serialised, find_topology(topology) if topology else None)
        except Exception as error:  # any error is the result of this program, and is reported to the caller
            result = error if isinstance(error, CompileError) else compile_error(f"{type(error).__name__}: {error}")
        write_result(folder, position, result)


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    """Read the header and the exported function that `export_program` wrote."""
    header, serialised = path.read_bytes().split(b"\n", 1)
    return json.loads(header), serialised


def _compile_and_measure(header: Mapping[str, Any], serialised: bytes, topology: Topology | None) -> Measured:
    """Compile one program and return the compiler's figures."""
    wanted = topology.platform if topology else "cpu"
    if header["platform"] != wanted:
        raise CompileError(
            f"the program was exported for {header['platform']}, and is to be compiled by {topology or 'the CPU compiler'}: "
            f'export it with platform="{wanted}"'
        )
    sizes: dict[str, int] = header["mesh"]
    mesh = topology_mesh(sizes, topology) if topology else concrete_mesh(sizes)
    lowered = _lower(jax.export.deserialize(bytearray(serialised)), mesh, header["donated"])
    print(COMPILING, file=sys.stderr, flush=True)
    start = time.perf_counter()
    compiled = lowered.compile(dict(_OPTIONS[wanted]))
    domain = topology.devices // topology.domains if topology and topology.domains > 1 else 0
    return measure(compiled, sizes, domain=domain, seconds_to_compile=time.perf_counter() - start)


_OPTIONS: dict[str, dict[str, Any]] = {"cpu": FAST_COMPILE, "tpu": {}, "gpu": {"xla_gpu_autotune_level": 0}}
"""Options of the compilers. Without a GPU, there is nothing to tune on."""


def topology_mesh(sizes: Mapping[str, int], topology: Topology) -> Mesh:
    """Return a mesh of the devices of a topology, which need not be present.

    Raises:
      CompileError: its compiler is not installed or refuses it, or it has another number of devices than the mesh.
    """
    from jax.experimental import topologies

    if missing := describe_missing_compiler(topology):
        raise CompileError(f'topology "{topology.name}": {missing}')
    if topology.devices != math.prod(sizes.values()):
        raise CompileError(
            f"topology {topology.name} has {topology.devices} devices, and the mesh {describe_mesh(sizes)} needs "
            f"{math.prod(sizes.values())}"
        )
    if topology.platform == "gpu":
        shape = f"{topology.domains}x1x{topology.devices // topology.domains}"  # slices × hosts × devices
        options: dict[str, Any] = {"platform": "cuda", "target_config": gpu_target(topology.chip), "topology": shape}
    else:
        options = {"platform": "tpu", "topology_name": topology.slice_name}
        # JAX uses the two cores of a TPU v4 chip as one device ("megacore"). By default, the compiler treats them as two. Other
        # chips do not need the setting, and most do not have it.
        options |= {"chip_config_name": "megacore"} if topology.chip == "v4" else {}
        options |= {"num_slices": topology.domains} if topology.domains > 1 else {}
    try:
        devices = list(topologies.get_topology_desc(**options).devices)
        return concrete_mesh(sizes, order_devices(sizes, devices))
    except (RuntimeError, ValueError) as error:
        raise compile_error(f'topology "{topology.name}": {error}') from None


def _lower(exported: jax.export.Exported, mesh: Mesh, donated: list[int]) -> Any:
    """Lower an exported function with the arguments that it uses, with their shardings and their donation."""
    avals = exported.in_avals
    # jit drops unused arguments. This function drops them too: otherwise they would become arguments of the program. Random keys
    # are kept, because they cannot be replaced by zeros.
    keys = {position for position, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jax.dtypes.extended)}
    kept = sorted(keys.union(exported.module_kept_var_idx))
    shardings = list(exported.in_shardings_jax(mesh))
    if not any(shardings):  # without any sharding, the devices would be unknown
        shardings = [NamedSharding(mesh, PartitionSpec())] * len(shardings)

    def function(*given: Any) -> list[Any]:
        values = dict(zip(kept, given, strict=True))
        leaves = [values[each] if each in values else jnp.zeros(aval.shape, aval.dtype) for each, aval in enumerate(avals)]
        arguments, keywords = jax.tree.unflatten(exported.in_tree, leaves)
        return jax.tree.leaves(exported.call(*arguments, **keywords))

    abstract = [jax.ShapeDtypeStruct(avals[each].shape, avals[each].dtype, sharding=shardings[each]) for each in kept]
    jitted = jax.jit(
        function,
        out_shardings=list(exported.out_shardings_jax(mesh)),
        donate_argnums=[position for position, each in enumerate(kept) if each in donated],
    )
    return jitted.lower(*abstract)


def _exit_with_parent() -> None:
    """Exit when the parent closes this process's standard input, or dies."""
    os.read(0, 1)  # not sys.stdin: the interpreter could not end while this thread holds its lock
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    main(Path(sys.argv[1]), sys.argv[2], [int(position) for position in sys.argv[3:]])
