"""Find the weights that Megatron shards in pairs (Shoeybi et al., arXiv:1909.08053).

In: the decision graph of a step. Out: the dimensions that weights connect, and for each set of connected weights two sides.

The dimensions of all arrays of a step fall into components: what is connected by edges has to be sharded together, or resharded.
A product with a weight connects the component of the weight's inputs with that of its outputs. In a transformer the width of the
residual stream is connected with the heads, the hidden units and the vocabulary, and none of these with each other. So the
components of a set have two sides, as a bipartite graph has: the residual stream on one, all others on the other. If one side is
sharded, each weight is sharded once, and pairs of weights need no collective between them.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.shard.graph.batch_dims import find_batch_dims
from penstock.shard.graph.overlap import find_early_values
from penstock.shard.graph.primitives import CONTRACTIONS
from penstock.shard.graph.step_model import StepModel


@dataclass(frozen=True)
class WeightPairs:
    """The dimensions that weights connect.

    Attributes:
      component: (node, dimension) → the component that it belongs to.
      weights: pairs (component of the inputs, component of the outputs) of the weights that products read, in program order.
      joined: the components that two weights or more have: what one makes, and another reads.
    """

    component: dict[tuple[int, int], int]
    weights: tuple[tuple[int, int], ...]
    joined: frozenset[int] = frozenset()

    @functools.cached_property
    def members(self) -> dict[int, list[tuple[int, int]]]:
        """Return the pairs (node, dimension) of each component."""
        members: dict[int, list[tuple[int, int]]] = {}
        for pair, number in self.component.items():
            members.setdefault(number, []).append(pair)
        return members


def find_weight_pairs(model: StepModel, batch: Sequence[int]) -> WeightPairs:
    """Find the dimensions that weights connect. There are none if no weight reads what another has made.

    Args:
      model: the step.
      batch: nodes of the inputs that are a batch.
    """
    component = model.graph.components
    of_batch = {component[node, dim] for node, dims in find_batch_dims(model.graph, batch).items() for dim in dims}
    rows = {value for value, node in model.graph.leaf.items() if node in set(batch)}
    early = {value: origin for value, origin in find_early_values(model.program).items() if origin not in rows}
    found: list[tuple[int, list[int], list[int]]] = []
    for op, node in zip(model.groups.non_elementwise, model.graph.op, strict=True):
        operands = [(value, dims) for value, dims in zip(op.operands, op.rule.operands, strict=True) if value is not None]
        weights = [(early[value], dims) for value, dims in operands if value in early]
        if op.primitive not in CONTRACTIONS or len(weights) != 1 or len(operands) != 2:
            continue
        weight, dims = weights[0]
        large = [factor for factor in dims if factor is not None and op.rule.sizes[factor] > 1]
        inputs = [component[node, factor] for factor in large if factor not in op.rule.results[0]]
        outputs = [component[node, factor] for factor in large if factor in op.rule.results[0]]
        found.append(
            (weight, [each for each in inputs if each not in of_batch], [each for each in outputs if each not in of_batch])
        )
    # The backward pass reads each weight the other way round. So a pair has two weights.
    readers: dict[int, set[int]] = {}
    for weight, inputs, outputs in found:
        for each in (*inputs, *outputs):
            readers.setdefault(each, set()).add(weight)
    joined = {each for each, weights_of in readers.items() if len(weights_of) > 1}
    # If a weight has several dimensions of inputs or outputs, such as heads and the width of a head, the first of a pair counts.
    chosen = [
        (min(inputs, key=lambda each: each not in joined), min(outputs, key=lambda each: each not in joined))
        for _, inputs, outputs in found
        if inputs and outputs
    ]
    first: dict[int, tuple[list[int], list[int]]] = {}
    for weight, inputs, outputs in found:
        first.setdefault(weight, (inputs, outputs))  # that of the forward pass
    paired = any(
        set(first[one][1]) & set(first[other][0]) for each in joined for one in readers[each] for other in readers[each] - {one}
    )
    weights_of_pairs = tuple(dict.fromkeys((a, b) for a, b in chosen if a != b)) if paired else ()
    return WeightPairs(component, weights_of_pairs, frozenset(joined))


def sides(pairs: WeightPairs) -> Iterator[tuple[set[int], set[int]]]:
    """Yield the two sides of each set of connected components.

    Where a cycle of odd length allows no sides, the weights of the cycle that come last are disregarded.

    Args:
      pairs: the dimensions that weights connect.
    """
    neighbours: dict[int, list[int]] = {}
    for a, b in pairs.weights:
        neighbours.setdefault(a, []).append(b)
        neighbours.setdefault(b, []).append(a)
    side: dict[int, int] = {}
    for first in neighbours:
        if first in side:
            continue
        side[first] = 0
        both: tuple[set[int], set[int]] = ({first}, set())
        queue = deque([first])
        while queue:
            each = queue.popleft()
            for other in neighbours[each]:
                if other not in side:
                    side[other] = 1 - side[each]
                    both[side[other]].add(other)
                    queue.append(other)
        yield both
