"""Find the state of a step: the results that replace inputs, as new parameters replace old ones.

State is found by structure: a result, or a part of one, has the same tree and shapes as an argument, or a part of one.
Two cases need more evidence: several arguments of the same structure (parameters and momentum), and a single array. There,
data flow decides, because an update is computed from the value that it replaces by elementwise operations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from penstock.shard.trace.flat_program import FlatProgram

_MOST_VALUES = 400
"""The most values that are visited when a result is traced back."""


def find_state(program: FlatProgram, args: tuple, out: Any, known: Mapping[int, int]) -> dict[int, int]:
    """Return the results that are state.

    Args:
      program: the step.
      args: its abstract arguments.
      out: its abstract results.
      known: state that is certain, as the result: of results that follow those of `out`.

    Returns:
      Index of each flattened result that replaces an input → index of that input.
    """
    elementwise = _ElementwiseDistances(program)
    state = dict(known)
    replaced = set(known.values())
    by_signature: dict[Any, list[tuple[int, bool]]] = {}
    for start, arg in _children(args):
        by_signature.setdefault(_signature(arg), []).append((start, True))
        for first, tree in _subtrees(start, arg):
            by_signature.setdefault(_signature(tree), []).append((first, False))
    queue = deque([(0, out)])
    while queue:
        index, part = queue.popleft()
        count = len(jax.tree_util.tree_leaves(part))
        best: tuple[float, int] | None = None
        for first, is_argument in by_signature.get(_signature(part), ()) if count else ():
            if replaced.isdisjoint(range(first, first + count)):
                distances = [elementwise.distance(index + leaf, first + leaf) for leaf in range(count)]
                certain = is_argument and (not jax.tree_util.all_leaves([part]) or elementwise.is_input(index))
                # Distance 0 does not tell which of two inputs a result replaces, as in (previous, current) → (current, next).
                nearness = sum(1 / distance for distance in distances if distance)
                related = any(distance is not None for distance in distances)
                if (certain or related) and (best is None or nearness > best[0]):
                    best = (nearness, first)
        if best is None:
            queue.extend((index + first, child) for first, child in _children(part) if child is not part)
        else:
            replaced.update(range(best[1], best[1] + count))
            state.update({index + leaf: best[1] + leaf for leaf in range(count)})
    return dict(sorted(state.items()))


class _ElementwiseDistances:
    """Distances between inputs and results, in elementwise operations."""

    def __init__(self, program: FlatProgram):
        self._program = program
        self._sources: dict[int, list[int]] = {}
        self._distances: dict[int, Mapping[int, int]] = {}
        shapes = [value.shape for value in program.values]
        for op in program.ops:
            if op.rule.identity:
                for result in op.results:
                    same_shape = [value for value in op.operands if value is not None and shapes[value] == shapes[result]]
                    self._sources.setdefault(result, []).extend(same_shape)
        for pair in program.same_sharding:
            if not pair.skip:
                self._sources.setdefault(pair.outer, []).append(pair.inner)
                self._sources.setdefault(pair.inner, []).append(pair.outer)

    def is_input(self, output: int) -> bool:
        """Return whether a result is an unchanged input."""
        return self._program.outputs[output] in self._program.inputs

    def distance(self, output: int, index: int) -> int | None:
        """Return the number of operations between an input and a result.

        Args:
          output: index of the result.
          index: index of the input.

        Returns:
          0 if the result is the unchanged input; None if no chain of elementwise operations connects them.
        """
        value = self._program.outputs[output]
        if value is None:
            return None
        if value not in self._distances:
            self._distances[value] = self._search_back(value)
        return self._distances[value].get(self._program.inputs[index])

    def _search_back(self, value: int) -> Mapping[int, int]:
        """Return the distances from a value to the values that it is computed from, by breadth-first search."""
        distances, queue = {value: 0}, deque([value])
        while queue and len(distances) < _MOST_VALUES:
            reached = queue.popleft()
            for source in self._sources.get(reached, ()):
                if source not in distances:
                    distances[source] = distances[reached] + 1
                    queue.append(source)
        return distances


def _children(tree: Any) -> Iterator[tuple[int, Any]]:
    """Yield the children of a pytree node, each with the index of its first leaf. A leaf yields itself."""
    first = 0
    for child in jax.tree_util.tree_flatten(tree, is_leaf=lambda node: node is not tree)[0]:
        yield first, child
        first += len(jax.tree_util.tree_leaves(child))


def _subtrees(start: int, tree: Any) -> Iterator[tuple[int, Any]]:
    """Yield all proper subtrees, each with the index of its first leaf, where the tree's first leaf has the index `start`."""
    for first, child in _children(tree):
        if child is not tree:
            yield start + first, child
            yield from _subtrees(start + first, child)


def _signature(tree: Any) -> Any:
    """Return the structure, shapes and dtypes of a tree."""
    flat, structure = jax.tree_util.tree_flatten(tree)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in flat)
