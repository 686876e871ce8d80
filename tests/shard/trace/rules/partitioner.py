"""Find by compiling which dimensions of a primitive XLA's partitioner shards without a collective, and keep a table of them.

    python -m tests.shard.trace.rules.partitioner [v5e:2x2 | h100:2]

writes the column of the compiler of CPUs, TPUs or GPUs into `partitioner.json`. A row is an equation of an example, by its
primitive and the shapes of its operands. An entry "0.1" is dimension 1 of operand 0: if it alone is sharded over two devices,
the compiled program has no collective.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tests.shard.trace.rules import (
    examples_contract,
    examples_elementwise,
    examples_index,
    examples_linalg,
    examples_random,
    examples_reduce,
    examples_shape,
)
from tests.shard.trace.rules.examples import EXAMPLES, drawn
from tests.shard.trace.rules.sharded import Equation, equations_of

from penstock._jax import program_text
from penstock.shard.compile_worker import topology_mesh
from penstock.shard.hlo.collectives import find_collectives
from penstock.shard.hlo.topologies import find_topology
from penstock.shard.trace.rules import Rule

MODULES = (
    *(examples_contract, examples_elementwise, examples_index, examples_linalg, examples_random, examples_reduce),
    examples_shape,
)
"""The modules whose examples are in `EXAMPLES`."""
TABLE = Path(__file__).with_name("partitioner.json")
Dim = tuple[int, int]
"""An operand and one of its dimensions."""


def rows(name: str) -> dict[str, Equation]:
    """Return the equations of the simplest example of a name, by their names in the table."""
    primitives, strategy = EXAMPLES[name]
    found = {}
    for one in equations_of(primitives, drawn(strategy, 1)[0]):
        shapes = ",".join(str(list(np.shape(operand))) for operand in one.operands)
        if list(dims_of(one)):
            found[f"{name}: {one.equation.primitive.name} {shapes}"] = one
    return found


def dims_of(one: Equation) -> Iterator[Dim]:
    """Yield the dimensions that two devices can share; sizes of groups count as none."""
    ragged = one.equation.primitive.name == "ragged_dot_general"
    for at, operand in enumerate(one.operands[:2] if ragged else one.operands):
        if not jax.numpy.issubdtype(operand.dtype, jax.dtypes.extended):
            yield from ((at, dim) for dim, size in enumerate(np.shape(operand)) if size and size % 2 == 0)


def in_rule(one: Equation, rule: Rule) -> list[str]:
    """Return the dimensions that a rule says are sharded without a collective."""
    factors = {(at, dim): rule.operands[at][dim] for at, dim in dims_of(one) if rule.operands[at]}
    return [f"{at}.{dim}" for (at, dim), factor in factors.items() if factor is not None and not rule.reduced(factor)]


def in_compiler(one: Equation, mesh: Mesh) -> list[str]:
    """Return the dimensions that a compiler shards without a collective, if it or the caller shards the results alike.

    Raises:
      NotImplementedError: the platform does not have the primitive.
    """
    return [f"{at}.{dim}" for at, dim in dims_of(one) if not all(_exchange(one, at, dim, mesh, alike) for alike in (False, True))]


def _exchange(one: Equation, at: int, dim: int, mesh: Mesh, alike: bool) -> bool:
    """Return whether devices exchange more than the number by which they agree to end a loop, or the sizes of groups.

    Args:
      alike: whether the caller shards the same dimension of all results that have it.
    """
    if one.equation.primitive.name == "reduce_xor" and dim in one.equation.params["axes"]:
        return True  # there is no such all-reduce: the CPU compiler raises an error, the GPU compiler aborts
    size, layout = np.shape(one.operands[at])[dim], NamedSharding(mesh, PartitionSpec(*[None] * dim, "two"))
    before = [layout if index == at else None for index in range(len(one.operands))]
    after = [layout if alike and np.shape(each)[dim : dim + 1] == (size,) else None for each in one.results]
    abstract = [jax.ShapeDtypeStruct(np.shape(operand), operand.dtype) for operand in one.operands]
    compiled = jax.jit(one.__call__, in_shardings=before, out_shardings=after).lower(*abstract).compile()
    small = one.operands[2].nbytes if one.equation.primitive.name == "ragged_dot_general" else 4
    return any(each.bytes > small for each in find_collectives(program_text(compiled), {"two": 2}))


def main(topology: str = "") -> None:
    found = find_topology(topology) if topology else None
    devices = jax.devices() if found is None else topology_mesh({"all": found.devices}, found).devices.tolist()
    mesh = Mesh(np.array(devices[:2]), ("two",), axis_types=(AxisType.Auto,))
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for name in EXAMPLES:
        for row, one in rows(name).items():
            try:
                table.setdefault(row, {})[found.platform if found else "cpu"] = " ".join(in_compiler(one, mesh))
            except (NotImplementedError, RuntimeError) as error:  # the platform does not have the primitive, or needs a device
                print(f"{row}: {error}")
    lines = (f"  {json.dumps(row)}: {json.dumps(table[row])}" for row in sorted(table))
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    main(*sys.argv[1:])
