"""The search problem: the cost of an assignment, and the exact best use of one mesh axis given the others.

In: the decision graph of a step, a mesh and the hardware. A node of the graph costs compute time: a roofline (Williams, Waterman,
Patterson 2009). An edge costs the time of its collectives, less what is hidden behind products (`hidden_seconds`). The memory
limit enters as a price on each byte that is live at the peak; `solver.py` raises it until the plan fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.shard.graph.batch_dims import first_shardable_dim
from penstock.shard.graph.decisions import Edge, Graph, Node
from penstock.shard.graph.folding import FoldedGraph
from penstock.shard.graph.live_ranges import LiveRanges
from penstock.shard.graph.step_model import StepModel
from penstock.shard.mesh.compiler_models import CompilerModel
from penstock.shard.mesh.hardware import Hardware
from penstock.shard.mesh.resharding import Layout, MeshLinks, ReshardStep, union
from penstock.shard.mesh.tiles import tiled_bytes
from penstock.shard.search.bucket_elimination import bucket_eliminate

Assignment = list[Layout]
"""The layout of each node, in the order of `Graph.nodes`."""

_ROW_ELEMENTS = 128
"""Elements in a row of a TPU tile. A GPU memory transaction has 32 to 128 elements."""
_FAST_PART = 0.5
"""The part of a TPU's vector memory in which temporary arrays are kept. The rest holds the operands of running operations."""
_SAVED = 0.5
"""The part of the time of a hidden collective that it saves. The rest is lost in two ways: what could be hidden is not always
scheduled so, and a collective takes memory bandwidth from the products. In TPU programs of the zoo and of layouts by hand, 25 %
to 97 % of the gathered bytes of weights, and about half on average, are asynchronous (docs/search.md)."""
_FORMS = ("", "reduce-scatter", "all-reduce")
"""The first collective of an edge, where a live range depends on it (`LiveRanges.form`)."""
_STORAGE_PRICE = 1e-3
"""Cost of storing all inputs replicated, as a fraction of the compute seconds. It breaks ties in favour of less memory."""


