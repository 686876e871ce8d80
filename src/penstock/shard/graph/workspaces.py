"""Find the arrays that a compiler makes although no value of the program is stored in them.

On CPU and GPU, XLA writes some operations as several of dense arrays before it fuses: masked operands, and indices of maxima.
On TPU, it copies state into another order of dimensions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.shard.graph.primitives import IN_PLACE, is_product
from penstock.shard.mesh.tiles import keeps_order
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
      product: index of the value that must be computed first, and does not say when they are made; -1 if there is none.
    """

    value: int
    bytes: float
    start: int
    end: int
    product: int = -1


def find_workspaces(program: FlatProgram) -> list[Workspace]:
    """Find the dense arrays with which a compiler carries out single operations.

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


def find_layout_copies(program: FlatProgram) -> list[Workspace]:
    """Find the copies of state that is updated with a transposed product.

    The gradient of a kernel is a product and then a transpose of it. Layout assignment (`LayoutAssignment`, from the products on)
    makes the transpose free, and gives its order of dimensions to all that is computed elementwise from it. State that is stored
    in the other order is copied when the update reads it: parameters and moments at once, since their updates are fused. The
    copies hold the new state until it is written back.

    Args:
      program: the step.
    """
    state = {value: frozenset((value,)) for value in program.inputs}  # the inputs that a value is computed from, and nothing else
    origin: dict[int, tuple[int, bool]] = {}  # the product that a value is computed from, and whether it is transposed
    first: dict[int, int] = {}
    copied: dict[int, tuple[int, int]] = {}
    for time, op in enumerate(program.ops):
        known = {origin[operand] for operand in op.operands if operand in origin}
        if is_product(op) or op.primitive in IN_PLACE:
            origin[op.results[0]] = (op.results[0], False)
        if not op.rule.identity or len({turned for _, turned in known}) > 1:
            continue
        shape = program.values[op.results[0]].shape
        read = [state[value] for value in op.operands if value in state and program.values[value].shape == shape]
        if not known:
            state[op.results[0]] = frozenset().union(*read)
            continue
        product, turned = min(known)
        for result in op.results:
            origin[result] = (product, turned != _swaps_last(op))
        if turned and keeps_order(shape):
            for value in frozenset().union(*read):
                copied.setdefault(value, (first.setdefault(product, time), product))
    return [Workspace(value, program.values[value].bytes, time, time, product) for value, (time, product) in copied.items()]


def _swaps_last(op: Op) -> bool:
    """Return whether an operation moves the last dimension of its operand elsewhere."""
    before, after = op.rule.operands[0], op.rule.results[0]
    return op.primitive == "transpose" and before[-1:] != after[-1:]


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
