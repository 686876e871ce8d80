"""Merge sums of sums, as XLA does before it partitions a program.

In: the jaxpr of a step. Out: the same, where a sum over some dimensions of a sum over others is one sum over both.

The gradient of a parameter that `jax.vmap` broadcasts is first summed over the batch, and then over the other dimensions of an
example. If the planner chose a layout between both sums, the compiler would have to sum the large array there over devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from typing import Any

from jax.extend import core

from penstock._jax import ClosedJaxpr
from penstock.shard.trace.flat_program import CUSTOM_DERIVATIVES, INLINED

_SUM = "reduce_sum"
_RESHAPES = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim")
_BODIES = {
    **{name: (key,) for name, key in INLINED.items() if name not in CUSTOM_DERIVATIVES},
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
}
"""Primitives → the parameters that hold jaxprs in which sums are merged, too."""


def merge_sums(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a closed jaxpr in which consecutive sums are one.

    Args:
      closed: the closed jaxpr of a step.

    >>> import jax
    >>> step = lambda x: x.sum(0).sum(1)
    >>> merged = merge_sums(jax.make_jaxpr(step)(jax.ShapeDtypeStruct((4, 8, 2), "float32")))
    >>> [(equation.primitive.name, equation.params["axes"]) for equation in merged.jaxpr.eqns]
    [('reduce_sum', (0, 2))]
    """
    return closed.replace(jaxpr=_merge(closed.jaxpr))


def _merge(jaxpr: Any) -> Any:
    """Return an open jaxpr with consecutive sums merged. Sums are only merged if nothing else reads what is between them."""
    reads = _count_reads(jaxpr.eqns, jaxpr.outvars)
    # Sums, and arrays that differ from them in dimensions of size 1 → the array that is summed, and for each dimension that of
    # the summed array, or None.
    sums: dict[Any, tuple[Any, list[int | None]]] = {}
    equations = []
    for equation in map(_merge_inside, jaxpr.eqns):
        kept = _kept_dims(equation)
        if kept is not None:
            (operand,), (result,) = equation.invars, equation.outvars
            before = sums.get(operand) if reads[operand] == 1 else None
            if before is not None:
                kept = [None if dim is None else before[1][dim] for dim in kept]
            if equation.primitive.name == _SUM and before is not None and None not in kept:
                axes = tuple(dim for dim in range(len(before[0].aval.shape)) if dim not in kept)
                equation = equation.replace(invars=[before[0]], params={**equation.params, "axes": axes})
            if equation.primitive.name == _SUM or before is not None:
                sums[result] = (operand if before is None else before[0], kept)
        equations.append(equation)
    return jaxpr.replace(eqns=_without_unread(equations, jaxpr.outvars, sums))


def _count_reads(equations: Iterable[Any], results: Iterable[Any]) -> Counter[Any]:
    """Return how often each variable is read."""
    atoms = (*(atom for equation in equations for atom in equation.invars), *results)
    return Counter(atom for atom in atoms if not isinstance(atom, core.Literal))


def _kept_dims(equation: Any) -> list[int | None] | None:
    """Return for each dimension of the result that of the operand, or None for a new one of size 1.

    The result is None if the equation is neither a sum nor a change of dimensions of size 1.
    """
    name, params = equation.primitive.name, equation.params
    if name not in (_SUM, *_RESHAPES) or len(equation.invars) != 1 or isinstance(equation.invars[0], core.Literal):
        return None
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    if name == _SUM:
        return [dim for dim in range(len(before)) if dim not in params["axes"]]
    large = [dim for dim, size in enumerate(before) if size != 1]
    if [before[dim] for dim in large] != [size for size in after if size != 1]:
        return None
    remaining = iter(large)
    return [None if size == 1 else next(remaining) for size in after]


def _without_unread(equations: Sequence[Any], results: Iterable[Any], merged: Container[Any]) -> list[Any]:
    """Return the equations without those of merged sums that nothing reads any longer."""
    read = set(_count_reads((), results))
    kept = []
    for equation in reversed(equations):
        if all(result in merged and result not in read for result in equation.outvars) and equation.outvars:
            continue
        read.update(_count_reads([equation], ()))
        kept.append(equation)
    return kept[::-1]


def _merge_inside(equation: Any) -> Any:
    """Return an equation with consecutive sums merged in the jaxprs nested in it."""
    keys = [key for key in _BODIES.get(equation.primitive.name, ()) if key in equation.params]
    changed = {key: _merge_nested(equation.params[key]) for key in keys}
    return equation.replace(params={**equation.params, **changed}) if changed else equation


def _merge_nested(nested: Any) -> Any:
    """Return a parameter that holds jaxprs, open, closed or several, with consecutive sums merged."""
    if isinstance(nested, tuple):
        return tuple(map(_merge_nested, nested))
    return merge_sums(nested) if hasattr(nested, "consts") else _merge(nested)
