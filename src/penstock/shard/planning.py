"""Find a plan for a step.

`trace/` reads the step, `graph/` turns it into decisions, `search/` decides, `apply/` turns the decisions into layouts, and
`memory.py` enforces the limit. The result is written as a `PlanRecord`; with its step and devices, it is a `Plan`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock._bytes import parse_bytes
from penstock._jax import checkpoints
from penstock.shard.apply.partition_specs import write_layouts
from penstock.shard.axis_names import name_axes
from penstock.shard.compiler import choose_compiler, hardware_of, match_topology, read_check
from penstock.shard.fitting import FittingSearch
from penstock.shard.graph.constraints import axes_in_constraints, given_roles
from penstock.shard.memory import Advise, describe_constants, enforce_limit, leave_to_compiler
from penstock.shard.mesh import shapes as mesh_shapes
from penstock.shard.mesh.compiler_models import COMPILER_MODELS
from penstock.shard.mesh.explicit_axes import automatic_axes
from penstock.shard.mesh.hardware import Hardware, detect_hardware, find_hardware
from penstock.shard.padding import padded_memory
from penstock.shard.plan import Plan
from penstock.shard.record import LeafLayout, PlanRecord
from penstock.shard.refusal import find_options
from penstock.shard.remarks import describe_lost_gradients, describe_uneven_batch
from penstock.shard.search.costs import Assignment, Cost, axis_work, predict_cost
from penstock.shard.search.solver import MeshPlan, PreparedMesh, Solve, best_baselines, prepare_meshes, search_meshes
from penstock.shard.trace.step import TracedStep, refuse_option_names, trace


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
    remat: str | None = None,
    microbatches: int | str | None = None,
    **kwargs: Any,
) -> Plan:
    """Find a sharding of all arguments and intermediates of a step, so that it runs fast and fits the memory.

    Args:
      step: a function that `jax.jit` accepts: (state, batch) → (state, loss), or (params, optimizer, batch) → (params, optimizer,
        loss), or any other. It is traced and never run. Its own `with_sharding_constraint` and `shard_map` are kept; they have
        to be on the mesh of the plan. Flax NNX objects among its arguments may be changed by it, with `nnx.jit` or without:
        (model, optimizer, batch) → loss. Such arguments are state. Leaves of Equinox modules that are not arrays are static.
      *args, **kwargs: its arguments, as pytrees of arrays or of `jax.ShapeDtypeStruct`. Nothing is allocated. An argument with
        the name of an option below has to be given by position.
      mesh: a `jax.sharding.Mesh`, an `AbstractMesh`, or a dict of axis sizes, {"data": 2, "model": 4}. One to three axes.
        Explicit axes count as automatic ones, inside of `jax.set_mesh` too.
      devices: a number of devices, or the devices. Without a mesh, the mesh shape is searched too: with up to three axes. They
        are named after what they do in the plan: data and fsdp shard the batch, model shards other dimensions of tensors. Axes
        that constraints name keep their names. Without both, all devices are used.
      hardware: a name ("tpu-v5e", "h100") or a `Hardware`. None takes the hardware of JAX's default device.
      memory: the memory limit of one device, in bytes or as "16GiB". None takes the memory of the hardware.
      constraints: layouts that the plan has to use, {path pattern: PartitionSpec}: {"params/embed": P("model", None)}.
      roles: the roles of leaves, where the planner infers them wrongly, {path pattern: role}. A role is "parameters",
        "optimizer", "batch" or "other".
      check: the compiler that decides whether plans fit. True takes the compiler of this process's devices, or of a topology if
        the plan is for TPUs or GPUs that are not here. A string names the topology: "v5e:2x4", "2xv5e:2x4" for two
        slices, or "h100:4x8" for 4 hosts of 8 GPUs. It also gives the hardware and the number of devices if these are not
        given. Both compile the plan that is returned. If its program costs over 5 % more than predicted, they compile up
        to four others, and return the fastest. None compiles if the prediction is near the limit or above. A plan for
        TPUs or GPUs is not judged by the CPU's compiler: without theirs (`pip install "penstock[tpu]"`,
        `pip install "penstock[gpu-compiler]"`), None returns it unchecked, with a warning. False compiles nothing; if no
        plan is predicted to fit, it returns the one of least memory, with a warning. If a compiled plan does not fit, or
        needs less than predicted, the search is repeated.
      remat: which values of the forward pass the backward pass computes again. None leaves the step as it is. "auto" decides
        it with the layouts, if the memory limit makes a plan slower than it could be: each value that both passes need is
        kept, or computed again from values that are kept, as `jax.checkpoint` does. The results of the step are the same, to
        rounding. Random numbers and callbacks are not computed again. "all" decides for the calls of `jax.checkpoint` in the
        step too, which "auto" keeps.
      microbatches: the number of parts of the batch that run one after the other, with their gradients added up. "auto"
        decides it with the layouts. Each result of the step without rows has to be computed from sums over the rows, as the
        gradients of a mean are. If it is not, as with batch normalization, "auto" leaves the batch whole, and says why.

    Returns:
      A `Plan`.

    Raises:
      PlanError: no plan fits the memory limit once compiled, or the arguments alone exceed it.
      CompileError: `check` asks to compile the plan, and it does not compile.
      TypeError: an argument has a wrong type; the message names it.
      ValueError: an argument has a wrong value; the message names the leaf, its shape, and what would be right.

    Errors that the step raises while it is traced are passed on. A step that computes gradients gets a `UserWarning` if no array
    that it returns depends on them; in a step without state, a scalar is enough. So do a step that drops the new parameters that
    it computes, and a batch whose rows do not divide over the devices.

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
    options = Options(mesh, devices, hardware, memory, constraints, roles, check, remat, microbatches)
    with automatic_axes():
        traced = trace_with(options, step, args, kwargs)
        return plan_traced(traced, options, functools.partial(find_options, traced, options, plan_traced))


