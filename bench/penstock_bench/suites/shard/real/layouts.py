"""Write the layouts of an expert, with constraints inside of the step: return specs of weights and activations for a mesh.

FSDP (Zhao et al. 2023, arXiv:2304.11277) gathers the weights of each layer where they are used, and reduce-scatters their
gradients. Megatron (Shoeybi et al. 2019, arXiv:1909.08053) splits heads, hidden units and the vocabulary; with sequence
parallelism (Korthikanti et al. 2022, arXiv:2205.05198), it also splits the tokens between the layers. Experts are split over the
devices that otherwise split a layer (GShard: Lepikhin et al. 2020, arXiv:2006.16668).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from penstock_bench.suites.shard.baselines import leaf_paths
from penstock_bench.suites.shard.real.step import Constrain
from penstock_bench.suites.shard.zoo.model import PyTree

P = PartitionSpec
Specs = tuple[PartitionSpec, ...]
"""The layouts through which a value passes, in order."""

_DATA, _MODEL = "data", "model"

# For each weight of a layer: its number of dimensions, the dimension that tensor or expert parallelism splits, and FSDP's
# dimension.
_WEIGHTS = {
    "wqkv": (3, 1, 0),
    "wo": (2, 0, 1),
    "w_gate_up": (3, 2, 0),
    "w_down": (2, 0, 1),
    "head": (2, 1, 0),
    "experts_gate_up": (4, 0, 1),
    "experts_down": (3, 0, 1),
}
_EXPERTS = ("experts_gate_up", "experts_down")
_EMBEDDING = "embedding"


@dataclass(frozen=True)
class HandLayout:
    """A layout by hand.

    Attributes:
      mesh: sizes of the mesh axes, in order.
      batch: layout of a leaf of the batch.
      stored, used: layouts of each weight of a layer. The others are replicated.
      activations: for each name, the layouts through which the value passes, and those through which its gradient does. The
        others are left to the compiler.
    """

    name: str
    mesh: dict[str, int]
    batch: PartitionSpec
    stored: Mapping[str, PartitionSpec]
    used: Mapping[str, PartitionSpec]
    activations: Mapping[str, tuple[Specs, Specs]] = field(default_factory=dict)

    def constrain(self, mesh: Any) -> Constrain:
        """Return the function that puts the constraints into a step.

        Args:
          mesh: a `Mesh` or an `AbstractMesh` with the axes of the layout.
        """
        constraints = dict(self.activations)
        for name, spec in self.stored.items():
            # The shard is cast before it is gathered, and the gradient is reduced to a shard before it is cast.
            constraints[name] = ((spec, self.used.get(name, spec)), (spec,))

        def constrain(name: str, array: Array) -> Array:
            if name not in constraints:
                return array
            forward, backward = ([NamedSharding(mesh, spec) for spec in specs] for specs in constraints[name])
            return _through(tuple(forward), tuple(backward), array)

        return constrain

    def state_shardings(self, state: PyTree, mesh: Any) -> PyTree:
        """Return the sharding of each leaf of a state: a moment has its parameter's sharding."""
        paths, (leaves, tree) = leaf_paths(state), jax.tree.flatten(state)
        return jax.tree.unflatten(
            tree, [NamedSharding(mesh, self._stored(path, leaf.ndim)) for path, leaf in zip(paths, leaves, strict=True)]
        )

    def batch_shardings(self, batch: PyTree, mesh: Any) -> PyTree:
        """Return the sharding of each leaf of a batch."""
        return jax.tree.map(lambda leaf: NamedSharding(mesh, self.batch), batch)

    def _stored(self, path: str, rank: int) -> PartitionSpec:
        """Return the layout of a leaf, whose layers may be stacked along one more dimension."""
        spec = self.stored.get(path.rsplit("/", 1)[-1])
        return P() if spec is None else P(*[None] * (rank - len(spec)), *spec)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _through(forward: tuple[NamedSharding, ...], backward: tuple[NamedSharding, ...], array: Array) -> Array:
    """Reshard an array through layouts, and its gradient through others: without this, it would pass through the same ones."""
    for sharding in forward:
        array = jax.lax.with_sharding_constraint(array, sharding)
    return array


def _through_forward(forward: tuple[NamedSharding, ...], backward: tuple[NamedSharding, ...], array: Array) -> tuple[Array, None]:
    return _through(forward, backward, array), None


def _through_backward(
    forward: tuple[NamedSharding, ...], backward: tuple[NamedSharding, ...], _: None, gradient: Array
) -> tuple[Array]:
    return (_through(backward, forward, gradient),)


_through.defvjp(_through_forward, _through_backward)


