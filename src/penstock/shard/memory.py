"""Which arrays live at the same time.

The model of a compiler: elementwise operations are fused into whatever reads them, and take no memory (they are computed again from what
they read, which has to live so much longer); products of matrices, convolutions, reductions and the like write their results, and want
operands that are there; reshapes and transposes are other names for the same memory. What the state is replaced by takes the place of
what it replaces, as `plan.jit` donates it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.shard.graph import Graph
from penstock.shard.program import Program

_ALIASES = frozenset(
    "reshape squeeze expand_dims transpose copy copy_p stop_gradient optimization_barrier sharding_constraint".split()
)
_READ_IN_PLACE = frozenset(
    """dot_general ragged_dot_general conv_general_dilated gather scatter scatter-add scatter_add sort top_k cumsum cumlogsumexp cumprod
    cummax cummin dynamic_update_slice select_and_scatter_add select_and_gather_add reduce_window_sum reduce_window_max
    fft cholesky triangular_solve shard_map""".split()
)
"""Their operands have to lie in memory, and so do their results."""
_WRITES = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin concatenate random_bits".split())
"""Their results lie in memory; operands are computed on the way in."""
_MOST_SOURCES = 12


@dataclass(frozen=True)
class Lifetimes:
    """What takes memory, when: arrays of the same length, one entry for each array that is kept.

    Attributes:
      value: number in the program.
      node: of the graph, whose layout divides it.
      bytes: of the whole array.
      start, end: operations during which it lives, both included.
      edge: where it is a copy that exists only if the edge changes the layout, that edge; else -1.
      steps: number of operations.
    """

    value: np.ndarray
    node: np.ndarray
    bytes: np.ndarray
    start: np.ndarray
    end: np.ndarray
    edge: np.ndarray
    steps: int


def lifetimes(program: Program, graph: Graph, state: frozenset[int]) -> Lifetimes:
    """Find when each array lives.

    Args:
      program: the step.
      graph: its decisions.
      state: places of the outputs that take the place of inputs.
    """
    inputs = {*program.inputs, *program.constants}
    kept, sources = _kept(program, inputs)
    birth: dict[int, int] = dict.fromkeys(inputs, -1)
    for time, op in enumerate(program.ops):
        for result in op.results:
            birth[result] = time
    for loop in program.loops:
        birth.update(dict.fromkeys((*loop.made, *loop.passed), loop.start))
    around: list[list[tuple[int, int]]] = [[] for _ in program.ops]
    for loop in program.loops:
        for time in range(loop.start, loop.end):
            around[time].append((loop.start, loop.end - 1))

    last: dict[int, int] = {}

    def use(value: int, time: int) -> None:
        for source in sources.get(value, ()):
            end = max([time, *(stop for start, stop in around[time] if birth.get(source, 0) < start)]) if around[time] else time
            last[source] = max(last.get(source, -1), end)

    for time, op in enumerate(program.ops):
        if any(result in kept for result in op.results):
            for operand in op.operands:
                if operand is not None:
                    use(operand, time)
    for loop in program.loops:
        for value in loop.made:
            last[value] = max(last.get(value, -1), loop.end - 1)
    for place, output in enumerate(program.outputs):
        if output is None or output in inputs:
            continue
        time = min(birth.get(output, 0), len(program.ops) - 1)
        if place in state:
            use(output, time)
        else:
            for source in sources.get(output, ()):
                last[source] = len(program.ops) - 1

    rows: list[tuple[int, int, int, int, int, int]] = []
    for value in kept:
        if value not in inputs:
            start = birth.get(value, 0)
            rows.append((value, graph.group[value], program.values[value].bytes, start, max(last.get(value, start), start), -1))
    first = _first_uses(program, inputs)
    for number, edge in enumerate(graph.edges):
        if edge.kind == "use" and graph.group.get(edge.value) == edge.b and edge.value in last:
            rows.append((edge.value, edge.b, edge.bytes, first.get(edge.value, 0), last[edge.value], number))
    at = {node: time for time, node in _times(program, graph).items()}
    for number, edge in enumerate(graph.edges):
        if edge.kind == "operand":
            rows.append((edge.value, edge.b, edge.bytes, at[edge.b], at[edge.b], number))
        elif edge.kind == "result" and edge.partial:
            rows.append((edge.value, edge.a, edge.bytes, at[edge.a], at[edge.a], number))
    columns = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    return Lifetimes(*columns, steps=len(program.ops))


def _times(program: Program, graph: Graph) -> dict[int, int]:
    """Time of each anchor → its node."""
    nodes = iter(graph.op)
    anchors = {graph.nodes[node].label: node for node in nodes}
    return {time: anchors[time] for time in range(len(program.ops)) if time in anchors}


def _first_uses(program: Program, inputs: set[int]) -> dict[int, int]:
    first: dict[int, int] = {}
    for time, op in enumerate(program.ops):
        for operand in op.operands:
            if operand in inputs:
                first.setdefault(operand, time)
    return first


def _kept(program: Program, inputs: set[int]) -> tuple[set[int], dict[int, frozenset[int]]]:
    """The values that lie in memory, and for each value those from which it is computed where it is read."""
    name: dict[int, int] = {}
    virtual_operands: set[int] = set()
    for op in program.ops:
        if op.primitive in _ALIASES and op.operands[0] is not None:
            for operand, result in zip(op.operands, op.results, strict=False):
                if operand is not None:
                    name[result] = name.get(operand, operand)
        elif op.primitive in _READ_IN_PLACE:
            virtual_operands |= {name.get(operand, operand) for operand in op.operands if operand is not None}
    kept: set[int] = set(inputs)
    for loop in program.loops:
        kept.update(loop.made)
        kept.update(loop.passed)
    sources: dict[int, frozenset[int]] = {value: frozenset((value,)) for value in kept}
    for op in program.ops:
        read = frozenset().union(*(sources.get(each, frozenset()) for each in op.operands if each is not None))
        for result in op.results:
            if op.primitive in _ALIASES:
                sources[result] = read
            elif op.primitive in _READ_IN_PLACE or op.primitive in _WRITES or result in virtual_operands or len(read) > _MOST_SOURCES:
                kept.add(result)
                sources[result] = frozenset((result,))
            else:
                sources[result] = read
    return kept, sources
