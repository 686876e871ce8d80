"""Find the arrays whose collectives can run while products are computed, and the products behind which they run.

A collective is *off the critical path* if no product has to wait for it at once. There are two cases:

- the gather of a weight, which exists since the step began. It runs behind the products before the one that reads the weight.
  These are the products of the layer before, which take about as long as those that read the weight.
- the reduction of a gradient that no product reads. It runs behind the product that makes the gradient, piece by piece (Wang et
  al., ASPLOS 2023), or behind those that follow.

Both are priced with the time of the products that read the weight or make the gradient. `CompilerModel.hides` has the kinds of
collectives that a compiler runs asynchronously.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from penstock.shard.graph.primitives import CONTRACTIONS
from penstock.shard.trace.flat_program import FlatProgram


def find_early_values(program: FlatProgram) -> dict[int, int]:
    """Return the values that are computed from the inputs of the step by elementwise operations alone, each with its input.

    The slices of an early stack that a loop reads are early too. Values that a loop passes on are not. A value that is computed
    from several inputs has the first of them.

    Args:
      program: the step.
    """
    early = {value: value for value in (*program.inputs, *program.constants)}
    slices = [pair for loop in program.loops for pair in loop.slices]
    before = -1
    while len(early) > before:  # one more round for each loop inside of a loop
        before = len(early)
        early.update({inner: early[outer] for outer, inner in slices if outer in early})
        for op in program.ops:
            operands = [operand for operand in op.operands if operand is not None]
            if op.rule.identity and operands and all(operand in early for operand in operands):
                early.update(dict.fromkeys(op.results, early[operands[0]]))
    return early


def find_late_values(program: FlatProgram) -> set[int]:
    """Return the values from which no product is computed, such as the gradients of weights.

    Args:
      program: the step.
    """
    sources: dict[int, list[int]] = defaultdict(list)
    products: list[int] = []
    for op in program.ops:
        operands = [operand for operand in op.operands if operand is not None]
        for result in op.results:
            sources[result] += operands
        if op.primitive in CONTRACTIONS:
            products += operands
    for loop in program.loops:
        for outer, inner in loop.slices:
            sources[inner] += [] if outer is None else [outer]
        for inside, stack in loop.stacks:
            sources[stack] += [] if inside is None else [inside]
        for carry in loop.carries:
            passed = [each for each in (carry.initial, carry.after) if each is not None]
            sources[carry.before] += passed
            sources[carry.result] += passed
    for branches in program.conditionals:
        for inside, result, _ in branches.results:
            sources[result] += [] if inside is None else [inside]
    return set(range(len(program.values))) - _reachable(sources, products)


def _reachable(sources: dict[int, list[int]], start: Iterable[int]) -> set[int]:
    """Return all values from which some values are computed, and these values themselves."""
    found = set(start)
    queue = list(found)
    while queue:
        for source in sources.get(queue.pop(), ()):
            if source not in found:
                found.add(source)
                queue.append(source)
    return found
