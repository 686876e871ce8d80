"""Find the live range of each array of a step: the operations between its first write and its last read.

The peak memory of a layout is the largest sum of live bytes. New state takes the memory of the old state, which `plan.jit`
donates. Some arrays hold no value of the program (`Workspace`): On CPU and GPU, XLA writes some operations as several of dense
arrays before it fuses, with masked operands and indices of maxima. On TPU, it copies state into another order of dimensions.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.shard.graph.decisions import Graph
from penstock.shard.graph.fusion import Fusion
from penstock.shard.mesh.compiler_models import keeps_order
from penstock.shard.trace.flat_program import ALIASES, CONTRACTIONS, IN_PLACE, FlatProgram, Op, find_dependents, is_product

_INDEX_BYTES = 4
"""Bytes of an index of a maximum, which is int32."""


@dataclass(frozen=True)
class Workspace:
    """Arrays that exist beside a value while some operations run.

    Attributes:
      value: index of the value in the program. The arrays are sharded as it is.
      bytes: bytes of the global arrays.
      start, end: indices of the first and the last operation at which they are in memory.
      product: index of the value, a product, that is computed before copies of state are read; -1 for other arrays. The copies
        may be made earlier.
    """

    value: int
    bytes: float
    start: int
    end: int
    product: int = -1


def find_workspaces(program: FlatProgram, primitives: Collection[str]) -> list[Workspace]:
    """Find the dense arrays with which a compiler carries out operations of some primitives (`CompilerModel.writes_dense`)."""
    found: list[Workspace] = []
    masked: dict[int, tuple[float, int, int]] = {}
    for time, op in enumerate(program.ops):
        if op.primitive not in primitives:
            continue
        if op.primitive == "ragged_dot_general":
            groups, operands = _ragged_operands(program, op)
            for value in operands:
                with_mask = program.values[value].bytes + math.prod(program.values[value].shape)
                size, first, _ = masked.get(value, (groups * with_mask, time, time))
                masked[value] = (size, first, time)
            if len(operands) == 1:
                # Groups and columns become one dimension, over which one product sums.
                found.append(Workspace(operands[0], groups * program.values[operands[0]].bytes, time, time))
        else:
            found += _maxima(program, op, time)
    return found + [Workspace(value, *each) for value, each in masked.items()]


def find_layout_copies(program: FlatProgram) -> list[Workspace]:
    """Find the copies of state that is updated with a transposed product.

    The gradient of a kernel is a product and then a transpose of it. Layout assignment (`LayoutAssignment`, from the products on)
    makes the transpose free, and gives its order of dimensions to all that is computed elementwise from it. State that is stored
    in the other order is copied when the update reads it: parameters and moments at once, since their updates are fused. The
    copies hold the new state until it is written back.
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


_EARLY = 0.4
"""The part of the copies of state in another order of dimensions that waits for an all-reduce of gradients with them.

The TPU compiler makes either all copies before the all-reduce or each where it is used, and small steps do not show which. It did
the first for 15 of 30 steps, most of them small. This value gives errors of the same size to both kinds in the zoo.
"""


@dataclass(frozen=True)
class LiveRanges:
    """The live ranges of the stored arrays of a step, as NumPy arrays of equal length with one entry per live range.

    Attributes:
      value: index of the value in the program.
      node: index of the graph node whose layout shards it.
      bytes: bytes of the global array as it is stored, times `CompilerModel.packing`.
      start, end: indices of the first and the last operation at which it is live.
      edge: index of the graph edge if the array exists only where this edge reshards; else -1.
      form: what must hold if it exists only where an edge reshards: 0 nothing more, 1 a reduce-scatter, 2 an all-reduce.
      steps: number of operations in the program.
    """

    value: np.ndarray
    node: np.ndarray
    bytes: np.ndarray
    start: np.ndarray
    end: np.ndarray
    edge: np.ndarray
    form: np.ndarray
    steps: int


Row = tuple[int, int, float, int, int, int, int]
"""The entries of a live range, in the order of the attributes of `LiveRanges`."""


