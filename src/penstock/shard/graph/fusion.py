"""Predict which values are materialized in HBM, and the HBM traffic of each operation, with a simple model of XLA's fusion.

- Elementwise operations are fused into the operations that read them. They take no memory, and are computed again from their
  sources, whose live ranges become longer.
- Matrix products, convolutions, lookups and the like read materialized operands and write materialized results.
- Reductions write materialized results, and may compute their operands on the fly.
- Reshapes and transposes are aliases of the same memory.
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
"""Primitives whose operands and results are materialized."""
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
"""Primitives whose results are materialized, while operands may be fused into them."""
_LOOKUPS = frozenset(["gather", "scatter", "scatter-add", "scatter_add", "dynamic_slice", "dynamic_update_slice"])
"""Primitives that read and write only the elements that they take or put."""
_MOST_SOURCES = 12
"""The most materialized values that one fusion reads: a value with more sources is materialized."""
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
"""Primitives that are computed again for each reader, however many there are."""
_MANY_READERS = 3
"""A value that this many operations read is materialized, unless its primitive is cheap."""


def materialized_values(program: FlatProgram) -> tuple[set[int], dict[int, frozenset[int]]]:
    """Return the materialized values of a program, and the sources of all values.

    Args:
      program: the step.

    Returns:
      The indices of the materialized values; and for each value, the materialized values from which a reader computes it.
    """
    inputs = {*program.inputs, *program.constants}
    alias_of: dict[int, int] = {}
    needed_in_hbm: set[int] = set()
    readers: Counter[int] = Counter()
    for op in program.ops:
        if op.primitive in _ALIASES and op.operands[0] is not None:
            for operand, result in zip(op.operands, op.results, strict=False):
                if operand is not None:
                    alias_of[result] = alias_of.get(operand, operand)
            continue
        operands = {alias_of.get(operand, operand) for operand in op.operands if operand is not None}
        readers.update(operands)
        if op.primitive in _READS_FROM_HBM:
            needed_in_hbm |= operands
    needed_in_hbm |= {alias_of.get(value, value) for loop in program.loops for value in loop.read}
    materialized: set[int] = set(inputs)
    for loop in program.loops:
        materialized.update(loop.results)
        materialized.update(loop.carries)
    read_by_many = {value for value, count in readers.items() if count >= _MANY_READERS}
    sources: dict[int, frozenset[int]] = {value: frozenset((value,)) for value in materialized}
    for op in program.ops:
        read = frozenset().union(*(sources.get(value, frozenset()) for value in op.operands if value is not None))
        for result in op.results:
            if op.primitive in _ALIASES:
                sources[result] = read
            elif (
                op.primitive in _READS_FROM_HBM
                or op.primitive in _WRITES_TO_HBM
                or result in needed_in_hbm
                or len(read) > _MOST_SOURCES
                or (result in read_by_many and read and op.primitive not in _CHEAP)
            ):
                materialized.add(result)
                sources[result] = frozenset((result,))
            else:
                sources[result] = read
    return materialized, sources


def hbm_traffic(program: FlatProgram) -> list[float]:
    """Return the bytes that each operation reads from and writes to HBM in one run, if nothing is sharded.

    Fused operations have none: their sources are read by the operation that they are fused into.

    Args:
      program: the step.

    Returns:
      Bytes, in the order of `program.ops`.
    """
    materialized, sources = materialized_values(program)
    materialized |= {output for output in program.outputs if output is not None}
    value_bytes = [value.bytes for value in program.values]
    traffic = []
    for op in program.ops:
        if op.primitive in _ALIASES or not any(result in materialized for result in op.results):
            traffic.append(0.0)
            continue
        read = frozenset().union(*(sources.get(value, frozenset()) for value in op.operands if value is not None))
        if op.primitive in _LOOKUPS:
            updates = op.operands[2] if op.primitive.startswith("scatter") else None
            traffic.append(2.0 * value_bytes[op.results[0] if updates is None else updates])
        else:
            traffic.append(float(sum(value_bytes[value] for value in read) + sum(value_bytes[value] for value in op.results)))
    return traffic
