"""Name the mesh axes that the planner chose after what they do in the plan, and order them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from penstock.shard.apply.sharding_constraints import ShardingConstraints, Spec
from penstock.shard.mesh.hardware import Hardware
from penstock.shard.mesh.resharding import MeshLinks
from penstock.shard.record import LeafLayout, PlanRecord
from penstock.shard.search.costs import Cost

_MODEL_SHARE = 0.25
"""The least fraction of the compute sharded by an axis that it shards along other dimensions than the batch, as a model axis."""


def name_axes(plan: PlanRecord, kept: Collection[str], hardware: Hardware) -> PlanRecord:
    """Return a plan with its mesh axes named after what they do.

    - *model*: at least a quarter of the compute that the axis shards, updates and casts of the state aside, is sharded along
      other dimensions than the batch.
    - *data*: another axis. If there are two, the one along which fewer parameters are gathered for use is *data*. The other is
      *fsdp* if any parameters are gathered along it.
    - A name that is taken gets a number: *model2*. An axis of size one keeps its name unless it is taken.

    Axes that cross the network come first, because `jax.devices()` lists the devices of a host one after the other. Otherwise,
    axes have the order of most dimensions with several axes: compilers find collectives over several axes more easily in the
    order of the devices.

    Args:
      kept: axes that the user names, which keep their names.
    """
    return rename_axes(_in_order(plan, hardware), _choose_names(plan, kept))


def _in_order(plan: PlanRecord, hardware: Hardware) -> PlanRecord:
    """Return the plan with the axes that cross the network first, and otherwise in the order of most layouts."""
    counts: Counter[tuple[str, ...]] = Counter()
    constraints = plan.sharding_constraints
    for by_path in (constraints.operands, constraints.results):
        chains = (chain for each in by_path.values() for chain in each if chain is not None)
        counts.update(entry for chain in chains for entry in chain[-1] if len(entry) > 1)
    counts.update(entry for leaf in plan.inputs for entry in leaf.stored if len(entry) > 1)

    def others(order: tuple[str, ...]) -> int:
        return sum(count for entry, count in counts.items() if tuple(axis for axis in order if axis in entry) != entry)

    links = MeshLinks.of(plan.mesh_shape, hardware)
    within = {axis: links.inside(links.bits((axis,))) == size for axis, size in plan.mesh_shape.items()}
    across_first = sorted(within.values())
    orders = [each for each in itertools.permutations(plan.mesh_shape) if [within[axis] for axis in each] == across_first]
    best = min(orders, key=others)
    return replace(
        plan,
        mesh_shape={axis: plan.mesh_shape[axis] for axis in best},
        axis_work={axis: plan.axis_work[axis] for axis in best},
    )


def rename_axes(plan: PlanRecord, names: Mapping[str, str]) -> PlanRecord:
    """Return the same plan with other names of the mesh axes, in its layouts, its cost and the compiler's figures.

    The costs of the baselines stay as they are: a baseline may have another mesh.

    Args:
      names: the new name of each axis; all differ.
    """

    def renamed(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(names[axis] for axis in axes)

    def spec(given: Spec) -> Spec:
        return tuple(map(renamed, given))

    def leaf(given: LeafLayout) -> LeafLayout:
        return replace(given, stored=spec(given.stored), used=None if given.used is None else spec(given.used))

    def chains(given: Mapping[Any, Any]) -> dict[Any, Any]:
        return {path: tuple(None if chain is None else tuple(map(spec, chain)) for chain in each) for path, each in given.items()}

    def with_collectives(given: Any) -> Any:
        return replace(given, collectives=tuple(replace(each, axes=renamed(each.axes)) for each in given.collectives))

    cost: Cost = with_collectives(plan.cost)
    constraints = plan.sharding_constraints
    at_start = tuple(None if each is None else spec(each) for each in constraints.at_start)
    return replace(
        plan,
        mesh_shape={names[axis]: size for axis, size in plan.mesh_shape.items()},
        inputs=tuple(map(leaf, plan.inputs)),
        outputs=tuple(map(leaf, plan.outputs)),
        sharding_constraints=ShardingConstraints(chains(constraints.operands), chains(constraints.results), at_start),
        cost=cost,
        axis_work={names[axis]: work for axis, work in plan.axis_work.items()},
        checked=None if plan.checked is None else with_collectives(plan.checked),
    )


def _choose_names(plan: PlanRecord, kept: Collection[str]) -> dict[str, str]:
    """Return the name of each axis."""
    names = {axis: axis for axis in plan.mesh_shape if axis in kept}
    free = [axis for axis in plan.mesh_shape if axis not in kept]
    large = [axis for axis in free if plan.mesh_shape[axis] > 1]
    gathered = {axis: _gathered(plan, axis) for axis in large}
    model = [axis for axis in large if _shards_tensors(plan, axis)]
    wanted: dict[str, tuple[str, ...]] = {}
    for axis in sorted(model, key=lambda axis: -plan.axis_work[axis]["tensor"]):
        wanted[axis] = ("model",)
    for axis in sorted(set(large) - set(model), key=lambda axis: (gathered[axis], large.index(axis))):
        wanted[axis] = ("data", "fsdp") if gathered[axis] else ("data",)
    wanted.update({axis: (axis,) for axis in free if axis not in large})
    for axis, options in wanted.items():
        numbered = (f"{options[0]}{number}" for number in itertools.count(2))
        names[axis] = next(name for name in itertools.chain(options, numbered) if name not in names.values())
    return names


def _shards_tensors(plan: PlanRecord, axis: str) -> bool:
    """Return whether an axis shards at least `_MODEL_SHARE` of its compute along other dimensions than the batch."""
    work = plan.axis_work[axis]
    return work["tensor"] > 0 and work["tensor"] >= _MODEL_SHARE * (work["batch"] + work["tensor"])


def _gathered(plan: PlanRecord, axis: str) -> int:
    """Return the number of elements of parameters that an axis shards in storage and not at their use."""
    return sum(math.prod(leaf.shape) for leaf in plan.inputs if leaf.role == "parameters" and leaf.is_gathered_along(axis))
