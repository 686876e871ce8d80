"""`plan`: which device holds what, for any step function."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.shard import known, meshes
from penstock.shard.check import PlanError, checked, fits_after_all
from penstock.shard.cost import Cost, axis_work, cost_of, largest_living
from penstock.shard.hardware import Hardware
from penstock.shard.hardware import hardware as find_hardware
from penstock.shard.layout import union
from penstock.shard.model import Model, model_of, problem_of
from penstock.shard.optimise import Candidate, optimise
from penstock.shard.pins import Fixed, axes_named, pinned, roles_given
from penstock.shard.planned import LeafLayout, Plan
from penstock.shard.program import meshes_in
from penstock.shard.roles import roles_of
from penstock.shard.search import Assignment, Problem
from penstock.shard.steer import layouts_of
from penstock.shard.text import size_of
from penstock.shard.trace import Traced, trace


def plan(
    step: Callable,
    *args: Any,
    mesh: Any = None,
    devices: Any = None,
    hardware: str | Hardware | None = None,
    memory: int | str | None = None,
    constraints: Mapping[str, Any] | None = None,
    roles: Mapping[str, str] | None = None,
    check: bool | None = None,
) -> Plan:
    """Find which device holds what, for any step function.

    Args:
      step: a function that jax.jit takes: of state and batch to new state and results; (state, batch) → (state,
        loss), or in parts, (params, optimizer, batch) → (params, optimizer, loss), or any other. It is traced, and
        never run.
        What the step itself prescribes, by `with_sharding_constraint` and `shard_map`, is kept; it has to be on the mesh of
        the plan.
      *args: its positional arguments, as pytrees of arrays or of `jax.ShapeDtypeStruct`. Nothing is allocated.
      mesh: a `jax.sharding.Mesh`, an `AbstractMesh`, or a dict of axis sizes, {"data": 2, "model": 4}; of one to three axes.
      devices: a number of devices, or the devices. Without a mesh its shape is searched too. Without both, all devices are taken.
      hardware: a name ("tpu-v5e", "h100") or a `Hardware`. None takes that of JAX's default device.
      memory: the limit of one device, in bytes or as "16GiB". None takes the hardware's.
      constraints: layouts that are prescribed, {path pattern: PartitionSpec}, as {"params/embed": P("model", None)}.
      check: whether to compile, and to search again where the compiler needs more memory than was predicted and the limit is not
        kept. None does it where the prediction is near the limit and the program is of a size that compiles in some seconds.
      roles: of leaves, where what the step does with them misleads, {path pattern: "parameters", "optimizer", "batch"
        or "other"}.

    Returns:
      A `Plan`.

    Raises:
      PlanError: no layout fits the memory limit.
      TypeError, ValueError: an argument is not what it should be; the message names the leaf, its shape and what would do.
      Exception: whatever the step raises when it is traced.
    """
    traced = trace(step, args)
    machine = _machine(hardware)
    limit = bytes_of(memory) if memory is not None else machine.memory
    axes, inner = axes_named(constraints, traced.inputs), meshes_in(traced.closed.jaxpr)
    shapes, given = meshes.shapes_of(mesh, devices, axes, {*machine.axis_bandwidth, *machine.axis_latency})
    named = roles_given(roles, traced.inputs)
    shapes, given = meshes.agreeing(shapes, given, inner, mesh is None)
    if mesh is None and not inner:
        shapes = meshes.with_axes(shapes, axes)
    traced = replace(
        traced, state={out: place for out, place in traced.state.items() if named.get(place) not in ("batch", "other")}
    )
    searches = _prepare_all(traced, shapes, machine, constraints, named)

    def search(within: float) -> _Found:
        return min((_search(each, within) for each in searches), key=lambda each: each.key(within))

    def again(within: float) -> Plan | None:
        found = search(within)
        return _plan(found, traced, machine, limit, given) if found.candidate.memory <= within else None

    found = search(limit)
    made = _plan(found, traced, machine, limit, given)
    if found.candidate.memory <= limit:
        return checked(made, again, check)
    fitting = fits_after_all(made, check)
    if fitting is None:
        raise PlanError(_does_not_fit(found, traced, limit))
    return fitting


def bytes_of(memory: int | float | str) -> int:
    """Bytes, of a number or of text such as "16GiB", "500 MB".

    Raises:
      TypeError, ValueError: it is none of these, or less than a byte.
    """
    units = {"": 1, "b": 1} | {f"{prefix}b": 1000**n for n, prefix in enumerate("kmgt", 1)}
    units |= {f"{prefix}ib": 1024**n for n, prefix in enumerate("kmgt", 1)}
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", memory)
        if not match or match[2].lower() not in units or match[1].count(".") > 1 or match[1] == ".":
            raise ValueError(f"memory={memory!r} is no number of bytes; write it as 17179869184, '16GiB' or '16GB'")
        number = float(match[1]) * units[match[2].lower()]
    else:
        try:
            number = float(memory)
        except (TypeError, ValueError, OverflowError):
            raise TypeError(f"memory={memory!r} is no number of bytes, and no text such as '16GiB'") from None
    if isinstance(memory, bool) or not 1 <= number < float("inf"):
        raise ValueError(f"memory={memory!r}: a limit is at least 1 byte")
    return int(number)


_HIDDEN = 0.75
"""Of the traffic of memory and of latency, where a plan is looked for that does not depend on either."""


@dataclass(frozen=True)
class _Prepared:
    """A mesh to be searched."""

    model: Model
    problem: Problem
    hidden: Problem
    shape: dict[str, int]
    roles: Sequence[str]
    batch: Sequence[int]
    baselines: dict[str, Assignment]


@dataclass(frozen=True)
class _Found:
    """The best decisions for one mesh."""

    of: _Prepared
    candidate: Candidate

    def key(self, limit: float) -> tuple[bool, float]:
        fits = self.candidate.memory <= limit
        return (not fits, self.candidate.weight if fits else self.candidate.memory)


def _prepare_all(
    traced: Traced,
    shapes: Sequence[dict[str, int]],
    machine: Hardware,
    constraints: Mapping[str, Any] | None,
    named: Mapping[int, str],
) -> list[_Prepared]:
    """Every mesh that the pinned layouts allow; if it is none, the error of the first."""
    prepared, errors = [], []
    model: Model | None = None
    pins: dict[int, Fixed] = {}
    roles: list[str] = []
    for shape in shapes:
        try:
            fixed = pinned(constraints, traced.inputs, shape)
        except ValueError as error:
            errors.append(error)
            continue
        if model is None or fixed != pins:  # it is the same for every mesh
            model, pins = model_of(traced, fixed), fixed
            roles = [named.get(place, role) for place, role in enumerate(roles_of(model, traced.state))]
        prepared.append(_prepare(model, shape, machine, roles))
    if not prepared:
        raise errors[0]
    return prepared


def _prepare(model: Model, shape: dict[str, int], machine: Hardware, roles: Sequence[str]) -> _Prepared:
    problem = problem_of(model, shape, machine)
    batch = [node for node, role in zip(model.inputs, roles, strict=True) if role == "batch"]
    kept = [node for node, role in zip(model.inputs, roles, strict=True) if role != "batch"]
    baselines = {
        "replicated, data parallel": known.data_parallel(problem, batch),
        "fully sharded, data parallel": known.fully_sharded(problem, batch, kept),
    }
    hidden = problem_of(model, shape, machine.hiding(_HIDDEN))
    return _Prepared(model, problem, hidden, shape, roles, batch, baselines)


def _search(prepared: _Prepared, limit: float) -> _Found:
    return _Found(prepared, optimise(prepared.problem, prepared.hidden, limit, list(prepared.baselines.values())))


def _plan(found: _Found, traced: Traced, machine: Hardware, limit: int, given: Sequence[Any] | None) -> Plan:
    model, problem, assignment = found.of.model, found.of.problem, found.candidate.assignment
    roles = found.of.roles
    layouts = layouts_of(model.program, model.groups, model.graph, problem.links, assignment, traced.state)

    def cost(decisions: Assignment) -> Cost:
        return cost_of(problem, decisions, roles, model.inputs, model.program.unknown)

    used = [layouts.used.get(value) for value in model.program.inputs]
    inputs = tuple(
        LeafLayout(leaf.path, leaf.shape, str(leaf.dtype), role, spec, use, leaf.weak)
        for leaf, role, spec, use in zip(traced.inputs, roles, layouts.inputs, used, strict=True)
    )
    outputs = tuple(
        LeafLayout(leaf.path, leaf.shape, str(leaf.dtype), "output", spec, None)
        for leaf, spec in zip(traced.outputs, layouts.outputs, strict=True)
    )
    return Plan(
        mesh_shape=dict(found.of.shape),
        hardware=machine.name,
        limit=limit,
        inputs=inputs,
        outputs=outputs,
        state=dict(traced.state),
        steering=layouts.steering,
        cost=cost(assignment),
        axis_work=axis_work(problem, assignment, found.of.batch),
        baselines={name: cost(decisions) for name, decisions in found.of.baselines.items()},
        fingerprint=traced.fingerprint(),
        traced=traced,
        devices=tuple(given) if given is not None else None,
        machine=machine,
    )


def _machine(hardware: str | Hardware | None) -> Hardware:
    if hardware is not None:
        return find_hardware(hardware)
    from penstock.shard.hardware import present

    return present()


def _does_not_fit(found: _Found, traced: Traced, limit: int) -> str:
    """By how much, and what is largest."""
    problem, assignment = found.of.problem, found.candidate.assignment
    cost = cost_of(problem, assignment, found.of.roles, found.of.model.inputs, found.of.model.program.unknown)
    stored = sorted(
        (
            (size / problem.links.shards(union(assignment[node])), leaf)
            for leaf, (node, size) in zip(traced.inputs, problem.stored, strict=True)
        ),
        key=lambda each: -each[0],
    )
    values = found.of.model.program.values
    living = [
        f"{size_of(size)} of an activation {values[number].dtype}{list(values[number].shape)}"
        for number, size in largest_living(problem, assignment, 3)
    ]
    leaves = [f"{size_of(size)} of {leaf.path!r} {leaf.dtype}{list(leaf.shape)}" for size, leaf in stored[:3]]
    n = 1
    for size in found.of.shape.values():
        n *= size
    return (
        f"no layout fits {size_of(limit)} a device on mesh {meshes.describe(found.of.shape)}: the smallest that was found needs "
        f"{size_of(cost.memory.total)} by prediction, {size_of(cost.memory.total - limit)} too much: "
        f"{size_of(cost.memory.arguments)} of arguments and "
        f"{size_of(cost.memory.activations)} of activations. The largest on each device: {'; '.join((*leaves, *living))}. "
        f"More than {n} devices, a smaller batch, or jax.checkpoint around each layer would help."
    )