def fsdp(devices: int, domains: int = 1) -> HandLayout:
    """Return FSDP over all devices: a weight is split along the dimension before its last ones, which are padded to tiles.

    Args:
      domains: FSDP is within each of so many equal parts of the devices, and data parallel over them.
    """
    rows: Any = ("domain", _DATA) if domains > 1 else _DATA
    stored = {name: _spec(rank, {int(name in _EXPERTS): _DATA}) for name, (rank, _, _) in _WEIGHTS.items()}
    used = {name: _spec(rank, {}) for name, (rank, _, _) in _WEIGHTS.items()}
    names = ("qkv", "query", "key", "attended", "gate_up", "hidden", "logits", "routing", "sent", "expert_hidden", "returned")
    activations = {name: _both(P(rows)) for name in ("residual", "gathered", "scattered", *names)}
    activations |= _embedding(P(None, _DATA), (P(rows),), _DATA)
    mesh = {"domain": domains, _DATA: devices // domains} if domains > 1 else {_DATA: devices}
    name = f"FSDP in {domains} domains, data parallel over them" if domains > 1 else "FSDP"
    return HandLayout(name, mesh, P(rows), stored | {_EMBEDDING: P(None, _DATA)}, used, activations)


def megatron(devices: int, ways: int, *, sequence: bool = False) -> HandLayout:
    """Return Megatron over `ways` devices, with FSDP over the others.

    Args:
      sequence: whether the activations between the matrix products are split along the tokens (sequence parallelism).
    """
    stored = {name: _spec(rank, {split: _MODEL, other: _DATA}) for name, (rank, split, other) in _WEIGHTS.items()}
    used = {name: _spec(rank, {split: _MODEL}) for name, (rank, split, _) in _WEIGHTS.items()}
    full, heads, experts = P(_DATA), P(_DATA, None, _MODEL), P(_DATA, _MODEL)
    residual = P(_DATA, _MODEL) if sequence else full
    activations = {
        "residual": _both(residual),
        "gathered": ((full,), (residual,)),
        "scattered": ((residual,), (residual, full)),
        "gate_up": _both(P(_DATA, None, None, _MODEL)),
        "routing": _both(full),
        "combine": _both(P(_DATA, None, _MODEL)),
        **dict.fromkeys(("qkv", "query", "key", "attended", "hidden", "logits"), _both(heads)),
        **dict.fromkeys(("slots", "sent", "expert_hidden", "returned"), _both(experts)),
        **_embedding(P(_MODEL, _DATA), (P(_DATA, None, _MODEL), residual), (_DATA, _MODEL)),
    }
    name = f"Megatron {ways}{' with sequence parallelism' if sequence else ''} + FSDP"
    mesh = {_DATA: devices // ways, _MODEL: ways}
    return HandLayout(name, mesh, full, stored | {_EMBEDDING: P(_MODEL, _DATA)}, used, activations)


def expert_parallel(devices: int, ways: int) -> HandLayout:
    """Return experts over `ways` devices, to which tokens are sent by all-to-all, and FSDP of everything."""
    every = (_DATA, _MODEL)
    stored, used = {}, {}
    for name, (rank, split, other) in _WEIGHTS.items():
        stored[name] = _spec(rank, {split: _MODEL, other: _DATA} if name in _EXPERTS else {0: every})
        used[name] = _spec(rank, {split: _MODEL} if name in _EXPERTS else {})
    rows, experts = P(every), P(_DATA, _MODEL)
    names = ("residual", "gathered", "scattered", "qkv", "query", "key", "attended", "logits", "routing", "slots", "combine")
    activations = {
        **dict.fromkeys(names, _both(rows)),
        "sent": ((rows, experts), (experts, rows)),
        "expert_hidden": _both(experts),
        "returned": ((experts, rows), (rows, experts)),
        **_embedding(P(None, every), (P(_DATA, None, _MODEL), rows), every),
    }
    mesh = {_DATA: devices // ways, _MODEL: ways}
    name = f"experts over {ways} + FSDP"
    return HandLayout(name, mesh, rows, stored | {_EMBEDDING: P(None, every)}, used, activations)


def _embedding(stored: PartitionSpec, residual: Specs, axes: Any) -> dict[str, tuple[Specs, Specs]]:
    """Return the layouts in which rows of the embedding are looked up: each device has a part of the width, for all tokens.

    The rows that are found, and their gradients, are much smaller than the table, which is not gathered then.

    Args:
      residual: the layouts through which the rows are resharded, one mesh axis after the other.
    """
    table, found = P(None, axes), P(None, None, axes)
    steps = (found, *residual)
    return {"lookup": ((table,), (table, stored)), "tokens": _both(P()), "found": (steps, steps[::-1])}


def _both(spec: PartitionSpec) -> tuple[Specs, Specs]:
    """Return the same layout for a value and its gradient."""
    return (spec,), (spec,)


def _spec(rank: int, axes: Mapping[int, Any]) -> PartitionSpec:
    return P(*(axes.get(dim) for dim in range(rank)))
