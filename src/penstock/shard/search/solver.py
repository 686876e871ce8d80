"""Search for the best assignment within a memory limit, on each candidate mesh shape, and take the best of all.

The exact search on each mesh begins with the baselines.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.shard.graph.constraints import FixedLayout, fixed_layouts
from penstock.shard.graph.live_ranges import LiveRanges
from penstock.shard.graph.roles import infer_roles
from penstock.shard.graph.step_model import StepModel, build_step_model
from penstock.shard.mesh.compiler_models import COMPILER_MODELS, CompilerModel
from penstock.shard.mesh.hardware import Hardware
from penstock.shard.mesh.resharding import MeshLinks, union
from penstock.shard.search.baselines import WeightPairs, find_baselines, find_weight_pairs
from penstock.shard.search.costs import GAP, Assignment, CostModel, Proof, build_costs
from penstock.shard.search.exact import LEAST_ROUNDS, ROUNDS, WORK, Bound, ExactSearch
from penstock.shard.search.layout_tables import KnownTables, LayoutTables
from penstock.shard.trace.step import TracedStep

_NEARLY_LEAST = 1.05
"""If no plan fits by prediction, the fastest is taken that needs at most so many times the least memory. The one of least memory
may be much slower and has strange layouts, to which compilers add copies."""
_NEAR_TIE = 0.02
"""Candidates whose predicted times differ by no more than this fraction are near-ties. Among near-ties the one of least memory is
chosen. If that is a near-tie too, the fewest bytes sent decide, and for as many bytes the fewest collectives."""
_CERTAIN = 0.08
"""A baseline is chosen if no candidate is predicted to be faster by more than this fraction. Its collectives are predicted
exactly; compilers add some to other layouts. Two recurrent networks on TPUs were predicted to be 6 % and 7 % faster than data
parallelism, and their programs were 1.4 times as slow."""
_WORK_OF_COARSER = WORK / 20
_LITTLE_WORK = WORK / 50
"""The work of a search on a mesh of which another is a refinement. It finds plans that are nearly as fast on a simpler mesh."""


@dataclass(frozen=True)
class Candidate:
    """An assignment with its predicted cost.

    Attributes:
      assignment: the layout of each node.
      seconds: predicted seconds of one step.
      sent: bytes that one device sends in a step.
      collectives: the number of its collectives in a step.
      memory: peak memory of one device, in bytes.
      baseline: whether it is a baseline.
      last_is_major: the order of the mesh axes that shard a dimension (`MeshLinks`).
    """

    assignment: Assignment
    seconds: float
    sent: float
    collectives: float
    memory: float
    baseline: bool = False
    last_is_major: bool = False


def evaluate(costs: CostModel, assignment: Assignment, baseline: bool = False) -> Candidate:
    """Return an assignment with its predicted cost."""
    seconds, sent, collectives = costs.compute_seconds(assignment), 0.0, 0.0
    for edge, steps, times in costs.all_reshard_steps(assignment):
        seconds += times * costs.edge_seconds(edge, steps)
        runs = times * edge.times(steps)
        sent += runs * sum(step.bytes_on_wire for step in steps)
        collectives += runs * len(steps)
    memory = costs.memory(assignment)[0]
    return Candidate(assignment, seconds, sent, collectives, memory, baseline, costs.links.last_is_major)


def choose(candidates: Sequence[Candidate], limit: float, certain_within: float = _CERTAIN) -> int:
    """Return the index of the best candidate: the fastest within the limit, or the one of least memory if none fits.

    A baseline is chosen if it is nearly as fast as all others. Among near-ties in time, the one of least memory is chosen. Among
    near-ties in both, the fewest bytes sent decide, and for as many bytes the fewest collectives.

    Args:
      certain_within: a baseline is chosen if no candidate is faster by more than this fraction.
    """
    fitting = [at for at, each in enumerate(candidates) if each.memory <= limit]
    seconds, memory = [each.seconds for each in candidates], [each.memory for each in candidates]
    if not fitting:
        return memory.index(min(memory))
    least = min(seconds[at] for at in fitting)
    certain = [at for at in fitting if candidates[at].baseline and seconds[at] <= least * (1 + certain_within)]
    near = _near_ties(certain or fitting, seconds)
    smallest = _near_ties(near, memory)
    return min(smallest, key=lambda at: (round(candidates[at].sent), candidates[at].collectives, candidates[at].seconds))


def _near_ties(indices: Sequence[int], values: Sequence[float]) -> list[int]:
    """Return the indices whose values are within a near-tie of the least."""
    least = min(values[at] for at in indices)
    return [at for at in indices if values[at] <= least * (1 + _NEAR_TIE)]


class MeshSearch:
    """The search on one mesh, and the candidates that it has found.

    Args:
      orders: the costs of layouts on the mesh, in each order in which its axes may shard a dimension.
      baselines: where the search begins, besides the assignment that shards nothing.
      known: what is known for the tables of each order of mesh axes.
    """

    def __init__(
        self, orders: Sequence[CostModel], baselines: Sequence[Assignment], known: dict[bool, KnownTables] | None = None
    ):
        self.orders, self._baselines = orders, baselines
        self.known = known = defaultdict(KnownTables) if known is None else known
        self._chosen: int | None = 0 if len(orders) == 1 else None
        self.found: dict[tuple[int, ...], Candidate] = {}
        self._tables = functools.cache(lambda order: LayoutTables(orders[order], known[orders[order].links.last_is_major]))

    @property
    def tables(self) -> LayoutTables:
        """Return the costs of all layouts in the first order."""
        return self._tables(0)

    def with_live_ranges(self, live: LiveRanges) -> MeshSearch:
        """Return a search in which arrays are in memory at other times. It shares the tables of this one, without candidates."""
        other = MeshSearch([replace(each, live_ranges=live) for each in self.orders], self._baselines, self.known)
        other._tables = functools.cache(lambda order: self._tables(order).with_costs(other.orders[order]))
        return other

    @functools.cached_property
    def _searches(self) -> list[ExactSearch]:
        """Return the search in each order."""
        each = range(len(self.orders))
        return [ExactSearch(self._tables(order), functools.partial(self.evaluate, order=order)) for order in each]

    def begin(self) -> None:
        """Evaluate the baselines and the assignment that shards nothing, once."""
        if self.found:
            return
        for each in self._baselines:
            self.evaluate_assignment(each, baseline=True)
        self.evaluate_assignment(self.orders[0].start())

    def bound(self, limit: float, to_beat: float = math.inf, work: float = WORK, rounds: int = ROUNDS) -> Bound:
        """Search for the fastest plan within a limit, and return what is proved of all layouts in the order that is searched.

        Args:
          to_beat: seconds of a plan within the limit on another mesh. The search ends if none here is faster.
          work, rounds: after which it ends anyway (`ExactSearch.run`).
        """
        self.begin()

        def run(search: ExactSearch, rounds: int) -> Bound:
            nonlocal work
            ranked = sorted(self.found.items(), key=lambda each: each[1].seconds)
            starts = [list(states) for (_, *states), _ in ranked]
            bound = search.run(starts, limit, min(to_beat, self.fastest(limit)), work, rounds)
            work = search.work_left
            return bound

        if self._chosen is None:
            self._chosen = self._choose_order(run, limit)
        return run(self._searches[self._chosen], rounds)

    def _choose_order(self, run: Callable[[ExactSearch, int], Bound], limit: float) -> int:
        """Return the index of the order to search: the first, unless message passing gives the second a lower bound.

        If the bounds are nearly equal and memory is short, they are compared with prices of memory.
        """
        first, second = self._searches
        for rounds in (1, 2):
            fits = math.isfinite(self.fastest(limit))
            before, after = run(first, rounds).seconds, run(second, rounds).seconds
            if not fits and math.isfinite(self.fastest(limit)):
                before = run(first, rounds).seconds  # without a plan that fits, it had no prices
            if not first.is_limited or max(before, after) > min(before, after) * (1 + GAP):
                break
        # The order makes little difference to the memory: if nothing fits in one, nothing fits in the other.
        return int(math.isfinite(before) and after < before * (1 - GAP))

    def fastest(self, limit: float) -> float:
        """Return the seconds of the fastest candidate within a limit; infinity if there is none."""
        return min((each.seconds for each in self.found.values() if each.memory <= limit), default=math.inf)

    def least(self) -> float:
        """Return the memory of the smallest candidate."""
        return min(each.memory for each in self.found.values())

    def evaluate(self, states: Sequence[int], order: int, baseline: bool = False) -> Candidate:
        """Return the predicted cost of states in an order as a candidate, and keep it."""
        key = (order, *states)
        if key not in self.found:
            self.found[key] = evaluate(self.orders[order], self.tables.assignment(states), baseline)
        return self.found[key]

    def evaluate_assignment(self, assignment: Assignment, baseline: bool = False) -> Candidate:
        """Return the predicted cost of an assignment in the order in which it is faster, and keep it."""
        states = self.tables.states(assignment)
        each = [self.evaluate(states, order, baseline) for order in range(len(self.orders))]
        return min(each, key=lambda candidate: candidate.seconds)


@dataclass(frozen=True)
class PreparedMesh:
    """A mesh to search, with its cost tables.

    Attributes:
      model: the step; it is the same for each mesh unless constraints differ.
      costs: the costs of layouts on this mesh, in one order of its axes.
      mesh_shape: sizes of the mesh axes.
      roles: the role of each input.
      search: the search on this mesh.
      batch: the nodes of the inputs that are a batch.
      baselines: name → decisions of a baseline on this mesh.
    """

    model: StepModel
    costs: CostModel
    search: MeshSearch
    mesh_shape: dict[str, int]
    roles: Sequence[str]
    batch: Sequence[int]
    baselines: dict[str, Assignment]

    def plan(self, candidate: Candidate, proof: Proof | None = None, faster: MeshPlan | None = None) -> MeshPlan:
        """Return a candidate as a plan, with the costs in its order of mesh axes."""
        costs = next(each for each in self.search.orders if each.links.last_is_major == candidate.last_is_major)
        return MeshPlan(replace(self, costs=costs), candidate, proof, faster)


@dataclass(frozen=True)
class MeshPlan:
    """A mesh, and the decisions for it.

    Attributes:
      prepared: the mesh.
      candidate: the decisions.
      proof: what the search proved of all layouts on all meshes; None for a baseline.
      faster: the plan that is predicted to be faster, where a baseline is preferred to it.
    """

    prepared: PreparedMesh
    candidate: Candidate
    proof: Proof | None = None
    faster: MeshPlan | None = None


def prepare_meshes(
    traced: TracedStep,
    shapes: Sequence[dict[str, int]],
    hardware: Hardware,
    constraints: Mapping[str, Any] | None,
    given_roles: Mapping[int, str],
    compiler: CompilerModel,
    like: Sequence[PreparedMesh] = (),
) -> list[PreparedMesh]:
    """Build the search problem of each mesh that the user's constraints allow, in the order of the shapes.

    Args:
      like: meshes that were prepared for another form of the step, whose tables are used again.

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
        orders = [costs.in_order(each) for each in _find_orders(model, costs.links)]
        baselines = find_baselines(orders[0], model, roles, pairs)
        known = next((each.search.known for each in like if each.mesh_shape == shape), None)
        search = MeshSearch(orders, list(baselines.values()), known)
        prepared.append(PreparedMesh(model, orders[0], search, shape, roles, batch, baselines))
    if not prepared:
        raise errors[0]
    return prepared


