"""A step that follows a plan: the same program, with the layouts of the plan written into it.

The step is traced and evaluated again, equation by equation; where the plan chose a layout, `with_sharding_constraint` says
so to the compiler. For an input that is stored in one layout and used in another that is the all-gather of FSDP; for a
gradient in the layout of what it updates, the reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from penstock._faults import SCATTER_OF_A_SLICE
from penstock._jax import ClosedJaxpr, constants_as_arguments
from penstock.shard.trace.flat_program import INLINED, Path

Spec = tuple[tuple[str, ...], ...]
"""Of each dimension the mesh axes that shard it, major first."""


@dataclass(frozen=True)
class ShardingConstraints:
    """The layouts inside of a step.

    Attributes:
      operands: of an equation, of each operand: the layout that its value lies in, then the one in which it is
        wanted; None for what is left to the compiler.
      results: of an equation, of each result: the layout in which it is made, if that is not partial, then that in
        which it is kept.
    """

    operands: Mapping[Path, tuple[tuple[Spec, ...] | None, ...]] = field(default_factory=dict)
    results: Mapping[Path, tuple[tuple[Spec, ...] | None, ...]] = field(default_factory=dict)


def insert_constraints(closed: ClosedJaxpr, sharding_constraints: ShardingConstraints, mesh: Any) -> Callable[..., list[Any]]:
    """A function of the flat arguments of a traced step, that returns its flat results.

    Args:
      closed: the step.
      steering: layouts inside of it.
      mesh: the layouts are on.
    """

    def run(*flat: Any) -> list[Any]:
        return _Evaluation(sharding_constraints, mesh).evaluate(closed.jaxpr, closed.consts, flat, (), {})

    return run


_Constrained = dict[tuple[int, Spec], tuple[Any, Any]]
"""Of the id of an array and a layout: the array, so that the id stays its own, and the same in that layout."""


class _Evaluation:
    """Evaluates a program and those nested in it."""

    def __init__(self, sharding_constraints: ShardingConstraints, mesh: Any):
        self._steering = sharding_constraints
        self._mesh = mesh
        may_be_cpu = not isinstance(mesh, jax.sharding.Mesh) or mesh.devices.flat[0].platform == "cpu"
        self._keep_scatters_apart = may_be_cpu and SCATTER_OF_A_SLICE.present

    def evaluate(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], path: Path, constrained: _Constrained
    ) -> list[Any]:
        """The results of a program.

        Args:
          constrained: what was laid out so far, where that can be read here; more is added.
        """
        environment: dict[Any, Any] = {}

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else environment[atom]

        def constrain_operand(atom: Any, specs: tuple[Spec, ...] | None) -> Any:
            """The value in the last of some layouts, by way of the others; each step is made once."""
            array = given = read(atom)
            for spec in specs or ():
                key = (id(given), spec)
                if key not in constrained:
                    constrained[key] = (given, self._constrain(array, spec))
                array = constrained[key][1]
            return array

        environment.update(zip(jaxpr.constvars, consts, strict=True))
        environment.update(zip(jaxpr.invars, args, strict=True))
        for number, equation in enumerate(jaxpr.eqns):
            here = (*path, number)
            wanted = self._steering.operands.get(here)
            if wanted is None:
                operands = [read(atom) for atom in equation.invars]
            else:
                operands = [constrain_operand(atom, specs) for atom, specs in zip(equation.invars, wanted, strict=True)]
            if wanted is not None and equation.primitive.name.startswith("scatter") and self._keep_scatters_apart:
                operands[0] = jax.lax.optimization_barrier(operands[0])
            results = self._equation(equation, operands, here, constrained)
            specs = self._steering.results.get(here, (None,) * len(results))
            for variable, result, chain in zip(equation.outvars, results, specs, strict=True):
                for spec in chain or ():
                    result = self._constrain(result, spec)
                environment[variable] = result
                if chain:
                    constrained[id(result), chain[-1]] = (result, result)
        return [read(atom) for atom in jaxpr.outvars]

    def _constrain(self, array: Any, spec: Spec) -> Any:
        return jax.lax.with_sharding_constraint(
            array, NamedSharding(self._mesh, PartitionSpec(*(entry or None for entry in spec)))
        )

    def _equation(self, equation: Any, operands: list[Any], path: Path, constrained: _Constrained) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        with equation.ctx.manager:
            if name in ("checkpoint", "remat", "remat2"):
                return self._checkpoint(equation, operands, path, constrained)
            if name in INLINED and not name.startswith("custom_"):
                closed = params[INLINED[name]]
                return self.evaluate(closed.jaxpr, closed.consts, operands, path, constrained)
            if name in ("scan", "while", "cond"):
                return equation.primitive.bind(*operands, **{**params, **self._bodies(name, params, path)})
            results = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(params))
        return list(results) if equation.primitive.multiple_results else [results]

    def _checkpoint(self, equation: Any, operands: list[Any], path: Path, constrained: _Constrained) -> list[Any]:
        """What is computed again for the backward pass.

        What was laid out in the forward pass, a weight that was gathered, goes in beside the operand that it was made of: inside,
        it would be gathered once more, which a plan does not count.
        """
        params = equation.params
        inner, wanted = self._traced(params["jaxpr"], (), path)
        ready = [(at, spec) for at, spec in wanted if (id(operands[at]), spec) in constrained]
        if ready:
            inner, _ = self._traced(params["jaxpr"], (), path, ready)
        beside = [constrained[id(operands[at]), spec][1] for at, spec in ready]
        given = [*inner.consts, *operands, *beside]  # it has an open jaxpr, which holds no constants
        return equation.primitive.bind(*given, **{**params, "jaxpr": constants_as_arguments(inner.jaxpr)})

    def _bodies(self, name: str, params: Mapping[str, Any], path: Path) -> dict[str, Any]:
        """The nested programs of a loop or a choice, with layouts in them."""
        if name == "cond":
            branches = enumerate(params["branches"])
            return {"branches": tuple(self._traced(each.jaxpr, each.consts, (*path, f"branch{n}"))[0] for n, each in branches)}
        parts = {"jaxpr": "body"} if name == "scan" else {"cond_jaxpr": "cond", "body_jaxpr": "body"}
        return {key: self._traced(params[key].jaxpr, params[key].consts, (*path, part))[0] for key, part in parts.items()}

    def _traced(
        self, jaxpr: Any, consts: Sequence[Any], path: Path, ready: Sequence[tuple[int, Spec]] = ()
    ) -> tuple[ClosedJaxpr, list[tuple[int, Spec]]]:
        """A nested program with layouts in it, and which of its operands it lays out how.

        Args:
          ready: operands, by place, and layouts in which they are given as well, as further operands.
        """
        avals = [
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=getattr(v.aval, "weak_type", False)) for v in jaxpr.invars
        ]
        wanted: list[tuple[int, Spec]] = []

        def body(*args: Any) -> list[Any]:
            own, beside = args[: len(avals)], args[len(avals) :]
            constrained = {(id(own[at]), spec): (own[at], other) for (at, spec), other in zip(ready, beside, strict=True)}
            results = self.evaluate(jaxpr, consts, own, path, constrained)
            indices = {id(each): at for at, each in enumerate(own)}
            wanted.extend((indices[key], spec) for key, spec in constrained if key in indices)
            return results

        return jax.make_jaxpr(body)(*avals, *(avals[at] for at, _ in ready)), wanted
