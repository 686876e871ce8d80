"""`plan` and `Plan`: find which device holds what, and run a step so.

The road of a plan: `trace/` reads the step, `graph/` turns it into decisions, `search/` makes them, `apply/` writes them as
sharding constraints, and `memory_check.py` compares them with the memory limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from penstock.shard.apply.partition_specs import write_layouts
from penstock.shard.apply.sharding_constraints import insert_constraints
from penstock.shard.arguments import find_argument
from penstock.shard.errors import PlanError
from penstock.shard.graph.constraints import axes_in_constraints, given_roles
from penstock.shard.hlo.analysis import Measured
from penstock.shard.memory_check import check_memory, compile_before_refusing, describe_excess
from penstock.shard.mesh import shapes as mesh_shapes
from penstock.shard.mesh.hardware import Hardware
from penstock.shard.mesh.lookup import detect_hardware, find_hardware
from penstock.shard.present.html import plan_page
from penstock.shard.present.text import plan_text
from penstock.shard.record import LeafLayout, PlanRecord, named_shardings
from penstock.shard.search.cost import Cost, axis_work, predict_cost
from penstock.shard.search.mesh_search import MeshPlan, prepare_meshes, search_meshes
from penstock.shard.search.problem import Assignment
from penstock.shard.serialization import load, save
from penstock.shard.trace.fingerprint import describe_difference
from penstock.shard.trace.prescribed_layouts import find_meshes
from penstock.shard.trace.step import TracedStep, trace
from penstock.shard.units import parse_bytes
from penstock.shard.verify import Verified, compile_plan, verify

_DECIDED_BY_PLAN = frozenset(["in_shardings", "out_shardings", "static_argnums", "static_argnames", "donate_argnames"])


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
      Whatever the step raises when it is traced.
    """
    traced = trace(step, args)
    chosen = find_hardware(hardware) if hardware is not None else detect_hardware()
    limit = parse_bytes(memory) if memory is not None else chosen.memory
    shapes, given = _mesh_shapes(traced, mesh, devices, constraints, chosen)
    named = given_roles(roles, traced.inputs)
    kept = {output: index for output, index in traced.state.items() if named.get(index) not in ("batch", "other")}
    traced = replace(traced, state=kept)
    prepared = prepare_meshes(traced, shapes, chosen, constraints, named)

    def compile_record(record: PlanRecord) -> tuple[Measured, str]:
        return compile_plan(record, traced, given)

    def search_again(within: float) -> PlanRecord | None:
        found = search_meshes(prepared, within)
        return _write_record(found, traced, chosen, limit) if found.candidate.memory <= within else None

    found = search_meshes(prepared, limit)
    record: PlanRecord | None = _write_record(found, traced, chosen, limit)
    assert record is not None
    if found.candidate.memory <= limit:
        record = check_memory(record, compile_record, search_again, check)
    else:
        record = compile_before_refusing(record, compile_record, check)
    if record is None:
        raise PlanError(describe_excess(found, traced, limit))
    return Plan._of(record, traced, given)


def _mesh_shapes(
    traced: TracedStep, mesh: Any, devices: Any, constraints: Mapping[str, Any] | None, hardware: Hardware
) -> tuple[list[dict[str, int]], list[Any] | None]:
    """Return the mesh shapes to search, and the devices if they were given."""
    axes, inner = axes_in_constraints(constraints, traced.inputs), find_meshes(traced.closed.jaxpr)
    told_apart = {*hardware.axis_bandwidth, *hardware.axis_latency}
    shapes, given = mesh_shapes.candidate_shapes(mesh, devices, axes, told_apart)
    shapes, given = mesh_shapes.match_step_meshes(shapes, given, inner, mesh is None)
    return (mesh_shapes.keep_with_axes(shapes, axes) if mesh is None and not inner else shapes), given


def _write_record(found: MeshPlan, traced: TracedStep, hardware: Hardware, limit: int) -> PlanRecord:
    """Write the decisions of a search out as layouts, with their predicted cost."""
    prepared, assignment = found.prepared, found.candidate.assignment
    model, problem, roles = prepared.model, prepared.problem, prepared.roles
    layouts = write_layouts(model.program, model.groups, model.graph, problem.links, assignment, traced.state)

    def cost(decisions: Assignment) -> Cost:
        return predict_cost(problem, decisions, roles, model.inputs, model.program.unknown)

    used = [layouts.used.get(value) for value in model.program.inputs]
    inputs = tuple(
        LeafLayout(leaf.path, leaf.shape, str(leaf.dtype), role, spec, use, leaf.weak)
        for leaf, role, spec, use in zip(traced.inputs, roles, layouts.inputs, used, strict=True)
    )
    outputs = tuple(
        LeafLayout(leaf.path, leaf.shape, str(leaf.dtype), "output", spec, None)
        for leaf, spec in zip(traced.outputs, layouts.outputs, strict=True)
    )
    return PlanRecord(
        mesh_shape=dict(prepared.mesh_shape),
        hardware=hardware.name,
        limit=limit,
        inputs=inputs,
        outputs=outputs,
        state=dict(traced.state),
        sharding_constraints=layouts.sharding_constraints,
        cost=cost(assignment),
        axis_work=axis_work(problem, assignment, prepared.batch),
        baselines={name: cost(decisions) for name, decisions in prepared.baselines.items()},
        fingerprint=traced.fingerprint(),
    )