def find_live_ranges(program: FlatProgram, graph: Graph, fusion: Fusion) -> LiveRanges:
    """Find the live ranges of a step."""
    rows: list[Row] = []
    # The compiler computes slices and casts of constants, and keeps them in their place.
    folded = find_dependents(program, program.constants) - find_dependents(program, program.inputs)
    for each in fusion.buffers:
        if each.value in folded:
            continue
        size = program.values[each.value].bytes * each.share
        rows.append((each.value, graph.group[each.value], size, each.start, each.end, -1, 0))
    for index, edge in enumerate(graph.edges):
        if edge.kind == "use" and graph.group.get(edge.value) == edge.b and edge.value in fusion.reads:
            need = fusion.reads[edge.value]
            array = program.values[edge.value]
            # A gathered copy is as it was sent: rounded, if only rounding products read it.
            size = array.bytes / 2 if fusion.rounds(array, need) else edge.bytes
            rows.append((edge.value, edge.b, size, min(need.first, need.end), need.end, index, 0))
    for work in find_workspaces(program, fusion.compiler.writes_dense):
        rows.append((work.value, graph.group[work.value], work.bytes, work.start, work.end, -1, 0))
    first_read = _find_first_reads(program)
    sums = _find_sums(program, graph, first_read, fusion.compiler.combines["all-reduce"])
    if fusion.compiler.copies_layouts:
        rows += _copy_rows(program, graph, sums)
    rows += _reshard_rows(graph) + _partial_rows(program, graph, fusion, first_read, sums)
    columns = np.array(rows, dtype=np.float64).reshape(-1, 7).T
    whole = columns.astype(np.int64)
    sizes = columns[2] * fusion.compiler.packing
    return LiveRanges(whole[0], whole[1], sizes, whole[3], whole[4], whole[5], whole[6], len(program.ops))


def _reshard_rows(graph: Graph) -> list[Row]:
    """Return the live ranges of arrays that exist only if an edge to an operation reshards."""
    time_of = {node: graph.nodes[node].label for node in graph.op}
    readers = defaultdict(list)
    for edge in graph.edges:
        if edge.kind == "operand":
            readers[edge.a].append(time_of[edge.b])
    rows: list[Row] = []
    for index, edge in enumerate(graph.edges):
        if edge.kind == "shared_reshard":
            rows.append((edge.value, edge.b, edge.bytes, min(readers[edge.b]), max(readers[edge.b]), index, 0))
        elif edge.kind == "operand":
            rows.append((edge.value, edge.b, edge.bytes, time_of[edge.b], time_of[edge.b], index, 0))
    return rows


def _copy_rows(program: FlatProgram, graph: Graph, sums: Mapping[int, _Sum]) -> list[Row]:
    """Return the live ranges of copies of state in another order of dimensions.

    They are made before the update that reads them. If this waits for an all-reduce of many gradients, so do their copies. The
    updates that follow an earlier all-reduce run while the last one waits for its gradients.
    """
    edge_of = {graph.edges[index].value: index for index in sums}
    rows: list[Row] = []
    for work in find_layout_copies(program):
        index = edge_of.get(work.product, -1)
        rows.append((work.value, graph.leaf[work.value], work.bytes, work.start, work.end, -1, 0))
        if index >= 0 and not sums[index].full and sums[index].end < work.start:
            size = _EARLY * work.bytes
            rows.append((work.value, graph.edges[index].a, size, sums[index].end, work.start - 1, index, 2))
    return rows


def _partial_rows(
    program: FlatProgram, graph: Graph, fusion: Fusion, first_read: Sequence[int], sums: Mapping[int, _Sum]
) -> list[Row]:
    """Return the live ranges of partial results, until they are summed, and of sums that are stored because they are sent.

    A partial result is in memory as long as its value would be: the result of a scatter from where its zeros are made.
    """
    made = {each.value: each.start for each in reversed(fusion.buffers)}
    scattered = {index: each.start for index, each in sums.items()}
    rows: list[Row] = []
    if fusion.compiler.slices_sums:
        scattered = _find_slices(program, graph, sums)
        rows += [
            (graph.edges[index].value, graph.edges[index].a, graph.edges[index].bytes, time, time, index, 1)
            for index, time in scattered.items()
        ]
    for index, each in sums.items():
        edge = graph.edges[index]
        start = min(each.start, made.get(edge.value, each.start))
        rows.append((edge.value, edge.a, edge.bytes, start, scattered[index], index, 1))
        rows.append((edge.value, edge.a, edge.bytes, start, each.end, index, 2))
        read = first_read[edge.value]
        if edge.value not in made and each.end < read < len(program.ops):
            rows.append((edge.value, edge.a, edge.bytes, each.end, read, index, 2))
    return rows


