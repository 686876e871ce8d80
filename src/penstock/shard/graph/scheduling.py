"""Find the arrays whose collectives or HBM traffic a compiler hoists out of loops, or overlaps with products.

- *Accumulated sums*: Each step of a sequence adds to the gradient of a weight of an RNN. XLA adds up the part of each device in
  the loop, and sums over devices once after it (`WhileLoopAllReduceCodeMotion`). It does not move a sum that is scattered.
- *Joint sums*: Several partial results may only be added to each other, such as the gradients of an activation that several
  products read, or of a weight that is used twice. XLA for TPUs and GPUs adds the part of each device, and sums over devices
  once (`AllReduceReassociate`). It was read from programs of both compilers: the products have to be added as they are, of one
  dtype and without a transpose between, and summed over the same devices.
- *Reuse*: A TPU moves the arrays that a loop reads or adds to in each iteration once, if its vector memory holds them all. These
  are operands that the loop does not change, such as the weights of an RNN, and sums, such as their gradients. In programs of the
  TPU compiler for LSTMs, GRUs and ODEs, they have the memory space of the vector memory (`S(1)` in the text).
- *Overlap*: A collective is *off the critical path* if no product has to wait for it at once, so that it can run behind products.

There are two cases of overlap:

- the gather of a weight, which exists since the step began. It runs behind the products before the one that reads the weight.
  These are the products of the layer before, which take about as long as the products that read the weight.
- the reduction of a gradient that no product reads. It runs behind the product that makes the gradient, piece by piece (Wang et
  al., ASPLOS 2023), or behind the products that follow.

Both are priced with the time of the products that read the weight or make the gradient. `CompilerModel.hides` has the kinds of
collectives that a compiler runs asynchronously.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.shard.graph.axis_groups import AxisGroups
from penstock.shard.trace.flat_program import ALIASES, CONTRACTIONS, FlatProgram, Loop, Op, reachable
from penstock.shard.trace.rules import Dims

_ADDITIONS = ("add", "add_any")


def find_joint_sums(program: FlatProgram, groups: AxisGroups) -> dict[int, int]:
    """Return the partial results that are only added to each other, by value, each with the value that is the sum of them all."""
    reads = _count_reads(program)
    terms: dict[int | None, tuple[int, ...]] = {}  # of a sum: the partial results
    found: dict[int, int] = {}
    for op in program.ops:
        if len(op.results) != 1:
            continue
        (result,) = op.results
        read = [terms.get(operand, ()) if reads[operand] == 1 else () for operand in op.operands]
        if op.primitive in ALIASES:
            terms[result] = read[0]
        elif op.primitive in _ADDITIONS and all(read):
            added = tuple(itertools.chain(*read))
            if {_place(groups, term) for term in added} == {_place(groups, result)}:
                terms[result] = added
                found |= dict.fromkeys(added, result)
        elif op.fixed is None and any(map(op.rule.reduced, range(len(op.rule.sizes)))):
            terms[result] = (result,)
    return found


def _place(groups: AxisGroups, value: int) -> tuple[int, Dims]:
    """Return the group of a value, and the dimensions in it."""
    return groups.group[value], groups.dims[value]


def find_accumulated(program: FlatProgram) -> dict[int, float]:
    """Return how often a sum over devices of a value runs in a step, for the values that iterations only add to a carry."""
    return {value: addition.count / (loop.length or 1) for loop, addition, value in find_additions(program)}


def find_additions(program: FlatProgram) -> Iterator[tuple[Loop, Op, int]]:
    """Yield each loop of known length, an addition to a carry in it that nothing else reads, and the value that is added.

    The value is the result of an operation that is not elementwise, perhaps reshaped before it is added.
    """
    made_by = {result: op for op in program.ops for result in op.results}
    reads = _count_reads(program)
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


def _count_reads(program: FlatProgram) -> Counter[int | None]:
    """Return how often each value is read: by operations, loops, and as a result of the step."""
    reads = Counter(operand for op in program.ops for operand in op.operands)
    reads.update(program.outputs)
    for loop in program.loops:
        reads.update((*loop.operands, *(inside for inside, _ in loop.stacks), *(carry.after for carry in loop.carries)))
    return reads


@dataclass(frozen=True)
class Reuse:
    """The reuse of an array by the iterations of a loop.

    Attributes:
      iterations: how many iterations use the array.
      bytes: bytes of all such arrays of the loop together, if nothing is sharded.
    """

    iterations: int
    bytes: int


def find_reuse(program: FlatProgram) -> dict[tuple[int, int], Reuse]:
    """Return the reuse of arrays, by the index of an operation and the index of a value that it reads or makes.

    Only products have it, and the additions to a sum. The innermost of several loops counts.
    """
    found: dict[tuple[int, int], Reuse] = {}
    index_of = {id(op): index for index, op in enumerate(program.ops)}
    added: dict[int, list[tuple[Op, int]]] = defaultdict(list)
    for loop, addition, value in find_additions(program):
        added[id(loop)].append((addition, value))
    made_by = {result: op for op in program.ops for result in op.results}
    for loop in program.loops:
        if loop.length is None:
            continue
        uses = list(_unchanged_reads(program, loop, index_of))
        held = {value: program.values[value].bytes for _, value in uses}
        for addition, value in added[id(loop)]:
            held[addition.results[0]] = program.values[addition.results[0]].bytes
            uses += [(index_of[id(addition)], addition.results[0]), (index_of[id(made_by[value])], value)]
        reuse = Reuse(loop.length, sum(held.values()))
        for use in uses:
            found.setdefault(use, reuse)
    return found


def _unchanged_reads(program: FlatProgram, loop: Loop, index_of: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Yield the index of each product in a loop, with each operand that all iterations share."""
    inside = [each for each in program.loops if loop.start <= each.start and each.end <= loop.end]
    changing = {carry.before for each in inside for carry in each.carries}
    changing |= {slice_ for each in inside for _, slice_ in each.slices}
    results = {carry.result for each in inside if each is not loop for carry in each.carries}
    changing |= results | {stack for each in inside if each is not loop for _, stack in each.stacks}
    for op in program.ops[loop.start : loop.end]:
        operands = [operand for operand in op.operands if operand is not None]
        is_moved_out = (op.rule.identity or op.primitive in ALIASES) and changing.isdisjoint(operands)
        if not is_moved_out:
            changing.update(op.results)
        if op.primitive in CONTRACTIONS:
            yield from ((index_of[id(op)], operand) for operand in operands if operand not in changing)


def find_early_values(program: FlatProgram) -> dict[int, int]:
    """Return the values that are computed from the inputs of the step by elementwise operations alone, each with its input.

    The slices of an early stack that a loop reads are early too. Values that a loop passes on are not. A value that is computed
    from several inputs has the first of them.
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


def find_lasting_values(program: FlatProgram, early: Mapping[int, int]) -> set[int]:
    """Return the values that are in memory before or after the step: inputs, what is computed early from them, and results."""
    results = {value for value in program.outputs if value is not None}
    results |= {inside for loop in program.loops for inside, stack in loop.stacks if inside is not None and stack in results}
    return {*early, *results}


def find_late_values(program: FlatProgram) -> set[int]:
    """Return the values from which no product is computed, such as the gradients of weights."""
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
    return set(range(len(program.values))) - reachable(sources, products)
