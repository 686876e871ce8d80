"""Find the sums over devices that a compiler moves out of a loop.

In: a flat program. Out: how often each sum runs that an iteration only adds to a carry.

The gradient of a weight that each iteration of a loop reads is such a sum: an RNN adds one for each step of the sequence. XLA
adds up what each device has, and sums over devices once after the loop (`WhileLoopAllReduceCodeMotion`). It does not move a sum
that is scattered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from penstock.shard.graph.primitives import ALIASES
from penstock.shard.trace.flat_program import FlatProgram, Loop, Op

_ADDITIONS = ("add", "add_any")


def find_accumulated(program: FlatProgram) -> dict[int, float]:
    """Return how often a sum over devices of a value runs in a step, for the values that iterations only add to a carry.

    Args:
      program: the step.
    """
    return {value: addition.count / (loop.length or 1) for loop, addition, value in find_additions(program)}


def find_additions(program: FlatProgram) -> Iterator[tuple[Loop, Op, int]]:
    """Yield each loop of known length, an addition to a carry in it that nothing else reads, and the value that is added.

    The value is the result of an operation that is not elementwise, perhaps reshaped before it is added.

    Args:
      program: the step.
    """
    made_by = {result: op for op in program.ops for result in op.results}
    reads = Counter(operand for op in program.ops for operand in op.operands)
    reads.update(program.outputs)
    for loop in program.loops:
        reads.update((*loop.operands, *(inside for inside, _ in loop.stacks), *(carry.after for carry in loop.carries)))
    for loop in program.loops:
        for carry in loop.carries:
            addition = made_by.get(carry.after) if carry.after is not None else None
            if addition is None or addition.primitive not in _ADDITIONS or carry.before not in addition.operands:
                continue
            if loop.length is None or reads[carry.before] != 1 or reads[carry.after] != 1:
                continue
            left, right = addition.operands
            added = right if left == carry.before else left
            while added in made_by and reads[added] == 1:
                op = made_by[added]
                if op.primitive not in ALIASES:
                    if op.count == addition.count and not op.rule.identity:
                        yield loop, addition, added
                    break
                added = op.operands[0]
