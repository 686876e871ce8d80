"""Count the bytes that each operation of a step reads from and writes to HBM."""

from __future__ import annotations

from penstock.shard.graph.overlap import find_early_values, find_late_values
from penstock.shard.graph.primitives import ALIASES, CONTRACTIONS, LOOKUPS, REDUCTIONS
from penstock.shard.graph.stored_values import Fusion
from penstock.shard.trace.flat_program import FlatProgram, Op


def hbm_traffic(program: FlatProgram, fusion: Fusion) -> list[float]:
    """Return the bytes that each operation reads from and writes to HBM in one run, if nothing is sharded.

    Fused operations have none: their sources are read by the operation that they are fused into. If the compiler fuses into
    products, elementwise operations and reductions read the result of a product without HBM, as it is made: its *epilogue*. The
    update of a weight does not: its gradient is summed over devices before.

    Args:
      program: the step.
      fusion: which values are stored.

    Returns:
      Bytes, in the order of `program.ops`.
    """
    stored = fusion.stored | {output for output in program.outputs if output is not None}
    value_bytes = [value.bytes for value in program.values]
    traffic = []
    epilogues = _Epilogues(program) if fusion.compiler.fuses_products else None
    for index, op in enumerate(program.ops):
        if op.primitive in ALIASES or not any(result in stored for result in op.results):
            traffic.append(0.0)
            continue
        read = frozenset().union(*(fusion.sources.get(value, frozenset((value,))) for value in op.operands if value is not None))
        if epilogues is not None:
            read -= epilogues.read_for_free(index, op, read)
        if op.primitive in LOOKUPS:
            updates = op.operands[2] if op.primitive.startswith("scatter") else None
            traffic.append(2.0 * value_bytes[op.results[0] if updates is None else updates])
        else:
            traffic.append(float(sum(value_bytes[value] for value in read) + sum(value_bytes[value] for value in op.results)))
    return traffic


class _Epilogues:
    """The products into which operations are fused.

    An operation is fused into the last of the products that its operands are made in, unless it needs the result of a reduction
    in the same product, which exists only when the product is done.
    """

    def __init__(self, program: FlatProgram) -> None:
        self._early, self._late = find_early_values(program), find_late_values(program)
        self._product: dict[int, int] = {}  # Value → the operation that is the product in whose epilogue it is made.
        self._reduced: set[int] = set()  # The values that are made by a reduction.

    def read_for_free(self, index: int, op: Op, read: frozenset[int]) -> frozenset[int]:
        """Return the operands that an operation reads as they are made, and note where its results are made.

        Args:
          index: the index of the operation.
          op: the operation.
          read: the stored values that it reads.
        """
        if op.primitive in CONTRACTIONS:
            if any(operand in self._early for operand in op.operands) or not self._late.issuperset(op.results):
                self._product.update(dict.fromkeys(op.results, index))
            return frozenset()  # the gradient of a weight, which no product reads, is not the product of one
        last = max((self._product.get(value, -1) for value in read), default=-1)
        beside = frozenset(value for value in read if last >= 0 and self._product.get(value, -1) == last)
        fusible = op.rule.identity or op.primitive in REDUCTIONS
        if not beside or not fusible or beside & self._reduced:
            return frozenset()
        self._product.update(dict.fromkeys(op.results, last))
        if op.primitive in REDUCTIONS:
            self._reduced.update(op.results)
        return beside
