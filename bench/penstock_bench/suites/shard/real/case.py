"""Define a case (a train step of a real size, its devices, and layouts by hand), and compile it in one of these layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from penstock.errors import CompileError
from penstock.shard.hlo.analysis import Measured
from penstock.shard.mesh.shapes import abstract_mesh
from penstock_bench.suites.shard.flat_step import FlatStep, compile_elsewhere, flat_step
from penstock_bench.suites.shard.real.layouts import HandLayout
from penstock_bench.suites.shard.real.step import Constrain, Step, unconstrained
from penstock_bench.suites.shard.zoo.model import PyTree


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


def jit_layout(case: Case, layout: HandLayout, mesh: Any) -> FlatStep:
    """Return the step in a layout.

    Args:
      mesh: a `Mesh` or an `AbstractMesh` with the axes of the layout.
    """
    state = jax.eval_shape(case.init)
    shardings = (layout.state_shardings(state, mesh), layout.batch_shardings(case.batch, mesh))
    return flat_step(case.make_step(layout.constrain(mesh)), state, case.batch, *shardings, mesh)


def measure_layout(case: Case, layout: HandLayout, topology: str | None, kept: Path | None = None) -> Measured:
    """Compile the step in a layout, in another process, and return the compiler's figures.

    Args:
      topology: the chips; None compiles for virtual CPU devices.
      kept: a folder for the figures, as for `compile_elsewhere`.

    Raises:
      CompileError: it does not compile.
    """
    (result,) = compile_elsewhere([jit_layout(case, layout, abstract_mesh(layout.mesh))], topology, kept)
    if isinstance(result, CompileError):
        raise result
    return result