UNLIMITED = 1 << 60
"""Bytes that no step needs."""


@dataclass(frozen=True)
class Options:
    """The options of `plan`."""

    mesh: Any = None
    devices: Any = None
    hardware: str | Hardware | None = None
    memory: int | str | None = None
    constraints: Mapping[str, Any] | None = None
    roles: Mapping[str, str] | None = None
    check: bool | str | None = None
    remat: str | None = None
    microbatches: int | str | None = None

    @property
    def chosen(self) -> Hardware:
        """Return the hardware."""
        hardware = self.with_topology().hardware
        return detect_hardware() if hardware is None else find_hardware(hardware)

    @property
    def limit(self) -> int:
        """Return the memory limit of one device, in bytes."""
        return self.chosen.memory if self.memory is None else parse_bytes(self.memory)

    def with_topology(self) -> Options:
        """Return the options with the hardware and the devices of the topology that `check` names, where they are not given."""
        topology = read_check(self.check)
        if topology is None:
            return self
        hardware = topology.place(find_hardware(hardware_of(topology) if self.hardware is None else self.hardware))
        devices = topology.devices if self.mesh is None and self.devices is None else self.devices
        return replace(self, hardware=hardware, devices=devices)

    def by_prediction(self, **changes: Any) -> Options:
        """Return the options, with some changed, so that nothing is compiled."""
        return replace(self.with_topology(), check=False, **changes)


def trace_with(options: Options, step: Callable, args: tuple, kwargs: dict[str, Any]) -> TracedStep:
    """Trace a step that was given together with options.

    Raises:
      TypeError: an argument of the step has the name of an option.
    """
    refuse_option_names(step, args, kwargs, vars(options))
    kept = options.remat != "all"
    with without_collection(), checkpoints(kept):
        traced = trace(step, args, kwargs=kwargs)
    return replace(traced, rewriting=replace(traced.rewriting, checkpoints=kept))


