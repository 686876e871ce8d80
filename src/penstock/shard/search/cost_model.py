"""The cost of an assignment of layouts: seconds of a step and peak memory of one device, on one mesh.

In: the decision graph of a step, a mesh and the hardware. A node of the graph costs compute time: a roofline (Williams, Waterman,
Patterson 2009). An edge costs the time of its collectives, less what is hidden behind products (`hidden_seconds`). The memory is
the largest sum of live bytes, with the stored inputs.

Equivalent nodes have one layout (`graph/folding.py`), so costs are summed over classes of nodes and bundles of edges.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.shard.graph.decisions import Edge, FoldedGraph, Graph, Traffic
from penstock.shard.graph.live_ranges import LiveRanges
from penstock.shard.mesh.compiler_models import CompilerModel, tiled_bytes
from penstock.shard.mesh.hardware import Hardware
from penstock.shard.mesh.resharding import Layout, MeshLinks, ReshardStep, union

Assignment = list[Layout]
"""The layout of each node, in the order of `Graph.nodes`. Nodes of a class have the same layout."""

_ROW_ELEMENTS = 128
"""Elements in a row of a TPU tile. A GPU memory transaction has 32 to 128 elements."""
_FAST_PART = 0.7
"""The part of a TPU's vector memory in which temporary arrays are kept. The rest holds the operands of running operations."""
_SPILLED = 0.02
"""The part of the temporary arrays in a TPU's vector memory that takes memory outside of it as well, while it is copied."""
_FORMS = ("", "reduce-scatter", "all-reduce")
"""The first collective of an edge, where a live range depends on it (`LiveRanges.form`)."""