@dataclass(frozen=True)
class Plan(PlanRecord):
    """A plan: which device holds what, with the functions that run a step so.

    Attributes:
      traced: the step; None in a plan that was loaded and is not bound.
      devices: the devices of the mesh, in order, if they were given.

    The other attributes are those of `PlanRecord`: `mesh_shape`, `inputs`, `outputs`, `cost`, `baselines`, …
    """

    traced: TracedStep | None = field(default=None, repr=False, compare=False)
    devices: tuple[Any, ...] | None = field(default=None, compare=False)

    @classmethod
    def _of(cls, record: PlanRecord, traced: TracedStep | None, devices: Sequence[Any] | None) -> Plan:
        """Return a plan of a record."""
        data = {each.name: getattr(record, each.name) for each in fields(PlanRecord)}
        return cls(**data, traced=traced, devices=None if devices is None else tuple(devices))

    @property
    def mesh(self) -> Any:
        """The mesh: of the devices that were given or that are here; an `AbstractMesh` where there are not enough."""
        if self.devices is not None or jax.device_count() >= self.device_count:
            return self._devices_mesh()
        return mesh_shapes.abstract_mesh(self.mesh_shape)

    @property
    def shardings(self) -> tuple[Any, ...]:
        """A `NamedSharding` for each leaf, in the form of the arguments: one tree for each of them."""
        return jax.tree_util.tree_unflatten(self._bound().tree, named_shardings(self.inputs, self.mesh))

    @property
    def out_shardings(self) -> Any:
        """The same in the form of what the step returns."""
        return jax.tree_util.tree_unflatten(self._bound().out_tree, named_shardings(self.outputs, self.mesh))

    @property
    def batch_shardings(self) -> Any:
        """Those of the argument that is the batch, on devices; a tuple of them where several are, as of (state, images, labels).

        An argument is the batch if the role of some of its leaves is, and no leaf belongs to parameters or optimizer.
        `ps.feed(batches, to=plan)` puts batches there.

        Raises:
          ValueError: no argument is a batch; there are fewer devices than the plan was made for; or it was loaded, and is not
            bound to its step.
        """
        tree = self._bound().tree
        arguments = jax.tree_util.tree_unflatten(tree, named_shardings(self.inputs, self._devices_mesh()))
        roles = jax.tree_util.tree_unflatten(tree, [leaf.role for leaf in self.inputs])
        found = [
            argument
            for argument, role in zip(arguments, roles, strict=True)
            if "batch" in (of_leaves := set(jax.tree_util.tree_leaves(role))) and not of_leaves & {"parameters", "optimizer"}
        ]
        if not found:
            raise ValueError(
                "no argument of the step is a batch by what the step does with it: take one of plan.shardings, or say which "
                "it is when it is planned, roles={'batch/*': 'batch'}"
            )
        return found[0] if len(found) == 1 else tuple(found)

    def bind(self, step: Callable, *args: Any) -> Plan:
        """A plan that was loaded, with the step that it is for.

        Raises:
          ValueError: it was made for another; the message says what differs.
        """
        traced = trace(step, args, [leaf.weak for leaf in self.inputs])
        self._match(traced)
        return replace(self, traced=traced)

    def jit(self, step: Callable, *, donate_argnums: int | tuple[int, ...] = (), **settings: Any) -> Any:
        """`jax.jit` of the step, which follows the plan: inputs and outputs, and the layouts inside.

        Args:
          step: the function that the plan was made for. Its arguments are positional, as `jax.jit` with shardings wants.
          donate_argnums: as `jax.jit` takes it; the plan's memory is that with the state donated.
          **settings: others of `jax.jit`, `compiler_options` for example. What the step does not use of its arguments is
            kept among them (`keep_unused`), unless it is said otherwise.

        Returns:
          what `jax.jit` returns. A call traces the step, as always when shapes are new.

        Raises:
          ValueError: there are fewer devices than it was made for; or, when it is called or lowered, the step or the
            arguments are not those of the plan.
          TypeError: a setting is one that the plan decides, or that is for arguments with names or without a layout.
        """
        if refused := _DECIDED_BY_PLAN & set(settings):
            raise TypeError(
                f"plan.jit takes no {', '.join(sorted(refused))}: the plan lays out all arguments and results, which are "
                "positional arrays. Pin a layout with constraints= when planning; close over what is static; use donate_argnums"
            )
        return self._jit(step, self._devices_mesh(), donate_argnums=donate_argnums, **settings)

    def init(self, init: Callable, *args: Any, argument: str | None = None) -> Any:
        """Run a function that makes an argument of the step, so that its leaves are born where the plan has them.

        Args:
          init: a function that jax.jit takes, which returns what one of the step's arguments is (the state), in
            structure and shapes.
          *args: its arguments.
          argument: the name of the step's argument, where several have that structure and are laid out otherwise.

        Raises:
          ValueError: it returns something else; the message says what differs from the nearest argument. Or there are fewer
            devices than the plan was made for.
        """
        made = jax.eval_shape(init, *args)
        return jax.jit(init, out_shardings=self._shardings_like(made, argument))(*args)

    def put(self, tree: Any, *, argument: str | None = None) -> Any:
        """Put an argument of the step, of arrays on host or device, where the plan has it.

        Args:
          tree: the arrays.
          argument: the name of the step's argument, where several have this structure and are laid out otherwise.

        Raises:
          ValueError: no argument has this structure and these shapes; or there are fewer devices than the plan was made for.
        """
        return jax.device_put(tree, self._shardings_like(tree, argument))

    def verify(self, topology: str | None = None) -> Verified:
        """Compile the step as planned, and hold what the compiler says against what was predicted.

        Args:
          topology: of TPUs that need not be here, as "v5e:2x4"; needs `pip install "penstock[tpu]"`. None compiles for the
            devices that are present if they are enough, or else for virtual CPU devices in a process of its own.

        Raises:
          ValueError: the plan was loaded, and is not bound to its step.
          CompileError: it does not compile; or the topology has another number of devices.
        """
        return verify(self, self.traced, self.devices, topology)

    def save(self, path: str | Path) -> None:
        """Write it to a file, as JSON."""
        save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path, devices: Any = None) -> Plan:
        """Read a plan that `save` wrote. `jit`, `init` and `put` work at once; `shardings` and `verify` after `bind`.

        Args:
          path: the file.
          devices: in the order of the mesh, as a list or an array (mesh.devices). A file holds none, as they differ from process
            to process: None takes the first that are present, arranged as JAX thinks best.

        Raises:
          ValueError: the file is no plan, or of another version; or there are more or fewer devices than it was made for.
        """
        plan = cls._of(load(Path(path)), None, None)
        if devices is None:
            return plan
        needed = plan.device_count
        flat = tuple(np.ravel(devices))
        if len(flat) != needed:
            raise ValueError(
                f"{path} is for {needed} devices ({mesh_shapes.describe_mesh(plan.mesh_shape)}), and {len(flat)} were given"
            )
        return replace(plan, devices=flat)

    def html(self, path: str | Path) -> None:
        """Write it as a page to look at, one file, with the layouts drawn."""
        Path(path).write_text(plan_page(self), encoding="utf-8")

    def __str__(self) -> str:
        return plan_text(self)

    def _jit(self, step: Callable, mesh: Any, **settings: Any) -> Any:
        def planned(*args: Any) -> Any:
            traced = trace(step, args, [leaf.weak for leaf in self.inputs])
            self._match(traced)
            flat = jax.tree_util.tree_leaves(args)
            if self.traced is None:
                flat = list(map(jax.lax.with_sharding_constraint, flat, named_shardings(self.inputs, mesh)))
            made = insert_constraints(traced.closed, self.sharding_constraints, mesh)(*flat)
            if self.traced is None:
                made = list(map(jax.lax.with_sharding_constraint, made, named_shardings(self.outputs, mesh)))
            return jax.tree_util.tree_unflatten(traced.out_tree, made)

        planned.__name__ = planned.__qualname__ = getattr(step, "__name__", "step")
        settings.setdefault("keep_unused", True)  # so that the arguments have the bytes that the plan says
        if self.traced is not None:
            settings["in_shardings"] = jax.tree_util.tree_unflatten(self.traced.tree, named_shardings(self.inputs, mesh))
            settings["out_shardings"] = jax.tree_util.tree_unflatten(self.traced.out_tree, named_shardings(self.outputs, mesh))
        return jax.jit(planned, **settings)

    def _devices_mesh(self) -> Mesh:
        return mesh_shapes.concrete_mesh(self.mesh_shape, self.devices)

    def _bound(self) -> TracedStep:
        if self.traced is None:
            raise ValueError(
                "this plan was loaded from a file, which does not have the structure of the step's arguments and results; "
                "plan.bind(step, *args) first, with the step that it was made for and its arguments"
            )
        return self.traced

    def _match(self, traced: TracedStep) -> None:
        if traced.fingerprint() != self.fingerprint:
            raise ValueError(
                f"the plan is for another step: {describe_difference(self.inputs, self.outputs, traced.inputs, traced.outputs)}"
            )

    def _shardings_like(self, tree: Any, argument: str | None) -> Any:
        """Return the shardings of the argument that has the structure and shapes of a tree."""
        shardings = named_shardings(find_argument(self.inputs, tree, argument), self._devices_mesh())
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(tree), shardings)