def plan_traced(
    traced: TracedStep,
    options: Options,
    advise: Advise = lambda needed, predicted: ("", {}),
    solve: Solve = search_meshes,
) -> Plan:
    """Find a plan of a step that is traced already, with automatic axes. The errors are the same as for `plan`.

    Args:
      advise: as in `enforce_limit`.
      solve: searches meshes.
    """
    lost = describe_lost_gradients(traced)
    if lost is not None:
        warnings.warn(lost, stacklevel=3)
    check, constraints, topology = options.check, options.constraints, read_check(options.check)
    options = options.with_topology()
    chosen, limit = options.chosen, options.limit
    shapes, given = _mesh_shapes(traced, options.mesh, options.devices, constraints, chosen)
    named = given_roles(options.roles, traced.inputs)
    state = {output: index for output, index in traced.state.items() if named.get(index) not in ("batch", "other")}
    traced = replace(traced, state=state)
    if topology is not None:
        match_topology(topology, shapes[0], chosen.name)
    count = math.prod(shapes[0].values())
    compiler = functools.cache(lambda: choose_compiler(check, chosen.name, count, traced, given))
    # Memory is predicted for the compiler that decides.
    platform = compiler().platform if check else chosen.platform

    def prepare(step: TracedStep, like: Sequence[PreparedMesh] = ()) -> list[PreparedMesh]:
        allowed = [each.mesh_shape for each in like] or shapes
        return prepare_meshes(step, allowed, chosen, constraints, named, COMPILER_MODELS[platform], like)

    with without_collection():
        prepared = prepare(traced)
    fitting = FittingSearch(
        traced, prepared, functools.partial(prepare, like=prepared), options.remat, options.microbatches, solve
    )
    remark = describe_uneven_batch(prepared, traced)
    if remark is not None:
        warnings.warn(remark, stacklevel=3)
    constants = traced.constant_bytes
    remarks = tuple(filter(None, (describe_constants(traced), remark)))
    baselines = best_baselines(prepared, limit - constants)
    kept = None if options.mesh is not None or traced.meshes() else axes_in_constraints(constraints, traced.inputs)

    @without_collection()
    def search(within: float) -> MeshPlan:
        found = fitting.search(within - constants)
        assert found.proof is not None
        return replace(found, proof=replace(found.proof, memory=found.proof.memory + constants))

    @without_collection()
    def write(found: MeshPlan) -> PlanRecord:
        record = write_record(found.prepared, found.candidate.assignment, baselines, traced, chosen, limit)
        return finish(replace(record, proof=found.proof, remarks=(*record.remarks, *fitting.describe(found))))

    def finish(record: PlanRecord) -> PlanRecord:
        record = replace(record, remarks=(*record.remarks, *remarks))
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
        meshes=prepared,
        baselines=baselines,
        limit=limit,
        check=check,
        advise=advise,
    )
    writers = {name: functools.partial(write, each) for name, each in baselines.items()}
    return Plan._from_record(record, traced, given, writers)


def _mesh_shapes(
    traced: TracedStep, mesh: Any, devices: Any, constraints: Mapping[str, Any] | None, hardware: Hardware
) -> tuple[list[dict[str, int]], list[Any] | None]:
    """Return the mesh shapes to search, and the devices if they were given."""
    axes, inner = axes_in_constraints(constraints, traced.inputs), traced.meshes()
    shapes, given = mesh_shapes.candidate_shapes(mesh, devices, axes, hardware.domain_of)
    shapes, given = mesh_shapes.match_step_meshes(shapes, given, inner, mesh is None)
    if mesh is None and not inner:
        shapes = mesh_shapes.keep_with_axes(shapes, axes)
    return shapes, given


def write_record(
    prepared: PreparedMesh,
    assignment: Assignment,
    baselines: Mapping[str, MeshPlan],
    traced: TracedStep,
    hardware: Hardware,
    limit: int,
) -> PlanRecord:
    """Write decisions as a record."""
    model, costs, roles = prepared.model, prepared.costs, prepared.roles
    split_from = costs.compiler.split_from
    layouts = write_layouts(model.program, model.groups, model.graph, costs.links, assignment, traced.state, split_from)

    def cost(mesh: PreparedMesh, decisions: Assignment) -> Cost:
        found = predict_cost(mesh.costs, decisions, roles, mesh.model.inputs, model.program.unknown)
        return replace(found, memory=replace(found.memory, constants=traced.constant_bytes))

    uses = [(layouts.used.get(value), layouts.slices[value]) for value in model.program.inputs]
    inputs = tuple(
        LeafLayout(leaf.path, leaf.shape, str(leaf.dtype), role, spec, used, leaf.weak, slices)
        for leaf, role, spec, (used, slices) in zip(traced.inputs, roles, layouts.inputs, uses, strict=True)
    )
    outputs = tuple(
        LeafLayout(leaf.path, leaf.shape, str(leaf.dtype), "output", spec, None)
        for leaf, spec in zip(traced.outputs, layouts.outputs, strict=True)
    )
    predicted = cost(prepared, assignment)
    return PlanRecord(
        mesh_shape=dict(prepared.mesh_shape),
        hardware=hardware.name,
        platform=costs.compiler.name,
        limit=limit,
        inputs=inputs,
        outputs=outputs,
        state=dict(traced.state),
        sharding_constraints=layouts.sharding_constraints,
        cost=predicted,
        padded=padded_memory(prepared, assignment) + predicted.memory.constants,
        axis_work=axis_work(costs, assignment, prepared.batch),
        baselines={name: cost(each.prepared, each.candidate.assignment) for name, each in baselines.items()},
        fingerprint=traced.fingerprint(),
        numbers=traced.numbers(),
        rewriting=model.rewriting,
    )


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Pause Python's cyclic garbage collector in a `with` block. It stays off if it was off before.

    Planning builds millions of objects that live until the plan is found and form almost no cycles. The collector would visit
    them repeatedly. It is a setting of the process: if another thread ends its own block first, the collector runs again earlier.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
