"""When which arrays live, and so how much memory is taken at the fullest time.

What the state is replaced by takes the place of what it replaces, as `plan.jit` donates it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from penstock.shard.graph.decisions import Graph
from penstock.shard.graph.fusion import materialized_values
from penstock.shard.trace.flat_program import FlatProgram

TEMP_FACTOR = 1.25
"""By how much more memory XLA takes than the arrays that have to live: for copies in other orders of dimensions, and by an order
of operations that is not the best. Found on 17 training steps compiled for CPU (`penstock bench shard`), where it is 1.05 to
1.5."""


@dataclass(frozen=True)
class LiveRanges:
    """What takes memory, when: arrays of the same length, one entry for each array that is kept.

    Attributes:
      value: number in the program.
      node: of the graph, whose layout divides it.
      bytes: of the whole array, times `COPIES`.
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


def find_live_ranges(program: FlatProgram, graph: Graph, state: frozenset[int]) -> LiveRanges:
    """Find when each array lives.

    Args:
      program: the step.
      graph: its decisions.
      state: places of the outputs that take the place of inputs.
    """
    inputs = {*program.inputs, *program.constants}
    materialized, sources = materialized_values(program)
    birth: dict[int, int] = dict.fromkeys(inputs, -1)
    for time, op in enumerate(program.ops):
        for result in op.results:
            birth[result] = time
    for loop in program.loops:
        birth.update(dict.fromkeys((*loop.results, *loop.carries), loop.start))
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
        if any(result in materialized for result in op.results):
            for operand in op.operands:
                if operand is not None:
                    use(operand, time)
    for loop in program.loops:
        for value in loop.read:
            if loop.end > loop.start:
                use(value, loop.end - 1)
        for value in loop.results:
            last[value] = max(last.get(value, -1), loop.end - 1)
    for index, output in enumerate(program.outputs):
        if output is None or output in inputs:
            continue
        time = min(birth.get(output, 0), len(program.ops) - 1)
        if index in state:
            use(output, time)
        else:
            for source in sources.get(output, ()):
                last[source] = len(program.ops) - 1

    rows: list[tuple[int, int, int, int, int, int]] = []
    for value in materialized:
        if value not in inputs:
            start = birth.get(value, 0)
            rows.append((value, graph.group[value], program.values[value].bytes, start, max(last.get(value, start), start), -1))
    first = _first_reads(program, inputs)
    for number, edge in enumerate(graph.edges):
        if edge.kind == "use" and graph.group.get(edge.value) == edge.b and edge.value in last:
            rows.append((edge.value, edge.b, edge.bytes, first.get(edge.value, 0), last[edge.value], number))
    at = {node: time for time, node in _times(program, graph).items()}
    readers = defaultdict(list)
    for edge in graph.edges:
        if edge.kind == "operand":
            readers[edge.a].append(edge)
    for number, edge in enumerate(graph.edges):
        if edge.kind == "shared_reshard":
            read = [at[other.b] for other in readers[edge.b]]
            rows.append((edge.value, edge.b, edge.bytes, min(read), max(read), number))
        elif edge.kind == "operand":
            rows.append((edge.value, edge.b, edge.bytes, at[edge.b], at[edge.b], number))
        elif edge.kind == "result" and edge.partial:
            rows.append((edge.value, edge.a, edge.bytes, at[edge.a], at[edge.a], number))
    columns = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    columns[2] = columns[2] * TEMP_FACTOR
    return LiveRanges(columns[0], columns[1], columns[2], columns[3], columns[4], columns[5], len(program.ops))


def _times(program: FlatProgram, graph: Graph) -> dict[int, int]:
    """Time of each anchor → its node."""
    nodes = iter(graph.op)
    non_elementwise = {graph.nodes[node].label: node for node in nodes}
    return {time: non_elementwise[time] for time in range(len(program.ops)) if time in non_elementwise}


def _first_reads(program: FlatProgram, inputs: set[int]) -> dict[int, int]:
    first: dict[int, int] = {}
    for time, op in enumerate(program.ops):
        for operand in op.operands:
            if operand in inputs:
                first.setdefault(operand, time)
    for loop in program.loops:
        for value in loop.read:
            if value in inputs:
                first[value] = min(first.get(value, loop.start), loop.start)
    return first
