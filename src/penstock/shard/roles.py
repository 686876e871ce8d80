"""What the inputs of a step are, found by what it does with them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from penstock.shard.graph import Graph
from penstock.shard.known import batch_slots
from penstock.shard.program import Program
from penstock.shard.search import Problem


def roles_of(program: Program, graph: Graph, problem: Problem, state: Mapping[int, int]) -> list[str]:
    """The role of each input.

    State is what the step gives back in the same form. Of it, what the other results (the loss) depend on are *parameters*,
    the rest is the *optimizer*'s; where there are no other results all is parameters. Of the inputs that are not state, a
    *batch* has a first dimension that no state has; the rest is *other*: frozen weights, learning rates.
    """
    replaced = set(state.values())
    results = [output for place, output in enumerate(program.outputs) if place not in state and output is not None]
    needed = _behind(program, results) if results else set(program.inputs)
    stored = {graph.leaf[program.inputs[place]] for place in replaced}
    roles = []
    for place, value in enumerate(program.inputs):
        if place in replaced:
            roles.append("parameters" if value in needed and program.values[value].shape else "optimizer")
        elif program.values[value].shape and not stored & set(batch_slots(problem, [graph.leaf[value]])):
            roles.append("batch")
        else:
            roles.append("other")
    return roles


def _behind(program: Program, results: list[int]) -> set[int]:
    """All values that some values depend on."""
    sources: dict[int, list[int]] = {}
    for op in program.ops:
        read = [operand for operand in op.operands if operand is not None]
        for result in op.results:
            sources.setdefault(result, []).extend(read)
    for tie in program.ties:
        sources.setdefault(tie.outer, []).append(tie.inner)
        sources.setdefault(tie.inner, []).append(tie.outer)
    found, queue = set(results), deque(results)
    while queue:
        for source in sources.get(queue.popleft(), ()):
            if source not in found:
                found.add(source)
                queue.append(source)
    return found