def _find_orders(model: StepModel, links: MeshLinks) -> tuple[bool, ...]:
    """Return the orders in which mesh axes may shard a dimension (`MeshLinks.last_is_major`).

    If the user's constraints name several axes of a dimension, the first such constraint decides. If a mesh without constraints
    looks the same from both ends, one order stands for both.
    """
    names = [name for name, size in zip(links.names, links.sizes, strict=True) if size > 1]
    entries = [entry for node in model.graph.nodes for entry in node.fixed or () if entry]
    given = next((axes for entry in entries if len(axes := [axis for axis in entry if axis in names]) > 1), None)
    if given is not None:
        return (names.index(given[0]) > names.index(given[-1]),)
    symmetric = not entries and not links.domain and links.sizes == links.sizes[::-1]
    return (False,) if symmetric or len(names) < 2 else (False, True)


def search_meshes(prepared: Sequence[PreparedMesh], limit: float, to_beat: float = math.inf) -> MeshPlan:
    """Return the best plan of all meshes: the fastest within the limit; if every plan exceeds it, the fastest of the smallest.

    A mesh of which another is a refinement, such as 8 of 2 × 4, needs no proof of its own: its plans are plans of the other.

    Args:
      to_beat: seconds of a plan of another step that fits. The search may end early if no plan is faster.
    """
    for each in prepared:
        each.search.begin()
    coarser = {at: _find_coarser(at, prepared) for at in range(len(prepared))}
    finest = [at for at in coarser if not any(at in others for others in coarser.values())]

    def fastest() -> float:
        return min(each.search.fastest(limit) for each in prepared)

    bounds = []
    for at in sorted(finest, key=lambda at: prepared[at].search.fastest(limit)):
        bounds.append(prepared[at].search.bound(limit, min(to_beat, fastest()), work=WORK / len(finest)))
        for other, axes in coarser[at].items():
            _take_over(prepared[at].search, prepared[other].search, axes, fastest())
    for at in sorted(coarser.keys() - finest):
        prepared[at].search.bound(limit, fastest(), work=_WORK_OF_COARSER)
    reached = (fastest(), min(bound.seconds for bound in bounds))
    best, least_seconds = (None if math.isinf(each) else each for each in reached)
    proof = Proof(best, least_seconds, min(bound.memory for bound in bounds))
    if proof.fastest is None and math.isinf(to_beat):
        least = min(prepared, key=lambda each: each.search.least())
        limit = _NEARLY_LEAST * least.search.least()
        # More rounds made the plans of 13 steps at most 3 % faster, and took up to 65 s more. Without this search, the plan of a
        # GPT-2 was eight times as slow.
        least.search.bound(limit, rounds=LEAST_ROUNDS)
    pairs = [(each, candidate) for each in prepared for candidate in each.search.found.values()]
    candidates = [candidate for _, candidate in pairs]
    chosen, fastest_of_all = (pairs[choose(candidates, limit, within)] for within in (_CERTAIN, 0.0))
    slower = chosen[1].seconds > fastest_of_all[1].seconds * (1 + _NEAR_TIE)
    faster = fastest_of_all[0].plan(fastest_of_all[1], proof) if slower else None
    return chosen[0].plan(chosen[1], proof, faster)


