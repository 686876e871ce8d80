"""Baselines: the layouts that people write by hand, as assignments.

- Data parallelism.
- ZeRO-1 and FSDP (ZeRO-3), which shard stored state (Rajbhandari et al., arXiv:1910.02054; Zhao et al., arXiv:2304.11277).
- Megatron, which shards pairs of weights (Shoeybi et al., arXiv:1909.08053), alone and with FSDP over the other axes.

The search starts from some of them, the text of a plan compares with all, and each can be taken instead.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.shard.graph.roles import find_batch_dims
from penstock.shard.graph.scheduling import find_early_values
from penstock.shard.graph.step_model import StepModel
from penstock.shard.mesh.compiler_models import LANES, SUBLANES
from penstock.shard.mesh.resharding import Layout, MeshLinks, union, with_axes
from penstock.shard.search.costs import Assignment, CostModel
from penstock.shard.trace.flat_program import CONTRACTIONS

DATA_PARALLEL, ZERO_1, FSDP, MEGATRON, MEGATRON_FSDP = "data parallel", "ZeRO-1", "FSDP", "Megatron", "Megatron + FSDP"

_LEAST_ELEMENTS = 1024
"""Leaves of fewer elements stay replicated."""


def find_baselines(
    costs: CostModel, model: StepModel, roles: Sequence[str], pairs: WeightPairs | None = None
) -> dict[str, Assignment]:
    """Return the baselines of a step on a mesh, by name.

    ZeRO-1 is missing if there is no optimizer state, FSDP if there is no state, and Megatron if no weights form pairs. Megatron
    uses the mesh axis that is fastest by prediction.

    Args:
      pairs: the pairs of weights, which are the same on each mesh; None computes them.
    """
    nodes = {role: [node for node, each in zip(model.inputs, roles, strict=True) if each == role] for role in set(roles)}
    batch, optimizer = nodes.get("batch", []), nodes.get("optimizer", [])
    state = [*nodes.get("parameters", []), *optimizer, *nodes.get("other", [])]
    batch_dims, every = find_batch_dims(costs.graph, batch), (1 << len(costs.links.sizes)) - 1
    pairs = find_weight_pairs(model, batch) if pairs is None else pairs
    found = {DATA_PARALLEL: data_parallel(costs, batch_dims, every)}

    def sharded(leaves: Sequence[int], assignment: Assignment, axes: int) -> Assignment:
        return shard_storage(costs, model, batch_dims, leaves, assignment, axes)

    if optimizer:
        found[ZERO_1] = sharded(optimizer, found[DATA_PARALLEL], every)
    if state:
        found[FSDP] = sharded(state, found[DATA_PARALLEL], every)
    if pairs.weights:
        by_axis = [(megatron(costs, pairs, batch_dims, 1 << axis), 1 << axis) for axis in range(len(costs.links.sizes))]
        found[MEGATRON] = min((assignment for assignment, _ in by_axis), key=costs.seconds)
        if every.bit_count() > 1:
            both = (sharded(state, assignment, every & ~axis) for assignment, axis in by_axis)
            found[MEGATRON_FSDP] = min(both, key=costs.seconds)
    return {name: costs.fold(assignment) for name, assignment in found.items()}


def split_storage(costs: CostModel, model: StepModel, roles: Sequence[str]) -> Iterator[Assignment]:
    """Yield layouts in which some mesh axes shard the state, along its largest dimensions, and the other axes the batch.

    FSDP, in which all axes shard both, is not among them.
    """
    batch = [node for node, role in zip(model.inputs, roles, strict=True) if role == "batch"]
    state = [node for node, role in zip(model.inputs, roles, strict=True) if role != "batch"]
    batch_dims, every = find_batch_dims(costs.graph, batch), (1 << len(costs.links.sizes)) - 1
    for axes in range(1, every + 1):
        assignment = data_parallel(costs, batch_dims, every & ~axes)
        yield shard_storage(costs, model, batch_dims, state, assignment, axes)


def by_largest_dim(costs: CostModel, model: StepModel, roles: Sequence[str]) -> Assignment:
    """Return the layout in which all mesh axes shard each leaf of the state along its largest dimension that they divide.

    FSDP replicates small leaves, and uses another dimension where it suits the values around a leaf better.
    """
    batch = [node for node, role in zip(model.inputs, roles, strict=True) if role == "batch"]
    every = (1 << len(costs.links.sizes)) - 1
    assignment, n = data_parallel(costs, find_batch_dims(costs.graph, batch), every), costs.links.shards(every)
    for leaf in set(model.inputs) - set(batch):
        sizes, layout = costs.graph.nodes[leaf].sizes, assignment[leaf]
        dims = [dim for dim, size in enumerate(sizes) if size > 1 and size % n == 0]
        if dims and costs.graph.nodes[leaf].fixed is None and not union(layout):
            assignment[leaf] = with_axes(layout, max(dims, key=lambda dim: (sizes[dim], -dim)), every)
    return costs.fold(assignment)


def data_parallel(costs: CostModel, batch_dims: Mapping[int, Sequence[int]], axes: int) -> Assignment:
    """Return data parallelism: the mesh axes `axes` (bits) shard the batch, and everything else is replicated."""
    assignment = costs.start()
    layouts: dict[tuple, Layout] = {}
    for node, candidates in batch_dims.items():
        if costs.graph.nodes[node].fixed is not None or node in costs.pinned:
            continue
        key = (costs.graph.nodes[node].sizes, tuple(candidates))
        if key not in layouts:
            layouts[key] = _batch_layout(costs.links, *key, axes)
        assignment[node] = layouts[key]
    return assignment


def _batch_layout(links: MeshLinks, sizes: tuple[int, ...], candidates: tuple[int, ...], axes: int) -> Layout:
    """Return the layout in which each mesh axis shards the first batch dimension of a node that it divides."""
    layout = [0] * len(sizes)
    for axis, n in enumerate(links.sizes):
        # If both dimensions are the batch, as in [B, B], only one is sharded.
        for dim in sorted(candidates):
            if axes >> axis & 1 and sizes[dim] > 1 and sizes[dim] % (n * links.shards(layout[dim])) == 0:
                layout[dim] |= 1 << axis
                break
    return tuple(layout)


def megatron(costs: CostModel, pairs: WeightPairs, batch_dims: Mapping[int, Sequence[int]], axis: int) -> Assignment:
    """Return the decisions of Megatron: one axis (a bit) shards pairs of weights, and the others the batch.

    The first weight of a pair is sharded along its outputs, the second along its inputs, and the activations between them along
    the same dimension: heads, hidden units, the vocabulary. Each set of connected pairs has two `sides` to shard. The side with
    more dimensions between two weights is sharded. The other side is the residual stream, which all layers share, or has the
    first inputs and the last outputs. If both have as many, as in a chain of three layers, the faster one by prediction is
    sharded.
    """
    every = (1 << len(costs.links.sizes)) - 1
    assignment = data_parallel(costs, batch_dims, every & ~axis)
    for both in sides(pairs):
        most = max(len(side & pairs.joined) for side in both)
        chosen = [side for side in both if len(side & pairs.joined) == most]
        tried = [costs.fold(_shard_dims(costs, pairs, side, assignment, axis)) for side in chosen]
        assignment = min(tried, key=costs.seconds)
    return assignment


def _shard_dims(costs: CostModel, pairs: WeightPairs, chosen: set[int], assignment: Assignment, axis: int) -> Assignment:
    """Return an assignment in which an axis also shards the dimensions of the chosen components, wherever it divides them."""
    sharded, n = list(assignment), costs.links.shards(axis)
    for node, dim in sorted(pair for number in chosen for pair in pairs.members[number]):
        layout, given = sharded[node], costs.graph.nodes[node]
        fits = given.sizes[dim] > 1 and given.sizes[dim] % (n * costs.links.shards(layout[dim])) == 0
        if fits and given.fixed is None and node not in costs.pinned and not union(layout) & axis:
            sharded[node] = with_axes(layout, dim, axis)
    return sharded


def shard_storage(
    costs: CostModel,
    model: StepModel,
    batch_dims: Mapping[int, Sequence[int]],
    leaves: Iterable[int],
    assignment: Assignment,
    axes: int,
) -> Assignment:
    """Return an assignment in which mesh axes also shard stored leaves, each along the largest dimension that they divide.

    On TPUs, a dimension whose shards fill tiles comes before larger ones. Values computed from these leaves alone are sharded
    like them, and so are their new values, such as the update of the optimizer. Products read gathered weights, in the layouts
    of the given assignment.
    """
    return costs.fold(_Storage(costs, model, batch_dims, leaves, assignment, axes).assignment)


class _Storage:
    """The state of `shard_storage`: the assignment so far, and the nodes that are done."""

    def __init__(
        self,
        costs: CostModel,
        model: StepModel,
        batch_dims: Mapping[int, Sequence[int]],
        leaves: Iterable[int],
        assignment: Assignment,
        axes: int,
    ):
        self.assignment = list(assignment)
        self._costs, self._axes, self._leaves = costs, axes, dict.fromkeys(leaves)
        self._batch_dims = batch_dims
        self._products = model.products
        self._gathered = {node for node, readers in model.operand_readers.items() if any(map(self._gathers, readers))}
        self._done: set[int] = set()
        for leaf in self._leaves:
            if leaf not in self._done and costs.graph.nodes[leaf].fixed is None:
                self._shard(leaf)

    def _gathers(self, op: int) -> bool:
        """Return whether an operation reads gathered weights: a product, or one that has a batch dimension."""
        return op in self._products or op in self._batch_dims

    def _shard(self, leaf: int) -> None:
        """Shard a leaf, and the nodes around it that follow."""
        sizes, layout = self._costs.graph.nodes[leaf].sizes, self.assignment[leaf]
        if math.prod(sizes) < _LEAST_ELEMENTS or union(layout) & self._axes:
            return
        dims = [dim for dim in range(len(sizes)) if self._divides(leaf, layout, dim)]
        local = [size // self._costs.links.shards(mask) for size, mask in zip(sizes, layout, strict=True)]
        n = self._costs.links.shards(self._axes)
        last, tiles = max(dim for dim, size in enumerate(sizes) if size > 1), self._costs.compiler.tiles
        # Shards that do not fill tiles are padded, and the TPU compiler makes an all-reduce of a reduce-scatter into them.
        dims.sort(key=lambda dim: (tiles and local[dim] // n % (LANES if dim == last else SUBLANES) != 0, -local[dim], dim))
        if dims:
            best = next((dim for dim in dims if self._fits_around(leaf, dim)), dims[0])
            self._spread(leaf, with_axes(layout, best, self._axes))

    def _divides(self, node: int, layout: Layout, dim: int) -> bool:
        links = self._costs.links
        return self._costs.graph.nodes[node].sizes[dim] % links.shards(layout[dim] | self._axes) == 0

    def _fits_around(self, leaf: int, dim: int) -> bool:
        """Return whether the values next to a leaf can be sharded like it along a dimension."""
        for edge in self._costs.graph.edges_of[leaf]:
            other, own, its = edge.seen_from(leaf)
            if self._follows(other) and dim in own:
                at = its[own.index(dim)]
                if at is None or not self._divides(other, self.assignment[other], at):
                    return False
        return True

    def _follows(self, node: int) -> bool:
        """Return whether a node is still to be sharded like the stored leaves around it."""
        given = self._costs.graph.nodes[node]
        if given.fixed is not None or node in self._batch_dims or node in self._done or union(self.assignment[node]) & self._axes:
            return False
        if given.kind == "leaf":
            return node in self._leaves
        return node not in self._gathered if given.kind == "shared_reshard" else node not in self._products

    def _spread(self, start: int, layout: Layout) -> None:
        """Set the layout of a node, and shard the nodes around it that follow in the same way."""
        self.assignment[start] = layout
        self._done.add(start)
        queue = deque([start])
        while queue:
            node = queue.popleft()
            for edge in self._costs.graph.edges_of[node]:
                other, own, its = edge.seen_from(node)
                if not self._follows(other):
                    continue
                layout = self.assignment[other]
                carried = [b for a, b in zip(own, its, strict=True) if a is not None and self.assignment[node][a] & self._axes]
                fitting = [dim for dim in carried if dim is not None and self._divides(other, layout, dim)]
                if fitting:
                    self.assignment[other] = with_axes(layout, fitting[0], self._axes)
                self._done.add(other)
                queue.append(other)


# The weights that Megatron shards in pairs.


@dataclass(frozen=True)
class WeightPairs:
    """The dimensions that weights connect.

    Dimensions that edges connect form a component: they have to be sharded together, or resharded. A product with a weight
    connects the component of the weight's inputs with the component of its outputs. In a transformer, weights connect the width
    of the residual stream with the heads, the hidden units and the vocabulary. No weight connects these with each other.

    Attributes:
      component: (node, dimension) → its component.
      weights: pairs (component of the inputs, component of the outputs) of the weights that products read, in program order.
      joined: the components of two weights or more: the outputs of one, and the inputs of another.
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
    """Find the dimensions that weights connect. There are none if no weight reads the outputs of another."""
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
        large = {factor: component[node, factor] for factor in dims if factor is not None and op.rule.sizes[factor] > 1}
        large = {factor: each for factor, each in large.items() if each not in of_batch}
        inputs = [each for factor, each in large.items() if factor not in op.rule.results[0]]
        outputs = [each for factor, each in large.items() if factor in op.rule.results[0]]
        found.append((weight, inputs, outputs))
    # The backward pass swaps the inputs and outputs of each weight, so only two different weights are a pair.
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
        first.setdefault(weight, (inputs, outputs))  # its product in the forward pass
    paired = any(
        set(first[one][1]) & set(first[other][0]) for each in joined for one in readers[each] for other in readers[each] - {one}
    )
    weights_of_pairs = tuple(dict.fromkeys((a, b) for a, b in chosen if a != b)) if paired else ()
    return WeightPairs(component, weights_of_pairs, frozenset(joined))


def sides(pairs: WeightPairs) -> Iterator[tuple[set[int], set[int]]]:
    """Yield the two sides of each set of connected components, as a bipartite graph has them.

    In a transformer, the residual stream is one side, and all other components the other. If one side is sharded, each weight is
    sharded once, and pairs of weights need no collective between them. In a cycle of odd length, the last weights are ignored.
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
