"""Find a plan for a step.

In: a step, abstract arguments, a mesh and a memory limit. Out: a `Plan`. `trace/` reads the step, `graph/` turns it
into decisions, `search/` decides, `apply/` turns the decisions into layouts, and `memory_check.py` enforces the limit.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from penstock._bytes import parse_bytes
from penstock.shard.axis_names import name_axes
from penstock.shard.compiler import choose_compiler, hardware_of, match_topology, read_check
from penstock.shard.garbage import without_collection
from penstock.shard.graph.constraints import axes_in_constraints, given_roles
from penstock.shard.left_to_compiler import leave_to_compiler
from penstock.shard.memory_check import enforce_limit, least_arguments
from penstock.shard.mesh import shapes as mesh_shapes
from penstock.shard.mesh.compiler_models import COMPILER_MODELS
from penstock.shard.mesh.explicit_axes import automatic_axes
from penstock.shard.mesh.hardware import Hardware
from penstock.shard.mesh.lookup import detect_hardware, find_hardware
from penstock.shard.planned import Plan
from penstock.shard.record import PlanRecord
from penstock.shard.search.cost_model import Assignment
from penstock.shard.search.mesh_search import MeshPlan, PreparedMesh, best_baselines, prepare_meshes, search_meshes
from penstock.shard.trace.call import refuse_option_names
from penstock.shard.trace.gradients import describe_lost_gradients
from penstock.shard.trace.prescribed_layouts import find_meshes
from penstock.shard.trace.step import TracedStep, trace
from penstock.shard.uneven_batch import describe_uneven_batch
from penstock.shard.write_record import write_record


def plan(
    step: Callable,
    /,
    *args: Any,
    mesh: Any = None,
    devices: Any = None,
    hardware: str | Hardware | None = None,
    memory: int | str | None = None,
    constraints: Mapping[str, Any] | None = None,
    roles: Mapping[str, str] | None = None,
    check: bool | str | None = None,
    **kwargs: Any,
) -> Plan:
    """Find a sharding of all arguments and intermediates of a step, so that it runs fast and fits the memory.

    Args:
      step: a function that `jax.jit` accepts: (state, batch) → (state, loss), or (params, optimizer, batch) → (params, optimizer,
        loss), or any other. It is traced and never run. Its own `with_sharding_constraint` and `shard_map` are kept; they have
        to be on the mesh of the plan. Flax NNX objects among its arguments may be changed by it, with `nnx.jit` or without:
        (model, optimizer, batch) → loss. Such arguments are state. Leaves of Equinox modules that are not arrays are static.
      *args, **kwargs: its arguments, as pytrees of arrays or of `jax.ShapeDtypeStruct`. Nothing is allocated. An argument whose
        name is that of an option below has to be given by position.
      mesh: a `jax.sharding.Mesh`, an `AbstractMesh`, or a dict of axis sizes, {"data": 2, "model": 4}. One to three axes.
        Explicit axes count as automatic ones, inside of `jax.set_mesh` too.
      devices: a number of devices, or the devices. Without a mesh, the mesh shape is searched too: with up to three axes, those
        that the hardware names (`Hardware.axis_bandwidth`) among them. The others are named after what they do in the plan: data
        and fsdp shard the batch, model shards other dimensions of tensors. Axes that constraints name keep their names. Without
        both, all devices are used.
      hardware: a name ("tpu-v5e", "h100") or a `Hardware`. None takes that of JAX's default device.
      memory: the memory limit of one device, in bytes or as "16GiB". None takes that of the hardware.
      constraints: layouts that the plan has to use, {path pattern: PartitionSpec}: {"params/embed": P("model", None)}.
      roles: the roles of leaves, where the planner infers them wrongly, {path pattern: role}. A role is "parameters",
        "optimizer", "batch" or "other".
      check: the compiler that decides whether plans fit. True takes that of this process's devices, or of a TPU topology if the
        plan is for TPUs that are not here. A string names the topology: "v5e:2x4". It also gives the hardware and the number of
        devices if these are not given. Both compile the plan that is returned, and if its program costs over 5 % more than
        predicted, up to eight others, of which the fastest is returned. None compiles if the prediction is near the limit
        or above. A plan for TPUs is not judged by the CPU's compiler: without the TPU's (`pip install "penstock[tpu]"`), None
        returns it unchecked, with a warning. False compiles nothing; if no plan is predicted to fit, it returns the one of least
        memory, with a warning. If a compiled plan does not fit, or needs less than predicted, the search is repeated.

    Returns:
      A `Plan`.

    Raises:
      PlanError: no plan fits the memory limit once compiled, or the arguments alone exceed it.
      CompileError: `check` asks to compile the plan, and it does not compile.
      TypeError: an argument has a wrong type; the message names it.
      ValueError: an argument has a wrong value; the message names the leaf, its shape, and what would be right.

    Errors that the step raises while it is traced are passed on. A step that computes gradients gets a
    `UserWarning` if no array that it returns depends on them; in a step without state, a scalar is enough. So do a step that
    drops the new parameters that it computes, and a batch whose rows do not divide over the devices.

    Examples:
      >>> import jax
      >>> def step(params, batch):
      ...     def loss(params):
      ...         return ((jax.nn.relu(batch["x"] @ params["up"]) @ params["down"] - batch["x"]) ** 2).mean()
      ...     value, gradients = jax.value_and_grad(loss)(params)
      ...     return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value
      >>> def array(*shape):
      ...     return jax.ShapeDtypeStruct(shape, "float32")
      >>> params = {"up": array(512, 2048), "down": array(2048, 512)}
      >>> plan = ps.plan(step, params, {"x": array(8192, 512)}, mesh={"data": 2}, hardware="tpu-v5e", check=False)
      >>> plan.mesh_shape
      {'data': 2}
      >>> [leaf.path for leaf in plan.inputs if leaf.role == "batch"]
      ['batch/x']
    """
    options = {
        "mesh": mesh,
        "devices": devices,
        "hardware": hardware,
        "memory": memory,
        "constraints": constraints,
        "roles": roles,
        "check": check,
    }
    refuse_option_names(step, args, kwargs, options)
    with automatic_axes():
        with without_collection():
            traced = trace(step, args, kwargs=kwargs)
        return plan_traced(traced, **options)


def plan_traced(
    traced: TracedStep,
    mesh: Any,
    devices: Any,
    hardware: str | Hardware | None,
    memory: int | str | None,
    constraints: Mapping[str, Any] | None,
    roles: Mapping[str, str] | None,
    check: bool | str | None,
) -> Plan:
    """Find a plan of a step that is traced already, with automatic axes.

    Args:
      traced: the step.
      mesh, devices, hardware, memory, constraints, roles, check: as in `plan`.

    Returns, raises:
      As `plan`.
    """
    lost = describe_lost_gradients(traced)
    if lost is not None:
        warnings.warn(lost, stacklevel=3)
    topology = read_check(check)
    if topology is not None:
        hardware = hardware_of(topology) if hardware is None else hardware
        devices = topology.devices if mesh is None and devices is None else devices
    chosen = find_hardware(hardware) if hardware is not None else detect_hardware()
    limit = parse_bytes(memory) if memory is not None else chosen.memory
    shapes, given = _mesh_shapes(traced, mesh, devices, constraints, chosen)
    named = given_roles(roles, traced.inputs)
    state = {output: index for output, index in traced.state.items() if named.get(index) not in ("batch", "other")}
    traced = replace(traced, state=state)
    if topology is not None:
        match_topology(topology, shapes[0], chosen.name)
    count = math.prod(shapes[0].values())
    compiler = functools.cache(lambda: choose_compiler(check, chosen.name, count, traced, given))
    # The prediction of memory is for the compiler that decides.
    platform = compiler().platform if check else chosen.platform
    with without_collection():
        prepared = prepare_meshes(traced, shapes, chosen, constraints, named, COMPILER_MODELS[platform])
    remark = describe_uneven_batch(prepared, traced)
    if remark is not None:
        warnings.warn(remark, stacklevel=3)
    baselines = best_baselines(prepared, limit)
    kept = _named_axes(traced, mesh, constraints, chosen)

    @without_collection()
    def search(within: float) -> MeshPlan:
        return search_meshes(prepared, within)

    @without_collection()
    def write(mesh: PreparedMesh, decisions: Assignment) -> PlanRecord:
        return finish(write_record(mesh, decisions, baselines, traced, chosen, limit))

    def finish(record: PlanRecord) -> PlanRecord:
        record = replace(record, remarks=(*record.remarks, *(() if remark is None else (remark,))))
        return record if kept is None else name_axes(record, kept, chosen)

    def write_left(mesh: PreparedMesh, decisions: Assignment) -> list[PlanRecord]:
        record = write_record(mesh, decisions, baselines, traced, chosen, limit)
        return [finish(left) for left in leave_to_compiler(record, mesh, decisions)]

    record = enforce_limit(
        search=search,
        write=write,
        write_left=write_left,
        choose_compiler=compiler,
        traced=traced,
        least_arguments=lambda: min(map(least_arguments, prepared)),
        baselines=baselines,
        limit=limit,
        check=check,
    )
    writers = {name: functools.partial(write, each.prepared, each.candidate.assignment) for name, each in baselines.items()}
    return Plan._from_record(record, traced, given, writers)


def _mesh_shapes(
    traced: TracedStep, mesh: Any, devices: Any, constraints: Mapping[str, Any] | None, hardware: Hardware
) -> tuple[list[dict[str, int]], list[Any] | None]:
    """Return the mesh shapes to search, and the devices if they were given."""
    axes, inner = axes_in_constraints(constraints, traced.inputs), find_meshes(traced.closed.jaxpr)
    machine = {axis: hardware.axis_size.get(axis) for axis in hardware.named_axes}
    shapes, given = mesh_shapes.candidate_shapes(mesh, devices, axes, machine)
    shapes, given = mesh_shapes.match_step_meshes(shapes, given, inner, mesh is None)
    if mesh is None and not inner:
        shapes = mesh_shapes.keep_with_axes(shapes, axes, machine)
    mesh_shapes.check_machine_axes(shapes, machine)
    return shapes, given


def _named_axes(
    traced: TracedStep, mesh: Any, constraints: Mapping[str, Any] | None, hardware: Hardware
) -> Collection[str] | None:
    """Return the mesh axes that the user or the hardware names; None if these name all, with the mesh."""
    if mesh is not None or find_meshes(traced.closed.jaxpr):
        return None
    return {*axes_in_constraints(constraints, traced.inputs), *hardware.named_axes}
