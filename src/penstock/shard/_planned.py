"""A plan, and what can be done with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penstock.shard import meshes
from penstock.shard.apply.sharding_constraints import Spec, ShardingConstraints, insert_constraints
from penstock.shard.hlo.analysis import Measured
from penstock.shard.search.cost import Cost
from penstock.shard.mesh.hardware import Hardware
from penstock.shard.trace.step import TracedStep, as_array, describe_difference, canonical_dtype, leaf_paths, trace

if TYPE_CHECKING:
    from penstock.shard.verify import Verified

_NOT_OF_A_PLAN = frozenset(["in_shardings", "out_shardings", "static_argnums", "static_argnames", "donate_argnames"])


@dataclass(frozen=True)
class LeafLayout:
    """A leaf of the arguments or results.

    Attributes:
      path: with the name of its argument first: "state/params/w".
      shape, dtype: of the whole array.
      role: "parameters", "optimizer", "batch", "other", or "output".
      stored: the layout it has between steps.
      weak: its type is weak, as that of a Python number.
      used: the layout in which it enters the first operation that computes with it (a product of matrices, a
        convolution, a lookup); None if nothing but elementwise operations do.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    role: str
    stored: Spec
    used: Spec | None
    weak: bool = False

    def partition_spec(self) -> PartitionSpec:
        return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in self.stored))


