"""Run one equation sharded as its rule says, and compare its results and its collectives with the rule."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tests.shard.trace.rules.examples import Example

from penstock._jax import program_text
from penstock.shard.hlo.collectives import Collective, find_collectives
from penstock.shard.trace.calls import find_call, open_jaxpr
from penstock.shard.trace.rules import Rule, find_rule

_FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclass(frozen=True, eq=False)
class Equation:
    """An equation with its rule, and with its operands and results in a run on one device."""

    equation: Any
    rule: Rule
    operands: tuple[Any, ...]
    results: tuple[Any, ...]

    def __call__(self, *operands: Any) -> list[Any]:
        return _results(self.equation, operands)

    def __str__(self) -> str:
        return f"{self.equation}\n{self.rule}"

    def factors(self, shards: int = 2) -> list[int]:
        """Return the factors that `shards` divides."""
        held = {factor for dims in (*self.rule.operands, *self.rule.results) for factor in dims}
        return [factor for factor, size in enumerate(self.rule.sizes) if factor in held and size and size % shards == 0]


def equations_of(primitives: Collection[str], given: Example) -> list[Equation]:
    """Return the equations of some primitives in the program of an example and in the programs that it calls."""
    closed = jax.make_jaxpr(given.function)(*given.arguments)
    equations: list[Any] = []

    def run(*arguments: Any) -> list[tuple[Any, Any]]:
        found: list[tuple[Any, Any, Any]] = []
        _evaluate(closed.jaxpr, closed.consts, arguments, primitives, found)
        equations[:] = [equation for equation, _, _ in found]
        return [(operands, results) for _, operands, results in found]

    values = jax.jit(run)(*jax.tree.leaves(given.arguments))
    return [Equation(equation, rule(equation), *map(tuple, each)) for equation, each in zip(equations, values, strict=True)]


def rule(equation: Any, compiler: str = "cpu") -> Rule:
    """Return the rule of an equation for a compiler."""
    operands, results = ([atom.aval for atom in atoms] for atoms in (equation.invars, equation.outvars))
    return find_rule(equation.primitive.name, equation.params, operands, results).on(compiler)


def _evaluate(
    jaxpr: Any, consts: Any, arguments: Any, primitives: Collection[str], found: list[tuple[Any, Any, Any]]
) -> list[Any]:
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        name = equation.primitive.name
        if (call := find_call(equation)) is not None:
            given = [operands[index] for index in call.operands]
            results = _evaluate(open_jaxpr(call.jaxpr), call.consts, given, primitives, found)
        else:
            results = _results(equation, operands)
            if name in primitives:
                found.append((equation, operands, results))
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _results(equation: Any, operands: Sequence[Any]) -> list[Any]:
    results = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
    return list(results) if equation.primitive.multiple_results else [results]


Case = tuple[Equation, Mapping[int, int]]
"""An equation with its number of shards, 2 or 4, by factor."""

_AXES = {2: "two", 4: "four"}


def assert_labels_every_dimension_once(one: Equation) -> None:
    """Check that a rule has an entry for each dimension, no factor twice in an array, and sizes that divide the dimensions."""
    for atoms, dims in ((one.equation.invars, one.rule.operands), (one.equation.outvars, one.rule.results)):
        for atom, factors in zip(atoms, dims, strict=True):
            held = [factor for factor in factors if factor is not None]
            assert len(held) == len(set(held)), one
            for size, factor in zip(atom.aval.shape, factors, strict=True):
                assert factor is None or (size == 0 if one.rule.sizes[factor] == 0 else size % one.rule.sizes[factor] == 0), one


def assert_hold(cases: Sequence[Case]) -> None:
    """Check that sharded equations have the results of one device, and the collectives that their rules predict.

    There are no collectives if no factor is reduced, else at most an all-reduce of the partial results over the axes of the
    reduced factors. The cases without are compiled as one program a mesh, which takes a small part of the time; if that has a
    collective, each is compiled alone, so that the error names one.
    """
    for mesh in ({2}, {2, 4}):
        silent = [case for case in cases if _is_silent(*case) and set(case[1].values()) == mesh]
        if silent and (collectives := _run(silent)):
            for case in silent:
                _assert_collectives(*case, _run([case]))
            raise AssertionError(f"equations have collectives together, and none alone: {silent}: {collectives}")
    for case in cases:
        if not _is_silent(*case):
            _assert_collectives(*case, _run([case]))


_LOOPS = ("random_gamma", "igamma", "igamma_grad_a", "igammac", "regularized_incomplete_beta")
"""Primitives that are loops, at whose end devices exchange a flag."""
_EXCHANGES = ("ragged_dot_general", *_LOOPS)


def _is_silent(one: Equation, shards: Mapping[int, int]) -> bool:
    """Return whether no collective is expected, and operands keep the equation apart from others in its program."""
    exchanges = one.equation.primitive.name in _EXCHANGES
    return bool(one.operands) and not exchanges and not any(one.rule.reduced(factor) for factor in shards)


def _run(cases: Sequence[Case]) -> list[Collective]:
    """Compile sharded equations as one program, check their results, and return the collectives of the program."""
    sizes = {_AXES[count]: count for _, shards in cases for count in shards.values()}
    devices = jax.devices()[: math.prod(sizes.values())]
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes), devices=devices)

    def shardings(every: Any, shards: Mapping[int, int]) -> list[NamedSharding]:
        specs = (PartitionSpec(*(_AXES[shards[dim]] if dim in shards else None for dim in dims)) for dims in every)
        return [NamedSharding(mesh, spec) for spec in specs]

    def compute(operands: list[list[Any]]) -> list[list[Any]]:
        return [one(*given) for (one, _), given in zip(cases, operands, strict=True)]

    before = [shardings(one.rule.operands, shards) for one, shards in cases]
    after = [shardings(one.rule.results, shards) for one, shards in cases]
    operands = jax.device_put([list(one.operands) for one, _ in cases], before)
    compiled = jax.jit(compute, in_shardings=(before,), out_shardings=after).lower(operands).compile(_FAST_COMPILE)
    for (one, _), results in zip(cases, compiled(operands), strict=True):
        for result, expected in zip(results, one.results, strict=True):
            _assert_same(result, expected, details=str(one))
    return find_collectives(program_text(compiled), sizes)


def _assert_collectives(one: Equation, shards: Mapping[int, int], found: list[Collective]) -> None:
    """Check the collectives of an equation.

    Two small exchanges are allowed beside those of partial results: the group sizes of a ragged product, and the flag that ends
    a loop.
    """
    if one.equation.primitive.name == "ragged_dot_general":
        found = [each for each in found if each.bytes > one.operands[2].nbytes]
    if one.equation.primitive.name in _LOOPS:
        found = [each for each in found if each.bytes > 1]
    reduced = {_AXES[count]: count for factor, count in shards.items() if one.rule.reduced(factor)}
    bytes_ = sum(
        math.prod(atom.aval.shape) * atom.aval.dtype.itemsize // math.prod(shards.get(dim, 1) for dim in dims)
        for atom, dims in zip(one.equation.outvars, one.rule.results, strict=True)
    )
    most_bytes = sum(Collective("all-reduce", bytes_, count, 1.0, ()).bytes_on_wire for count in reduced.values())
    details = f"{one}\nwith {dict(shards)} shards: {found}"
    assert all(each.kind in ("all-reduce", "reduce-scatter", "all-gather") for each in found), details
    assert all(set(each.axes) <= set(reduced) for each in found), details
    assert sum(each.bytes_on_wire * each.count for each in found) <= most_bytes, details
    assert {axis for each in found for axis in each.axes} == set(reduced), details


def _assert_same(result: Any, expected: Any, details: str) -> None:
    if jnp.issubdtype(result.dtype, jax.dtypes.prng_key):
        result, expected = jax.random.key_data(result), jax.random.key_data(expected)
    np.testing.assert_allclose(np.asarray(result), np.asarray(expected), rtol=2e-5, atol=2e-5, err_msg=details)
