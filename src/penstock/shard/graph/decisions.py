"""Build the decision graph of a step: its nodes are layouts to choose, its edges are arrays that may have to be resharded.

A *node* is one decision: the layout of a stored input (a leaf), of an axis group, or of the factors of an operation. Each mesh
axis shards one dimension (or factor) of a node, or none.

An *edge* is an array that passes from one decision to another. It is resharded on the way if their layouts differ. There are
edges from a leaf to the group in which it is used, from a group to the operand of an operation, and from the result of an
operation (which may be partial) to its group. New state has an edge from its group back to the leaf where it is stored.

Repeated layers are *folded*: nodes with equal neighbourhoods, up to a number of edges away, get one decision. The method is
colour refinement (B. Weisfeiler and A. Leman, 1968). A stack of equal layers has one decision for each position in a layer, and
the same weight of all layers has one layout.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from penstock.shard.graph.axis_groups import AxisGroups
from penstock.shard.graph.fusion import Moved
from penstock.shard.graph.scheduling import (
    Reuse,
    find_accumulated,
    find_early_values,
    find_joint_sums,
    find_lasting_values,
    find_late_values,
    find_reuse,
)
from penstock.shard.mesh.compiler_models import CompilerModel
from penstock.shard.mesh.resharding import ReshardStep
from penstock.shard.trace.flat_program import CONTRACTIONS, RANDOM_NUMBERS, FlatProgram, Op, Path
from penstock.shard.trace.rules import Dims


class Traffic(NamedTuple):
    """The HBM traffic of an array in a step, if nothing is sharded.

    Attributes:
      bytes: bytes that are read or written.
      dims: the dimensions of the node that divide them; None if all do.
      reuse: the iterations of a loop that may share it; None if none do.
      temporary: whether a product reads or makes it and it exists only inside of the step, so that a TPU may keep it in its
        vector memory.
    """

    bytes: float
    dims: Dims | None
    reuse: Reuse | None = None
    temporary: bool = False


VECTOR = "vector"
"""Stands for a dtype where the vector unit decides the time of an operation: random numbers, which HBM traffic does not bound."""


class Work(NamedTuple):
    """The work of an operation in a step, if nothing is sharded.

    Attributes:
      dtype: in which it computes, or `VECTOR`.
      flops: FLOPs.
      traffic: its HBM traffic.
      runs: how often it runs by itself; 0 if it is fused into others.
      updates: the dimensions of the node that divide its runs.
    """

    dtype: str
    flops: float
    traffic: tuple[Traffic, ...]
    runs: float
    updates: Dims = ()


ReshardKey = tuple[int, float, Path]
"""A value, how often the operations run that read it, and the `jax.checkpoint` that they are in. A weight that is gathered for
the forward pass is gathered again where the backward pass recomputes the layer."""


def reshard_key(value: int, op: Op) -> ReshardKey:
    """Return the key under which readers share one reshard of a value."""
    return value, op.count, op.region


@dataclass(frozen=True)
class Node:
    """A decision: the mesh axes that shard each dimension (or factor).

    Attributes:
      kind: "leaf", "group", "op", or "shared_reshard" for a value that is resharded once for several operations that read it.
      sizes: for each dimension, a number that must be divisible by the number of shards; 1 if it must be replicated.
      work: the work of each operation of the node.
      fixed: for each dimension, the mesh axes that it must have, None if it is unconstrained; None if all dimensions are.
      label: the index of the input's value (leaf), of the group, of the operation, or of the value (shared reshard).
    """

    kind: str
    sizes: tuple[int, ...]
    work: tuple[Work, ...]
    fixed: tuple[tuple[str, ...] | None, ...] | None
    label: int


@dataclass(frozen=True)
class Edge:
    """An array that passes from one decision to another, and is resharded if their layouts differ.

    Attributes:
      a, b: indices of the nodes.
      source: for each dimension of the array that is larger than one, the dimension of `a` that gives its layout, or None.
      target: the same for `b`.
      partial: factors of `a` over which the array is still to be summed.
      bytes: bytes of the global array as it is sent: half for a float32 array that is rounded to bfloat16 before.
      count: how often it passes from one to the other in a step.
      value: the index of its value in the program.
      kind: "use" (leaf to group), "broadcast" (leaf or group to the group of an elementwise operation that broadcasts it),
        "shared_reshard" (group to shared reshard), "operand" (to an operation), "result" (of an operation), or "store" (group
        to leaf).
      position: the index of the operand or result.
      behind: the dtype and the FLOPs of the products behind which its collectives can run each time (`scheduling.py`); 0 FLOPs if
        a product waits for them.
      all_reduce_count: runs of its all-reduce in a step if this is hoisted out of a loop (`scheduling.py`); None: `count`.
      together: whether its collectives can run together with others: no product is computed from it, or it is computed from no
        product and gathered for the first operation that reads it.
      summed_as: the value that is the sum of this partial result and of others that are summed over devices with it
        (`scheduling.py`); None if it is summed alone.
      combined: the number of partial results that one all-reduce sums at once, with this one (`_combine_sums`).
    """

    a: int
    b: int
    source: Dims
    target: Dims
    partial: tuple[int, ...]
    bytes: int
    count: float
    value: int
    kind: str
    position: int = 0
    behind: tuple[str, float] = ("float32", 0.0)
    all_reduce_count: float | None = None
    together: bool = False
    summed_as: int | None = None
    combined: int = 1

    def times(self, steps: Sequence[ReshardStep]) -> float:
        """Return how often some collectives reshard the array in a step.

        XLA's `WhileLoopAllReduceCodeMotion` moves an all-reduce whose result is added to a carry, and not a slice of it.
        """
        alone = len(steps) == 1 and steps[0].kind == "all-reduce" and not steps[0].sliced
        return self.all_reduce_count if alone and self.all_reduce_count is not None else self.count

    def seen_from(self, node: int) -> tuple[int, Dims, Dims]:
        """Return the node at the other end, and the dimensions that give the array's layout, of this node and of the other."""
        return (self.b, self.source, self.target) if self.a == node else (self.a, self.target, self.source)


