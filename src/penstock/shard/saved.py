"""Plans in files: JSON, with a version of the format."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.shard.apply import Spec, Steering
from penstock.shard.compiled import Measured
from penstock.shard.cost import Cost, Memory, PlannedCollective
from penstock.shard.planned import LeafLayout, Plan

FORMAT = "penstock plan"
VERSION = 1


def save(plan: Plan, path: Path) -> None:
    """Write a plan, whole or not at all."""
    written = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": plan.fingerprint,
        "mesh": plan.mesh_shape,
        "hardware": plan.hardware,
        "limit": plan.limit,
        "inputs": [asdict(leaf) for leaf in plan.inputs],
        "outputs": [asdict(leaf) for leaf in plan.outputs],
        "state": sorted(plan.state.items()),
        "operands": [[list(place), specs] for place, specs in plan.steering.operands.items()],
        "results": [[list(place), specs] for place, specs in plan.steering.results.items()],
        "cost": asdict(plan.cost),
        "checked": None if plan.checked is None else json.loads(plan.checked.to_json()),
        "axis_work": plan.axis_work,
        "baselines": {name: asdict(cost) for name, cost in plan.baselines.items()},
    }
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(written), encoding="utf-8")
    part.replace(path)


def load(path: Path) -> Plan:
    """Read a plan.

    Raises:
      ValueError: the file is no plan, or of another version.
    """
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no plan: it is not JSON ({error})") from None
    if not isinstance(read, dict) or read.get("format") != FORMAT:
        raise ValueError(f"{path} is no plan: it lacks format: {FORMAT!r}")
    if read.get("version") != VERSION:
        raise ValueError(
            f"{path} has version {read.get('version')!r} of the format, and this penstock reads {VERSION}; plan again"
        )
    try:
        return _plan(read)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} is a damaged plan: {type(error).__name__}: {error}") from None


def _plan(read: dict[str, Any]) -> Plan:
    return Plan(
        mesh_shape={str(name): int(size) for name, size in read["mesh"].items()},
        hardware=read["hardware"],
        limit=int(read["limit"]),
        inputs=tuple(_leaf(each) for each in read["inputs"]),
        outputs=tuple(_leaf(each) for each in read["outputs"]),
        state={int(place): int(source) for place, source in read["state"]},
        steering=Steering(_places(read["operands"]), _places(read["results"])),
        cost=_cost(read["cost"]),
        axis_work={axis: {kind: float(part) for kind, part in parts.items()} for axis, parts in read["axis_work"].items()},
        baselines={name: _cost(cost) for name, cost in read["baselines"].items()},
        fingerprint=read["fingerprint"],
        checked=None if read["checked"] is None else Measured.from_json(json.dumps(read["checked"])),
    )


def _spec(entries: list[list[str]]) -> Spec:
    return tuple(tuple(entry) for entry in entries)


def _leaf(read: dict[str, Any]) -> LeafLayout:
    used = read["used"]
    return LeafLayout(
        read["path"],
        tuple(read["shape"]),
        read["dtype"],
        read["role"],
        _spec(read["stored"]),
        None if used is None else _spec(used),
        bool(read["weak"]),
    )


def _places(read: list[Any]) -> dict[Any, Any]:
    return {
        tuple(place): tuple(None if chain is None else tuple(_spec(spec) for spec in chain) for chain in specs)
        for place, specs in read
    }


def _cost(read: dict[str, Any]) -> Cost:
    collectives = tuple(PlannedCollective(**{**each, "axes": tuple(each["axes"])}) for each in read["collectives"])
    return Cost(**{**read, "collectives": collectives, "memory": Memory(**read["memory"])})
