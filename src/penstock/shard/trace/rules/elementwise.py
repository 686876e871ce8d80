"""Rules of elementwise operations of more than one operand, which broadcast operands of size one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.shard.trace.rules.rule import Dims, Rule, replicated, rule_for


@rule_for(
    *("add", "add_any", "sub", "mul", "div", "rem", "max", "min", "pow", "atan2", "nextafter", "complex", "select_n", "clamp"),
    *("and", "or", "xor", "shift_left", "shift_right_logical", "shift_right_arithmetic", "eq", "ne", "lt", "le", "gt", "ge"),
)
def broadcasting(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Everything shares the layout of the result; what has no dimensions, or one of size one, is there for all of it."""
    shape = tuple(results[0].shape)
    dims = tuple(range(len(shape)))
    placed: list[Dims] = []
    for each in operands:
        if each.shape and (
            len(each.shape) != len(shape) or any(one not in (1, size) for one, size in zip(each.shape, shape, strict=True))
        ):
            return replicated(params, operands, results)
        placed.append(tuple(dim if each.shape[dim] == shape[dim] else None for dim in dims) if each.shape else ())
    return Rule(shape, tuple(placed), (dims,), identity=True)
