"""Predict which values of a step XLA stores and which it computes again for each reader, and count the resulting HBM traffic.

XLA fuses an elementwise operation into the operations that read it, so that only the values at both ends of a fusion are stored.
On TPU, the forward pass of a softmax stores the scores and not their exponentials, and the backward pass computes these again. We
decide from the last operation to the first, so that we know until when the result of an operation is needed. A result that is
stored takes memory until then. If it is computed again, its operands do. On TPU, the cheaper of the two is taken, which
approximates a minimal cut between the forward and the backward pass.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.shard.graph.scheduling import find_early_values, find_late_values
from penstock.shard.mesh.compiler_models import CPU, CompilerModel
from penstock.shard.trace.flat_program import (
    ALIASES,
    CONTRACTIONS,
    EXPENSIVE,
    IN_PLACE,
    LOOKUPS,
    MOVES,
    REDUCTIONS,
    Conditional,
    FlatProgram,
    Loop,
    Op,
    Value,
    is_one_hot,
    is_outer_product,
    is_product,
)


@dataclass(frozen=True)
class Buffer:
    """A stored value during a part of its live range.

    Attributes:
      value: index of the value in the program.
      share: the stored fraction of the bytes of the value: 0.5 for a bfloat16 copy of float32.
      start, end: indices of the first and the last operation at which it is in memory.
    """

    value: int
    share: float
    start: int
    end: int


@dataclass
class Need:
    """The uses of a value by the operations after the one that is decided.

    Attributes:
      last: index of the last operation that needs it as it is; -1 if none does.
      last_product: index of the last product that reads it; -1 if none does.
      first: index of the first operation that needs it.
      readers: the operations that store something computed from it; not more than two are kept.
    """

    last: int = -1
    last_product: int = -1
    first: int = 1 << 60
    readers: set[int] = field(default_factory=set)

    @property
    def end(self) -> int:
        """Return the index of the last operation that needs it in any form; -1 if none does."""
        return max(self.last, self.last_product)


@dataclass
class Fusion:
    """The values that a compiler stores, and those that it computes again.

    Attributes:
      stored: the stored values; inputs and constants are among them.
      sources: for each value, the stored values from which a reader computes it.
      buffers: the stored values other than inputs and constants.
      reads: the uses of each input and each constant.
      compiler: how the compiler fuses.
    """

    stored: set[int] = field(default_factory=set)
    sources: dict[int, frozenset[int]] = field(default_factory=dict)
    buffers: list[Buffer] = field(default_factory=list)
    reads: dict[int, Need] = field(default_factory=dict)
    compiler: CompilerModel = CPU

    def rounds(self, value: Value, need: Need) -> bool:
        """Return whether only a bfloat16 copy of a value is needed in the end."""
        return self.compiler.rounds(value.dtype) and need.last_product > need.last


_SURPLUS = 1.1
"""A value is stored only if this saves more than a tenth: while it is written, its operands are in memory too."""
_DEEPEST = 24
"""The longest chain of operations that is searched for the values from which a value can be computed again."""


def fuse(program: FlatProgram, state: Collection[int], compiler: CompilerModel) -> Fusion:
    """Predict which values a compiler stores.

    Args:
      state: indices of the outputs that replace inputs. They are written to the memory of the inputs, which are donated.
    """
    return _Fuser(program, state, compiler).run()


class _Fuser:
    """The decisions for one program, from its last operation to its first."""

    def __init__(self, program: FlatProgram, state: Collection[int], compiler: CompilerModel):
        self.program, self.compiler = program, compiler
        self.ops, self.bytes = program.ops, [value.bytes for value in program.values]
        self.inputs = {*program.inputs, *program.constants}
        self.needs: defaultdict[int, Need] = defaultdict(Need)
        self.found = Fusion(stored=set(self.inputs), compiler=compiler)
        self.alias_of = {
            result: operand
            for op in self.ops
            if op.primitive in ALIASES
            for operand, result in zip(op.operands, op.results, strict=False)
            if operand is not None
        }
        outputs = [(index, self.root(output)) for index, output in enumerate(program.outputs) if output is not None]
        self.replaced = {output for index, output in outputs if index in state}
        self.returned = {output for _, output in outputs} - self.replaced
        for output in self.returned:
            self.needs[output].last = len(self.ops) - 1
        self.births, self.around = _find_births(program, self.inputs)
        # The values that are written to memory that exists already: to stacks.
        self.written = {self.root(inside) for loop in program.loops for inside, _ in loop.stacks if inside is not None}
        self.products = {result for op in self.ops if is_product(op) for result in op.results}
        self.fusible_op = {op.results[0]: op for op in self.ops if len(op.results) == 1 and self._is_fusible(op)}
        self.operands_of = {
            op.results[0]: tuple(dict.fromkeys(self.root(operand) for operand in op.operands if operand is not None))
            for op in self.fusible_op.values()
        }

    def root(self, value: int) -> int:
        """Return the value whose memory a value shares."""
        while value in self.alias_of:
            value = self.alias_of[value]
        return value

    def run(self) -> Fusion:
        """Decide for all operations, from the last to the first."""
        ends: defaultdict[int, list[Loop]] = defaultdict(list)
        starts: defaultdict[int, list[Loop]] = defaultdict(list)
        for loop in self.program.loops:
            if loop.end > loop.start:
                ends[loop.end - 1].append(loop)
                starts[loop.start].append(loop)
        branches = {each.end - 1: each for each in self.program.conditionals if each.end > each.start}
        for time in range(len(self.ops) - 1, -1, -1):
            for loop in reversed(ends[time]):  # inner loops come before outer ones in the list
                self._leave(loop)
            if time in branches:
                self._merge_branches(branches[time])
            self._decide(time, self.ops[time])
            for loop in starts[time]:
                self._enter(loop)
        self.found.reads = {value: self.needs[value] for value in self.inputs if self.needs[value].end >= 0}
        self._find_sources()
        return self.found

    def _read(
        self, value: int, time: int, *, product: bool = False, reader: int | None = None, enters: Loop | None = None
    ) -> None:
        """Note that an operation needs a value. If it is inside of a loop and the value outside, the whole loop needs it.

        Args:
          reader: index of the operation that stores a result computed from the value; None for the operation itself.
          enters: the loop that takes the value as the first of a carry. It overwrites it, as XLA gives a loop's operand, body and
            result one buffer (`HloDataflowAnalysis`; `CopyInsertion` adds a copy only if the value is read later).
        """
        value = self.root(value)
        birth = self.births.get(value, -1)
        around = self.around[time] if enters is None else self.around[time][self.around[time].index(enters) + 1 :]
        loops = [loop for loop in around if birth < loop.start]
        end = max([time, *(loop.end - 1 for loop in loops)])
        need = self.needs[value]
        if product:
            need.last_product = max(need.last_product, end)
        else:
            need.last = max(need.last, end)
        need.first = min([need.first, time, *(loop.start for loop in loops)])
        if len(need.readers) < 2:
            need.readers.add(time if reader is None else reader)

    def _store(self, value: int, start: int, need: Need, *, fused: bool = False) -> None:
        """Note that a value is in memory from an operation on, until nothing needs it.

        A float32 value whose last readers are products is kept as bfloat16 for them, where the compiler rounds.
        """
        self.found.stored.add(value)
        if fused:
            return
        rounds = self.found.rounds(self.program.values[value], need)
        if rounds and need.last > start:
            self.found.buffers.append(Buffer(value, 1.0, start, need.last))
            self.found.buffers.append(Buffer(value, 0.5, need.last + 1, need.last_product))
        else:
            self.found.buffers.append(Buffer(value, 0.5 if rounds else 1.0, start, max(start, need.end)))

    def _leave(self, loop: Loop) -> None:
        """Store the results of a loop. A stack exists from the start of the loop; a carry only after its end."""
        end = loop.end - 1
        for inside, stack in loop.stacks:
            need = self.needs[stack]
            if need.end >= 0 or stack in self.replaced:
                self._store(stack, loop.start, Need(max(need.last, end), need.last_product), fused=stack in self.replaced)
            elif inside is not None:
                self.written.discard(self.root(inside))
        for carry in loop.carries:
            need = self.needs[carry.result]
            if need.end > end and carry.result not in self.replaced:
                self._store(carry.result, loop.end, need)
            self.found.stored.add(carry.result)
            if carry.after is not None:
                self._read(carry.after, end)

    def _enter(self, loop: Loop) -> None:
        """Store the values with which an iteration begins, and note what the loop reads from outside."""
        start, end = loop.start, loop.end - 1
        for carry in loop.carries:
            need = self.needs[carry.before]
            self.found.stored.add(carry.before)
            if need.end >= 0 and carry.result not in self.replaced:
                self._store(carry.before, start, need)
            if carry.initial is not None:
                self._read(carry.initial, start, enters=loop)
        for stack, piece in loop.slices:
            need = self.needs[piece]
            if need.end < 0 or stack is None:
                continue
            self.found.stored.add(piece)
            if not self.compiler.fuses_products or need.last_product >= 0:
                self._store(piece, min(need.first, need.end), need)
            self._read(stack, end)
            self.needs[self.root(stack)].first = min(self.needs[self.root(stack)].first, start)

    def _merge_branches(self, branches: Conditional) -> None:
        """Store the results of a conditional.

        The result of a branch shares the memory of the conditional's result (`HloDataflowAnalysis`, phi values). So the latter
        takes none while the other branch, or the first part of its own, runs.
        """
        for inside, result, end in branches.results:
            need = self.needs[result]
            replaced = result in self.replaced
            if need.end < 0 and not replaced:
                continue
            if result not in self.found.stored:
                self._store(result, branches.end, need, fused=replaced or need.end < branches.end)
            if inside is not None:
                if replaced:
                    self.replaced.add(self.root(inside))
                self._read(inside, max(end - 1, branches.start))

    def _decide(self, time: int, op: Op) -> None:
        """Decide whether the results of an operation are stored, and note the values that it needs."""
        if op.primitive in ALIASES:
            return
        needed = [result for result in op.results if self._is_needed(result)]
        if op.results and not needed:
            return  # XLA removes it
        if len(op.results) == 1 and self._is_fusible(op):
            self._decide_fusible(time, op, op.results[0])
            return
        product = is_product(op)
        in_place = self._updated_in_place(op, time)
        for result in needed:
            need = self.needs[result]
            owned = result in self.replaced or (result in self.written and need.end <= time)
            self._store(result, self._made_at(time, op), need, fused=owned or in_place or (product and self._is_epilogue(need)))
        for position, operand in enumerate(op.operands):
            if operand is not None:
                until = self.needs[op.results[0]].end if in_place and position == 0 else time
                self._read(operand, max(until, time), product=product and (op.rounded or not self.compiler.rounds_products))

    def _made_at(self, time: int, op: Op) -> int:
        """Return the operation at which the memory of a result is first written.

        A scatter writes into a copy of zeros, which depend on nothing. A compiler that runs everything as soon as its operands
        exist makes them at the start of the program, or of the body of the loop.
        """
        filled = op.operands[0] if op.primitive in IN_PLACE else None
        if not self.compiler.breadth_first or filled is None or not self._is_constant(self.root(filled)):
            return time
        return max((loop.start for loop in self.around[time]), default=0)

    def _is_constant(self, value: int, depth: int = 0) -> bool:
        """Return whether a value is computed from literals only."""
        operands = self.operands_of.get(value)
        if operands is None or depth == _DEEPEST:
            return False
        return all(self._is_constant(operand, depth + 1) for operand in operands)

    def _is_needed(self, result: int) -> bool:
        return self.needs[result].end >= 0 or result in self.replaced or result in self.written

    def _updated_in_place(self, op: Op, time: int) -> bool:
        """Return whether an operation writes its result into the memory of its first operand, which nothing needs later."""
        if op.primitive not in IN_PLACE or op.operands[0] is None:
            return False
        updated = self.root(op.operands[0])
        return updated not in self.fusible_op and updated not in self.inputs and self.needs[updated].end < time

    def _is_epilogue(self, need: Need) -> bool:
        """Return whether the only reader of a product is an elementwise operation or a reduction, which is fused into it."""
        if not self.compiler.fuses_products or len(need.readers) != 1 or need.last_product >= 0:
            return False
        op = self.ops[next(iter(need.readers))]
        return self._is_fusible(op) or op.primitive in REDUCTIONS

    def _is_fusible(self, op: Op) -> bool:
        if is_outer_product(op) or (self.compiler.computes_again and is_one_hot(op)):
            return True
        return op.primitive in MOVES or (op.rule.identity and not is_product(op))

    def _decide_fusible(self, time: int, op: Op, result: int) -> None:
        """Store the result of an elementwise operation, or compute it again for each reader."""
        need = self.needs[result]
        operands = self.operands_of[result]
        if result in self.replaced or result in self.written:
            self.found.stored.add(result)
            if need.end > time:
                self._store(result, time, need, fused=result in self.replaced)
            for operand in operands:
                self._read(operand, time)
        elif self._is_stored(time, op, result, need, operands):
            replaces = any(self.needs[each].end < 0 and self._holds(each) >= self.bytes[result] for each in operands)
            self._store(result, min(time + replaces, need.end), need)
            for operand in operands:
                self._read(operand, time)
        else:
            for operand in operands:
                for reader in need.readers:
                    self._read(operand, max(need.end, time), reader=reader)
                own = self.needs[operand]
                own.first = min(own.first, need.first)

    def _is_stored(self, time: int, op: Op, result: int, need: Need, operands: tuple[int, ...]) -> bool:
        """Return whether it is cheaper to store a result than to compute it again for each reader."""
        if result in self.returned:
            return True
        size = self.bytes[result]
        if self.compiler.computes_again:
            # A value that only products read is fused into them, unless it is fused into the product that it comes from.
            halved = self.found.rounds(self.program.values[result], need) and self._ends_product(operands, size)
            kept = size * (0.5 if halved else 1.0) * (need.end - time)
            return _SURPLUS * kept < self._cost_until(operands, need.end, time)
        if need.last_product >= 0:
            return True
        if len(need.readers) < 2:
            return False  # all that read it are parts of one fusion
        return op.primitive in EXPENSIVE or self._cost_until(operands, need.end, time) > 0

    def _cost_until(self, values: Iterable[int], until: int, now: int) -> float:
        """Return the memory that it takes to have values until an operation, in bytes times operations.

        Values that are needed until then anyway cost nothing. Each of the others is kept, or the values that it is computed from.
        """
        seen: set[int] = set()

        def cost(value: int, depth: int) -> float:
            end = self.needs[value].end
            if value in seen or value in self.inputs or end >= until:
                return 0.0
            seen.add(value)
            kept = float(self.bytes[value] * (until - max(end, now)))
            operands = self.operands_of.get(value)
            if operands is None or depth == _DEEPEST:
                return kept
            again = 0.0
            for operand in operands:
                again += cost(operand, depth + 1)
                if again >= kept:
                    return kept
            return again

        return sum(cost(value, 0) for value in values)

    def _ends_product(self, operands: Iterable[int], size: int, depth: int = 0) -> bool:
        """Return whether an operation is the last of a chain from a product, so that it can be fused into it."""
        large = [operand for operand in operands if operand not in self.inputs and 2 * self.bytes[operand] >= size]
        if len(large) != 1:
            return False
        before = self.operands_of.get(large[0])
        if before is None or depth == _DEEPEST:
            return large[0] in self.products
        return self._ends_product(before, size, depth + 1)

    def _holds(self, value: int) -> int:
        """Return the bytes of memory of a value that is certain to be stored; 0 for any other."""
        return 0 if value in self.inputs or value in self.fusible_op else self.bytes[value]

    def _find_sources(self) -> None:
        """Find the stored values from which every value is computed."""
        stored, sources = self.found.stored, self.found.sources
        for op in self.ops:
            read = frozenset().union(*(self._sources_of(value) for value in op.operands if value is not None))
            for operand, result in zip((*op.operands, *[None] * len(op.results)), op.results, strict=False):
                if op.primitive in ALIASES and operand is not None:
                    sources[result] = self._sources_of(operand)
                else:
                    sources[result] = frozenset((result,)) if result in stored else read

    def _sources_of(self, value: int) -> frozenset[int]:
        return self.found.sources.get(value, frozenset((value,)) if value in self.found.stored else frozenset())


def _find_births(program: FlatProgram, inputs: Iterable[int]) -> tuple[dict[int, int], list[list[Loop]]]:
    """Return the operation at which each value is first written, and the loops around each operation."""
    births = dict.fromkeys(inputs, -1)
    around: list[list[Loop]] = [[] for _ in program.ops]
    for time, op in enumerate(program.ops):
        births.update(dict.fromkeys(op.results, time))
    for loop in program.loops:
        births.update({carry.result: loop.start for carry in loop.carries} | {carry.before: loop.start for carry in loop.carries})
        births.update({stack: loop.start for _, stack in loop.stacks} | {piece: loop.start for _, piece in loop.slices})
        for time in range(loop.start, loop.end):
            around[time].append(loop)
    for each in program.conditionals:
        births.update({result: each.start for _, result, _ in each.results})
    return births, around


_RUNS_OF_AN_UPDATE = 4
"""The least times of an operation that an update takes which a TPU applies in a loop (`Rule.one_by_one`).

