"""Find the inputs of a step that are keys of random numbers, typed (`jax.random.key`) or raw (`jax.random.PRNGKey`).

A raw key is an array of integers, [2] or stacked [n, 2], and looks like data. It is known by its use: JAX wraps it into a typed
key, or passes it to the generator. One that nothing reads is known by its shape.
"""

from __future__ import annotations

from collections import deque

import jax

from penstock.shard.trace.flat_program import FlatProgram

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
