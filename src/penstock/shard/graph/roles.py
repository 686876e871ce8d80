"""Infer the role of each input of a step: "parameters", "optimizer", "batch" or "other".

The roles are read from data flow: which results an input influences, and how it is first used. Names are not considered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from penstock.shard.graph.batch_dims import first_shardable_dim
from penstock.shard.graph.first_use import find_uses
from penstock.shard.graph.step_model import StepModel
from penstock.shard.trace.flat_program import FlatProgram
from penstock.shard.trace.random_keys import find_keys

_CONTRACTIONS_AND_LOOKUPS = ("dot_general", "ragged_dot_general", "conv_general_dilated", "gather")


def infer_roles(model: StepModel, state: Mapping[int, int]) -> list[str]:
    """Return the role of each input.

    - "parameters": state on which the other results, such as the loss, depend. All state, if there are no other results.
    - "optimizer": the other state.
    - "batch": an input that is not state, and whose first dimension is connected with no dimension of the state. At the first
      non-elementwise use of the input, this dimension is neither contracted nor looked up.
    - "other": the other inputs, such as frozen weights and learning rates. Keys of random numbers are "other" in the state too.

    Args:
      model: the step.
      state: index of each output that replaces an input → index of that input.
    """
    program = model.program
    replaced = set(state.values())
    results = [output for index, output in enumerate(program.outputs) if index not in state and output is not None]
    needed = _find_dependencies(program, results) if results else set(program.inputs)
    batch, keys = _find_batch(model, replaced), find_keys(program)
    roles = []
    for index, value in enumerate(program.inputs):
        if index in keys:
            roles.append("other")
        elif index in replaced:
            roles.append("parameters" if value in needed and program.values[value].shape else "optimizer")
        else:
            roles.append("batch" if index in batch else "other")
    return roles


def _find_batch(model: StepModel, replaced: set[int]) -> set[int]:
    """Return the indices of the inputs that are a batch; `replaced` has the indices of the state."""
    components = model.graph.components
    state_nodes = {model.inputs[index] for index in replaced}
    state_components = {component for (node, _), component in components.items() if node in state_nodes}
    uses = find_uses(model.program, model.groups).first
    batch = set()
    for index, value in enumerate(model.program.inputs):
        if index in replaced or not model.program.values[value].shape:
            continue
        node, use = model.inputs[index], uses.get(value)
        dim = first_shardable_dim(model.graph, node)
        is_weight = use is not None and use.op.primitive in _CONTRACTIONS_AND_LOOKUPS and use.sums_over(dim)
        if not is_weight and components[node, dim] not in state_components:
            batch.add(index)
    return batch


def _find_dependencies(program: FlatProgram, results: list[int]) -> set[int]:
    """Return all values on which some values depend, and these values themselves."""
    sources: dict[int, list[int]] = {}
    for op in program.ops:
        operands = [operand for operand in op.operands if operand is not None]
        for result in op.results:
            sources.setdefault(result, []).extend(operands)
    for pair in program.same_sharding:
        sources.setdefault(pair.outer, []).append(pair.inner)
        sources.setdefault(pair.inner, []).append(pair.outer)
    needed, queue = set(results), deque(results)
    while queue:
        for source in sources.get(queue.popleft(), ()):
            if source not in needed:
                needed.add(source)
                queue.append(source)
    return needed
