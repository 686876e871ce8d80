"""Count the bytes that each operation of a step reads from and writes to HBM."""

from __future__ import annotations

from penstock.shard.graph.primitives import ALIASES, LOOKUPS
from penstock.shard.graph.stored_values import Fusion
from penstock.shard.trace.flat_program import FlatProgram


def hbm_traffic(program: FlatProgram, fusion: Fusion) -> list[float]:
    """Return the bytes that each operation reads from and writes to HBM in one run, if nothing is sharded.

    Fused operations have none: their sources are read by the operation that they are fused into.

    Args:
      program: the step.
      fusion: which values are stored.

    Returns:
      Bytes, in the order of `program.ops`.
    """
    stored = fusion.stored | {output for output in program.outputs if output is not None}
    value_bytes = [value.bytes for value in program.values]
    traffic = []
    for op in program.ops:
        if op.primitive in ALIASES or not any(result in stored for result in op.results):
            traffic.append(0.0)
            continue
        read = frozenset().union(*(fusion.sources.get(value, frozenset((value,))) for value in op.operands if value is not None))
        if op.primitive in LOOKUPS:
            updates = op.operands[2] if op.primitive.startswith("scatter") else None
            traffic.append(2.0 * value_bytes[op.results[0] if updates is None else updates])
        else:
            traffic.append(float(sum(value_bytes[value] for value in read) + sum(value_bytes[value] for value in op.results)))
    return traffic
