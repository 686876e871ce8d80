"""A sharding rule: an operation as a generalised einsum. The form and the word *factor* are Shardy's (`sdy.op_sharding_rule`).

A *factor* is an index that labels dimensions of operands and results. If a factor is sharded over a mesh axis, every operand
dimension with this factor must be sharded over that axis, and every result dimension with it comes out sharded. A factor that
no result has is reduced: the result is *partial*, and an all-reduce or a reduce-scatter completes it.

A rule describes what XLA's partitioner does, not what would be possible. Where the partitioner gathers the operands of an
operation although it is independent along a dimension, that dimension has no factor and must be replicated.

Example: "bij,bjk->bik" has the factors b, j, i, k, the operands ((b, i, j), (b, j, k)) and the results ((b, i, k),).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Dims = tuple[int | None, ...]


@dataclass(frozen=True)
class Rule:
    """The factors of an operation, and the dimensions that they label.

    Attributes:
      sizes: for each factor, a number that must be divisible by the number of shards. It is the size of the dimension. Where a
        reshape splits or merges dimensions, it is the size of the major part.
      operands: for each operand, the factor of each dimension; None for a dimension that must be replicated.
      results: the same for each result.
      identity: whether each result element is computed from operand elements at the same position (elementwise operations,
        transposes, added or removed unit dimensions), so that all operands and results may share one layout.
    """

    sizes: tuple[int, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    identity: bool = False

    def reduced(self, factor: int) -> bool:
        """Return whether sharding this factor makes the results partial."""
        return not any(factor in dims for dims in self.results)


RuleFunction = Callable[[Mapping[str, Any], Sequence[Any], Sequence[Any]], Rule]

RULES: dict[str, RuleFunction] = {}
"""The rule functions by primitive. A rule function takes the parameters, the operand avals and the result avals."""


def rule_for(*primitives: str) -> Callable[[RuleFunction], RuleFunction]:
    """Return a decorator that registers a function as the rule of some primitives."""

    def register(function: RuleFunction) -> RuleFunction:
        for primitive in primitives:
            RULES[primitive] = function
        return function

    return register


def find_rule(primitive: str, params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return the rule of an equation.

    A primitive without a registered rule counts as elementwise if all shapes agree (scalar operands aside). Otherwise it is
    replicated. If such an operation keeps all shapes but is not elementwise, the program is still correct, because the compiler
    inserts the collectives that it needs; only the predicted cost is wrong.

    Args:
      primitive: the name of the primitive.
      params: the parameters of the equation.
      operands, results: anything with a `shape`.

    Returns:
      The rule, with one entry for each operand and each result.

    >>> import jax
    >>> x, w = jax.ShapeDtypeStruct((8, 4), "float32"), jax.ShapeDtypeStruct((4, 6), "float32")
    >>> rule = find_rule("dot_general", {"dimension_numbers": (((1,), (0,)), ((), ()))}, [x, w], [x])
    >>> rule.operands, rule.results, rule.reduced(0)
    (((1, 0), (0, 2)), ((1, 2),), True)
    """
    function = RULES.get(primitive, elementwise)
    return function(params, operands, results)


def elementwise(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return the rule `ij,ij,…->ij`: all operands and results share one layout, except for scalar operands."""
    shapes = {tuple(aval.shape) for aval in (*operands, *results) if aval.shape} or {()}
    if len(shapes) != 1 or any(tuple(aval.shape) not in shapes for aval in results) or not results:
        return replicated(params, operands, results)
    (shape,) = shapes
    dims = tuple(range(len(shape)))
    return Rule(shape, tuple(dims if aval.shape else () for aval in operands), (dims,) * len(results), identity=True)


def replicated(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return the rule without factors: nothing may be sharded, and every device computes the whole operation."""
    return Rule((), tuple((None,) * len(aval.shape) for aval in operands), tuple((None,) * len(aval.shape) for aval in results))


def batched(
    params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any], *, replicated_dims: Sequence[int]
) -> Rule:
    """Return the rule of an operation that is independent along all dimensions except some.

    In einsum form `ij.,ij.->ij.`, where `.` is a dimension in `replicated_dims`. All operands (scalars aside) and results have
    the same rank. A dimension that is not in `replicated_dims` has the same size in all of them.
    """
    rank = len(results[0].shape)
    kept = [dim for dim in range(rank) if dim not in replicated_dims]
    factor = {dim: number for number, dim in enumerate(kept)}
    dims = tuple(factor.get(dim) for dim in range(rank))
    sizes = tuple(results[0].shape[dim] for dim in kept)
    return Rule(sizes, tuple(dims if aval.shape else () for aval in operands), (dims,) * len(results))


def leading_dims(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any], *, count: int) -> Rule:
    """Return the rule of an operation that is independent along its first `count` dimensions: `ij.,ij..->ij.`.

    All operands (scalars aside) and results share these dimensions. Their other dimensions are replicated.
    """
    sizes = tuple(results[0].shape[:count])
    if any(tuple(aval.shape[:count]) != sizes for aval in (*operands, *results) if aval.shape):
        return replicated(params, operands, results)

    def dims(aval: Any) -> Dims:
        return (*range(count), *(None,) * (len(aval.shape) - count)) if aval.shape else ()

    return Rule(sizes, tuple(map(dims, operands)), tuple(map(dims, results)))