@dataclass(frozen=True)
class Plan:
    """Which device holds what.

    Attributes:
      mesh_shape: sizes of the mesh axes, in order.
      hardware: name of the device that it was made for.
      limit: bytes that a device may hold.
      inputs, outputs: the leaves of the arguments and results.
      state: of each output that replaces an input, by place, the place of the input.
      steering: the layouts inside of the step.
      cost: predicted, of one step.
      axis_work: of each mesh axis, the part of the computing that it shards along the "batch", otherwise ("tensor"),
        or not ("idle").
      baselines: the same prediction for plans that everybody knows.
      fingerprint: of the step and its arguments' signature.
      checked: what the compiler said of it while it was made; None if nothing was compiled.
      traced: the step; None in a plan that was loaded.
      devices: that it was made for, if they were given.
      machine: the hardware.
    """

    mesh_shape: dict[str, int]
    hardware: str
    limit: int
    inputs: tuple[LeafLayout, ...]
    outputs: tuple[LeafLayout, ...]
    state: dict[int, int]
    sharding_constraints: ShardingConstraints = field(repr=False)
    cost: Cost
    axis_work: dict[str, dict[str, float]]
    baselines: dict[str, Cost]
    fingerprint: str
    checked: Measured | None = None
    traced: TracedStep | None = field(default=None, repr=False, compare=False)
    devices: tuple[Any, ...] | None = field(default=None, compare=False)
    machine: Hardware | None = field(default=None, repr=False, compare=False)

    @property
    def mesh(self) -> Any:
        """The mesh: of the devices that were given or that are here; an `AbstractMesh` where there are not enough."""
        if self.devices is not None or jax.device_count() >= math.prod(self.mesh_shape.values()):
            return self._devices_mesh()
        return meshes.abstract_mesh(self.mesh_shape)

    @property
    def shardings(self) -> tuple[Any, ...]:
        """A `NamedSharding` for each leaf, in the form of the arguments: one tree for each of them."""
        return jax.tree_util.tree_unflatten(self._bound().tree, shardings_of(self.inputs, self.mesh))

    @property
    def out_shardings(self) -> Any:
        """The same in the form of what the step returns."""
        return jax.tree_util.tree_unflatten(self._bound().out_tree, shardings_of(self.outputs, self.mesh))

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
        arguments = jax.tree_util.tree_unflatten(tree, shardings_of(self.inputs, self._devices_mesh()))
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
        if refused := _NOT_OF_A_PLAN & set(settings):
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
        return jax.jit(init, out_shardings=self._sharding_like(made, argument))(*args)

    def put(self, tree: Any, *, argument: str | None = None) -> Any:
        """Put an argument of the step, of arrays on host or device, where the plan has it.

        Args:
          tree: the arrays.
          argument: the name of the step's argument, where several have this structure and are laid out otherwise.

        Raises:
          ValueError: no argument has this structure and these shapes; or there are fewer devices than the plan was made for.
        """
        return jax.device_put(tree, self._sharding_like(tree, argument))

    def verify(self, topology: str | None = None) -> Verified:
        """Compile the step as planned, and hold what the compiler says against what was predicted.

        Args:
          topology: of TPUs that need not be here, as "v5e:2x4"; needs `pip install "penstock[tpu]"`. None compiles for the
            devices that are present if they are enough, or else for virtual CPU devices in a process of its own.

        Raises:
          ValueError: the plan was loaded, and is not bound to its step.
          CompileError: it does not compile; or the topology has another number of devices.
        """
        from penstock.shard.verify import verify

        return verify(self, topology)

    def save(self, path: str | Path) -> None:
        """Write it to a file, as JSON."""
        from penstock.shard.serialization import save

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
        from penstock.shard.serialization import load

        plan = load(Path(path))
        if devices is None:
            return plan
        needed = math.prod(plan.mesh_shape.values())
        flat = tuple(np.ravel(devices))
        if len(flat) != needed:
            raise ValueError(f"{path} is for {needed} devices ({meshes.describe_mesh(plan.mesh_shape)}), and {len(flat)} were given")
        return replace(plan, devices=flat)

    def html(self, path: str | Path) -> None:
        """Write it as a page to look at, one file, with the layouts drawn."""
        from penstock.shard.present.html import page

        Path(path).write_text(page(self), encoding="utf-8")

    def __str__(self) -> str:
        from penstock.shard.present.text import report

        return report(self)

    def _jit(self, step: Callable, mesh: Any, **settings: Any) -> Any:
        def planned(*args: Any) -> Any:
            traced = trace(step, args, [leaf.weak for leaf in self.inputs])
            self._match(traced)
            flat = jax.tree_util.tree_leaves(args)
            if self.traced is None:
                flat = list(map(jax.lax.with_sharding_constraint, flat, shardings_of(self.inputs, mesh)))
            made = insert_constraints(traced.closed, self.sharding_constraints, mesh)(*flat)
            if self.traced is None:
                made = list(map(jax.lax.with_sharding_constraint, made, shardings_of(self.outputs, mesh)))
            return jax.tree_util.tree_unflatten(traced.out_tree, made)

        planned.__name__ = planned.__qualname__ = getattr(step, "__name__", "step")
        settings.setdefault("keep_unused", True)  # so that the arguments have the bytes that the plan says
        if self.traced is not None:
            settings["in_shardings"] = jax.tree_util.tree_unflatten(self.traced.tree, shardings_of(self.inputs, mesh))
            settings["out_shardings"] = jax.tree_util.tree_unflatten(self.traced.out_tree, shardings_of(self.outputs, mesh))
        return jax.jit(planned, **settings)

    def _devices_mesh(self) -> Mesh:
        return meshes.concrete_mesh(self.mesh_shape, self.devices)

    def _bound(self) -> TracedStep:
        if self.traced is None:
            raise ValueError(
                "this plan was loaded from a file, which does not have the structure of the step's arguments and results; "
                "plan.bind(step, *args) first, with the step that it was made for and its arguments"
            )
        return self.traced

    def _match(self, traced: TracedStep) -> None:
        if traced.fingerprint() != self.fingerprint:
            raise ValueError(f"the plan is for another step: {describe_difference(self.inputs, self.outputs, traced)}")

    def _sharding_like(self, tree: Any, argument: str | None) -> Any:
        """The shardings of the argument that has this structure and these shapes."""
        flat, structure = jax.tree_util.tree_flatten(tree)
        leaves = [as_array(each) for each in flat]
        paths = leaf_paths(tree)
        arguments: dict[str, list[LeafLayout]] = {}
        for leaf in self.inputs:
            arguments.setdefault(leaf.path.partition("/")[0], []).append(leaf)
        if argument is not None and argument not in arguments:
            raise ValueError(f"the step has no argument {argument!r}; its arguments are {', '.join(map(repr, arguments))}")
        nearest, match_step_meshes = "", -1
        found: dict[str, list[LeafLayout]] = {}
        for name, planned in arguments.items():
            if argument not in (None, name):
                continue
            same = [
                leaf.path.partition("/")[2] == path and leaf.shape == tuple(each.shape) and leaf.dtype == str(canonical_dtype(each))
                for leaf, path, each in zip(planned, paths, leaves, strict=False)
            ]
            if len(planned) == len(leaves) and all(same):
                found[name] = planned
            elif sum(same) > match_step_meshes:
                nearest, match_step_meshes = _first_difference(name, planned, paths, leaves), sum(same)
        if not found:
            raise ValueError(f"no argument of the step has this structure; {nearest}")
        if len({tuple(leaf.stored for leaf in planned) for planned in found.values()}) > 1:
            raise ValueError(
                f"{' and '.join(map(repr, found))} have this structure, and are laid out differently; "
                f"say which it is: argument={next(iter(found))!r}"
            )
        shardings = shardings_of(next(iter(found.values())), self._devices_mesh())
        return jax.tree_util.tree_unflatten(structure, shardings)


def shardings_of(leaves: Sequence[LeafLayout], mesh: Any) -> list[NamedSharding]:
    """Of each leaf, on a mesh."""
    return [NamedSharding(mesh, leaf.partition_spec()) for leaf in leaves]


def _first_difference(name: str, planned: list[LeafLayout], paths: list[str], leaves: list[Any]) -> str:
    for leaf, path, each in zip(planned, paths, leaves, strict=False):
        here = leaf.path.partition("/")[2]
        if here != path:
            return f"the nearest is {name!r}, which has a leaf {here!r} where this has {path!r}"
        if leaf.shape != tuple(each.shape) or leaf.dtype != str(canonical_dtype(each)):
            return (
                f"the nearest is {name!r}, where {here!r} is {leaf.dtype}{list(leaf.shape)}, "
                f"and here it is {canonical_dtype(each)}{list(each.shape)}"
            )
    return f"the nearest is {name!r}, which has {len(planned)} leaves where this has {len(leaves)}"
