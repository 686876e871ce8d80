"""Infer the role of each input of a step: "parameters", "optimizer", "batch" or "other".

The roles are read from data flow: which results an input influences, and how it is first used. Names are not considered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import jax

from penstock.shard.graph.batch_inputs import find_batch
from penstock.shard.graph.step_model import StepModel
from penstock.shard.trace.flat_program import FlatProgram


def infer_roles(model: StepModel, state: Mapping[int, int], arguments: Sequence[int]) -> list[str]:
    """Return the role of each input.

    - "parameters": state on which the other results, such as the loss, depend. All state, if there are no other results.
    - "optimizer": the other state.
    - "batch": an input that is not state, whose first dimension is connected with no dimension of the state, and that is not
      frozen (`batch_inputs.py`). Keys of random numbers are a batch if their first dimension is that of other batch inputs.
    - "other": the other inputs, such as frozen weights and learning rates. Keys of random numbers are "other" in the state too.

    Args:
      model: the step.
      state: index of each output that replaces an input → index of that input.
      arguments: for each input, the number of the argument that it belongs to.
    """
    program = model.program
    replaced = set(state.values())
    results = [output for index, output in enumerate(program.outputs) if index not in state and output is not None]
    needed = _find_dependencies(program, results) if results else set(program.inputs)
    keys = find_keys(program)
    reached = _find_dependencies(program, [output for output in program.outputs if output is not None])
    used = {index for index, value in enumerate(program.inputs) if value in reached}
    batch = find_batch(model, replaced, keys, used, arguments)
    roles = []
    for index, value in enumerate(program.inputs):
        if index in replaced and index not in keys:
            roles.append("parameters" if value in needed and program.values[value].shape else "optimizer")
        else:
            roles.append("batch" if index in batch else "other")
    return roles


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


_KEY_OPERANDS = {"random_wrap": 1, "threefry2x32": 2}
"""Primitives that read raw keys → how many of their first operands are keys."""

_MOVES: dict[str, int | None] = {
    **dict.fromkeys(("slice", "dynamic_slice", "gather", "squeeze", "reshape", "broadcast_in_dim", "transpose", "copy"), 1),
    **dict.fromkeys(("concatenate", "select_n", "split", "unstack", "optimization_barrier")),
}
"""Primitives that only select or move elements → how many of their first operands hold these; None for all."""

_RAW_SHAPES = ((2,), (4,))
"""Shapes of raw keys of one generator: of threefry2x32, and of rbg and unsafe_rbg."""


def find_keys(program: FlatProgram) -> set[int]:
    """Return the indices of the inputs that are keys of random numbers.

    Args:
      program: the step.
    """
    sources: dict[int, list[int]] = {}
    keys: set[int] = set()
    for op in program.ops:
        if op.primitive in _KEY_OPERANDS:
            keys.update(value for value in op.operands[: _KEY_OPERANDS[op.primitive]] if value is not None)
        elif op.primitive in _MOVES:
            moved = [value for value in op.operands[: _MOVES[op.primitive]] if value is not None]
            for result in op.results:
                sources.setdefault(result, []).extend(moved)
    for pair in program.same_sharding:
        sources.setdefault(pair.inner, []).append(pair.outer)
    read = {value for op in program.ops for value in op.operands} | {pair.outer for pair in program.same_sharding}
    keys |= {value for value in program.inputs if value not in read and program.values[value].shape in _RAW_SHAPES}
    queue = deque(keys)
    while queue:
        for source in sources.get(queue.popleft(), ()):
            if source not in keys:
                keys.add(source)
                queue.append(source)
    return {
        index
        for index, value in enumerate(program.inputs)
        if jax.numpy.issubdtype(program.values[value].dtype, jax.dtypes.prng_key)
        or (value in keys and program.values[value].dtype == "uint32")
    }
