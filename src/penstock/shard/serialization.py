"""Write plans to files and read them: JSON, with a version of the format.

In: a `PlanRecord` and a path. Out: a file, and from it an equal record. A file that contradicts itself is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock._atomic_write import replace
from penstock.shard.apply.sharding_constraints import ShardingConstraints, Spec
from penstock.shard.graph.constraints import ROLES
from penstock.shard.hlo.analysis import Measured
from penstock.shard.mesh.shapes import describe_mesh
from penstock.shard.record import LeafLayout, PlanRecord, local_bytes
from penstock.shard.search.cost import Cost, Memory, PlannedCollective
from penstock.shard.units import format_spec

FORMAT = "penstock plan"
VERSION = 4


def save(plan: PlanRecord, path: Path) -> None:
    """Write a plan to a file, atomically.

    Args:
      plan: the plan.
      path: the file, which is replaced if it exists.
    """
    replace(path, to_json(plan))


def to_json(plan: PlanRecord) -> str:
    """Return a plan as the text of its file.

    Args:
      plan: the plan.
    """
    content = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": plan.fingerprint,
        "numbers": plan.numbers,
        "mesh": plan.mesh_shape,
        "hardware": plan.hardware,
        "platform": plan.platform,
        "limit": plan.limit,
        "inputs": [asdict(leaf) for leaf in plan.inputs],
        "outputs": [asdict(leaf) for leaf in plan.outputs],
        "state": sorted(plan.state.items()),
        "operands": [[list(index), specs] for index, specs in plan.sharding_constraints.operands.items()],
        "results": [[list(index), specs] for index, specs in plan.sharding_constraints.results.items()],
        "at_start": plan.sharding_constraints.at_start,
        "cost": asdict(plan.cost),
        "checked": None if plan.checked is None else json.loads(plan.checked.to_json()),
        "compiler_failed": plan.compiler_failed,
        "axis_work": plan.axis_work,
        "remarks": list(plan.remarks),
        "baselines": {name: asdict(cost) for name, cost in plan.baselines.items()},
    }
    return json.dumps(content)


def load(path: Path) -> PlanRecord:
    """Read a plan from a file.

    Args:
      path: the file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is not a plan, has another version of the format, or contradicts itself.
    """
    try:
        return from_json(path.read_text(encoding="utf-8"), path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a plan: it is not JSON ({error})") from None


def from_json(text: str, path: Path | str) -> PlanRecord:
    """Read a plan from the text of its file.

    Args:
      text: the text.
      path: the file, or another name for it in errors.

    Raises:
      ValueError: as `load`.
    """
    try:
        read = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not a plan: it is not JSON ({error})") from None
    if not isinstance(read, dict) or read.get("format") != FORMAT:
        raise ValueError(f"{path} is not a plan: it lacks format: {FORMAT!r}")
    if read.get("version") != VERSION:
        raise ValueError(
            f"{path} has version {read.get('version')!r} of the format, and this penstock reads {VERSION}; plan again"
        )
    try:
        plan = _plan(read)
        wrong = next(_contradictions(plan), None)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise ValueError(f"{path} is a damaged plan: {type(error).__name__}: {error}") from None
    if wrong is not None:
        raise ValueError(f"{path} is a damaged plan: {wrong}")
    return plan


def _plan(read: dict[str, Any]) -> PlanRecord:
    """Build a record from JSON."""
    return PlanRecord(
        mesh_shape={str(name): int(size) for name, size in read["mesh"].items()},
        hardware=read["hardware"],
        platform=read["platform"],
        limit=int(read["limit"]),
        inputs=tuple(_leaf(each) for each in read["inputs"]),
        outputs=tuple(_leaf(each) for each in read["outputs"]),
        state={int(index): int(source) for index, source in read["state"]},
        sharding_constraints=ShardingConstraints(
            _by_path(read["operands"]),
            _by_path(read["results"]),
            tuple(None if spec is None else _spec(spec) for spec in read["at_start"]),
        ),
        cost=_cost(read["cost"]),
        axis_work={axis: {kind: float(part) for kind, part in parts.items()} for axis, parts in read["axis_work"].items()},
        baselines={name: _cost(cost) for name, cost in read["baselines"].items()},
        fingerprint=read["fingerprint"],
        numbers=read["numbers"],
        checked=None if read["checked"] is None else Measured.from_json(json.dumps(read["checked"])),
        compiler_failed=bool(read["compiler_failed"]),
        remarks=tuple(map(str, read["remarks"])),
    )


def _spec(entries: list[list[str]]) -> Spec:
    """Build a layout from JSON."""
    return tuple(tuple(entry) for entry in entries)


def _leaf(read: dict[str, Any]) -> LeafLayout:
    """Build a leaf from JSON."""
    used = read["used"]
    return LeafLayout(
        read["path"],
        tuple(map(int, read["shape"])),
        read["dtype"],
        read["role"],
        _spec(read["stored"]),
        None if used is None else _spec(used),
        bool(read["weak"]),
        int(read["slices"]),
    )


def _by_path(read: list[Any]) -> dict[Any, Any]:
    """Build sharding constraints, by path of the equation, from JSON."""
    return {
        tuple(index): tuple(None if chain is None else tuple(_spec(spec) for spec in chain) for chain in specs)
        for index, specs in read
    }


def _cost(read: dict[str, Any]) -> Cost:
    """Build a cost from JSON."""
    collectives = tuple(PlannedCollective(**{**each, "axes": tuple(each["axes"])}) for each in read["collectives"])
    nested = {"collectives": collectives, "memory": Memory(**read["memory"]), "unknown": tuple(read["unknown"])}
    return Cost(**{**read, **nested})


def _contradictions(plan: PlanRecord) -> Iterator[str]:
    """Yield a description of each contradiction in a plan. Without it, the error would come only when the plan is used."""
    mesh = plan.mesh_shape
    if not mesh or min(mesh.values()) < 1:
        yield f"a mesh of the axes {mesh}"
    if list(plan.axis_work) != list(mesh):
        yield f"it is for mesh {describe_mesh(mesh)}, and says what the axes {', '.join(plan.axis_work)} do"
    for leaf in (*plan.inputs, *plan.outputs):
        for spec in (leaf.stored, leaf.used):
            if spec is not None and (len(spec) != len(leaf.shape) or not _divides(spec, leaf.shape, mesh)):
                yield f"{leaf.path!r}, shape {list(leaf.shape)}, cannot be {format_spec(spec)} on mesh {describe_mesh(mesh)}"
        if leaf.slices < 1 or math.prod(leaf.shape) % leaf.slices:
            yield f"{leaf.path!r}, shape {list(leaf.shape)}, does not have {leaf.slices} slices"
    at_start = plan.sharding_constraints.at_start
    if at_start and len(at_start) != len(plan.inputs):
        yield f"it has {len(at_start)} layouts at the start of the step, and {len(plan.inputs)} arguments"
    for leaf, brought in zip(plan.inputs, at_start, strict=False):
        if brought is not None and (len(brought) != len(leaf.shape) or not _divides(brought, leaf.shape, mesh)):
            yield f"{leaf.path!r}, shape {list(leaf.shape)}, cannot be brought to {format_spec(brought)} at the start of the step"
    for by_index in (plan.sharding_constraints.operands, plan.sharding_constraints.results):
        for chain in (chain for specs in by_index.values() for chain in specs if chain is not None):
            for spec in chain:
                if not _divides(spec, (0,) * len(spec), mesh):
                    yield f"inside of the step it has {format_spec(spec)}, and its mesh is {describe_mesh(mesh)}"
    for index, source in plan.state.items():
        if not (0 <= index < len(plan.outputs) and 0 <= source < len(plan.inputs)):
            yield f"result {index} replaces argument {source}, of {len(plan.outputs)} results and {len(plan.inputs)} arguments"
        elif (plan.outputs[index].shape, plan.outputs[index].stored) != (plan.inputs[source].shape, plan.inputs[source].stored):
            yield f"{plan.outputs[index].path!r} replaces {plan.inputs[source].path!r}, and they differ in shape or layout"
    for role in ROLES:
        leaves = [leaf for leaf in plan.inputs if leaf.role == role]
        predicted, actual = getattr(plan.cost.memory, role), sum(local_bytes(leaf, mesh, plan.platform) for leaf in leaves)
        # The dtype of a random key does not always show how many bytes it has.
        keys = any(leaf.dtype.startswith("key<") for leaf in leaves)
        if not keys and not math.isclose(predicted, actual, rel_tol=1e-6, abs_tol=1):
            yield f"leaves of role {role!r} take {predicted} bytes of a device in its cost, and its leaves take {actual:.0f}"


def _divides(spec: Spec, shape: tuple[int, ...], mesh: Mapping[str, int]) -> bool:
    """Return whether a layout names axes of the mesh, each at most once, that divide the dimensions of a shape."""
    axes = [axis for entry in spec for axis in entry]
    valid = len(set(axes)) == len(axes) and set(axes) <= set(mesh)
    return valid and all(size % math.prod(mesh[axis] for axis in entry) == 0 for size, entry in zip(shape, spec, strict=True))
