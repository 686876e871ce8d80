"""Search for the best assignment within a memory limit, on each candidate mesh shape, and take the best of all.

Coordinate descent over the mesh axes improves an assignment at a given price of memory, which is raised until a plan fits.
Fictitious play (G. Brown, 1951) finds the operations at which memory gets a price. The search starts from some of the baselines.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.shard.graph.constraints import FixedLayout, fixed_layouts
from penstock.shard.graph.roles import infer_roles
from penstock.shard.graph.step_model import StepModel, build_step_model
from penstock.shard.mesh.compiler_models import COMPILER_MODELS, CompilerModel
from penstock.shard.mesh.hardware import Hardware
from penstock.shard.search.baselines import WeightPairs, find_baselines, find_weight_pairs
from penstock.shard.search.costs import Assignment, CostModel, build_costs
from penstock.shard.search.problem import Problem
from penstock.shard.trace.step import TracedStep

_DESCENT_ROUNDS = 6
"""The most rounds over all mesh axes from one start."""
_PRICE_STEPS = 14
"""How often the price of memory is raised at most."""
_BISECTIONS = 3
"""Bisections between the last price at which no plan fits and the first at which one does."""
_STARTS = 3
"""The number of fastest baselines from which a search starts. It also starts from the smallest of the other baselines."""
_STUCK_STEPS = 2
"""The search gives up after this many price steps that find no plan of less memory."""
_NEAR_TIE = 0.02
"""Candidates whose predicted times differ by no more than this fraction are near-ties. Among near-ties the one of least memory is
chosen. If that is a near-tie too, the fewest bytes sent decide, and for as many bytes the fewest collectives."""
_CERTAIN = 0.08
"""A baseline is chosen if no candidate is predicted to be faster by more than this fraction. Its collectives are predicted
exactly; compilers add some to other layouts. Two recurrent networks on TPUs were predicted to be 6 % and 7 % faster than data
parallelism, and their programs were 1.4 times as slow."""


@dataclass(frozen=True)
class Candidate:
    """An assignment with its predicted cost.

    Attributes:
      assignment: the layout of each node.
      seconds: predicted seconds of one step.
      sent: bytes that one device sends in a step.
      collectives: the number of its collectives in a step.
      memory: peak memory of one device, in bytes.
      peak_op: the operation at which the peak is reached.
      baseline: whether it is a baseline.
    """

    assignment: Assignment
    seconds: float
    sent: float
    collectives: float
    memory: float
    peak_op: int
    baseline: bool = False


def evaluate(costs: CostModel, assignment: Assignment, baseline: bool = False) -> Candidate:
    """Return an assignment with its predicted cost."""
    seconds, sent, collectives = costs.compute_seconds(assignment), 0.0, 0.0
    for edge, steps, times in costs.all_reshard_steps(assignment):
        seconds += times * costs.edge_seconds(edge, steps)
        runs = times * edge.times(steps)
        sent += runs * sum(step.bytes_on_wire for step in steps)
        collectives += runs * len(steps)
    return Candidate(assignment, seconds, sent, collectives, *costs.memory(assignment), baseline)


def choose(candidates: Sequence[Candidate], limit: float) -> int:
    """Return the index of the best candidate: the fastest within the limit, or the one of least memory if none fits.

    A baseline is chosen if it is nearly as fast as all others. Among near-ties in time, the one of least memory is chosen. Among
    near-ties in both, the fewest bytes sent decide, and for as many bytes the fewest collectives.
    """
    fitting = [at for at, each in enumerate(candidates) if each.memory <= limit]
    if not fitting:
        return min(range(len(candidates)), key=lambda at: candidates[at].memory)
    seconds = [each.seconds for each in candidates]
    least = min(seconds[at] for at in fitting)
    certain = [at for at in fitting if candidates[at].baseline and seconds[at] <= least * (1 + _CERTAIN)]
    near = _near_ties(certain or fitting, seconds)
    smallest = _near_ties(near, [each.memory for each in candidates])
    return min(smallest, key=lambda at: (round(candidates[at].sent), candidates[at].collectives, candidates[at].seconds))


def _near_ties(indices: Sequence[int], values: Sequence[float]) -> list[int]:
    """Return the indices whose values are within a near-tie of the least."""
    least = min(values[at] for at in indices)
    return [at for at in indices if values[at] <= least * (1 + _NEAR_TIE)]


def solve(problem: Problem, limit: float, starts: Sequence[Assignment], to_beat: float = math.inf) -> Candidate:
    """Find the best assignment within the memory limit, or the one of least memory if none fits.

    The price of a byte at the peak is zero at first. It is raised fourfold until a plan fits, and then bisected between the last
    two prices. Each round at a price has two moves (fictitious play, G. Brown 1951). The first finds the best plan for the
    average of all prices so far. The second puts the price on the operation at which that plan has its peak.

    Args:
      starts: baselines. The search starts from the three fastest, the smallest of the others, and the assignment that shards
        nothing.
      to_beat: seconds of a plan that fits, on another mesh. Memory gets no price if even plans that exceed the limit are slower.

    Returns:
      The best candidate. Its memory exceeds the limit if no candidate fits.
    """
    candidates: dict[tuple, Candidate] = {}

    def evaluated(assignment: Assignment) -> Candidate:
        key = tuple(assignment)
        if key not in candidates:
            candidates[key] = evaluate(problem.costs, assignment)
        return candidates[key]

    def search(starts: Iterable[Assignment], price: float) -> bool:
        """Search at a price of memory, and return whether one of the new candidates fits."""
        return min(each.memory for each in descend(problem, starts, price, evaluated)) <= limit

    def best_at(price: float) -> list[Assignment]:
        """Return the best candidate so far at a price, as a list of starts."""
        return [min(candidates.values(), key=lambda each: each.seconds + price * each.memory).assignment]

    for start in starts:
        candidates[tuple(start)] = evaluate(problem.costs, start, baseline=True)
    given = sorted(candidates.values(), key=lambda each: each.seconds)
    smallest_start = min(given[_STARTS:], key=lambda each: each.memory, default=None)
    starts = [each.assignment for each in (*given[:_STARTS], *([smallest_start] if smallest_start else []))]
    price = 0.0
    search([problem.costs.start(), *starts], price)
    fastest = min(candidates.values(), key=lambda each: each.seconds)
    if fastest.memory > limit and fastest.seconds < to_beat:
        low, price = 0.0, fastest.seconds / max(fastest.memory, 1.0) / 4
        smallest, stuck = min(each.memory for each in candidates.values()), 0
        for step in range(_PRICE_STEPS):
            fits = search([*best_at(price), *(starts if step == 0 else ())], price)
            if fits:
                break
            # Once memory costs more than the whole step, a higher price does not find a smaller plan.
            before, smallest = smallest, min(each.memory for each in candidates.values())
            dominates = price * fastest.memory > max(each.seconds for each in candidates.values())
            stuck = stuck + 1 if dominates and smallest > 0.995 * before else 0
            if stuck == _STUCK_STEPS:
                break
            low, price = price, price * 4
        for _ in range(_BISECTIONS if fits else 0):
            middle = (low + price) / 2
            if search(best_at(middle), middle):
                price = middle
            else:
                low = middle
    found = list(candidates.values())
    return found[choose(found, limit)]


def descend(
    problem: Problem, starts: Iterable[Assignment], price: float, evaluate: Callable[[Assignment], Candidate]
) -> Iterator[Candidate]:
    """Improve one mesh axis after the other until a round improves nothing, and yield the candidate after each round.

    This is done from each start and in each order of the axes. Orders that differ only in equal axes count as one.

    Args:
      price: seconds that one byte of peak memory costs.
    """
    links = problem.costs.links
    orders = {
        tuple((links.sizes[axis], links.bandwidth[axis]) for axis in order): order
        for order in itertools.permutations(reversed(range(len(links.sizes))))
    }
    reached: set[tuple] = set()
    for start, order in itertools.product(starts, orders.values()):
        assignment, peaks = start, []
        best, stale = math.inf, 0
        for _ in range(_DESCENT_ROUNDS):
            prices = np.zeros(problem.costs.live_ranges.steps)
            if price:
                peaks.append(evaluate(assignment).peak_op)
                np.add.at(prices, peaks, price / len(peaks))
            elif (order, tuple(assignment)) in reached:
                break  # an earlier descent has continued from here
            reached.add((order, tuple(assignment)))
            for axis in order:
                assignment = problem.improve(assignment, axis, prices)
            candidate = evaluate(assignment)
            yield candidate
            value = candidate.seconds + price * candidate.memory
            stale = 0 if value < best * (1 - 1e-9) else stale + 1
            best = min(best, value)
            if stale >= (2 if price else 1):
                break


@dataclass(frozen=True)
class PreparedMesh:
    """A mesh to search, with its cost tables.

    Attributes:
      model: the step; it is the same for each mesh unless constraints differ.
      mesh_shape: sizes of the mesh axes.
      roles: the role of each input.
      problem: the search problem on this mesh, with its costs.
      batch: the nodes of the inputs that are a batch.
      baselines: name → decisions of a baseline on this mesh.
    """

    model: StepModel
    problem: Problem
    mesh_shape: dict[str, int]
    roles: Sequence[str]
    batch: Sequence[int]
    baselines: dict[str, Assignment]

    @property
    def costs(self) -> CostModel:
        """Return the costs of layouts on this mesh."""
        return self.problem.costs


@dataclass(frozen=True)
class MeshPlan:
    """A mesh with its search problem, and the decisions for it."""

    prepared: PreparedMesh
    candidate: Candidate


def prepare_meshes(
    traced: TracedStep,
    shapes: Sequence[dict[str, int]],
    hardware: Hardware,
    constraints: Mapping[str, Any] | None,
    given_roles: Mapping[int, str],
    compiler: CompilerModel,
) -> list[PreparedMesh]:
    """Build the search problem of each mesh that the user's constraints allow, in the order of the shapes.

    Raises:
      TypeError, ValueError: the constraints allow no shape; the error is about the first shape.
    """
    prepared, errors = [], []
    model: StepModel | None = None
    last: dict[int, FixedLayout] = {}
    roles: list[str] = []
    batch: list[int] = []
    pairs: WeightPairs | None = None
    for shape in shapes:
        try:
            fixed = fixed_layouts(constraints, traced.inputs, shape)
        except ValueError as error:
            errors.append(error)
            continue
        if model is None or fixed != last:
            model, last = build_step_model(traced, fixed, compiler, COMPILER_MODELS[hardware.platform]), fixed
            inferred = infer_roles(model, traced.state, traced.arguments)
            roles = [given_roles.get(index, role) for index, role in enumerate(inferred)]
            batch = [node for node, role in zip(model.inputs, roles, strict=True) if role == "batch"]
            pairs = find_weight_pairs(model, batch)
        costs = build_costs(model, shape, hardware, batch)
        baselines = find_baselines(costs, model, roles, pairs)
        prepared.append(PreparedMesh(model, Problem(costs), shape, roles, batch, baselines))
    if not prepared:
        raise errors[0]
    return prepared


def search_meshes(prepared: Sequence[PreparedMesh], limit: float) -> MeshPlan:
    """Return the best plan of all meshes: the fastest within the limit; if every plan exceeds it, the one of least memory."""
    plans: list[MeshPlan] = []
    for each in prepared:
        to_beat = min((plan.candidate.seconds for plan in plans if plan.candidate.memory <= limit), default=math.inf)
        plans.append(MeshPlan(each, solve(each.problem, limit, list(each.baselines.values()), to_beat)))
    return plans[choose([plan.candidate for plan in plans], limit)]


def best_baselines(prepared: Sequence[PreparedMesh], limit: float) -> dict[str, MeshPlan]:
    """Return each baseline on the mesh on which it is best: the fastest within the limit, else the one of least memory."""
    by_name: dict[str, list[MeshPlan]] = defaultdict(list)
    for each in prepared:
        for name, assignment in each.baselines.items():
            by_name[name].append(MeshPlan(each, evaluate(each.costs, assignment)))
    return {name: plans[choose([plan.candidate for plan in plans], limit)] for name, plans in by_name.items()}
