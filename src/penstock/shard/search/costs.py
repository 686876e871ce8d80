"""The cost of an assignment of layouts: seconds of a step and peak memory of one device, on one mesh.

A node of the decision graph costs compute time: a roofline (Williams, Waterman, Patterson 2009), with a least time. An edge
costs the time of its collectives, by the α–β model of Thakur et al. (2005), less the part hidden behind products
(`hidden_seconds`). The peak memory is the largest sum of live bytes, with the stored inputs. Equivalent nodes have one layout
(`FoldedGraph`), so costs are summed over classes of nodes and bundles of edges.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from penstock.shard.graph.decisions import VECTOR, Edge, FoldedGraph, Graph, Node, Traffic
from penstock.shard.graph.live_ranges import LiveRanges
from penstock.shard.graph.roles import find_batch_dims, find_state_work, first_shardable_dim
from penstock.shard.graph.step_model import StepModel
from penstock.shard.mesh.compiler_models import CompilerModel, tiled_bytes
from penstock.shard.mesh.hardware import Hardware
from penstock.shard.mesh.resharding import Layout, MeshLinks, ReshardStep, union

Assignment = list[Layout]
"""The layout of each node, in the order of `Graph.nodes`. Nodes of a class have the same layout."""

_ROW_ELEMENTS = 128
"""Elements in a row of a TPU tile. A GPU memory transaction has 32 to 128 elements."""
_VECTOR_PART = 1 / 32
"""The peak of the vector unit, as a part of the peak of bfloat16 products.

In a cycle, a TPU v5e makes 4 · 8 · 128 operations, and 2 · 4 · 128 · 128 in its four matrix units (Austin et al., How to Scale
Your Model, 2025). By datasheet, it is 1/16 on an A100 and 1/15 on an H100. Without it, random numbers cost nothing: each device
made most of the noise of an evolution strategy, which took twice as long by the cycles and collectives of the TPU program.
"""
_LEAST_SECONDS = 1.2e-6
"""The least time of an operation that is not fused into others.

The TPU compiler estimates 1,820 cycles at 1.5 GHz for the smallest fusions of a v5e. Without it, the program of a small QLoRA
step took 1.6 times as long as data parallelism, and that of a decoder with three rows 1.4 times.
"""
_FAST_PART = 0.7
"""The part of a TPU's vector memory in which temporary arrays are kept. The rest holds the operands of running operations."""
_SPILLED = 0.02
"""The part of the temporary arrays in a TPU's vector memory that takes memory outside of it as well, while it is copied."""
COLLECTIVE_FORMS = ("", "reduce-scatter", "all-reduce")
"""The first collective of an edge, where a live range depends on it (`LiveRanges.form`)."""