@dataclass
class Problem:
    """A search over the layouts of a step on one mesh.

    Attributes:
      graph: the decisions, and the arrays that pass between them.
      folded: the decisions that repeated layers share.
      links: the mesh, and what its collectives cost.
      hardware: the device.
      live_ranges: the operations during which each array is in memory.
      stored: (node, bytes of the global array) of each stored input.
      compiler: how the compiler uses memory.
      pinned: the layouts of nodes that the search leaves as they are: how the inputs of the batch are stored.
    """

    graph: Graph
    folded: FoldedGraph
    links: MeshLinks
    hardware: Hardware
    live_ranges: LiveRanges
    stored: tuple[tuple[int, int], ...]
    compiler: CompilerModel
    pinned: Mapping[int, Layout] = field(default_factory=dict)
    _tables: dict = field(default_factory=dict, repr=False)
    _work: dict = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._members = np.bincount(self.folded.of_node, minlength=len(self.folded.first))
        total = sum(size for _, size in self.stored)
        self._storage_price = _STORAGE_PRICE * self.compute_seconds(self.start()) / total if total else 0.0

    def start(self) -> Assignment:
        """Return the assignment that shards nothing except the dimensions that the user fixed, and the stored batch."""
        return [
            self.pinned[number] if number in self.pinned else self._fixed_layout(node.fixed, len(node.sizes))
            for number, node in enumerate(self.graph.nodes)
        ]

    def _fixed_layout(self, fixed: Sequence[tuple[str, ...] | None] | None, rank: int) -> Layout:
        """Return the layout that a node has to have; unconstrained dimensions are replicated."""
        return tuple(self.links.bits(entry) if entry else 0 for entry in fixed) if fixed is not None else (0,) * rank

    def seconds(self, assignment: Assignment) -> float:
        """Return the seconds of one step: compute, then collectives, without the part of them that is hidden.

        Args:
          assignment: the layout of each node.
        """
        communication = sum(self.edge_seconds(edge, steps) for edge, steps in self.all_reshard_steps(assignment))
        return self.compute_seconds(assignment) + communication

    def edge_seconds(self, edge: Edge, steps: Sequence[ReshardStep]) -> float:
        """Return the seconds that the collectives of an edge add to one step.

        Args:
          edge: the edge.
          steps: its collectives.
        """
        return edge.count * (sum(map(self.links.seconds, steps)) - sum(self.hidden_seconds(edge, steps)))

    def hidden_seconds(self, edge: Edge, steps: Sequence[ReshardStep]) -> list[float]:
        """Return the seconds that each collective of an edge saves each time, as it runs behind products.

        A collective off the critical path (`graph/overlap.py`), of a kind that the compiler runs asynchronously, is hidden for as
        long as the products take on all devices. `_SAVED` is the part of this time that it saves.

        Args:
          edge: the edge.
          steps: its collectives.
        """
        dtype, flops = edge.behind
        left = flops / self.hardware.peak(dtype) / math.prod(self.links.sizes) if flops else 0.0
        saved = []
        for step in steps:
            hidden = min(left, self.links.seconds(step)) if step.kind in self.compiler.hides else 0.0
            left -= hidden
            saved.append(_SAVED * hidden)
        return saved

    def compute_seconds(self, assignment: Assignment) -> float:
        """Return the seconds of compute, without collectives.

        Args:
          assignment: the layout of each node.
        """
        return sum(self.node_seconds(number, layout) for number, layout in enumerate(assignment))

    def node_seconds(self, node: int, layout: Layout) -> float:
        """Return the compute seconds of a node: a roofline for each operation in it.

        An operation takes the longer of its FLOPs at the peak, and its HBM traffic at the bandwidth. Memory is moved in rows of
        128 elements (a TPU tile) or 32 to 128 (a GPU transaction). Sharding rows that are shorter than that saves no traffic.

        Args:
          node: index of the node.
          layout: its layout.
        """
        key = (self.folded.of_node[node], layout)
        if key not in self._work:
            kind, sizes = self.graph.nodes[node].kind, self.graph.nodes[node].sizes
            short = kind == "group" and len(sizes) > 1 and sizes[-1] < _ROW_ELEMENTS
            parts = self.links.shards(union(layout[:-1] if short else layout))
            self._work[key] = sum(
                max(
                    flops / self.hardware.peak(dtype) / parts,
                    sum(
                        size / (parts if dims is None else self.links.shards(union(project(dims, layout))))
                        for size, dims in traffic
                    )
                    / self.hardware.memory_bandwidth,
                )
                for dtype, flops, traffic in self.graph.nodes[node].work
            )
        return self._work[key]

    def all_reshard_steps(self, assignment: Assignment) -> Iterator[tuple[Edge, tuple[ReshardStep, ...]]]:
        """Yield each edge that needs collectives, with its reshard steps.

        An array that several elementwise operations, or several operands of one operation, read in the same new layout is
        resharded once.

        Args:
          assignment: the layout of each node.
        """
        seen: set[tuple] = set()
        for edge in self.graph.edges:
            reshard_steps = self.reshard_steps(edge, assignment)
            if reshard_steps:
                reader = edge.b if edge.kind in ("operand", "shared_reshard") else None
                key = (edge.value, edge.count, edge.kind == "result", reader, project(edge.target, assignment[edge.b]))
                if key not in seen:
                    seen.add(key)
                    yield edge, reshard_steps

    def reshard_steps(self, edge: Edge, assignment: Assignment) -> tuple[ReshardStep, ...]:
        """Return the collectives of one edge; () if both ends have the same layout.

        Args:
          edge: the edge.
          assignment: the layout of each node.
        """
        source, target = assignment[edge.a], assignment[edge.b]
        partial = union(tuple(source[dim] for dim in edge.partial))
        return self.links.reshard_steps(project(edge.source, source), project(edge.target, target), partial, edge.bytes)

    def local_bytes(self, assignment: Assignment) -> tuple[np.ndarray, float]:
        """Return the bytes on one device: of each array in `live_ranges`, and of all stored inputs together.

        Args:
          assignment: the layout of each node.
        """
        shards = np.array([self.links.shards(union(layout)) for layout in assignment], dtype=np.float64)
        live_ranges = self.live_ranges
        each = live_ranges.bytes / shards[live_ranges.node]
        for row in np.flatnonzero(live_ranges.edge >= 0):
            edge = self.graph.edges[live_ranges.edge[row]]
            steps = self.reshard_steps(edge, assignment)
            if not steps or (live_ranges.form[row] and steps[0].kind != _FORMS[live_ranges.form[row]]):
                each[row] = 0.0
            elif edge.kind in ("operand", "result"):
                dims = edge.target if edge.kind == "operand" else edge.source
                each[row] = live_ranges.bytes[row] / self.links.shards(union(project(dims, assignment[live_ranges.node[row]])))
        stored = sum(self.stored_bytes(node, size, assignment[node]) for node, size in self.stored)
        return each, stored

    def stored_bytes(self, node: int, size: int, layout: Layout) -> float:
        """Return the bytes that one device stores of an input, with the padding of its tiles.

        Args:
          node: index of the input's node.
          size: bytes of the global array.
          layout: the layout of the node.
        """
        if not self.compiler.tiles:
            return size / self.links.shards(union(layout))
        shape = self.graph.nodes[node].sizes
        elements = math.prod(shape)
        local = tuple(dim // self.links.shards(mask) for dim, mask in zip(shape, layout, strict=True))
        return tiled_bytes(local, size // elements) if elements else 0

    def memory(self, assignment: Assignment) -> tuple[float, int]:
        """Return the peak memory of one device in bytes, and the operation at which it is reached.

        Args:
          assignment: the layout of each node.
        """
        each, stored = self.local_bytes(assignment)
        change = np.zeros(self.live_ranges.steps + 1)
        np.add.at(change, self.live_ranges.start, each)
        np.add.at(change, self.live_ranges.end + 1, -each)
        live = np.cumsum(change[:-1])
        if not len(live):
            return stored, 0
        time = int(np.argmax(live))
        fast = _FAST_PART * self.hardware.fast_memory if self.compiler.tiles else 0.0
        held = max(0.0, float(live[time]) - fast)
        return stored + held + self.compiler.reserve * len(live), time

    def improve(self, assignment: Assignment, axis: int, prices: np.ndarray) -> Assignment:
        """Find the best use of one mesh axis, given how the others are used.

        The result is exact, except where a table is too large (`bucket_eliminate`).

        Args:
          assignment: the current layouts. The use of the other axes stays as it is.
          axis: index of the mesh axis.
          prices: for each operation, the seconds that one live byte costs [operations].

        Returns:
          An assignment.
        """
        bit = 1 << axis
        folded, nodes = self.folded, self.graph.nodes
        layouts = []
        for node in folded.first:
            layout = assignment[node]
            without = tuple(mask & ~bit for mask in layout)
            if node in self.pinned or (nodes[node].fixed is not None and all(entry is not None for entry in nodes[node].fixed)):
                layouts.append([layout])
            else:
                layouts.append([_assign_axis(without, dim, bit) for dim in self._candidate_dims(nodes[node], without, axis)])
        shards = [np.array([self.links.shards(union(layout)) for layout in each], dtype=float) for each in layouts]
        own, reshard_prices = self._memory_prices(prices)
        unary = [
            members * np.array([self.node_seconds(node, layout) for layout in each]) + cost / n
            for node, members, each, cost, n in zip(folded.first, self._members, layouts, own, shards, strict=True)
        ]
        pairs: dict[tuple[int, int], np.ndarray] = {}
        for bundle, price in zip(folded.bundles, reshard_prices, strict=True):
            seconds, fraction = self._tables_of(bundle.edge, layouts[bundle.a], layouts[bundle.b])
            if seconds is None:
                continue
            table = len(bundle.edges) * seconds + price * fraction if price else len(bundle.edges) * seconds
            if bundle.a == bundle.b:
                unary[bundle.a] = unary[bundle.a] + np.diagonal(table)
                continue
            key, table = ((bundle.a, bundle.b), table) if bundle.a < bundle.b else ((bundle.b, bundle.a), table.T)
            pairs[key] = pairs[key] + table if key in pairs else table
        current = [
            next((at for at, layout in enumerate(each) if layout == assignment[node]), 0)
            for node, each in zip(folded.first, layouts, strict=True)
        ]
        chosen = bucket_eliminate(unary, pairs, current)
        return [layouts[number][chosen[number]] for number in folded.of_node]

    def _memory_prices(self, prices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the price of memory in seconds: of each folded node, replicated, and of the copies of each edge bundle."""
        live_ranges, folded = self.live_ranges, self.folded
        everywhere = float(prices.sum()) + self._storage_price
        running = np.concatenate([[0.0], np.cumsum(prices)])
        cost = (running[live_ranges.end + 1] - running[live_ranges.start]) * live_ranges.bytes
        own = np.zeros(len(folded.first))
        materialized = live_ranges.edge < 0
        np.add.at(own, folded.of_node[live_ranges.node[materialized]], cost[materialized])
        for node, size in self.stored:
            own[folded.of_node[node]] += everywhere * size
        of_edge = np.zeros(len(self.graph.edges))
        np.add.at(of_edge, live_ranges.edge[~materialized], cost[~materialized])
        return own, np.array([of_edge[bundle.edges].sum() for bundle in folded.bundles])

    def _candidate_dims(self, node: Node, without: Layout, axis: int) -> list[int]:
        """Return the dimensions of a node that the axis may shard; -1 means that it shards none."""
        if node.fixed is not None:
            given = [dim for dim, entry in enumerate(node.fixed) if entry and self.links.names[axis] in entry]
            if given:
                return [given[0]]
        n = self.links.sizes[axis]
        states = [-1]
        for dim, size in enumerate(node.sizes):
            open_ = node.fixed is None or node.fixed[dim] is None
            if open_ and size > 1 and size % (n * self.links.shards(without[dim])) == 0:
                states.append(dim)
        return states

    def _tables_of(self, edge: Edge, of_a: list[Layout], of_b: list[Layout]) -> tuple[np.ndarray | None, np.ndarray]:
        """Return two tables over the layouts of both ends of an edge [layouts of a, layouts of b].

        The first holds the seconds of the collectives; None if all are zero. The second holds the fraction of the array that the
        resharded copy takes on one device.
        """
        key = (edge.source, edge.target, edge.partial, edge.bytes, edge.count, edge.kind, edge.behind, tuple(of_a), tuple(of_b))
        if key not in self._tables:
            seconds, fraction = np.zeros((2, len(of_a), len(of_b)))
            for row, source in enumerate(of_a):
                start = project(edge.source, source)
                partial = union(tuple(source[dim] for dim in edge.partial))
                for column, target in enumerate(of_b):
                    end = project(edge.target, target)
                    reshard_steps = self.links.reshard_steps(start, end, partial, edge.bytes)
                    if reshard_steps:
                        seconds[row, column] = self.edge_seconds(edge, reshard_steps)
                        fraction[row, column] = 1 / self.links.shards(union(start if edge.kind == "result" else end))
            self._tables[key] = (seconds, fraction) if seconds.any() else (None, fraction)
        return self._tables[key]


def build_problem(model: StepModel, mesh: Mapping[str, int], hardware: Hardware, batch: Sequence[int] = ()) -> Problem:
    """Build the search problem of a step on one mesh.

    Args:
      model: the step.
      mesh: sizes of the mesh axes.
      hardware: the device.
      batch: nodes of the inputs that are a batch. Each is stored along its batch dimension over all axes that divide it, so that
        each process reads only its own rows.
    """
    names: Sequence[str] = tuple(mesh)
    links = MeshLinks(
        tuple(names),
        tuple(mesh.values()),
        tuple(hardware.bandwidth([name]) for name in names),
        tuple(hardware.latency([name]) for name in names),
    )
    program = model.program
    stored = tuple((model.graph.leaf[value], program.values[value].bytes) for value in program.inputs)
    pinned = {node: _rows_layout(model.graph, node, links) for node in batch if model.graph.nodes[node].fixed is None}
    return Problem(model.graph, model.folded, links, hardware, model.live_ranges, stored, model.compiler, pinned)


def _rows_layout(graph: Graph, leaf: int, links: MeshLinks) -> Layout:
    """Return the layout of an input of the batch whose rows are sharded over all mesh axes that divide them."""
    sizes, dim = graph.nodes[leaf].sizes, first_shardable_dim(graph, leaf)
    layout = [0] * len(sizes)
    for axis, n in enumerate(links.sizes):
        if n > 1 and sizes and sizes[dim] % (n * links.shards(layout[dim])) == 0:
            layout[dim] |= 1 << axis
    return tuple(layout)


def project(dims: Sequence[int | None], layout: Layout) -> Layout:
    """Return the layout of an array, given the layout of its node.

    Args:
      dims: for each dimension of the array, the dimension of the node that gives its layout, or None.
      layout: the layout of the node.

    >>> project((1, None), (0b01, 0b10))
    (2, 0)
    """
    return tuple(0 if dim is None else layout[dim] for dim in dims)


def _assign_axis(layout: Layout, dim: int, bit: int) -> Layout:
    """Return a layout in which the axis of a bit shards one more dimension; the same layout if the dimension is -1."""
    return layout if dim < 0 or layout[dim] & bit else (*layout[:dim], layout[dim] | bit, *layout[dim + 1 :])
