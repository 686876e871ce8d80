"""Insert the layouts of a plan into a step, as sharding constraints.

The jaxpr is evaluated equation by equation; `with_sharding_constraint` is called where the plan chose a layout. Where a weight
is stored in one layout and used in another, the compiler inserts the all-gather of FSDP (arXiv:1910.02054). Where a gradient gets
the layout of the state that it updates, the compiler inserts the reduce-scatter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from penstock._jax import ClosedJaxpr, constants_as_arguments
from penstock._jaxlib_faults import SCATTER_OF_A_SLICE
from penstock.shard.trace.calls import CHECKPOINTS, LOOP_BODIES, PLAIN_CALLS, Call, find_call, open_jaxpr
from penstock.shard.trace.flat_program import DEBUG, Path

Spec = tuple[tuple[str, ...], ...]
"""For each dimension of an array, the mesh axes that shard it, major first: (("data", "model"), ())."""


@dataclass(frozen=True)
class ShardingConstraints:
    """The layouts inside of a step.

    Each entry is a chain of specs, applied in order, or None where the compiler decides.

    Attributes:
      operands: path of an equation → for each operand, the layout of its value, then the layout in which it is used. After a
        layout that is there twice in a row (`split_again`) is a barrier: what follows is done again for this equation, because
        the copy for an earlier one is not kept.
      results: path of an equation → for each result, the layout in which it is computed, unless it is a partial sum, then the
        layout of its axis group.
      at_start: for each flat argument, its layout from the start of the step, or None; () if all are None.
    """

    operands: Mapping[Path, tuple[tuple[Spec, ...] | None, ...]] = field(default_factory=dict)
    results: Mapping[Path, tuple[tuple[Spec, ...] | None, ...]] = field(default_factory=dict)
    at_start: tuple[Spec | None, ...] = ()


def split_again(chain: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the layouts of a chain that several equations share, and those that are made again for one.

    >>> split_again(["a", "b"]), split_again(["a", "a", "b"])
    ((['a', 'b'], []), (['a'], ['b']))
    """
    for number, (one, following) in enumerate(itertools.pairwise(chain), start=1):
        if one == following:
            return chain[:number], chain[number + 1 :]
    return chain, chain[:0]


def insert_constraints(
    closed: ClosedJaxpr, sharding_constraints: ShardingConstraints, mesh: Any, callbacks: bool = True
) -> Callable[..., list[Any]]:
    """Return a function from the flat arguments of a traced step to its flat results, with sharding constraints inside.

    Args:
      callbacks: whether to keep the calls of `jax.debug.print`, `jax.debug.callback` and `jax.pure_callback`. Without them, the
        function can be compiled where there is no host to call. The results of `jax.pure_callback` are then zeros, and the
        compiler drops what only callbacks read.
    """

    def run(*flat: Any) -> list[Any]:
        specs = sharding_constraints.at_start or (None,) * len(flat)
        arguments = [each if spec is None else _constrain(each, (spec,), mesh) for each, spec in zip(flat, specs, strict=True)]
        return _Evaluation(sharding_constraints, mesh, callbacks).evaluate(closed.jaxpr, closed.consts, arguments, (), {})

    return run


_Constrained = dict[tuple[int, Spec], tuple[Any, Any]]
"""(id of an array, layout) → (the array, the same array in that layout). The reference keeps the id from being used again."""