@dataclass
class CostModel:
    """The costs of the layouts of a step on one mesh.

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
    _work: dict = field(default_factory=dict, repr=False)
    _peaks: dict = field(default_factory=dict, repr=False)
    _stored_bytes: dict = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        folded, live = self.folded, self.live_ranges
        self._class = folded.of_node.tolist()
        self._first = folded.first.tolist()
        dtypes = {dtype for node in self._first for dtype, _, _ in self.graph.nodes[node].work}
        self._peaks |= {dtype: self.hardware.peak(dtype) for dtype in dtypes}
        self._members = np.bincount(folded.of_node, minlength=len(folded.first))
        self._bundle_of = bundle_of = np.zeros(len(self.graph.edges), dtype=np.int64)
        for number, bundle in enumerate(folded.bundles):
            bundle_of[bundle.edges] = number
        arrays: dict[tuple, list[int]] = defaultdict(list)
        for index, edge in enumerate(self.graph.edges):
            # Several elementwise operations, or several operands of one operation, share a reshard to the same layout.
            reader = edge.b if edge.kind in ("operand", "shared_reshard") else None
            arrays[edge.value, edge.count, edge.kind == "result", reader].append(int(bundle_of[index]))
        self._arrays = Counter(map(tuple, arrays.values()))
        self._copies = np.flatnonzero(live.edge >= 0)
        forms = np.stack([bundle_of[live.edge[self._copies]], live.form[self._copies]])
        kinds, self._copy_kind = np.unique(forms, axis=1, return_inverse=True)
        self._copy_kinds = kinds.T.tolist()

        self._fast_bytes = _FAST_PART * self.hardware.fast_memory if self.compiler.tiles else 0.0

    def fold(self, assignment: Assignment) -> Assignment:
        """Return an assignment in which each class of nodes has the layout of its first node.

        Args:
          assignment: the layout of each node.
        """
        return [assignment[self._first[number]] for number in self._class]

    def start(self) -> Assignment:
        """Return the assignment that shards nothing except the dimensions that the user fixed, and the stored batch."""
        return list(self._start)

    @functools.cached_property
    def _start(self) -> Assignment:
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
        return self.compute_seconds(assignment) + sum(
            times * self.edge_seconds(edge, steps) for edge, steps, times in self.all_reshard_steps(assignment)
        )

    def edge_seconds(self, edge: Edge, steps: Sequence[ReshardStep]) -> float:
        """Return the seconds that the collectives of an edge add to one step.

        Args:
          edge: the edge.
          steps: its collectives.
        """
        return edge.times(steps) * (sum(self.step_seconds(edge, steps)) - sum(self.hidden_seconds(edge, steps)))

    def step_seconds(self, edge: Edge, steps: Sequence[ReshardStep]) -> list[float]:
        """Return the seconds of each collective of an edge each time, if nothing else runs.

        The compiler combines all-reduces that do not depend on each other into one, up to `CompilerModel.combines` bytes. So
        those of late arrays, such as gradients, share a latency, except in loops.

        Args:
          edge: the edge.
          steps: its collectives.
        """
        each = [self.links.seconds(step) for step in steps]
        if edge.late and edge.times(steps) <= 1:
            for number, step in enumerate(steps):
                if step.kind == "all-reduce":
                    _, latency = self.links.speed(step)
                    each[number] -= latency * (1 - min(1.0, step.bytes_on_wire / self.compiler.combines))
        return each

    def hidden_seconds(self, edge: Edge, steps: Sequence[ReshardStep]) -> list[float]:
        """Return the seconds that each collective of an edge saves each time, as it runs behind products.

        A collective off the critical path (`graph/overlap.py`), of a kind that the compiler runs asynchronously, is hidden for as
        long as the products take on all devices. `CompilerModel.hides` has the part of this time that it saves.

        Args:
          edge: the edge.
          steps: its collectives.
        """
        dtype, flops = edge.behind
        if not flops or not self.compiler.hides:
            return [0.0] * len(steps)
        left = flops / self.hardware.peak(dtype) / math.prod(self.links.sizes)
        saved = []
        for step, seconds in zip(steps, self.step_seconds(edge, steps), strict=True):
            part = self.compiler.hides.get(step.kind, 0.0)
            hidden = min(left, seconds) if part else 0.0
            left -= hidden
            saved.append(part * hidden)
        return saved

    def compute_seconds(self, assignment: Assignment) -> float:
        """Return the seconds of compute, without collectives.

        Args:
          assignment: the layout of each node.
        """
        each = zip(self._first, self._members.tolist(), strict=True)
        return float(sum(members * self.node_seconds(node, assignment[node]) for node, members in each))

    def node_seconds(self, node: int, layout: Layout) -> float:
        """Return the compute seconds of a node: a roofline for each operation in it.

        An operation takes the longer of its FLOPs at the peak, and its HBM traffic at the bandwidth. Memory is moved in rows of
        128 elements (a TPU tile) or 32 to 128 (a GPU transaction). Sharding rows that are shorter than that saves no traffic.

        Args:
          node: index of the node.
          layout: its layout.
        """
        key = (self._class[node], layout)
        if key not in self._work:
            kind, sizes = self.graph.nodes[node].kind, self.graph.nodes[node].sizes
            short = kind == "group" and len(sizes) > 1 and sizes[-1] < _ROW_ELEMENTS
            parts = self.links.shards(union(layout[:-1] if short else layout))
            self._work[key] = sum(
                max(
                    flops / self._peaks[dtype] / parts,
                    sum(self._moved_bytes(each, layout, parts) for each in traffic) / self.hardware.memory_bandwidth,
                )
                for dtype, flops, traffic in self.graph.nodes[node].work
            )
        return self._work[key]

    def _moved_bytes(self, traffic: Traffic, layout: Layout, parts: int) -> float:
        """Return the bytes of HBM traffic of an array on one device, with the layout of its node, which has so many parts.

        Arrays that all iterations of a loop use are moved once, if one device's part of them fits into the vector memory.
        """
        shards = parts if traffic.dims is None else self.links.shards(union(project(traffic.dims, layout)))
        reuse = traffic.reuse
        moves_once = reuse is not None and reuse.held / shards <= self._fast_bytes
        return traffic.bytes / shards / (reuse.turns if reuse is not None and moves_once else 1)

    def all_reshard_steps(self, assignment: Assignment) -> Iterator[tuple[Edge, tuple[ReshardStep, ...], int]]:
        """Yield each edge that needs collectives, with its reshard steps and the number of such edges.

        An array that several elementwise operations, or several operands of one operation, read in the same new layout is
        resharded once.

        Args:
          assignment: the layout of each node.
        """
        for bundles, times in self._arrays.items():
            seen: set[Layout] = set()
            for number in bundles:
                edge = self.folded.bundles[number].edge
                steps = self.reshard_steps(edge, assignment)
                if steps and (target := project(edge.target, assignment[edge.b])) not in seen:
                    seen.add(target)
                    yield edge, steps, times

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
        live_ranges = self.live_ranges
        shards = np.array([self.links.shards(union(assignment[node])) for node in self._first], dtype=np.float64)
        each = live_ranges.bytes / shards[self.folded.of_node[live_ranges.node]]
        fractions = np.array(
            [self._copied_fraction(number, form, assignment) for number, form in self._copy_kinds], dtype=np.float64
        )
        each[self._copies] = live_ranges.bytes[self._copies] * fractions[self._copy_kind]
        stored = sum(self.stored_bytes(node, size, assignment[node]) for node, size in self.stored)
        return each, stored

    def _copied_fraction(self, bundle: int, form: int, assignment: Assignment) -> float:
        """Return the fraction of an array that one device holds of the copy which an edge makes, if it reshards; else 0."""
        edge = self.folded.bundles[bundle].edge
        steps = self.reshard_steps(edge, assignment)
        if not steps or (form and steps[0].kind != _FORMS[form]):
            return 0.0
        if edge.kind == "operand":
            return 1 / self.links.shards(union(project(edge.target, assignment[edge.b])))
        if edge.kind == "result":
            return 1 / self.links.shards(union(project(edge.source, assignment[edge.a])))
        return 1 / self.links.shards(union(assignment[edge.b]))

    def stored_bytes(self, node: int, size: int, layout: Layout) -> float:
        """Return the bytes that one device stores of an input, with the padding of its tiles.

        Args:
          node: index of the input's node.
          size: bytes of the global array.
          layout: the layout of the node.
        """
        if not self.compiler.tiles:
            return size / self.links.shards(union(layout))
        key = (self._class[node], layout)
        if key not in self._stored_bytes:
            shape = self.graph.nodes[node].sizes
            elements = math.prod(shape)
            local = tuple(dim // self.links.shards(mask) for dim, mask in zip(shape, layout, strict=True))
            self._stored_bytes[key] = tiled_bytes(local, size // elements) if elements else 0
        return self._stored_bytes[key]

    def memory(self, assignment: Assignment) -> tuple[float, int]:
        """Return the peak memory of one device in bytes, and the operation at which it is reached.

        Args:
          assignment: the layout of each node.
        """
        live, stored = self._live_bytes(assignment)
        if not len(live):
            return stored, 0
        time = int(np.argmax(live))
        fast, peak = self._fast_bytes, float(live[time])
        held = max(0.0, peak - fast) + _SPILLED * min(peak, fast)
        return stored + held + self.compiler.reserve * len(live), time

    def vector_memory(self, assignment: Assignment) -> float:
        """Return the bytes of temporary arrays that are in a TPU's vector memory at the peak, which `memory` does not count.

        Args:
          assignment: the layout of each node.
        """
        live, _ = self._live_bytes(assignment)
        return min(float(live.max(initial=0.0)), self._fast_bytes)

    def _live_bytes(self, assignment: Assignment) -> tuple[np.ndarray, float]:
        """Return the bytes of temporary arrays on one device at each operation, and of all stored inputs together."""
        each, stored = self.local_bytes(assignment)
        change = np.zeros(self.live_ranges.steps + 1)
        np.add.at(change, self.live_ranges.start, each)
        np.add.at(change, self.live_ranges.end + 1, -each)
        return np.cumsum(change[:-1]), stored


def project(dims: Sequence[int | None], layout: Layout) -> Layout:
    """Return the layout of an array, given the layout of its node.

    Args:
      dims: for each dimension of the array, the dimension of the node that gives its layout, or None.
      layout: the layout of the node.

    >>> project((1, None), (0b01, 0b10))
    (2, 0)
    """
    return tuple(0 if dim is None else layout[dim] for dim in dims)