GAP = 0.01
"""The exact search ends when it is proved that no layout is faster than the fastest by more than this fraction."""


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
      class_of, first_of, members: the class of each node; the first node and the number of nodes of each class.
      bundle_of: the bundle of each edge.
      arrays: the bundles of the edges that share reshards, of an array or of partial results that are added → the number of such
        arrays or sums.
      copy_kinds: (bundle, form) of the arrays that exist only where a bundle reshards (`LiveRanges`).
      held: pairs (part, free). Temporary arrays take the largest part · live bytes − free of memory, as a TPU has some of them in
        its vector memory.
      peaks: the peak FLOP/s of each kind of work.
    """

    graph: Graph
    folded: FoldedGraph
    links: MeshLinks
    hardware: Hardware
    live_ranges: LiveRanges
    stored: tuple[tuple[int, int], ...]
    compiler: CompilerModel
    pinned: Mapping[int, Layout] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict, repr=False)
    _work: dict = field(default_factory=dict, repr=False)
    _stored_bytes: dict = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        folded, live = self.folded, self.live_ranges
        self.class_of = folded.of_node.tolist()
        self.first_of = folded.first.tolist()
        dtypes = {work.dtype for node in self.first_of for work in self.graph.nodes[node].work}
        vector = _VECTOR_PART * self.hardware.peak("bfloat16")
        self.peaks |= {dtype: vector if dtype == VECTOR else self.hardware.peak(dtype) for dtype in dtypes}
        self.members = np.bincount(folded.of_node, minlength=len(folded.first))
        self.bundle_of = bundle_of = np.zeros(len(self.graph.edges), dtype=np.int64)
        for number, bundle in enumerate(folded.bundles):
            bundle_of[bundle.edges] = number
        arrays: dict[tuple, list[int]] = defaultdict(list)
        for index, edge in enumerate(self.graph.edges):
            # Several elementwise operations, or several operands of one operation, share a reshard to the same layout.
            reader = edge.b if edge.kind in ("operand", "shared_reshard") else None
            array = edge.value if edge.summed_as is None else edge.summed_as
            arrays[array, edge.count, edge.kind == "result", reader].append(int(bundle_of[index]))
        self.arrays = Counter(map(tuple, arrays.values()))
        self._copies = np.flatnonzero(live.edge >= 0)
        forms = np.stack([bundle_of[live.edge[self._copies]], live.form[self._copies]])
        kinds, self._copy_kind = np.unique(forms, axis=1, return_inverse=True)
        self.copy_kinds = kinds.T.tolist()
        self._fast_bytes = _FAST_PART * self.hardware.fast_memory
        self._uncounted_bytes = self._fast_bytes if self.compiler.tiles else 0.0
        self.held = [(1.0, (1 - _SPILLED) * self._uncounted_bytes), (_SPILLED, 0.0)][: 2 if self._uncounted_bytes else 1]
        made = np.where(live.edge < 0, live.bytes, 0.0)
        self._temporary_bytes = float(_sum_over_time(live, made).max(initial=0.0))

    def fold(self, assignment: Assignment) -> Assignment:
        """Return an assignment in which each class of nodes has the layout of its first node."""
        return [assignment[self.first_of[number]] for number in self.class_of]

    def in_order(self, last_is_major: bool) -> CostModel:
        """Return the same costs for an order of the mesh axes that shard a dimension (`MeshLinks.last_is_major`)."""
        if last_is_major == self.links.last_is_major:
            return self
        return replace(self, links=replace(self.links, last_is_major=last_is_major))

    def start(self) -> Assignment:
        """Return the assignment that shards nothing except the dimensions that the user fixed, and the stored batch."""
        return list(self._start)

    @functools.cached_property
    def _start(self) -> Assignment:
        return [
            self.pinned[number] if number in self.pinned else self._fixed_layout(node)
            for number, node in enumerate(self.graph.nodes)
        ]

    def _fixed_layout(self, node: Node) -> Layout:
        """Return the layout that the user fixes for a node; unconstrained dimensions are replicated."""
        return (0,) * len(node.sizes) if node.fixed is None else tuple(self.links.bits(entry or ()) for entry in node.fixed)

    def seconds(self, assignment: Assignment) -> float:
        """Return the seconds of one step: compute, and collectives without their hidden part."""
        return self.compute_seconds(assignment) + sum(
            times * self.edge_seconds(edge, steps) for edge, steps, times in self.all_reshard_steps(assignment)
        )

    def edge_seconds(self, edge: Edge, steps: Sequence[ReshardStep]) -> float:
        """Return the seconds that the collectives of an edge add to one step."""
        return edge.times(steps) * (sum(self.step_seconds(edge, steps)) - sum(self.hidden_seconds(edge, steps)))

    def step_seconds(self, edge: Edge, steps: Sequence[ReshardStep]) -> list[float]:
        """Return the seconds that each collective of an edge takes once, if nothing else runs.

        The compiler combines collectives of some kinds that do not depend on each other, up to `CompilerModel.combines` bytes. So
        collectives of gradients and weights share a latency, except in loops. All-reduces of partial results that exist at the
        same time share one too.
        """
        each = [self.links.seconds(step) for step in steps]
        if edge.combined > 1:
            for number, step in enumerate(steps):
                if step.kind == "all-reduce":
                    each[number] -= self.links.speed(step.kind, step.axes)[1] * (1 - 1 / edge.combined)
        if edge.together and edge.times(steps) <= 1:
            for number, step in enumerate(steps):
                if step.kind in self.compiler.combines:
                    _, latency = self.links.speed(step.kind, step.axes)
                    each[number] -= latency * (1 - min(1.0, step.bytes_on_wire / self.compiler.combines[step.kind]))
        return each

    def hidden_seconds(self, edge: Edge, steps: Sequence[ReshardStep]) -> list[float]:
        """Return the seconds by which running behind products shortens each collective of an edge.

        A collective off the critical path (`graph/scheduling.py`) is hidden for as long as the products take on all devices, if
        the compiler runs its kind asynchronously. `CompilerModel.hides` has the part of this time that it saves.
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
        """Return the seconds of compute, without collectives."""
        each = zip(self.first_of, self.members.tolist(), strict=True)
        return float(sum(members * self.node_seconds(node, assignment[node]) for node, members in each))

    def node_seconds(self, node: int, layout: Layout) -> float:
        """Return the compute seconds of a node: a roofline for each operation in it.

        An operation takes the longest of its FLOPs at the peak, its HBM traffic at the bandwidth, and the least time of an
        operation. Memory is moved in rows of 128 elements (a TPU tile) or 32 to 128 (a GPU transaction). Sharding shorter rows
        saves no traffic.
        """
        key = (self.class_of[node], layout)
        if key not in self._work:
            kind, sizes = self.graph.nodes[node].kind, self.graph.nodes[node].sizes
            short = kind == "group" and len(sizes) > 1 and sizes[-1] < _ROW_ELEMENTS
            parts = self.links.shards(union(layout[:-1] if short else layout))
            self._work[key] = sum(
                max(
                    work.flops / self.peaks[work.dtype] / parts,
                    sum(self._moved_bytes(each, layout, parts) for each in work.traffic) / self.hardware.memory_bandwidth,
                    _LEAST_SECONDS * work.runs / self.links.shards(union(project(work.updates, layout))),
                )
                for work in self.graph.nodes[node].work
            )
        return self._work[key]

    def _moved_bytes(self, traffic: Traffic, layout: Layout, parts: int) -> float:
        """Return the bytes of HBM traffic of an array on one device, given the layout of its node and its number of shards.

        Arrays that all iterations of a loop use are moved once, if one device's shard of them fits into the vector memory.
        Temporary arrays of products are not moved, if one device's shard of all that are live together fits.
        """
        shards = parts if traffic.dims is None else self.links.shards(union(project(traffic.dims, layout)))
        if traffic.temporary and self._temporary_bytes / shards <= self._fast_bytes:
            return 0.0
        reuse = traffic.reuse
        moves_once = reuse is not None and reuse.bytes / shards <= self._fast_bytes
        return traffic.bytes / shards / (reuse.iterations if reuse is not None and moves_once else 1)

    def all_reshard_steps(self, assignment: Assignment) -> Iterator[tuple[Edge, tuple[ReshardStep, ...], int]]:
        """Yield each edge that needs collectives, with its reshard steps and the number of such edges.

        An array that several elementwise operations, or several operands of one operation, read in the same new layout is
        resharded once, for the reader for which this takes longest: one may read it in half of its bytes. Partial results that
        are added are summed once, if nothing but the same sum reshards them.
        """
        for bundles, times in self.arrays.items():
            found: dict[tuple, tuple[Edge, tuple[ReshardStep, ...]]] = {}
            for position, number in enumerate(bundles):
                edge = self.folded.bundles[number].edge
                steps = self.reshard_steps(edge, assignment)
                if not steps:
                    continue
                shared = joint_number(edge, steps)
                key = project(edge.target, assignment[edge.b]), shared, position if shared < 0 else -1
                known = found.setdefault(key, (edge, steps))
                if known[0] is not edge and self.edge_seconds(edge, steps) > self.edge_seconds(*known):
                    found[key] = edge, steps
            for edge, steps in found.values():
                yield edge, steps, times

    def reshard_steps(self, edge: Edge, assignment: Assignment) -> tuple[ReshardStep, ...]:
        """Return the collectives of one edge; () if both ends have the same layout."""
        source, target = assignment[edge.a], assignment[edge.b]
        partial = union(tuple(source[dim] for dim in edge.partial))
        return self.links.reshard_steps(project(edge.source, source), project(edge.target, target), partial, edge.bytes)

    def local_bytes(self, assignment: Assignment) -> tuple[np.ndarray, float]:
        """Return the bytes on one device of each array in `live_ranges`, and of all stored inputs together."""
        classes = np.array([1 / self.links.shards(union(assignment[node])) for node in self.first_of], dtype=np.float64)
        copies = np.array([self._copied_fraction(number, form, assignment) for number, form in self.copy_kinds], dtype=np.float64)
        stored = sum(self.stored_bytes(node, size, assignment[node]) for node, size in self.stored)
        return self._arrays_live(classes, copies), stored

    def live_bytes(self, classes: np.ndarray, copies: np.ndarray) -> np.ndarray:
        """Return the bytes of temporary arrays on one device at each operation [operations].

        Args:
          classes: the part of its arrays that a device holds, for each class of nodes.
          copies: the part of its arrays that a device holds of each of `copy_kinds`.
        """
        return _sum_over_time(self.live_ranges, self._arrays_live(classes, copies))

    def _arrays_live(self, classes: np.ndarray, copies: np.ndarray) -> np.ndarray:
        """Return the bytes on one device of each array in `live_ranges`; the arguments are those of `live_bytes`."""
        each = self.live_ranges.bytes * classes[self.folded.of_node[self.live_ranges.node]]
        each[self._copies] = self.live_ranges.bytes[self._copies] * copies[self._copy_kind]
        return each

    def _copied_fraction(self, bundle: int, form: int, assignment: Assignment) -> float:
        """Return the fraction of an array that one device holds of the copy that an edge makes; 0 if it does not reshard."""
        edge = self.folded.bundles[bundle].edge
        steps = self.reshard_steps(edge, assignment)
        if not steps or (form and steps[0].kind != COLLECTIVE_FORMS[form]):
            return 0.0
        copy = assignment[edge.b]
        if edge.kind == "operand":
            copy = project(edge.target, copy)
        elif edge.kind == "result":
            copy = project(edge.source, assignment[edge.a])
        return 1 / self.links.shards(union(copy))

    def stored_bytes(self, node: int, size: int, layout: Layout) -> float:
        """Return the bytes that one device stores of an input of `size` bytes, with the padding of its tiles."""
        if not self.compiler.tiles:
            return size / self.links.shards(union(layout))
        key = (self.class_of[node], layout)
        if key not in self._stored_bytes:
            shape = self.graph.nodes[node].sizes
            elements = math.prod(shape)
            local = tuple(dim // self.links.shards(mask) for dim, mask in zip(shape, layout, strict=True))
            self._stored_bytes[key] = tiled_bytes(local, size // elements) if elements else 0
        return self._stored_bytes[key]

    def memory(self, assignment: Assignment, padding: np.ndarray | float = 1.0) -> tuple[float, int]:
        """Return the peak memory of one device in bytes, and the operation at which it is reached.

        Args:
          padding: a factor on the bytes of each live range.
        """
        live, stored = self.memory_over_time(assignment, padding)
        if not len(live):
            return stored, 0
        time = int(np.argmax(live))
        held = max(part * float(live[time]) - free for part, free in self.held)
        return stored + held + self.compiler.reserve * len(live), time

    def vector_memory(self, assignment: Assignment) -> float:
        """Return the bytes of temporary arrays that are in a TPU's vector memory at the peak, which `memory` does not count."""
        live, _ = self.memory_over_time(assignment)
        return min(float(live.max(initial=0.0)), self._uncounted_bytes)

    def memory_over_time(self, assignment: Assignment, padding: np.ndarray | float = 1.0) -> tuple[np.ndarray, float]:
        """Return the bytes of temporary arrays on one device at each operation, and of all stored inputs together."""
        each, stored = self.local_bytes(assignment)
        return _sum_over_time(self.live_ranges, each * padding), stored


def _sum_over_time(live_ranges: LiveRanges, each: np.ndarray) -> np.ndarray:
    """Return the bytes of all live ranges together at each operation, given the bytes of each."""
    change = np.zeros(live_ranges.steps + 1)
    np.add.at(change, live_ranges.start, each)
    np.add.at(change, live_ranges.end + 1, -each)
    return np.cumsum(change[:-1])


def joint_number(edge: Edge, steps: Sequence[ReshardStep]) -> int:
    """Return a number of what several edges of an array, or of partial results that are added, do once to reshard to a layout.

    It is 0 for an array, which is resharded once in any case. Partial results share their sum, if nothing else reshards them: its
    kind and its axes make its number. It is -1 if they share nothing.
    """
    if edge.kind != "result":
        return 0
    form = COLLECTIVE_FORMS.index(steps[0].kind) if len(steps) == 1 and steps[0].kind in COLLECTIVE_FORMS else 0
    return len(COLLECTIVE_FORMS) * steps[0].axes + form if form else -1


def project(dims: Sequence[int | None], layout: Layout) -> Layout:
    """Return the layout of an array, given the layout of its node.

    Args:
      dims: for each dimension of the array, the dimension of the node that gives its layout; None replicates it.

    >>> project((1, None), (0b01, 0b10))
    (2, 0)
    """
    return tuple(0 if dim is None else layout[dim] for dim in dims)


def build_costs(model: StepModel, mesh: Mapping[str, int], hardware: Hardware, batch: Sequence[int] = ()) -> CostModel:
    """Build the costs of the layouts of a step on one mesh.

    Args:
      batch: nodes of the inputs that are a batch. Each is stored along its batch dimension over all axes that divide it, so that
        each process reads only its own rows.
    """
    links = MeshLinks.of(mesh, hardware, model.compiler)
    program = model.program
    stored = tuple((model.graph.leaf[value], program.values[value].bytes) for value in program.inputs)
    pinned = {node: _rows_layout(model.graph, node, links) for node in batch if model.graph.nodes[node].fixed is None}
    return CostModel(model.graph, model.folded, links, hardware, model.live_ranges, stored, model.compiler, pinned)


def _rows_layout(graph: Graph, leaf: int, links: MeshLinks) -> Layout:
    """Return the layout of an input of the batch with its rows sharded over all mesh axes that divide them."""
    sizes, dim = graph.nodes[leaf].sizes, first_shardable_dim(graph, leaf)
    layout = [0] * len(sizes)
    for axis, n in enumerate(links.sizes):
        if n > 1 and sizes and sizes[dim] % (n * links.shards(layout[dim])) == 0:
            layout[dim] |= 1 << axis
    return tuple(layout)


# The predicted cost of a plan.


@dataclass(frozen=True)
class PlannedCollective:
    """All collectives of one kind over the same mesh axes in one step, as predicted.

    Attributes:
      kind: the name that XLA gives it, "all-reduce" for example.
      axes: the mesh axes that it runs over.
      count: the number of such collectives in a step.
      bytes_on_wire: bytes that one device sends for all of them.
      seconds: the time of all of them, if nothing else runs.
      hidden: the seconds that are saved because they run behind products.
    """

    kind: str
    axes: tuple[str, ...]
    count: float
    bytes_on_wire: float
    seconds: float
    hidden: float


@dataclass(frozen=True)
class Memory:
    """The predicted peak memory of one device, in bytes. The state is donated: the new state takes no further memory.

    Attributes:
      parameters, optimizer, batch, other: the arguments with that role.
      activations: everything else that is live at the peak.
      constants: arrays that the step closes over, which each device has whole.
    """

    parameters: int
    optimizer: int
    batch: int
    other: int
    activations: int
    constants: int = 0

    @property
    def arguments(self) -> int:
        """Return the bytes of all arguments."""
        return self.parameters + self.optimizer + self.batch + self.other

    @property
    def total(self) -> int:
        """Return the peak memory."""
        return self.arguments + self.constants + self.activations


@dataclass(frozen=True)
class Cost:
    """The predicted cost of one step on one device.

    Attributes:
      compute: seconds of compute (`CostModel.node_seconds`).
      flops: FLOPs of one device.
      flops_seconds: seconds that the FLOPs alone would take at the peak.
      collectives: collectives by kind and mesh axes, the slowest first.
      memory: peak memory.
      unknown: sentences about unknown costs, such as a loop of unknown length; () if all costs are known.

    Examples:
      >>> import jax
      >>> step = lambda w, x: w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)
      >>> w, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in ([512, 512], [65536, 512]))
      >>> cost = ps.plan(step, w, x, mesh={"data": 2}, hardware="tpu-v5e", check=False).cost
      >>> {each.axes for each in cost.collectives}
      {('data',)}
      >>> cost.seconds == cost.compute + cost.communication - cost.hidden
      True
    """

    compute: float
    flops: float
    flops_seconds: float
    collectives: tuple[PlannedCollective, ...]
    memory: Memory
    unknown: tuple[str, ...] = ()

    @property
    def communication(self) -> float:
        """Return the seconds of all collectives, if nothing else runs."""
        return sum(each.seconds for each in self.collectives)

    @property
    def hidden(self) -> float:
        """Return the seconds of collectives that run behind products (`CostModel.hidden_seconds`)."""
        return sum(each.hidden for each in self.collectives)

    @property
    def seconds(self) -> float:
        """Return the seconds of one step: compute, and collectives without their hidden part."""
        return self.compute + self.communication - self.hidden

    @property
    def bytes_on_wire(self) -> float:
        """Return the bytes that one device sends in a step."""
        return sum(each.bytes_on_wire for each in self.collectives)


@dataclass(frozen=True)
class Proof:
    """The proof of a search within a memory limit, about all layouts on all meshes and by the estimate.

    Attributes:
      fastest: seconds of the fastest plan within the limit that it found; None if it found none. The plan that is taken may be a
        near-tie.
      seconds: every layout within the limit takes at least so long; None if there is none.
      memory: every layout needs at least so many bytes of a device; 0 if nothing is known.
    """

    fastest: float | None
    seconds: float | None
    memory: float

    @property
    def gap(self) -> float | None:
        """Return by which fraction a layout may be faster than the fastest that was found; None if none was found.

        >>> from penstock.shard.search.costs import Proof
        >>> Proof(fastest=1.02, seconds=1.0, memory=0.0).gap
        0.02
        """
        if self.fastest is None:
            return None
        return max(0.0, round(self.fastest / self.seconds - 1, 9)) if self.seconds else 0.0


def predict_cost(
    costs: CostModel, assignment: Assignment, roles: Sequence[str], inputs: Sequence[int], unknown: tuple[str, ...]
) -> Cost:
    """Predict the cost of one step on one device. `unknown` has the sentences of `FlatProgram.unknown`."""
    totals: dict[tuple[str, tuple[str, ...]], list[float]] = {}
    for edge, steps, times in costs.all_reshard_steps(assignment):
        count = times * edge.times(steps)
        each = zip(steps, costs.step_seconds(edge, steps), costs.hidden_seconds(edge, steps), strict=True)
        for step, seconds, hidden in each:
            entry = totals.setdefault((step.kind, costs.links.axes(step.axes)), [0.0, 0.0, 0.0, 0.0])
            entry[0] += count
            entry[1] += count * step.bytes_on_wire
            entry[2] += count * seconds
            entry[3] += count * hidden
    flops = flops_seconds = 0.0
    for node, layout in zip(costs.graph.nodes, assignment, strict=True):
        shards = costs.links.shards(union(layout))
        for work in node.work:
            flops += work.flops / shards
            flops_seconds += work.flops / shards / costs.peaks[work.dtype]
    total = costs.memory(assignment)[0]
    stored = dict.fromkeys(("parameters", "optimizer", "batch", "other"), 0.0)
    for role, leaf, (_, size) in zip(roles, inputs, costs.stored, strict=True):
        stored[role] += costs.stored_bytes(leaf, size, assignment[leaf])
    sizes = {role: int(size) for role, size in stored.items()}
    memory = Memory(**sizes, activations=max(0, int(total) - sum(sizes.values())))
    collectives = [PlannedCollective(kind, axes, *entry) for (kind, axes), entry in totals.items()]
    return Cost(
        costs.compute_seconds(assignment),
        flops,
        flops_seconds,
        tuple(sorted(collectives, key=lambda each: -each.seconds)),
        memory,
        unknown,
    )


def live_values_at_peak(costs: CostModel, assignment: Assignment) -> list[tuple[int, float]]:
    """Return the values that are live at the peak, the largest first, as pairs (index in the program, bytes on one device)."""
    each, _ = costs.local_bytes(assignment)
    _, time = costs.memory(assignment)
    alive = np.flatnonzero((costs.live_ranges.start <= time) & (costs.live_ranges.end >= time))
    order = alive[np.argsort(-each[alive], kind="stable")]
    return [(int(costs.live_ranges.value[row]), float(each[row]) / costs.compiler.packing) for row in order]


def axis_work(costs: CostModel, assignment: Assignment, batch: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return the fractions of the compute time for which each mesh axis shards the batch, another dimension, or nothing.

    An axis that shards a batch dimension of an operation counts as "batch" for it. An axis that shards another dimension counts
    as "state" for updates and casts of the state, and else as "tensor". If it shards none, all devices along the axis compute
    the same: "idle".

    Returns:
      The fractions for each mesh axis: {"data": {"batch": 0.9, "tensor": 0.1, "state": 0.0, "idle": 0.0}}.
    """
    batch_dims = find_batch_dims(costs.graph, batch)
    of_state = find_state_work(costs.graph, batch, batch_dims)
    work = {name: dict.fromkeys(("batch", "tensor", "state", "idle"), 0.0) for name in costs.links.names}
    for number, layout in enumerate(assignment):
        seconds = costs.node_seconds(number, (0,) * len(layout))
        if not seconds:
            continue
        for axis, name in enumerate(costs.links.names):
            sharded = {dim for dim, mask in enumerate(layout) if mask >> axis & 1}
            other = "state" if number in of_state else "tensor"
            kind = "idle" if not sharded else "batch" if sharded & set(batch_dims.get(number, ())) else other
            work[name][kind] += seconds
    for parts in work.values():
        total = sum(parts.values()) or 1.0
        parts.update({kind: seconds / total for kind, seconds in parts.items()})
    return work
