"""Define a case: a train step of a real size, the devices for it, and layouts by hand; and compile it in one of these layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from penstock.bench.suites.shard.real.layouts import HandLayout
from penstock.bench.suites.shard.real.step import Constrain, Step, unconstrained
from penstock.bench.suites.shard.zoo.model import PyTree
from penstock.shard.errors import CompileError
from penstock.shard.hlo.analysis import Measured
from penstock.shard.hlo.compile_exported import export_program, measure_exported
from penstock.shard.mesh.shapes import abstract_mesh


@dataclass(frozen=True)
class Case:
    """A train step of a real size, and the layouts by hand for it.

    Attributes:
      name: such as "llama-7b-16", with the number of chips at the end.
      devices: the number of chips.
      topology: the chips, as `jax.experimental.topologies` names them.
      init: () → state. Use it with `jax.eval_shape`: the arrays do not fit in one machine.
      batch: the abstract batch, {"tokens" [B, T], "targets" [B, T]}, int32.
      make_step: returns the step, with a layout's constraints in it.
      layouts: the layouts by hand.
    """

    name: str
    devices: int
    topology: str
    init: Callable[[], PyTree]
    batch: PyTree
    make_step: Callable[[Constrain], Step]
    layouts: tuple[HandLayout, ...]

    @property
    def step(self) -> Step:
        """Return the step without any constraint, as it is given to the planner."""
        return self.make_step(unconstrained)


def jit_layout(case: Case, layout: HandLayout, mesh: Any) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
    """Return the step in a layout as a jitted function of its flat arguments, with the state donated, and those arguments.

    The function returns the leaves of the new state and then the loss.

    Args:
      mesh: a `Mesh` or an `AbstractMesh` with the axes of the layout.
    """
    state = jax.eval_shape(case.init)
    leaves, tree = jax.tree.flatten((state, case.batch))  # jax.export knows no named tuples of Optax
    shardings = jax.tree.leaves((layout.state_shardings(state, mesh), layout.batch_shardings(case.batch, mesh)))
    step = case.make_step(layout.constrain(mesh))

    def flat(*arguments: Array) -> list[Array]:
        return jax.tree.leaves(step(*jax.tree.unflatten(tree, arguments)))

    donated = len(jax.tree.leaves(state))
    jitted = jax.jit(
        flat,
        in_shardings=tuple(shardings),
        out_shardings=[*shardings[:donated], NamedSharding(mesh, PartitionSpec())],
        donate_argnums=tuple(range(donated)),
    )
    arguments = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for leaf, sharding in zip(leaves, shardings, strict=True)
    ]
    return jitted, arguments


def measure_layout(case: Case, layout: HandLayout, topology: str | None) -> Measured:
    """Compile the step in a layout, in another process, and return the compiler's figures.

    Args:
      topology: the chips; None compiles for virtual CPU devices.

    Raises:
      CompileError: it does not compile.
    """
    jitted, arguments = jit_layout(case, layout, abstract_mesh(layout.mesh))
    platform = "cpu" if topology is None else "tpu"
    program = export_program(jitted, *arguments, mesh=layout.mesh, platform=platform)
    (result,) = measure_exported([program], topology=topology)
    if isinstance(result, CompileError):
        raise result
    return result