def _find_slices(program: FlatProgram, graph: Graph, sums: Mapping[int, _Sum]) -> dict[int, int]:
    """Return when each sum of which a device takes a slice has been made (`CompilerModel.slices_sums`), by index of its edge.

    Such sums are combined as all-reduces are, if none depends on another. Otherwise a sum is made by itself, but after the next
    product: both gradients of a product are computed before the first of them is sent.
    """
    again = _find_summed_again(program, graph, sums)
    products = [time for time, op in enumerate(program.ops) if op.primitive in CONTRACTIONS]

    def after_next(time: int) -> int:
        following = bisect.bisect_right(products, time)
        return products[following] + 1 if following < len(products) else time

    return {index: min(after_next(each.start), each.end) if index in again else each.end for index, each in sums.items()}


def _find_summed_again(program: FlatProgram, graph: Graph, sums: Mapping[int, _Sum]) -> frozenset[int]:
    """Return the sums that are summed again, such as gradients whose norm is computed, by index of their edges.

    If the first sum is scattered, the second is over devices, too, and depends on the first. A sum that another depends on is not
    combined with the sums that follow it (XLA's `AllReduceCombiner`).
    """
    summing = {graph.nodes[edge.a].label for edge in graph.edges if edge.kind == "result" and edge.partial}
    origin = {graph.edges[index].value: index for index in sums}
    found: set[int] = set()
    for time, op in enumerate(program.ops):
        known = {origin[operand] for operand in op.operands if operand in origin}
        if len(known) == 1 and op.rule.identity and not is_product(op):
            origin.update(dict.fromkeys(op.results, min(known)))
        elif time in summing:
            found |= known
    return frozenset(found)


@dataclass(frozen=True)
class _Sum:
    """A partial result that is summed.

    Attributes:
      start: index of the operation that makes it.
      end: index of the last operation whose result is summed in the same all-reduce.
      full: whether its all-reduce is as large as one may be, so that another follows.
    """

    start: int
    end: int
    full: bool = False


def _find_sums(program: FlatProgram, graph: Graph, first_read: Sequence[int], combines: float) -> dict[int, _Sum]:
    """Return when each partial result is summed, by the index of its edge.

    The compiler combines independent sums up to `combines` bytes into one collective. Partial results then wait for each other.
    """
    time_of = {node: graph.nodes[node].label for node in graph.op}
    products = [time for time, op in enumerate(program.ops) if op.primitive in CONTRACTIONS]
    components = graph.components
    at = defaultdict(list)
    for index, edge in enumerate(graph.edges):
        if edge.kind == "result" and edge.partial:
            at[time_of[edge.a]].append(index)
    queues: defaultdict[int, _Queue] = defaultdict(_Queue)
    found: dict[int, _Sum] = {}
    for time, op in enumerate(program.ops):
        for index in at[time]:
            edge = graph.edges[index]
            following = bisect.bisect_right(products, time)
            if first_read[edge.value] <= (products[following] if following < len(products) else time):
                found[index] = _Sum(time, time)  # the next product depends on it
                continue
            queue = queues[min(components[edge.a, dim] for dim in edge.partial)]
            full = queue.bytes + edge.bytes > combines
            if queue.waiting and (full or queue.precedes(op) or edge.count != graph.edges[queue.waiting[-1][1]].count):
                found |= queue.empty(full)
            queue.waiting.append((time, index))
            queue.bytes += edge.bytes
            queue.dependent.add(edge.value)
        for queue in queues.values():
            if queue.precedes(op):
                queue.dependent.update(op.results)
    for queue in queues.values():
        found |= queue.empty()
    return found


@dataclass
class _Queue:
    """Sums over one dimension that can be combined: none depends on another (XLA's `CombineInstructionsByKey`).

    Attributes:
      waiting: (index of the operation, index of the edge) of each.
      dependent: the sums, and all values that are computed from them.
      bytes: the bytes of all sums.
    """

    waiting: list[tuple[int, int]] = field(default_factory=list)
    dependent: set[int] = field(default_factory=set)
    bytes: float = 0.0

    def precedes(self, op: Op) -> bool:
        """Return whether an operation depends on one of the sums."""
        return not self.dependent.isdisjoint(op.operands)

    def empty(self, full: bool = False) -> dict[int, _Sum]:
        """Return when each is summed, by the index of its edge, and start with none."""
        found = {index: _Sum(time, self.waiting[-1][0], full) for time, index in self.waiting}
        self.waiting, self.dependent, self.bytes = [], set(), 0.0
        return found


def _find_first_reads(program: FlatProgram) -> list[int]:
    """Return, for each value, the first operation that reads it other than to reshape it."""
    never = len(program.ops)
    first = [never] * len(program.values)
    for time in range(never - 1, -1, -1):
        op = program.ops[time]
        for operand in op.operands:
            if operand is not None:
                through = first[op.results[0]] if op.primitive in ALIASES and op.results else time
                first[operand] = min(first[operand], through)
    return first
