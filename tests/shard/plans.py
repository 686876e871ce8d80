"""Plans that are written by hand, without a search."""

from __future__ import annotations

from typing import Any

from penstock.shard.apply.sharding_constraints import ShardingConstraints, Spec
from penstock.shard.plan import Plan
from penstock.shard.record import LeafLayout
from penstock.shard.search.costs import Cost, Memory, PlannedCollective

GIB = 2**30
BATCH = {"batch": 1.0, "tensor": 0.0, "idle": 0.0}
TENSOR = {"batch": 0.0, "tensor": 1.0, "idle": 0.0}


def spec(*entries: str | tuple[str, ...] | None) -> Spec:
    """Return a layout, from entries as in `PartitionSpec`."""
    return tuple(() if entry is None else (entry,) if isinstance(entry, str) else entry for entry in entries)


def leaf(path: str, shape: tuple[int, ...], stored: Spec, used: Spec | None = None, role: str = "parameters") -> LeafLayout:
    return LeafLayout(path, shape, "float32", role, stored, used)


def with_moments(path: str, shape: tuple[int, ...], stored: Spec, used: Spec | None, kept: Spec) -> list[LeafLayout]:
    """Return a parameter and its two Adam moments."""
    moments = [leaf(f"state/optimizer/0/{name}/{path}", shape, kept, role="optimizer") for name in ("mu", "nu")]
    return [leaf(f"state/params/{path}", shape, stored, used), *moments]


def cost(*collectives: PlannedCollective, activations: int = 2 * GIB) -> Cost:
    return Cost(0.010, 1e12, 0.008, collectives, Memory(GIB, 2 * GIB, 1000, 0, activations))


def collective(kind: str, axes: tuple[str, ...], count: float, bytes_on_wire: float = 1e6) -> PlannedCollective:
    return PlannedCollective(kind, axes, count, bytes_on_wire, 0.001, 0.0)


def plan(
    leaves: list[LeafLayout],
    mesh: dict[str, int],
    work: dict[str, dict[str, float]],
    *collectives: PlannedCollective,
    **changed: Any,
) -> Plan:
    made: dict[str, Any] = {
        "mesh_shape": mesh,
        "hardware": "tpu-v5e",
        "platform": "cpu",
        "limit": 16 * GIB,
        "inputs": tuple(leaves),
        "outputs": (),
        "state": {},
        "sharding_constraints": ShardingConstraints(),
        "cost": cost(*collectives),
        "axis_work": work,
        "baselines": {"data parallel": cost(activations=20 * GIB)},
        "fingerprint": "0" * 16,
    }
    return Plan(**(made | changed))


def megatron(layers: int = 4) -> Plan:
    """Return a plan with tensor parallelism over "model" (Megatron), and ZeRO-1 over "data"."""
    leaves = [leaf("batch/tokens", (16, 128), spec("data", None), role="batch")]
    for number in range(layers):
        wide, narrow = spec(None, "model"), spec("model", None)
        leaves += with_moments(f"layers/{number}/up", (512, 2048), wide, wide, spec("data", "model"))
        leaves += with_moments(f"layers/{number}/down", (2048, 512), narrow, narrow, spec("model", "data"))
    return plan(
        leaves,
        {"data": 2, "model": 4},
        {"data": BATCH, "model": TENSOR},
        collective("all-reduce", ("model",), 4 * layers),
        collective("reduce-scatter", ("data",), 2 * layers),
    )
