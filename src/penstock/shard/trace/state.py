"""Which results of a step replace which of its inputs.

State is found by structure: a result, or a part of one, of the same tree and shapes as an argument or a part of one. Where
several arguments have that structure (parameters and momentum), and where all there is is one array, which proves little, it is
found by what flows: an update is computed from what it replaces by elementwise operations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from penstock.shard.trace.flat_program import FlatProgram

_MOST_VALUES = 400
"""Values that are looked at on the way back from a result."""


def find_state(program: FlatProgram, args: tuple, out: Any) -> dict[int, int]:
    """Of each result that replaces an input, by place among the flattened results, the place of the input.

    Args:
      program: the step.
      args: its abstract arguments.
      out: what it returns, abstract.
    """
    flows = _Flows(program)
    found: dict[int, int] = {}
    taken: set[int] = set()
    same_form: dict[Any, list[tuple[int, bool]]] = {}
    for start, arg in _children(args):
        same_form.setdefault(_form(arg), []).append((start, True))
        for first, tree in _subtrees(start, arg):
            same_form.setdefault(_form(tree), []).append((first, False))
    queue = deque([(0, out)])
    while queue:
        index, part = queue.popleft()
        count = len(jax.tree_util.tree_leaves(part))
        best: tuple[float, int] | None = None
        for first, is_argument in same_form.get(_form(part), ()) if count else ():
            if taken.isdisjoint(range(first, first + count)):
                distances = [flows.distance(index + leaf, first + leaf) for leaf in range(count)]
                sure = is_argument and (not jax.tree_util.all_leaves([part]) or flows.given_back(index))
                # What is given back as it was tells nothing of which of two it replaces: (previous, current) → (current, next).
                near = sum(1 / each for each in distances if each)
                if (sure or any(each is not None for each in distances)) and (best is None or near > best[0]):
                    best = (near, first)
        if best is None:
            queue.extend((index + first, child) for first, child in _children(part) if child is not part)
        else:
            taken.update(range(best[1], best[1] + count))
            found.update({index + leaf: best[1] + leaf for leaf in range(count)})
    return dict(sorted(found.items()))


class _Flows:
    """How near inputs are to results, in elementwise operations."""

    def __init__(self, program: FlatProgram):
        self._program = program
        self._sources: dict[int, list[int]] = {}
        self._known: dict[int, Mapping[int, int]] = {}
        shapes = [value.shape for value in program.values]
        for op in program.ops:
            if op.rule.identity:
                for result in op.results:
                    read = [each for each in op.operands if each is not None and shapes[each] == shapes[result]]
                    self._sources.setdefault(result, []).extend(read)
        for pair in program.same_sharding:
            if not pair.skip:
                self._sources.setdefault(pair.outer, []).append(pair.inner)
                self._sources.setdefault(pair.inner, []).append(pair.outer)

    def given_back(self, output: int) -> bool:
        """Whether a result is an input."""
        return self._program.outputs[output] in self._program.inputs

    def distance(self, output: int, index: int) -> int | None:
        """How many operations are between an input and a result: 0 if it is given back; None where none leads there."""
        value = self._program.outputs[output]
        if value is None:
            return None
        if value not in self._known:
            self._known[value] = self._distances(value)
        return self._known[value].get(self._program.inputs[index])

    def _distances(self, value: int) -> Mapping[int, int]:
        distances, queue = {value: 0}, deque([value])
        while queue and len(distances) < _MOST_VALUES:
            each = queue.popleft()
            for source in self._sources.get(each, ()):
                if source not in distances:
                    distances[source] = distances[each] + 1
                    queue.append(source)
        return distances


def _children(tree: Any) -> Iterator[tuple[int, Any]]:
    """The children of a node, as JAX has registered it, each with the place of its first leaf; of a leaf itself."""
    first = 0
    for child in jax.tree_util.tree_flatten(tree, is_leaf=lambda each: each is not tree)[0]:
        yield first, child
        first += len(jax.tree_util.tree_leaves(child))


def _subtrees(start: int, tree: Any) -> Iterator[tuple[int, Any]]:
    for first, child in _children(tree):
        if child is not tree:
            yield start + first, child
            yield from _subtrees(start + first, child)


def _form(tree: Any) -> Any:
    """Equal for trees of the same structure, shapes and dtypes."""
    flat, structure = jax.tree_util.tree_flatten(tree)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in flat)