Solve = Callable[[Sequence[PreparedMesh], float, float], MeshPlan]
"""Searches meshes, as `search_meshes` does."""


def search_briefly(prepared: Sequence[PreparedMesh], limit: float, to_beat: float = math.inf) -> MeshPlan:
    """Return a plan as `search_meshes` does, of those that little work finds, without a proof."""
    for each in prepared:
        each.search.bound(limit, to_beat, work=_LITTLE_WORK / len(prepared))
    pairs = [(each, candidate) for each in prepared for candidate in each.search.found.values()]
    mesh, candidate = pairs[choose([candidate for _, candidate in pairs], limit)]
    return mesh.plan(candidate, Proof(None, None, 0.0))


def _find_coarser(at: int, prepared: Sequence[PreparedMesh]) -> dict[int, list[int]]:
    """Return the meshes whose plans are plans of a mesh too, with the axis of each that an axis of this one is a part of.

    If meshes are equal but for the order of their axes, the first stands for the others.
    """
    fine = prepared[at].costs
    found = {}
    for other, mesh in enumerate(prepared):
        coarse = mesh.costs
        smaller = (len(coarse.links.sizes), -other) < (len(fine.links.sizes), -at)
        named = any(entry for node in fine.graph.nodes for entry in node.fixed or ())
        if not smaller or named or mesh.model is not prepared[at].model:
            continue
        rows = [{node: each.links.shards(union(layout)) for node, layout in each.pinned.items()} for each in (coarse, fine)]
        if rows[0] != rows[1]:
            continue
        for axes in itertools.product(range(len(coarse.links.sizes)), repeat=len(fine.links.sizes)):
            if _are_parts(axes, fine.links, coarse.links):
                found[other] = list(axes)
                break
    return found


