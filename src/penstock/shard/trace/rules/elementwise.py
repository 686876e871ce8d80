"""Sharding rules of elementwise operations with several operands, which broadcast dimensions of size one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.shard.trace.rules.rule import Dims, Rule, replicated, rule_for


@rule_for(
    *("add", "add_any", "sub", "mul", "div", "rem", "max", "min", "pow", "atan2", "nextafter", "complex", "select_n", "clamp"),
    *("and", "or", "xor", "shift_left", "shift_right_logical", "shift_right_arithmetic", "eq", "ne", "lt", "le", "gt", "ge"),
)
def broadcasting(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `ij,ij->ij`. A scalar operand has no factors, and a broadcast dimension, of size one, is replicated: `ij,.j->ij`."""
    shape = tuple(results[0].shape)
    dims = tuple(range(len(shape)))
    operand_dims: list[Dims] = []
    for aval in operands:
        if aval.shape and (
            len(aval.shape) != len(shape) or any(own not in (1, size) for own, size in zip(aval.shape, shape, strict=True))
        ):
            return replicated(params, operands, results)
        operand_dims.append(tuple(dim if aval.shape[dim] == shape[dim] else None for dim in dims) if aval.shape else ())
    return Rule(shape, tuple(operand_dims), (dims,), identity=True)
