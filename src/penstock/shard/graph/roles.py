"""What the inputs of a step are, found by what it does with them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from penstock.shard.graph.batch_dims import first_shardable_dim
from penstock.shard.graph.decisions import connect_dims
from penstock.shard.graph.first_use import find_first_uses
from penstock.shard.graph.step_model import StepModel
from penstock.shard.trace.flat_program import FlatProgram

_LOOKS_INTO = ("dot_general", "ragged_dot_general", "conv_general_dilated", "gather")


def infer_roles(model: StepModel, state: Mapping[int, int]) -> list[str]:
    """The role of each input.

    State is what the step gives back in the same form. Of it, what the other results (the loss) depend on are *parameters*,
    the rest is the *optimizer*'s; where there are no other results all is parameters. Of the inputs that are not state, a
    *batch* has a first dimension that no state has, and that is not summed over or looked up in where it is first computed with.
    The rest is *other*: frozen weights, learning rates.
    """
    program = model.program
    replaced = set(state.values())
    results = [output for index, output in enumerate(program.outputs) if index not in state and output is not None]
    needed = _depended_on(program, results) if results else set(program.inputs)
    batch = _batch(model, replaced)
    roles = []
    for index, value in enumerate(program.inputs):
        if index in replaced:
            roles.append("parameters" if value in needed and program.values[value].shape else "optimizer")
        else:
            roles.append("batch" if index in batch else "other")
    return roles


def _batch(model: StepModel, replaced: set[int]) -> set[int]:
    """The places of inputs that are a batch."""
    connected = connect_dims(model.graph)
    stored = {model.inputs[index] for index in replaced}
    of_state = {number for (node, _), number in connected.items() if node in stored}
    uses = find_first_uses(model.program, model.groups)
    found = set()
    for index, value in enumerate(model.program.inputs):
        if index in replaced or not model.program.values[value].shape:
            continue
        node, use = model.inputs[index], uses.get(value)
        dim = first_shardable_dim(model.graph, node)
        weight = use is not None and use.op.primitive in _LOOKS_INTO and use.sums_over(dim)
        if not weight and connected[node, dim] not in of_state:
            found.add(index)
    return found


def _depended_on(program: FlatProgram, results: list[int]) -> set[int]:
    """All values that some values depend on."""
    sources: dict[int, list[int]] = {}
    for op in program.ops:
        read = [operand for operand in op.operands if operand is not None]
        for result in op.results:
            sources.setdefault(result, []).extend(read)
    for pair in program.same_sharding:
        sources.setdefault(pair.outer, []).append(pair.inner)
        sources.setdefault(pair.inner, []).append(pair.outer)
    found, queue = set(results), deque(results)
    while queue:
        for source in sources.get(queue.popleft(), ()):
            if source not in found:
                found.add(source)
                queue.append(source)
    return found
