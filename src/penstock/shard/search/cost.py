"""What a plan is predicted to cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.shard.graph.batch_dims import find_batch_dims
from penstock.shard.graph.live_ranges import TEMP_FACTOR
from penstock.shard.mesh.resharding import union
from penstock.shard.search.problem import Assignment, Problem


@dataclass(frozen=True)
class PlannedCollective:
    """Collectives of one kind over the same mesh axes, in a step.

    Attributes:
      kind: as XLA names it.
      axes: mesh axes that it runs over.
      count: how many there are.
      wire: bytes that a device sends for all of them.
      seconds: that they take.
    """

    kind: str
    axes: tuple[str, ...]
    count: float
    bytes_on_wire: float
    seconds: float


@dataclass(frozen=True)
class Memory:
    """Bytes of one device when memory is fullest; state is donated, and what replaces it takes no more."""

    parameters: int
    optimizer: int
    batch: int
    other: int
    activations: int

    @property
    def arguments(self) -> int:
        return self.parameters + self.optimizer + self.batch + self.other

    @property
    def total(self) -> int:
        return self.arguments + self.activations


@dataclass(frozen=True)
class Cost:
    """A step, of one device.

    Attributes:
      compute: seconds; of each operation the longer of FLOPs over their peak and memory traffic over its bandwidth.
      flops: of a device.
      flops_seconds: what the FLOPs alone would take at the peaks.
      collectives: by kind and axes.
      memory: bytes.
      unknown: what the prediction leaves open, a sentence each; () where nothing.
    """

    compute: float
    flops: float
    flops_seconds: float
    collectives: tuple[PlannedCollective, ...]
    memory: Memory
    unknown: tuple[str, ...] = ()

    @property
    def communication(self) -> float:
        """Seconds of all collectives; nothing is taken to overlap."""
        return sum(each.seconds for each in self.collectives)

    @property
    def seconds(self) -> float:
        return self.compute + self.communication

    @property
    def bytes_on_wire(self) -> float:
        """Bytes that a device sends in a step."""
        return sum(each.bytes_on_wire for each in self.collectives)


def predict_cost(
    problem: Problem, assignment: Assignment, roles: Sequence[str], inputs: Sequence[int], unknown: tuple[str, ...]
) -> Cost:
    """The cost of decisions.

    Args:
      problem: what was searched.
      assignment: the decisions.
      roles: of each input.
      inputs: the node of each input.
      unknown: of the step (`Program.unknown`).
    """
    found: dict[tuple[str, tuple[str, ...]], list[float]] = {}
    for edge, steps in problem.all_reshard_steps(assignment):
        for step in steps:
            entry = found.setdefault((step.kind, problem.links.axes(step.axes)), [0.0, 0.0, 0.0])
            entry[0] += edge.count
            entry[1] += edge.count * step.bytes_on_wire
            entry[2] += edge.count * problem.links.seconds(step)
    flops = flops_seconds = 0.0
    for node, layout in zip(problem.graph.nodes, assignment, strict=True):
        shards = problem.links.shards(union(layout))
        for dtype, number, _ in node.work:
            flops += number / shards
            flops_seconds += number / shards / problem.hardware.peak(dtype)
    total = problem.memory(assignment)[0]
    stored = dict.fromkeys(("parameters", "optimizer", "batch", "other"), 0.0)
    for role, leaf, (_, size) in zip(roles, inputs, problem.stored, strict=True):
        stored[role] += size / problem.links.shards(union(assignment[leaf]))
    sizes = {role: int(size) for role, size in stored.items()}
    memory = Memory(**sizes, activations=max(0, int(total) - sum(sizes.values())))
    collectives = [PlannedCollective(kind, axes, *entry) for (kind, axes), entry in found.items()]
    return Cost(
        problem.compute_seconds(assignment),
        flops,
        flops_seconds,
        tuple(sorted(collectives, key=lambda each: -each.seconds)),
        memory,
        unknown,
    )


def largest_live_values(problem: Problem, assignment: Assignment, count: int) -> list[tuple[int, float]]:
    """The values that take most when memory is fullest: (number, bytes of a device)."""
    each, _ = problem.local_bytes(assignment)
    _, time = problem.memory(assignment)
    alive = np.flatnonzero((problem.live_ranges.start <= time) & (problem.live_ranges.end >= time))
    order = alive[np.argsort(-each[alive], kind="stable")][:count]
    return [(int(problem.live_ranges.value[row]), float(each[row]) / TEMP_FACTOR) for row in order]


def axis_work(problem: Problem, assignment: Assignment, batch: Sequence[int]) -> dict[str, dict[str, float]]:
    """What each mesh axis shards, as parts of the seconds of computing: {axis: {"batch": 0.9, "tensor": 0.1, "idle": 0.0}}.

    An operation is sharded along the batch where one of its batch dimensions is; along anything else it is tensor parallelism;
    what an axis does not shard is done by all devices along it alike.

    Args:
      problem: what was searched.
      assignment: the decisions.
      batch: nodes of the inputs that are batches.
    """
    batch_dims = find_batch_dims(problem.graph, batch)
    work = {name: {"batch": 0.0, "tensor": 0.0, "idle": 0.0} for name in problem.links.names}
    for number, layout in enumerate(assignment):
        seconds = problem.node_seconds(number, (0,) * len(layout))
        if not seconds:
            continue
        for axis, name in enumerate(problem.links.names):
            held = [dim for dim, mask in enumerate(layout) if mask >> axis & 1]
            kind = "idle" if not held else "batch" if set(held) & set(batch_dims.get(number, ())) else "tensor"
            work[name][kind] += seconds
    for parts in work.values():
        total = sum(parts.values()) or 1.0
        parts.update({kind: seconds / total for kind, seconds in parts.items()})
    return work
