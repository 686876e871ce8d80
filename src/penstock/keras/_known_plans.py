"""Remember the plans of a distribution, by the steps that they are for and the layouts that they had to keep."""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penstock.shard import Plan
from penstock.shard.record import named_shardings

_MOST = 64


class KnownPlans:
    """The plans that were made last."""

    def __init__(self) -> None:
        self._plans: dict[tuple[str, frozenset[tuple[str, str]]], Plan] = {}

    def find(self, fingerprint: str, kept: Mapping[str, PartitionSpec], mesh: Mesh | None) -> Plan | None:
        """Return a plan for an equal step that has the layouts to keep; None if there is none.

        A plan that had to keep fewer layouts, and has the others too, is as good as one that had to keep all. An example is the
        plan of `fit` for `train_on_batch` afterwards.

        Args:
          fingerprint: that of the step.
          kept: the layouts to keep, by the path of the leaf.
          mesh: the mesh of these layouts; None for any.
        """
        entries = _entries(kept)
        for (other, free), plan in self._plans.items():
            if other == fingerprint and free <= entries and mesh in (None, plan.mesh) and _has(plan, kept):
                return plan
        return None

    def add(self, fingerprint: str, kept: Mapping[str, PartitionSpec], plan: Plan) -> None:
        """Remember a plan. The oldest is forgotten if there are many.

        Args:
          fingerprint, kept: as for `find`.
          plan: the plan.
        """
        if len(self._plans) >= _MOST:
            del self._plans[next(iter(self._plans))]
        self._plans[fingerprint, _entries(kept)] = plan


def _entries(kept: Mapping[str, PartitionSpec]) -> frozenset[tuple[str, str]]:
    return frozenset((path, str(spec)) for path, spec in kept.items())


def _has(plan: Plan, kept: Mapping[str, PartitionSpec]) -> bool:
    """Return whether the arguments of a plan have these layouts."""
    shardings = zip(plan.inputs, named_shardings(plan.inputs, plan.mesh), strict=True)
    return all(
        sharding.is_equivalent_to(NamedSharding(plan.mesh, kept[leaf.path]), len(leaf.shape))
        for leaf, sharding in shardings
        if leaf.path in kept
    )