@dataclass(frozen=True)
class Graph:
    """All decisions of a step.

    Attributes:
      nodes: the decisions.
      edges: the arrays between them.
      leaf: index of the value of each input → index of its node.
      group: for each value, the index of the node of its group.
      shared_reshard: for each value that several operations read, and their key, the index of the node of their shared reshard.
      op: for each non-elementwise operation, in order, the index of its node.
      splits: (node of an operation, factor) that a reshape splits → (node, dimension) of the major part, and of the next part.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    leaf: Mapping[int, int]
    group: Mapping[int, int]
    shared_reshard: Mapping[ReshardKey, int]
    op: tuple[int, ...]
    splits: Mapping[tuple[int, int], tuple[tuple[int, int], tuple[int, int]]] = field(default_factory=dict)

    @functools.cached_property
    def components(self) -> dict[tuple[int, int], int]:
        """Return the number of the connected component of each pair (node, dimension), as edges connect them, by union-find."""
        parent = {(index, dim): (index, dim) for index, node in enumerate(self.nodes) for dim in range(len(node.sizes))}

        def root(dim: tuple[int, int]) -> tuple[int, int]:
            while parent[dim] != dim:
                parent[dim] = parent[parent[dim]]
                dim = parent[dim]
            return dim

        for edge in self.edges:
            for a, b in zip(edge.source, edge.target, strict=True):
                if a is not None and b is not None:
                    parent[root((edge.a, a))] = root((edge.b, b))
        components: dict[tuple[int, int], int] = {}
        return {dim: components.setdefault(root(dim), len(components)) for dim in parent}

    @functools.cached_property
    def edges_of(self) -> tuple[tuple[Edge, ...], ...]:
        """Return the edges at each node."""
        edges: list[list[Edge]] = [[] for _ in self.nodes]
        for edge in self.edges:
            edges[edge.a].append(edge)
            edges[edge.b].append(edge)
        return tuple(map(tuple, edges))


def build_graph(
    program: FlatProgram,
    groups: AxisGroups,
    state: Mapping[int, int],
    fixed_layouts: Mapping[int, tuple],
    traffic: Sequence[Moved],
    compiler: CompilerModel,
) -> Graph:
    """Build the decision graph of a program.

    Args:
      state: index of each output that replaces an input → index of that input.
      fixed_layouts: index of each input whose layout the user prescribes → the mesh axes of each dimension.
      traffic: the HBM traffic of each operation, if nothing is sharded (`fusion.hbm_traffic`).
    """
    return _GraphBuilder(program, groups, traffic, compiler).build(state, fixed_layouts)


class _GraphBuilder:
    """A graph that is being built, with its program."""

    def __init__(self, program: FlatProgram, groups: AxisGroups, traffic: Sequence[Moved], compiler: CompilerModel):
        self.program, self.groups, self.compiler = program, groups, compiler
        self.early, self.late = find_early_values(program), find_late_values(program)
        self.lasting = find_lasting_values(program, self.early)
        self.accumulated = find_accumulated(program) if compiler.moves_sums else {}
        self.joint_sums = find_joint_sums(program, groups) if compiler.joins_sums else {}
        self.reuse = find_reuse(program)
        self.readers: dict[int, list[Op]] = defaultdict(list)
        for op in groups.non_elementwise:
            for operand in {value for value in op.operands if value is not None}:
                self.readers[operand].append(op)
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self.leaf: dict[int, int] = {}
        self.shared_reshard: dict[ReshardKey, int] = {}
        self.hbm_traffic = traffic
        self.op_index = {id(op): index for index, op in enumerate(program.ops)}
        self.group_of: dict[int, int] = {}
        self.dtype_of: dict[int, str] = {}  # by the identity of an operation
        self.splits: dict[tuple[int, int], tuple[tuple[int, int], tuple[int, int]]] = {}

    def build(self, state: Mapping[int, int], fixed_layouts: Mapping[int, tuple]) -> Graph:
        self._add_groups()
        self._add_inputs(fixed_layouts)
        self._add_shared_reshards()
        ops = tuple(self._add_operation(op) for op in self.groups.non_elementwise)
        self._add_stores(state)
        graph = Graph(tuple(self.nodes), tuple(self.edges), self.leaf, self.group_of, self.shared_reshard, ops, self.splits)
        combined = _combine_sums(graph, self.program, self.compiler.combines.get("all-reduce", 0.0))
        edges = (replace(edge, combined=combined.get(index, 1)) for index, edge in enumerate(graph.edges))
        return replace(graph, edges=tuple(edges))

    def _add_groups(self) -> None:
        node_of: dict[int, int] = {}
        for number, group in enumerate(self.groups.groups):
            if group is not None:
                node_of[number] = len(self.nodes)
                sizes = tuple(1 if dim in group.replicated else size for dim, size in enumerate(group.sizes))
                self.nodes.append(Node("group", sizes, tuple(self._work_of(op) for op in group.elementwise), None, number))
        self.group_of = {value: node_of[number] for value, number in enumerate(self.groups.group)}

    def _add_inputs(self, fixed_layouts: Mapping[int, tuple]) -> None:
        program, groups = self.program, self.groups
        used = _read_inputs(program, groups)
        count_of = {result: op.count for op in program.ops for result in op.results}
        readers_of_group: dict[int, list[Op]] = defaultdict(list)
        for value, readers in self.readers.items():
            readers_of_group[self.group_of[value]] += readers
        for index, value in enumerate((*program.inputs, *program.constants)):
            self.leaf[value] = len(self.nodes)
            shape = program.values[value].shape
            fixed = fixed_layouts.get(index) if index < len(program.inputs) else ((),) * len(shape)
            self.nodes.append(Node("leaf", shape, (), fixed, value))
            if value in used:
                group = self.group_of[value]
                readers = readers_of_group[group]
                self._add_edge(self.leaf[value], group, value, range(len(shape)), groups.dims[value], "use", readers=readers)
        for value, result, dims in groups.broadcast_uses:
            target = tuple(None if dim is None else groups.dims[result][dim] for dim in dims)
            source = self._layout_dims(value)
            into, count = self.group_of[result], count_of[result]
            readers = readers_of_group[into]
            self._add_edge(self._node_of(value), into, value, source, target, "broadcast", count=count, readers=readers)

    def _add_shared_reshards(self) -> None:
        """Add a node for each value that several operations read, so that it can be resharded once for all of them."""
        shared: dict[ReshardKey, list[Op]] = defaultdict(list)
        for value, readers in self.readers.items():
            for op in readers:
                shared[reshard_key(value, op)].append(op)
        for (value, count, region), readers in shared.items():
            dims = self.groups.dims[value]
            if len(readers) > 1 and any(dim is not None for dim in dims):
                group, node = self.group_of[value], len(self.nodes)
                self.shared_reshard[value, count, region] = node
                self.nodes.append(Node("shared_reshard", self.nodes[group].sizes, (), None, value))
                self._add_edge(group, node, value, dims, dims, "shared_reshard", count=count, readers=readers)

    def _add_operation(self, op: Op) -> int:
        node = len(self.nodes)
        self.nodes.append(Node("op", op.rule.sizes, (self._work_of(op),), _fixed_factors(op), self.op_index[id(op)]))
        for position, (operand, factors) in enumerate(zip(op.operands, op.rule.operands, strict=True)):
            if operand is not None and factors:
                origin = self.shared_reshard.get(reshard_key(operand, op), self.group_of[operand])
                dims = self.groups.dims[operand]
                self._add_edge(origin, node, operand, dims, factors, "operand", count=op.count, position=position, readers=[op])
        for position, (result, factors) in enumerate(zip(op.results, op.rule.results, strict=True)):
            partial = tuple(factor for factor in range(len(op.rule.sizes)) if factor not in factors) if op.fixed is None else ()
            target, into = self.groups.dims[result], self.group_of[result]
            self._add_edge(
                node, into, result, factors, target, "result", partial=partial, count=op.count, position=position, writer=op
            )
            if op.primitive == "reshape":
                self._note_splits(node, into, factors, target)
        return node

    def _note_splits(self, node: int, into: int, factors: Dims, target: Dims) -> None:
        """Note the dimensions of the result of a reshape that are parts of one dimension: [B] → [major, next, …]."""
        parts = [(factor, dim) for factor, dim in zip(factors, target, strict=True) if dim is not None]
        for (factor, major), (other, following) in itertools.pairwise(parts):
            if factor is not None and other is None:
                self.splits[node, factor] = (into, major), (into, following)

    def _add_stores(self, state: Mapping[int, int]) -> None:
        for index, replaced in state.items():
            value, stored = self.program.outputs[index], self.program.inputs[replaced]
            if value is not None and value != stored:
                dims = self._layout_dims(value)
                self._add_edge(self._node_of(value), self.leaf[stored], value, dims, range(len(dims)), "store")

    def _node_of(self, value: int) -> int:
        """Return the node that gives the layout of a value: its leaf if it is an input, else its group."""
        return self.leaf[value] if value in self.leaf else self.group_of[value]

    def _layout_dims(self, value: int) -> Dims:
        """Return the dimensions of the node of a value (see `_node_of`) that give its layout."""
        return tuple(range(len(self.program.values[value].shape))) if value in self.leaf else self.groups.dims[value]

    def _work_of(self, op: Op) -> Work:
        """Return the work of an operation. A contraction reads its local shard of every operand from HBM."""
        flops, count, index = op.flops * op.count, op.count, self.op_index[id(op)]
        if op.primitive not in CONTRACTIONS:
            reuse = self.reuse.get((index, op.results[0])) if op.results else None
            kind = VECTOR if op.primitive in RANDOM_NUMBERS else self._dtype_of(op)
            moved = self.hbm_traffic[index]
            updates = op.rule.operands[1] if moved.runs > 1 else ()
            return Work(kind, flops, (Traffic(moved.bytes * count, None, reuse),), moved.runs * count, updates)
        arrays = zip((*op.operands, *op.results), (*op.rule.operands, *op.rule.results), strict=True)
        traffic = tuple(
            Traffic(self.program.values[value].bytes * count, dims, self.reuse.get((index, value)), value not in self.lasting)
            for value, dims in arrays
            if value is not None
        )
        return Work(self._dtype_of(op), flops, traffic, count)

    def _add_edge(
        self,
        a: int,
        b: int,
        value: int,
        source: Sequence[int | None],
        target: Sequence[int | None],
        kind: str,
        *,
        partial: tuple[int, ...] = (),
        count: float = 1.0,
        position: int = 0,
        readers: Sequence[Op] = (),
        writer: Op | None = None,
    ) -> None:
        """Add an edge. `readers` are the operations that read the array at its end, `writer` the one that makes it, if known."""
        array = self.program.values[value]
        large = [dim for dim, size in enumerate(array.shape) if size > 1]
        dims = tuple(source[dim] for dim in large), tuple(target[dim] for dim in large)
        first = kind in ("use", "broadcast") or (bool(readers) and readers[0] is self.readers[value][0])
        readers = [product for op in readers for product in self._products_of(op)]
        products = [op for op in readers if op.primitive in CONTRACTIONS]
        rounded = bool(products) and len(products) == len(readers) and all(op.rounded for op in products)
        size = array.bytes // 2 if rounded and self.compiler.rounds(array.dtype) else array.bytes
        behind = products if value in self.early else [writer] if writer is not None and value in self.late else []
        hidden_by = self._flops_of(behind, count)
        hoisted = self.accumulated.get(value) if kind == "result" else None
        summed_as = self.joint_sums.get(value) if kind == "result" else None
        together = value in self.late or (value in self.early and first)
        edge = Edge(a, b, *dims, partial, size, count, value, kind, position, hidden_by, hoisted, together, summed_as)
        self.edges.append(edge)

    def _products_of(self, op: Op) -> Sequence[Op]:
        """Return an operation; if it reverses a kernel for products that alone read it, these products."""
        reversed_for = self.readers.get(op.results[0], []) if op.primitive == "rev" else []
        return reversed_for if reversed_for and all(each.primitive in CONTRACTIONS for each in reversed_for) else [op]

    def _flops_of(self, ops: Iterable[Op], count: float) -> tuple[str, float]:
        """Return the FLOPs of some operations in a step, divided by a count, and the dtype of the most of them."""
        flops: dict[str, float] = defaultdict(float)
        for op in ops:
            flops[self._dtype_of(op)] += op.flops * op.count / count
        return (max(flops, key=flops.__getitem__), sum(flops.values())) if flops else ("float32", 0.0)

    def _dtype_of(self, op: Op) -> str:
        """Return the name of the dtype in which an operation computes: the dtype of its largest operand."""
        if id(op) not in self.dtype_of:
            arrays = [value for value in op.operands if value is not None] or op.results[:1]
            largest = max((self.program.values[value] for value in arrays), key=lambda value: value.bytes)
            self.dtype_of[id(op)] = _dtype_name(largest.dtype)
        return self.dtype_of[id(op)]


def _combine_sums(graph: Graph, program: FlatProgram, most: float) -> dict[int, int]:
    """Return the number of partial results that are summed at once, by the indices of their edges.

    The compiler combines all-reduces of one dtype and loop if none depends on another (XLA's `AllReduceCombiner`): both sums of a
    batch norm are one, in the forward and in the backward pass. Sums from which no product is computed can also wait
    (`Edge.together`).

    Args:
      most: bytes of the largest all-reduce that the compiler makes of several.
    """
    at = defaultdict(list)
    for index, edge in enumerate(graph.edges):
        if edge.kind == "result" and edge.partial and not edge.together:
            at[graph.nodes[edge.a].label].append(index)
    groups: list[list[int]] = []  # edges of sums that are combined
    latest: dict[tuple, int] = {}  # the last group of each kind
    after: dict[int, int] = defaultdict(int)  # value → a bit for each group that it is computed from
    for time, op in enumerate(program.ops):
        before = functools.reduce(operator.or_, (after.get(operand, 0) for operand in op.operands if operand is not None), 0)
        if before:
            after.update(dict.fromkeys(op.results, before))
        for index in at[time]:
            edge = graph.edges[index]
            loop = next((op.path[:end] for end in range(len(op.path), 0, -1) if isinstance(op.path[end - 1], str)), ())
            over = min(graph.components[edge.a, dim] for dim in edge.partial)
            key = (loop, over, program.values[edge.value].dtype, op.primitive.removeprefix("reduce_") in ("max", "min"))
            group = latest.get(key, -1)
            size = sum(graph.edges[each].bytes for each in groups[group]) + edge.bytes if group >= 0 else 0
            if group < 0 or after[edge.value] >> group & 1 or size > most:
                group = latest[key] = len(groups)
                groups.append([])
            groups[group].append(index)
            after[edge.value] |= 1 << group
    found: dict[int, int] = {}
    for group_edges in groups:
        edges = [graph.edges[index] for index in group_edges]
        sums = {edge.value if edge.summed_as is None else edge.summed_as for edge in edges}
        found |= dict.fromkeys(group_edges, len(sums))
    return found


@functools.lru_cache(maxsize=256)
def _dtype_name(dtype: Any) -> str:
    try:
        return np.dtype(dtype).name
    except TypeError:  # Random keys have an extended dtype, and consist of uint32.
        return "uint32"


def _read_inputs(program: FlatProgram, groups: AxisGroups) -> set[int]:
    """Return the inputs that a non-elementwise operation or a loop reads. They need a layout in use besides the stored one."""
    read = {operand for op in groups.non_elementwise for operand in op.operands}
    read |= {pair.outer for pair in program.same_sharding}
    return {value for value in (*program.inputs, *program.constants) if value in read}


def _fixed_factors(op: Op) -> tuple[tuple[str, ...] | None, ...] | None:
    """Return the mesh axes that the program prescribes for each factor of an operation, None where it prescribes none."""
    if op.fixed is None:
        return None
    fixed: dict[int, tuple[str, ...] | None] = {}
    for factors, entries in zip((*op.rule.operands, *op.rule.results), op.fixed, strict=True):
        for factor, entry in zip(factors, entries, strict=True):
            if factor is not None:
                fixed[factor] = entry
    return tuple(fixed.get(factor) for factor in range(len(op.rule.sizes)))


# Folding

_REFINEMENT_ROUNDS = 24
"""The radius of a neighbourhood, in edges: about one layer of a transformer. A chain of equal matrix products folds only in its
middle, as two products in sequence may need different layouts (column-parallel, then row-parallel)."""


@dataclass(frozen=True)
class Bundle:
    """Equal edges between the same two classes of nodes.

    Attributes:
      edge: one of them.
      a, b: the classes.
      edges: indices of all of them.
    """

    edge: Edge
    a: int
    b: int
    edges: np.ndarray


@dataclass(frozen=True)
class FoldedGraph:
    """A graph whose equivalent nodes are grouped into classes, which have one decision each.

    Attributes:
      of_node: for each node, its class.
      first: for each class, the index of its first node.
      bundles: the edges between classes.
    """

    of_node: np.ndarray
    first: np.ndarray
    bundles: tuple[Bundle, ...]


def fold_layers(graph: Graph) -> FoldedGraph:
    """Return the graph with equivalent nodes grouped."""
    colours = _number_values((node.kind, node.sizes, node.work, node.fixed) for node in graph.nodes)
    kinds = _number_values(
        (edge.source, edge.target, edge.partial, edge.bytes, edge.count, edge.kind, edge.position, edge.all_reduce_count)
        for edge in graph.edges
    )
    for _ in range(_REFINEMENT_ROUNDS):
        neighbours: list[list[tuple[int, int, int]]] = [[] for _ in graph.nodes]
        for edge, kind in zip(graph.edges, kinds, strict=True):
            neighbours[edge.a].append((kind, 0, colours[edge.b]))
            neighbours[edge.b].append((kind, 1, colours[edge.a]))
        refined = _number_values((colour, tuple(sorted(nearby))) for colour, nearby in zip(colours, neighbours, strict=True))
        if max(refined, default=0) == max(colours, default=0):
            break
        colours = refined
    of_node = np.array(colours, dtype=np.int64)
    first = np.full(of_node.max(initial=-1) + 1, -1)
    for node in range(len(of_node) - 1, -1, -1):
        first[of_node[node]] = node
    bundles: dict[tuple, list[int]] = {}
    for number, edge in enumerate(graph.edges):
        # Arrays that are sent together share a latency (`CostModel.step_seconds`), so that they have another price than others.
        key = (int(of_node[edge.a]), int(of_node[edge.b]), kinds[number], edge.together, edge.combined)
        bundles.setdefault(key, []).append(number)
    return FoldedGraph(
        of_node, first, tuple(Bundle(graph.edges[edges[0]], a, b, np.array(edges)) for (a, b, *_), edges in bundles.items())
    )


def _number_values(values: Iterable) -> list[int]:
    """Return a number for each value: equal values have equal numbers, in the order of their first occurrence."""
    numbers: dict = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]