By the cycles of TPU programs it takes 4.9 µs, for tables of 16 to 256 columns and 384 to 4,096 updates. An LSTM with Equinox's
embedding took 5 times as long as data parallelism without it.
"""


class Moved(NamedTuple):
    """The HBM traffic of one run of an operation, if nothing is sharded.

    Attributes:
      bytes: bytes that it reads from and writes to HBM.
      runs: as how many operations it runs; 0 if it is a part of others.
    """

    bytes: float
    runs: int


def hbm_traffic(program: FlatProgram, fusion: Fusion) -> list[Moved]:
    """Return the HBM traffic of each operation.

    Fused operations move nothing: their sources are read by the operation that they are fused into. If the compiler fuses into
    products, elementwise operations and reductions read the result of a product without HBM, as it is made: its *epilogue*. The
    update of a weight does not: its gradient is summed over devices before. The updates of a weight and of its moments are one
    operation with several results, which reads each array once.
    """
    stored = fusion.stored | {output for output in program.outputs if output is not None}
    value_bytes = [value.bytes for value in program.values]
    late = find_late_values(program)
    seen: set[int] = set()  # by updates
    traffic = []
    epilogues = _Epilogues(program, late) if fusion.compiler.fuses_products else None
    for index, op in enumerate(program.ops):
        if op.primitive in ALIASES or not any(result in stored for result in op.results):
            traffic.append(Moved(0.0, 0))
            continue
        read = frozenset().union(*(fusion.sources.get(value, frozenset((value,))) for value in op.operands if value is not None))
        free = epilogues.read_for_free(index, op, read) if epilogues is not None else frozenset()
        if op.rule.identity and late.issuperset(op.results):
            free |= read & seen
            seen |= read | set(op.results)
        runs = int(not free)
        if op.primitive in LOOKUPS:
            updates = op.operands[2] if op.primitive.startswith("scatter") else None
            moved = 2.0 * value_bytes[op.results[0] if updates is None else updates]
            if updates is not None and op.operands[0] not in stored:  # into zeros, as the gradient of a lookup
                moved += value_bytes[op.results[0]]
            if op.rule.one_by_one and fusion.compiler.name == "tpu" and (indices := op.operands[1]) is not None:
                runs *= _RUNS_OF_AN_UPDATE * math.prod(program.values[indices].shape[:-1])
        else:
            moved = float(sum(value_bytes[value] for value in (*(read - free), *op.results)))
        traffic.append(Moved(moved, runs))
    return traffic


class _Epilogues:
    """The products into which operations are fused.

    An operation is fused into the last of the products that its operands are made in. It is not if it needs the result of a
    reduction in the same product, which exists only when the product is done.
    """

    def __init__(self, program: FlatProgram, late: set[int]) -> None:
        self._early, self._late = find_early_values(program), late
        self._product: dict[int, int] = {}  # Value → the operation that is the product in whose epilogue it is made.
        self._reduced: set[int] = set()  # The values that are made by a reduction.

    def read_for_free(self, index: int, op: Op, read: frozenset[int]) -> frozenset[int]:
        """Return the stored operands that an operation reads as they are made, and note where its results are made."""
        if op.primitive in CONTRACTIONS:
            if any(operand in self._early for operand in op.operands) or not self._late.issuperset(op.results):
                self._product.update(dict.fromkeys(op.results, index))
            return frozenset()  # The gradient of a weight, which no product reads, has no epilogue.
        last = max((self._product.get(value, -1) for value in read), default=-1)
        beside = frozenset(value for value in read if last >= 0 and self._product.get(value, -1) == last)
        fusible = op.rule.identity or op.primitive in REDUCTIONS
        if not beside or not fusible or beside & self._reduced:
            return frozenset()
        self._product.update(dict.fromkeys(op.results, last))
        if op.primitive in REDUCTIONS:
            self._reduced.update(op.results)
        return beside
