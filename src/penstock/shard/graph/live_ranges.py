"""Find the live range of each array of a step: the operations between its first write and its last read.

The peak memory of a layout is the largest sum of live bytes. New state takes the memory of the old state, which `plan.jit`
donates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from penstock.shard.graph.decisions import Graph
from penstock.shard.graph.fusion import materialized_values
from penstock.shard.trace.flat_program import FlatProgram

TEMP_FACTOR = 1.25
"""The ratio of XLA's temporary memory to the bytes that must be live. XLA keeps copies with other orders of dimensions, and its
order of operations is not optimal. The ratio is 1.05 to 1.5 on 17 training steps compiled for CPU (`penstock bench shard`)."""


@dataclass(frozen=True)
class LiveRanges:
    """The live ranges of the materialized arrays of a step, as NumPy arrays of equal length with one entry per live range.

    Attributes:
      value: index of the value in the program.
      node: index of the graph node whose layout shards it.
      bytes: bytes of the global array, times `TEMP_FACTOR`.
      start, end: indices of the first and the last operation at which it is live.
      edge: index of the graph edge if the array exists only where this edge reshards; else -1.
      steps: number of operations in the program.
    """

    value: np.ndarray
    node: np.ndarray
    bytes: np.ndarray
    start: np.ndarray
    end: np.ndarray
    edge: np.ndarray
    steps: int


def find_live_ranges(program: FlatProgram, graph: Graph, state: frozenset[int]) -> LiveRanges:
    """Find the live ranges of a step.

    Args:
      program: the step.
      graph: its decisions.
      state: indices of the outputs that replace inputs.
    """
    inputs = {*program.inputs, *program.constants}
    materialized, sources = materialized_values(program)
    births = _find_births(program, inputs)
    last_reads = _find_last_reads(program, materialized, sources, births, inputs, state)
    rows: list[tuple[int, int, int, int, int, int]] = []
    for value in materialized:
        if value not in inputs:
            start = births.get(value, 0)
            end = max(last_reads.get(value, start), start)
            rows.append((value, graph.group[value], program.values[value].bytes, start, end, -1))
    first_reads = _find_first_reads(program, inputs)
    for index, edge in enumerate(graph.edges):
        if edge.kind == "use" and graph.group.get(edge.value) == edge.b and edge.value in last_reads:
            rows.append((edge.value, edge.b, edge.bytes, first_reads.get(edge.value, 0), last_reads[edge.value], index))
    rows += _reshard_rows(graph)
    columns = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    columns[2] = columns[2] * TEMP_FACTOR
    return LiveRanges(columns[0], columns[1], columns[2], columns[3], columns[4], columns[5], len(program.ops))


def _find_births(program: FlatProgram, inputs: set[int]) -> dict[int, int]:
    """Return the operation at which each value is first written: -1 for inputs, the start of the loop for its results."""
    births: dict[int, int] = dict.fromkeys(inputs, -1)
    for time, op in enumerate(program.ops):
        for result in op.results:
            births[result] = time
    for loop in program.loops:
        births.update(dict.fromkeys((*loop.results, *loop.carries), loop.start))
    return births


def _find_last_reads(
    program: FlatProgram,
    materialized: set[int],
    sources: Mapping[int, frozenset[int]],
    births: Mapping[int, int],
    inputs: set[int],
    state: frozenset[int],
) -> dict[int, int]:
    """Return the last operation that reads each materialized value, directly or through operations that are fused into it.

    A value from outside of a loop that is read inside lives until the end of the loop. An output lives until the end of the
    step, unless it is new state, which takes the memory of the old state.
    """
    loops_around: list[list[tuple[int, int]]] = [[] for _ in program.ops]
    for loop in program.loops:
        for time in range(loop.start, loop.end):
            loops_around[time].append((loop.start, loop.end - 1))
    last_reads: dict[int, int] = {}

    def read(value: int, time: int) -> None:
        for source in sources.get(value, ()):
            ends = [end for start, end in loops_around[time] if births.get(source, 0) < start]
            last_reads[source] = max(last_reads.get(source, -1), time, *ends)

    for time, op in enumerate(program.ops):
        if any(result in materialized for result in op.results):
            for operand in op.operands:
                if operand is not None:
                    read(operand, time)
    for loop in program.loops:
        for value in loop.read:
            if loop.end > loop.start:
                read(value, loop.end - 1)
        for value in loop.results:
            last_reads[value] = max(last_reads.get(value, -1), loop.end - 1)
    for index, output in enumerate(program.outputs):
        if output is None or output in inputs:
            continue
        if index in state:
            read(output, min(births.get(output, 0), len(program.ops) - 1))
        else:
            for source in sources.get(output, ()):
                last_reads[source] = len(program.ops) - 1
    return last_reads


def _reshard_rows(graph: Graph) -> list[tuple[int, int, int, int, int, int]]:
    """Return the live ranges of arrays that exist only if an edge of a non-elementwise operation reshards."""
    time_of = {node: graph.nodes[node].label for node in graph.op}
    operands = defaultdict(list)
    for edge in graph.edges:
        if edge.kind == "operand":
            operands[edge.a].append(edge)
    rows = []
    for index, edge in enumerate(graph.edges):
        if edge.kind == "shared_reshard":
            reads = [time_of[operand.b] for operand in operands[edge.b]]
            rows.append((edge.value, edge.b, edge.bytes, min(reads), max(reads), index))
        elif edge.kind == "operand":
            rows.append((edge.value, edge.b, edge.bytes, time_of[edge.b], time_of[edge.b], index))
        elif edge.kind == "result" and edge.partial:
            rows.append((edge.value, edge.a, edge.bytes, time_of[edge.a], time_of[edge.a], index))
    return rows


def _find_first_reads(program: FlatProgram, inputs: set[int]) -> dict[int, int]:
    """Return the first operation that reads each input."""
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
