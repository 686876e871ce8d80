"""How far the plan that is found is from the best of all.

In: a problem with its baselines, and a memory limit. Out: seconds and objective of the search over those of the best plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tests.shard.search.exhaustive import Costs, Exhaustive, TooLarge
from tests.shard.search.programs import Recorded, random_problem

from penstock.shard.graph.step_model import StepModel
from penstock.shard.mesh.hardware import Hardware
from penstock.shard.search.baselines import data_parallel, fully_sharded
from penstock.shard.search.problem import Assignment, Problem, build_problem
from penstock.shard.search.solver import Candidate, choose, solve

_SLOWEST = 1.5
"""The rule that takes a plan looks at none that is slower than this many times the fastest."""
LIMITS = (0.2, 0.6)
"""Memory limits: from the smallest plan that is found (0) to what the fastest takes (1)."""


@dataclass(frozen=True)
class Case:
    """A problem, the same on hardware that overlaps more, and baselines."""

    problem: Problem
    overlapped: Problem
    baselines: tuple[Assignment, ...]


@dataclass(frozen=True)
class Gap:
    """A plan against the best of all within the limit, as ratios; 1 is the best.

    Attributes:
      seconds: of the fastest plan that the search came by.
      exact: whether that is so; otherwise the best of all is only bounded, and `seconds` is an upper bound.
      objective: of the plan that it takes, over that which the same rule takes from all plans; None if there are too many.
    """

    seconds: float
    exact: bool
    objective: float | None


def case_of(model: StepModel, mesh: dict[str, int], hardware: Hardware) -> Case:
    """Return the problem of a step on a mesh; its last input is the batch."""
    problem = build_problem(model, mesh, hardware)
    *kept, batch = model.inputs
    baselines = data_parallel(problem, [batch]), fully_sharded(problem, [batch], kept)
    return Case(problem, build_problem(model, mesh, hardware.overlapping(0.75)), baselines)


def random_case(seed: int, mesh: dict[str, int], nodes: int = 4) -> Case:
    """Return the problem of a random graph, whose only baseline is that nothing is sharded."""
    problem = random_problem(seed, mesh, nodes)
    return Case(problem, random_problem(seed, mesh, nodes, 0.75), (problem.start(),))


def search(case: Case, limit: float) -> tuple[Candidate, list[Assignment]]:
    """Return the plan that is found, and all that were looked at on the way."""
    recorded = Recorded.of(case.problem)
    found = solve(recorded, case.overlapped, limit, case.baselines)
    return found, list({tuple(each): each for each in recorded.asked}.values())


def limits_of(case: Case, every: Exhaustive) -> list[float]:
    """Return memory limits between the smallest plan that is found, and the memory of the fastest of all."""
    fastest = float(every.costs(every.cheapest().best[None]).memory[0])
    smallest = search(case, 0.0)[0].memory
    return [smallest + part * (fastest - smallest) for part in LIMITS] if fastest > smallest * (1 + 1e-6) else []


def gap(case: Case, every: Exhaustive, limit: float, most: int) -> Gap:
    """Measure the gap at a memory limit, looking at no more than `most` plans one by one."""
    found, seen = search(case, limit)
    known = np.stack([every.state(each) for each in seen])
    costs = every.costs(known)
    quickest = float(costs.seconds[costs.memory <= limit].min())
    try:
        least, exact = every.fastest(limit, known, most), True
    except TooLarge:
        least, exact = every.bound(limit, known), False
    try:
        near = every.within(_SLOWEST * found.seconds, limit, known, most)
        objective = _ratio(found.objective, _choose(case, every, near, limit).objective)
    except TooLarge:
        objective = None
    return Gap(_ratio(quickest, least), exact, objective)


def _choose(case: Case, every: Exhaustive, states: np.ndarray, limit: float) -> Candidate:
    """Take a plan by the solver's rule: from those that no other beats in both seconds and ideal seconds."""
    costs = every.costs(states)
    candidates = [_candidate(case.problem, every.assignment(states[row])) for row in _front(costs)]
    baselines = [_candidate(case.problem, each) for each in case.baselines]
    return choose([*candidates, *baselines], baselines, limit)


def _ratio(one: float, other: float) -> float:
    """Return a quotient of times, which is 1 where both are zero: a step that only sorts has no FLOPs to count."""
    return 1.0 if one == other else float(one) / other if other else float("inf")


def _front(costs: Costs) -> Sequence[int]:
    order = np.lexsort((costs.ideal_seconds, costs.seconds))
    ideal = costs.ideal_seconds[order]
    before = np.concatenate([[np.inf], np.minimum.accumulate(ideal)[:-1]])
    return order[ideal < before].tolist()


def _candidate(problem: Problem, assignment: Assignment) -> Candidate:
    return Candidate(assignment, problem.seconds(assignment), problem.ideal_seconds(assignment), *problem.memory(assignment))
