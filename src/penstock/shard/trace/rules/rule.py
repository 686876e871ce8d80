"""A rule: an operation as a generalised einsum.

A *factor* is an index that runs through dimensions of operands and results. Where a factor is sharded over a mesh axis, every
operand dimension that holds it has to be sharded over that axis, and every result dimension that holds it comes out sharded. A
factor that no result holds is summed (or maximised) over: the result is *partial*, and is completed by an all-reduce or a
reduce-scatter.

A rule says what XLA's partitioner makes of an operation, not what could be made of it: where it moves operands of an operation
that is independent along a dimension, that dimension has to be whole.

"bij,bjk->bik" as a rule: factors b i k j, operands ((b, i, j), (b, j, k)), results ((b, i, k),). The same form serves Shardy
(`sdy.op_sharding_rule`), from which the word *factor* is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Dims = tuple[int | None, ...]


@dataclass(frozen=True)
class Rule:
    """How an operation may be sharded.

    Attributes:
      sizes: of each factor, the number that a number of shards has to divide. It is the size of the dimension, or where a reshape
        splits or merges dimensions the size of the major part.
      operands: of each operand, of each dimension, its factor; None is a dimension that has to be whole.
      results: the same of each result.
      identity: the operation computes result elements from operand elements at the same place (elementwise, transpose, a unit
        dimension more or less), so that all operands and results may share one layout.
    """

    sizes: tuple[int, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    identity: bool = False

    def reduced(self, factor: int) -> bool:
        """Whether the results are partial where this factor is sharded."""
        return not any(factor in dims for dims in self.results)


RuleFunction = Callable[[Mapping[str, Any], Sequence[Any], Sequence[Any]], Rule]

RULES: dict[str, RuleFunction] = {}
"""Primitive name → function of (params, operand avals, result avals)."""


def rule_for(*primitives: str) -> Callable[[RuleFunction], RuleFunction]:
    """Register a function as the rule of some primitives."""

    def register(function: RuleFunction) -> RuleFunction:
        for primitive in primitives:
            RULES[primitive] = function
        return function

    return register


def find_rule(primitive: str, params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """The rule of an equation; of a primitive that nobody wrote one for, the safe default.

    The default is elementwise where all shapes agree (operands without dimensions aside). Otherwise nothing may be sharded.
    An operation that is not elementwise and keeps all shapes, and is not registered, gets layouts that are right, as the compiler
    moves what it needs, and a cost that is not.

    Args:
      primitive: its name.
      params: of the equation.
      operands, results: anything with a `shape`.
    """
    function = RULES.get(primitive, elementwise)
    return function(params, operands, results)


def elementwise(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Everything shares one layout, except for operands without dimensions."""
    shapes = {tuple(each.shape) for each in (*operands, *results) if each.shape} or {()}
    if len(shapes) != 1 or any(tuple(each.shape) not in shapes for each in results) or not results:
        return replicated(params, operands, results)
    (shape,) = shapes
    dims = tuple(range(len(shape)))
    return Rule(shape, tuple(dims if each.shape else () for each in operands), (dims,) * len(results), identity=True)


def replicated(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Nothing may be sharded: every device computes all of it."""
    return Rule((), tuple((None,) * len(each.shape) for each in operands), tuple((None,) * len(each.shape) for each in results))


def batched(
    params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any], *, replicated_dims: Sequence[int]
) -> Rule:
    """All operands and results have the same rank, and may be sharded along every dimension except `whole_dims`."""
    rank = len(results[0].shape)
    kept = [dim for dim in range(rank) if dim not in replicated_dims]
    factor = {dim: number for number, dim in enumerate(kept)}
    dims = tuple(factor.get(dim) for dim in range(rank))
    sizes = tuple(results[0].shape[dim] for dim in kept)
    return Rule(sizes, tuple(dims if each.shape else () for each in operands), (dims,) * len(results))


def leading(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any], *, count: int) -> Rule:
    """The first `count` dimensions of all operands and results are the same ones; the others stay whole."""
    sizes = tuple(results[0].shape[:count])
    if any(tuple(each.shape[:count]) != sizes for each in (*operands, *results) if each.shape):
        return replicated(params, operands, results)

    def dims(each: Any) -> Dims:
        return (*range(count), *(None,) * (len(each.shape) - count)) if each.shape else ()

    return Rule(sizes, tuple(map(dims, operands)), tuple(map(dims, results)))