def _are_parts(axes: Sequence[int], fine: MeshLinks, coarse: MeshLinks) -> bool:
    """Return whether each axis of a mesh is a part of the given axis of a coarser one, and collectives are as fast on both."""
    parts = [sum(1 << part for part, whole in enumerate(axes) if whole == axis) for axis in range(len(coarse.sizes))]
    if tuple(map(fine.shards, parts)) != coarse.sizes:
        return False
    used = {union(part for bit, part in enumerate(parts) if each >> bit & 1): each for each in range(1, 1 << len(parts))}
    kinds = ("all-gather", "all-to-all")
    return all(fine.speed(kind, mask) == coarse.speed(kind, each) for mask, each in used.items() for kind in kinds)


def _take_over(fine: MeshSearch, coarse: MeshSearch, axes: Sequence[int], fastest: float) -> None:
    """Evaluate the fastest plans of a mesh on a coarser mesh too, where they use the parts of its axes together.

    Args:
      axes: for each axis of the finer mesh, the axis of the coarser one that it is a part of.
    """
    parts = [
        sum(1 << part for part, whole in enumerate(axes) if whole == axis) for axis in range(len(coarse.orders[0].links.sizes))
    ]

    merged = [-1] * (1 << len(axes))  # of each set of axes of the finer mesh, or -1
    for used in range(1 << len(parts)):
        merged[sum(part for bit, part in enumerate(parts) if used >> bit & 1)] = used
    for candidate in list(fine.found.values()):
        if candidate.seconds > fastest * (1 + _CERTAIN):
            continue
        layouts = [tuple(map(merged.__getitem__, layout)) for layout in candidate.assignment]
        if not any(-1 in layout for layout in layouts):
            coarse.evaluate_assignment(layouts, candidate.baseline)


def best_baselines(prepared: Sequence[PreparedMesh], limit: float) -> dict[str, MeshPlan]:
    """Return each baseline on the mesh on which it is best: the fastest within the limit, else the one of least memory."""
    by_name: dict[str, list[MeshPlan]] = defaultdict(list)
    for each in prepared:
        for name, assignment in each.baselines.items():
            by_name[name].append(each.plan(each.search.evaluate_assignment(assignment, baseline=True)))
    return {name: plans[choose([plan.candidate for plan in plans], limit)] for name, plans in by_name.items()}
