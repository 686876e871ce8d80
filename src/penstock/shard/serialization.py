"""Write plans to JSON files with a version of the format, and read them. A file that contradicts itself is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from penstock._atomic_write import replace
from penstock.shard.apply.sharding_constraints import ShardingConstraints, Spec
from penstock.shard.graph.constraints import ROLES
from penstock.shard.mesh.compiler_models import COMPILER_MODELS
from penstock.shard.mesh.shapes import describe_mesh
from penstock.shard.record import PlanRecord, local_bytes
from penstock.shard.trace import flat_program
from penstock.shard.wording import format_spec

FORMAT = "penstock plan"
VERSION = 6

_Layouts = list[tuple[flat_program.Path, tuple[tuple[Spec, ...] | None, ...]]]


@dataclass(frozen=True)
class _Mappings:
    """The parts of a file that JSON cannot hold as `PlanRecord` does: mappings of numbers and paths are lists of pairs."""

    mesh: dict[str, int]
    state: list[tuple[int, int]]
    operands: _Layouts
    results: _Layouts
    at_start: tuple[Spec | None, ...]


def save(plan: PlanRecord, path: Path) -> None:
    """Write a plan to a file atomically, and replace one that exists."""
    replace(path, to_json(plan))


def to_json(plan: PlanRecord) -> str:
    """Return a plan as the text of its file."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": plan.fingerprint,
        "numbers": plan.numbers,
        "mesh": plan.mesh_shape,
        "hardware": plan.hardware,
        "platform": plan.platform,
        "limit": plan.limit,
        "inputs": plan.inputs,
        "outputs": plan.outputs,
        "state": sorted(plan.state.items()),
        "operands": list(plan.sharding_constraints.operands.items()),
        "results": list(plan.sharding_constraints.results.items()),
        "at_start": plan.sharding_constraints.at_start,
        "cost": plan.cost,
        "checked": plan.checked,
        "compiler_failed": plan.compiler_failed,
        "padded": plan.padded,
        "proof": plan.proof,
        "axis_work": plan.axis_work,
        "remarks": plan.remarks,
        "baselines": plan.baselines,
        "rewriting": plan.rewriting,
    }
    return json.dumps(content, default=asdict)


def load(path: Path) -> PlanRecord:
    """Read a plan from a file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is not a plan, has another version of the format, or contradicts itself.
    """
    return from_json(path.read_bytes(), path)


def from_json(text: str | bytes, path: Path | str) -> PlanRecord:
    """Read a plan from the text of its file, which errors call `path`.

    Raises:
      ValueError: as `load`.
    """
    try:
        read = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not a plan: it is not JSON ({error})") from None
    if not isinstance(read, dict) or read.get("format") != FORMAT:
        raise ValueError(f"{path} is not a plan: it lacks format: {FORMAT!r}")
    if (version := read.get("version")) != VERSION:
        raise ValueError(f"{path} has version {version!r} of the format, and this penstock reads {VERSION}; plan again")
    try:
        found = msgspec.convert(read, _Mappings)
        constraints = ShardingConstraints(dict(found.operands), dict(found.results), found.at_start)
        mappings = {"mesh_shape": found.mesh, "state": dict(found.state), "sharding_constraints": constraints}
        plan = msgspec.convert({**read, **mappings}, PlanRecord)
        wrong = next(_contradictions(plan), None)
    except (msgspec.ValidationError, OverflowError) as error:
        wrong = str(error)
    if wrong is not None:
        raise ValueError(f"{path} is a damaged plan: {wrong}; plan again")
    return plan


def _contradictions(plan: PlanRecord) -> Iterator[str]:
    """Yield a description of each contradiction in a plan, which would otherwise raise an error only when the plan is used."""
    mesh = plan.mesh_shape
    if plan.platform not in COMPILER_MODELS:
        yield f"it is for the platform {plan.platform!r}, and penstock knows {', '.join(COMPILER_MODELS)}"
    if not mesh or min(mesh.values()) < 1:
        yield f"a mesh of the axes {mesh}"
    if list(plan.axis_work) != list(mesh):
        yield f"it is for mesh {describe_mesh(mesh)}, and says what the axes {', '.join(plan.axis_work)} do"
    for leaf in (*plan.inputs, *plan.outputs):
        for spec in (leaf.stored, leaf.used):
            if spec is not None and not _divides(spec, leaf.shape, mesh):
                yield f"{leaf.path!r}, shape {list(leaf.shape)}, cannot be {format_spec(spec)} on mesh {describe_mesh(mesh)}"
        if leaf.slices < 1 or math.prod(leaf.shape) % leaf.slices:
            yield f"{leaf.path!r}, shape {list(leaf.shape)}, does not have {leaf.slices} slices"
    at_start = plan.sharding_constraints.at_start
    if at_start and len(at_start) != len(plan.inputs):
        yield f"it has {len(at_start)} layouts at the start of the step, and {len(plan.inputs)} arguments"
    for leaf, brought in zip(plan.inputs, at_start, strict=False):
        if brought is not None and not _divides(brought, leaf.shape, mesh):
            yield f"{leaf.path!r}, shape {list(leaf.shape)}, cannot be brought to {format_spec(brought)} at the start of the step"
    for layouts in (plan.sharding_constraints.operands, plan.sharding_constraints.results):
        for spec in (spec for chains in layouts.values() for chain in chains for spec in chain or ()):
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
    """Return whether a layout has the dimensions of a shape, and names axes of the mesh, each at most once, that divide them."""
    axes = [axis for entry in spec for axis in entry]
    valid = len(spec) == len(shape) and len(set(axes)) == len(axes) and set(axes) <= set(mesh)
    return valid and all(size % math.prod(mesh[axis] for axis in entry) == 0 for size, entry in zip(shape, spec, strict=True))
