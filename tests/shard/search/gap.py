"""How far the plan that is found is from the best of all.

In: a problem with its baselines, and a memory limit. Out: the seconds of the plans that are found over those of the best plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tests.shard.search.exhaustive import Exhaustive, TooLarge
from tests.shard.search.programs import Recorded, random_problem

from penstock.shard.graph.step_model import StepModel
from penstock.shard.mesh.hardware import Hardware
from penstock.shard.search.baselines import find_baselines
from penstock.shard.search.costs import Assignment, CostModel, build_costs
from penstock.shard.search.problem import Problem
from penstock.shard.search.solver import Candidate, solve

LIMITS = (0.2, 0.6)
"""Memory limits: from the smallest plan that is found (0) to what the fastest takes (1)."""


@dataclass(frozen=True)
class Case:
    """Costs on a mesh, with the baselines."""

    costs: CostModel
    baselines: tuple[Assignment, ...]


@dataclass(frozen=True)
class Gap:
    """A plan against the best of all within the limit, as ratios; 1 is the best.

    Attributes:
      seconds: of the fastest plan that the search came by.
      exact: whether that is so; otherwise the best of all is only bounded, and `seconds` is an upper bound.
      taken: of the plan that it takes, which may be a near-tie that needs less memory.
    """

    seconds: float
    exact: bool
    taken: float


def case_of(model: StepModel, mesh: dict[str, int], hardware: Hardware) -> Case:
    """Return the problem of a step on a mesh; its last input is the batch."""
    costs = build_costs(model, mesh, hardware)
    roles = [*["parameters"] * (len(model.inputs) - 1), "batch"]
    return Case(costs, tuple(find_baselines(costs, model, roles).values()))


def random_case(seed: int, mesh: dict[str, int], nodes: int = 4) -> Case:
    """Return the problem of a random graph, whose only baseline is that nothing is sharded."""
    costs = random_problem(seed, mesh, nodes)
    return Case(costs, (costs.start(),))


def search(case: Case, limit: float) -> tuple[Candidate, list[Assignment]]:
    """Return the plan that is found, and all that were looked at on the way."""
    recorded = Recorded.of(case.costs)
    found = solve(Problem(recorded), limit, case.baselines)
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
    return Gap(_ratio(quickest, least), exact, _ratio(found.seconds, least))


def _ratio(one: float, other: float) -> float:
    """Return a quotient of times, which is 1 where both are zero: a step that only sorts has no FLOPs to count."""
    return 1.0 if one == other else float(one) / other if other else float("inf")