class _Evaluation:
    """An evaluation of a jaxpr and its nested jaxprs, with sharding constraints."""

    def __init__(self, sharding_constraints: ShardingConstraints, mesh: Any, callbacks: bool):
        self._callbacks = callbacks
        self._sharding_constraints = sharding_constraints
        self._mesh = mesh
        self._context = jax.sharding.get_abstract_mesh()
        may_be_cpu = not isinstance(mesh, jax.sharding.Mesh) or mesh.devices.flat[0].platform == "cpu"
        self._keep_scatters_apart = may_be_cpu and SCATTER_OF_A_SLICE.present

    def evaluate(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], path: Path, constrained: _Constrained
    ) -> list[Any]:
        """Evaluate a jaxpr and return its results.

        Args:
          path: where it is nested in the step; () for the step itself.
          constrained: the constrained arrays so far in the jaxpr around it. New ones are added.
        """
        environment: dict[Any, Any] = {}

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else environment[atom]

        def constrain_operand(atom: Any, specs: Sequence[Spec]) -> Any:
            """Return a value after a chain of constraints; each of them is inserted once."""
            array = given = read(atom)
            for spec in specs:
                key = (id(given), spec)
                if key not in constrained:
                    constrained[key] = (given, _constrain(array, (spec,), self._mesh))
                array = constrained[key][1]
            return array

        environment.update(zip(jaxpr.constvars, consts, strict=True))
        environment.update(zip(jaxpr.invars, args, strict=True))
        for number, equation in enumerate(jaxpr.eqns):
            if equation.primitive.name in DEBUG and not self._callbacks:
                continue
            here = (*path, number)
            chains = self._sharding_constraints.operands.get(here)
            specs = [split_again(chain or ()) for chain in chains or (None,) * len(equation.invars)]
            operands = [constrain_operand(atom, shared) for atom, (shared, _) in zip(equation.invars, specs, strict=True)]
            if any(again for _, again in specs):
                # The other operands are behind the barrier too, so that a gather is not done before they are known.
                operands = jax.lax.optimization_barrier(operands)
                operands = [_constrain(array, again, self._mesh) for array, (_, again) in zip(operands, specs, strict=True)]
            if chains is not None and equation.primitive.name.startswith("scatter") and self._keep_scatters_apart:
                operands[0] = jax.lax.optimization_barrier(operands[0])
            results = self._equation(equation, operands, here, constrained)
            layouts = self._sharding_constraints.results.get(here, (None,) * len(results))
            for variable, result, chain in zip(equation.outvars, results, layouts, strict=True):
                environment[variable] = result = _constrain(result, chain or (), self._mesh)
                if chain:
                    constrained[id(result), chain[-1]] = (result, result)
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Any, operands: list[Any], path: Path, constrained: _Constrained) -> list[Any]:
        """Evaluate one equation, with constraints in the jaxprs nested in it."""
        name, params = equation.primitive.name, equation.params
        # An equation keeps the mesh that `jax.set_mesh` had where it was traced. JAX refuses operands on another one.
        with equation.ctx.manager, jax.sharding.use_abstract_mesh(self._context):
            if name == "pure_callback" and not self._callbacks:
                # Zeros, behind a barrier, so that nothing is simplified because they are zeros.
                zeros = (jax.numpy.zeros(each.aval.shape, each.aval.dtype) for each in equation.outvars)
                return list(map(jax.lax.optimization_barrier, zeros))
            call = find_call(equation)
            if call is not None and name in PLAIN_CALLS:
                return self.evaluate(open_jaxpr(call.jaxpr), call.consts, operands, path, constrained)
            if call is not None:
                operands, params = self._call(call, equation, operands, path)
            elif name in ("scan", "while", "cond"):
                params = {**params, **self._bodies(name, params, path)}
            results = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(params))
        return list(results) if equation.primitive.multiple_results else [results]

    def _call(self, call: Call, equation: Any, operands: list[Any], path: Path) -> tuple[list[Any], dict[str, Any]]:
        """Return the operands and parameters of a call, with constraints in the jaxpr that it calls.

        Nothing else of the call changes. So the backward pass of a `jax.checkpoint` computes its body, and the gathers of its
        weights, again. The derivative of a `custom_jvp`, `custom_vjp` or linear solve has no constraints: it is only used if the
        caller differentiates the planned step.
        """
        inner = self._trace_nested(open_jaxpr(call.jaxpr), call.consts, path)
        if hasattr(call.jaxpr, "consts") and equation.primitive.name not in CHECKPOINTS:
            return operands, call.with_jaxpr(equation.params, inner)
        # The equation takes a jaxpr that holds no constants.
        return [*inner.consts, *operands], call.with_jaxpr(equation.params, constants_as_arguments(inner.jaxpr))

    def _bodies(self, name: str, params: Mapping[str, Any], path: Path) -> dict[str, Any]:
        """Return the nested jaxprs of a `scan`, `while` or `cond`, with constraints in them, as parameters of the equation."""
        if name == "cond":
            branches = enumerate(params["branches"])
            return {"branches": tuple(self._trace_nested(each.jaxpr, each.consts, (*path, f"branch{n}")) for n, each in branches)}
        nested = LOOP_BODIES[name].items()
        return {key: self._trace_nested(params[key].jaxpr, params[key].consts, (*path, part)) for key, part in nested}

    def _trace_nested(self, jaxpr: Any, consts: Sequence[Any], path: Path) -> ClosedJaxpr:
        """Trace a nested jaxpr with constraints in it."""
        avals = [
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=getattr(v.aval, "weak_type", False)) for v in jaxpr.invars
        ]
        return jax.make_jaxpr(lambda *args: self.evaluate(jaxpr, consts, args, path, {}))(*avals)


def _constrain(array: Any, specs: Sequence[Spec], mesh: Any) -> Any:
    """Return an array after a chain of sharding constraints."""
    for spec in specs:
        sharding = NamedSharding(mesh, PartitionSpec(*(entry or None for entry in spec)))
        array = jax.lax.with_sharding_constraint(array, sharding)
    return array
