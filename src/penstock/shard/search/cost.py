"""Predict what a plan costs: time, FLOPs, collectives and peak memory of one device.

In: a search problem and an assignment. Out: a `Cost`. Compute time is a roofline (Williams, Waterman, Patterson 2009), and the
time of collectives is the α–β model of Thakur et al. (2005).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.shard.graph.roles import find_batch_dims, find_state_work
from penstock.shard.mesh.resharding import union
from penstock.shard.search.cost_model import Assignment
from penstock.shard.search.problem import Problem


@dataclass(frozen=True)
class PlannedCollective:
    """All collectives of one kind over the same mesh axes in one step, as predicted.

    Attributes:
      kind: the name that XLA gives it, "all-reduce" for example.
      axes: the mesh axes that it runs over.
      count: the number of such collectives in a step.
      bytes_on_wire: bytes that one device sends for all of them.
      seconds: the time of all of them, if nothing else runs.
      hidden: the seconds of it that are saved, as they run behind products.
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
    """

    parameters: int
    optimizer: int
    batch: int
    other: int
    activations: int

    @property
    def arguments(self) -> int:
        """Return the bytes of all arguments."""
        return self.parameters + self.optimizer + self.batch + self.other

    @property
    def total(self) -> int:
        """Return the peak memory."""
        return self.arguments + self.activations


@dataclass(frozen=True)
class Cost:
    """The predicted cost of one step on one device.

    Attributes:
      compute: seconds of compute. An operation takes the longer of its FLOPs at the peak and its HBM traffic at the bandwidth.
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
        """Return the seconds of collectives that are saved, as they run behind products (`Problem.hidden_seconds`)."""
        return sum(each.hidden for each in self.collectives)

    @property
    def seconds(self) -> float:
        """Return the seconds of one step: compute, then collectives, without what is hidden of them."""
        return self.compute + self.communication - self.hidden

    @property
    def bytes_on_wire(self) -> float:
        """Return the bytes that one device sends in a step."""
        return sum(each.bytes_on_wire for each in self.collectives)


def predict_cost(
    problem: Problem, assignment: Assignment, roles: Sequence[str], inputs: Sequence[int], unknown: tuple[str, ...]
) -> Cost:
    """Predict the cost of an assignment.

    Args:
      problem: the search problem.
      assignment: the layout of each node.
      roles: the role of each input.
      inputs: the node of each input.
      unknown: sentences about the unknown costs of the step (`FlatProgram.unknown`).

    Returns:
      The cost of one step on one device.
    """
    totals: dict[tuple[str, tuple[str, ...]], list[float]] = {}
    for edge, steps, times in problem.all_reshard_steps(assignment):
        count = times * edge.times(steps)
        each = zip(steps, problem.step_seconds(edge, steps), problem.hidden_seconds(edge, steps), strict=True)
        for step, seconds, hidden in each:
            entry = totals.setdefault((step.kind, problem.links.axes(step.axes)), [0.0, 0.0, 0.0, 0.0])
            entry[0] += count
            entry[1] += count * step.bytes_on_wire
            entry[2] += count * seconds
            entry[3] += count * hidden
    flops = flops_seconds = 0.0
    for node, layout in zip(problem.graph.nodes, assignment, strict=True):
        shards = problem.links.shards(union(layout))
        for dtype, number, _ in node.work:
            flops += number / shards
            flops_seconds += number / shards / problem.hardware.peak(dtype)
    total = problem.memory(assignment)[0]
    stored = dict.fromkeys(("parameters", "optimizer", "batch", "other"), 0.0)
    for role, leaf, (_, size) in zip(roles, inputs, problem.stored, strict=True):
        stored[role] += problem.stored_bytes(leaf, size, assignment[leaf])
    sizes = {role: int(size) for role, size in stored.items()}
    memory = Memory(**sizes, activations=max(0, int(total) - sum(sizes.values())))
    collectives = [PlannedCollective(kind, axes, *entry) for (kind, axes), entry in totals.items()]
    return Cost(
        problem.compute_seconds(assignment),
        flops,
        flops_seconds,
        tuple(sorted(collectives, key=lambda each: -each.seconds)),
        memory,
        unknown,
    )


def largest_live_values(problem: Problem, assignment: Assignment, count: int) -> list[tuple[int, float]]:
    """Return the largest values that are live at the peak, the largest first.

    Args:
      problem: the search problem.
      assignment: the layout of each node.
      count: the most values to return.

    Returns:
      Pairs (index of the value in the program, bytes on one device).
    """
    each, _ = problem.local_bytes(assignment)
    _, time = problem.memory(assignment)
    alive = np.flatnonzero((problem.live_ranges.start <= time) & (problem.live_ranges.end >= time))
    order = alive[np.argsort(-each[alive], kind="stable")][:count]
    return [(int(problem.live_ranges.value[row]), float(each[row]) / problem.compiler.packing) for row in order]


def axis_work(problem: Problem, assignment: Assignment, batch: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return the fractions of the compute time for which each mesh axis shards the batch, another dimension, or nothing.

    An axis that shards a batch dimension of an operation counts as "batch" for it. One that shards another dimension counts as
    "state" for updates and casts of the state, and else as "tensor". If it shards none, all devices along the axis compute the
    same: "idle".

    Args:
      problem: the search problem.
      assignment: the layout of each node.
      batch: nodes of the inputs that are batches.

    Returns:
      The fractions for each mesh axis: {"data": {"batch": 0.9, "tensor": 0.1, "state": 0.0, "idle": 0.0}}.
    """
    batch_dims = find_batch_dims(problem.graph, batch)
    of_state = find_state_work(problem.graph, batch, batch_dims)
    work = {name: dict.fromkeys(("batch", "tensor", "state", "idle"), 0.0) for name in problem.links.names}
    for number, layout in enumerate(assignment):
        seconds = problem.node_seconds(number, (0,) * len(layout))
        if not seconds:
            continue
        for axis, name in enumerate(problem.links.names):
            sharded = {dim for dim, mask in enumerate(layout) if mask >> axis & 1}
            other = "state" if number in of_state else "tensor"
            kind = "idle" if not sharded else "batch" if sharded & set(batch_dims.get(number, ())) else other
            work[name][kind] += seconds
    for parts in work.values():
        total = sum(parts.values()) or 1.0
        parts.update({kind: seconds / total for kind, seconds in parts.items()})
    return work
