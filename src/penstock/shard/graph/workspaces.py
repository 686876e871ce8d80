"""Find the arrays that a compiler makes to carry out single operations: masked operands, and indices of maxima.

On CPU and GPU, XLA writes some operations as several of dense arrays before it fuses. Their shapes are in no jaxpr.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.shard.trace.flat_program import FlatProgram, Op, Value

_INDEX_BYTES = 4
"""Bytes of an index of a maximum, which is int32."""


@dataclass(frozen=True)
class Workspace:
    """Arrays that exist beside a value while some operations run.

    Attributes:
      value: index of the value in the program. The arrays are sharded as it is.
      bytes: bytes of the global arrays.
      start, end: indices of the first and the last operation at which they are in memory.
    """

    value: int
    bytes: float
    start: int
    end: int


def find_workspaces(program: FlatProgram) -> list[Workspace]:
    """Find the workspaces of a step.

    Args:
      program: the step.
    """
    found: list[Workspace] = []
    masked: dict[int, tuple[float, int, int]] = {}
    for time, op in enumerate(program.ops):
        if op.primitive == "ragged_dot_general":
            groups, operands = _ragged_operands(program, op)
            for value in operands:
                size, first, _ = masked.get(value, (groups * _with_mask(program.values[value]), time, time))
                masked[value] = (size, first, time)
            if len(operands) == 1:
                # Groups and columns become one dimension, over which one product sums.
                found.append(Workspace(operands[0], groups * program.values[operands[0]].bytes, time, time))
        elif op.primitive == "select_and_scatter_add":
            found += _maxima(program, op, time)
    return found + [Workspace(value, *each) for value, each in masked.items()]


def _ragged_operands(program: FlatProgram, op: Op) -> tuple[int, list[int]]:
    """Return the number of groups of a ragged product, and its operands whose rows are in groups.

    XLA repeats each for every group, with zeros in the rows of other groups (`RaggedDotRewriter`). Products of the same operand
    share the result.
    """
    left, right, sizes = op.operands[:3]
    if left is None or right is None or sizes is None:
        return 0, []
    groups = program.values[sizes].shape[-1]
    sums_rows = len(program.values[right].shape) == len(program.values[left].shape)
    return groups, [left, right] if sums_rows else [left]


def _with_mask(value: Value) -> float:
    """Return the bytes of a value and of a mask of its shape."""
    return value.bytes + math.prod(value.shape)


def _maxima(program: FlatProgram, op: Op, time: int) -> list[Workspace]:
    """Return the indices with which XLA finds the maxima of windows in the gradient of a max-pool.

    It reduces the operand together with one array of its own indices for each dimension, and scatters by the results
    (`SelectAndScatterExpander`). The arrays of indices depend on nothing, so that they are made at the start of the program.
    """
    source, operand = op.operands[:2]
    return [
        Workspace(value, _INDEX_BYTES * len(shape) * math.prod(shape), start, time)
        for value, start in ((operand, 0), (source, time))
        if value is not None
        for shape in (program.values[value].shape,)
    ]
