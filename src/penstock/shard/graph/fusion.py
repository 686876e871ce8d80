"""Which values lie in memory, and what is read and written.

The model of a compiler: elementwise operations are fused into whatever reads them, and take no memory (they are computed
again from what they read, which has to live so much longer); products of matrices, convolutions, reductions and the like
write their results, and want operands that are there; reshapes and transposes are other names for the same memory.
"""

from __future__ import annotations

from collections import Counter

from penstock.shard.trace.flat_program import FlatProgram

_ALIASES = frozenset(
    [
        "reshape",
        "squeeze",
        "expand_dims",
        "transpose",
        "copy",
        "copy_p",
        "stop_gradient",
        "optimization_barrier",
        "sharding_constraint",
    ]
)
CONTRACTIONS = ("dot_general", "ragged_dot_general", "conv_general_dilated")
_READS_FROM_HBM = frozenset(
    [
        "dot_general",
        "ragged_dot_general",
        "conv_general_dilated",
        "gather",
        "scatter",
        "scatter-add",
        "scatter_add",
        "sort",
        "top_k",
        "cumsum",
        "cumlogsumexp",
        "cumprod",
        "cummax",
        "cummin",
        "dynamic_update_slice",
        "select_and_scatter_add",
        "select_and_gather_add",
        "reduce_window_sum",
        "reduce_window_max",
        "fft",
        "cholesky",
        "triangular_solve",
        "shard_map",
    ]
)
"""Their operands have to lie in memory, and so do their results."""
_WRITES_TO_HBM = frozenset(
    [
        "reduce_sum",
        "reduce_max",
        "reduce_min",
        "reduce_prod",
        "reduce_and",
        "reduce_or",
        "argmax",
        "argmin",
        "concatenate",
        "random_bits",
    ]
)
"""Their results lie in memory; operands are computed on the way in."""
_LOOKS_UP = frozenset(["gather", "scatter", "scatter-add", "scatter_add", "dynamic_slice", "dynamic_update_slice"])
"""They touch only what they take or put."""
_MOST_SOURCES = 12
"""What is computed from more values than this lies in memory itself."""
_CHEAP = frozenset(
    [
        "broadcast_in_dim",
        "iota",
        "convert_element_type",
        "select_n",
        "eq",
        "ne",
        "lt",
        "gt",
        "le",
        "ge",
        "and",
        "or",
        "not",
    ]
)
_MANY_READERS = 3
"""What this many operations read is computed once, unless it is cheap."""


def materialized_values(program: FlatProgram) -> tuple[set[int], dict[int, frozenset[int]]]:
    """The values that lie in memory, and for each value those from which it is computed where it is read."""
    inputs = {*program.inputs, *program.constants}
    name: dict[int, int] = {}
    virtual_operands: set[int] = set()
    readers: Counter[int] = Counter()
    for op in program.ops:
        if op.primitive in _ALIASES and op.operands[0] is not None:
            for operand, result in zip(op.operands, op.results, strict=False):
                if operand is not None:
                    name[result] = name.get(operand, operand)
            continue
        operands = {name.get(operand, operand) for operand in op.operands if operand is not None}
        readers.update(operands)
        if op.primitive in _READS_FROM_HBM:
            virtual_operands |= operands
    virtual_operands |= {name.get(value, value) for loop in program.loops for value in loop.read}
    materialized: set[int] = set(inputs)
    for loop in program.loops:
        materialized.update(loop.results)
        materialized.update(loop.carries)
    many = {value for value, count in readers.items() if count >= _MANY_READERS}
    sources: dict[int, frozenset[int]] = {value: frozenset((value,)) for value in materialized}
    for op in program.ops:
        read = frozenset().union(*(sources.get(each, frozenset()) for each in op.operands if each is not None))
        for result in op.results:
            if op.primitive in _ALIASES:
                sources[result] = read
            elif (
                op.primitive in _READS_FROM_HBM
                or op.primitive in _WRITES_TO_HBM
                or result in virtual_operands
                or len(read) > _MOST_SOURCES
                or (result in many and read and op.primitive not in _CHEAP)
            ):
                materialized.add(result)
                sources[result] = frozenset((result,))
            else:
                sources[result] = read
    return materialized, sources


def hbm_traffic(program: FlatProgram) -> list[float]:
    """Of each operation the bytes that it reads from and writes to memory in one run, nothing being sharded; fused ones none."""
    materialized, sources = materialized_values(program)
    materialized |= {output for output in program.outputs if output is not None}
    value_bytes = [value.bytes for value in program.values]
    moved = []
    for op in program.ops:
        if op.primitive in _ALIASES or not any(result in materialized for result in op.results):
            moved.append(0.0)
            continue
        read = frozenset().union(*(sources.get(each, frozenset()) for each in op.operands if each is not None))
        if op.primitive in _LOOKS_UP:
            touched = op.operands[2] if op.primitive.startswith("scatter") else None
            moved.append(2.0 * value_bytes[op.results[0] if touched is None else touched])
        else:
            moved.append(float(sum(value_bytes[each] for each in read) + sum(value_bytes[each] for each in op.results)))
    return moved
