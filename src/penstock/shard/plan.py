"""A plan of a step: shardings, the jitted step, sharded state, verification, files and pages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from penstock._jax import checkpoints
from penstock.shard.alternatives import Alternatives
from penstock.shard.arguments import find_arguments, put_copy, select_batch
from penstock.shard.jit import PlannedStep, check_step, refuse_other_arguments
from penstock.shard.mesh import shapes as mesh_shapes
from penstock.shard.mesh.explicit_axes import automatic_axes, to_automatic, to_explicit
from penstock.shard.present.text import plan_line, plan_text
from penstock.shard.record import PlanRecord, named_shardings
from penstock.shard.serialization import load, save
from penstock.shard.trace.modules import Shared, drop_static, mark_static, put_shared_back, take_shared_out, unmark_static
from penstock.shard.trace.step import TracedStep, trace, tree_leaves
from penstock.shard.verify import Verified, compare_results, verify

_DECIDED_BY_PLAN = frozenset(["in_shardings", "out_shardings", "static_argnums", "static_argnames", "donate_argnames"])


@dataclass(frozen=True)
class Plan(PlanRecord):
    """A sharding of all arguments and intermediates of a step, with methods that run the step accordingly.

    Attributes:
      traced: the step; None in a plan that was loaded and is not bound.
      devices: the devices of the mesh, in order, if they were given.
      writers: for each baseline, a function that writes it as a record; None in a plan that was loaded.

    It also has the attributes of `PlanRecord`: `mesh_shape`, `inputs`, `outputs`, `cost`, `baselines`, …

    Examples:
      >>> def init():
      ...     return {"w": jax.numpy.ones((16, 16))}
      >>> def step(params, x):
      ...     value, gradients = jax.value_and_grad(lambda params: ((x @ params["w"]) ** 2).mean())(params)
      ...     return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value
      >>> x = np.ones((8, 16), np.float32)
      >>> mesh = {"data": jax.device_count()}
      >>> plan = ps.plan(step, jax.eval_shape(init), x, mesh=mesh, hardware="tpu-v5e", check=False)
      >>> params = plan.init(init)
      >>> params["w"].sharding == plan.shardings[0]["w"]
      True
      >>> train = plan.jit(step, donate_argnums=0)
      >>> params, loss = train(params, plan.put(x))
      >>> float(loss)
      256.0
    """

    traced: TracedStep | None = field(default=None, repr=False, compare=False)
    devices: tuple[Any, ...] | None = field(default=None, compare=False)
    writers: Mapping[str, Callable[[], PlanRecord]] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def _from_record(
        cls,
        record: PlanRecord,
        traced: TracedStep | None,
        devices: Sequence[Any] | None,
        writers: Mapping[str, Callable[[], PlanRecord]] | None = None,
    ) -> Plan:
        """Return a plan with the data of a record."""
        data = {each.name: getattr(record, each.name) for each in fields(PlanRecord)}
        return cls(**data, traced=traced, devices=None if devices is None else tuple(devices), writers=writers)

    @functools.cached_property
    def alternatives(self) -> Mapping[str, Plan]:
        """Return the baselines as plans, by the names of their rows: "data parallel", "ZeRO-1", "FSDP", "Megatron", ….

        Each can be used in place of this plan. It may be over the memory limit, and its mesh may be another one if the mesh was
        searched.

        Raises:
          ValueError: the plan was loaded; a file has only the costs of the baselines.

        Examples:
          >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
          >>> plan = ps.plan(lambda w, x: (w - (x @ w).mean(), 0.0), x, x, mesh={"data": 2}, hardware="tpu-v5e", check=False)
          >>> tuple(plan.alternatives["data parallel"].shardings[0].spec)
          (None, None)
        """
        if self.writers is None:
            raise ValueError(
                "this plan was loaded from a file, which has only the costs of the baselines; ps.plan(step, *args) makes a plan "
                "that has them as plans"
            )

        def made(write: Callable[[], PlanRecord]) -> Plan:
            return self._from_record(write(), self.traced, self.devices, self.writers)

        return Alternatives({name: functools.partial(made, write) for name, write in self.writers.items()})

    @property
    def mesh(self) -> Any:
        """Return the mesh of the given devices, or of those that are present; an `AbstractMesh` if these are too few."""
        if self.devices is not None or jax.device_count() >= self.device_count:
            return self._devices_mesh()
        return mesh_shapes.abstract_mesh(self.mesh_shape)

    @property
    def shardings(self) -> tuple[Any, ...]:
        """Return a `NamedSharding` for each leaf of the arguments: one tree for each argument, keyword arguments last.

        An Equinox module has None where it has no array, as the result of `eqx.filter(module, eqx.is_array)`.

        Raises:
          ValueError: the plan was loaded, and is not bound to its step.
        """
        return drop_static(jax.tree_util.tree_unflatten(self._bound().tree, named_shardings(self.inputs, self.mesh)))

    @property
    def out_shardings(self) -> Any:
        """Return a `NamedSharding` for each leaf of the results, as a tree like the result of the step.

        Raises:
          ValueError: the plan was loaded, and is not bound to its step.
        """
        structure = self._bound().out_tree
        shardings = named_shardings(self.outputs[: structure.num_leaves], self.mesh)
        return drop_static(jax.tree_util.tree_unflatten(structure, shardings))

    @property
    def batch_shardings(self) -> Any:
        """Return the shardings of the argument that is the batch, or a tuple of them if several are: (state, images, labels).

        An argument is a batch if some of its leaves have that role, and none is a parameter or belongs to the optimizer.
        `ps.feed(batches, to=plan)` puts batches there.

        Raises:
          ValueError: no argument is a batch, there are fewer devices than the plan needs, or the plan was loaded and is not bound
            to its step.
        """
        shardings = named_shardings(self.inputs, self._devices_mesh())
        return select_batch(self.inputs, self._bound().tree, shardings)

    def bind(self, step: Callable, /, *args: Any, **kwargs: Any) -> Plan:
        """Return a loaded plan together with the step that it was made for, so that all its methods work.

        Args:
          step: the step.
          *args, **kwargs: its arguments, as `plan` takes them.

        A step that differs only in numbers written in it, such as a learning rate, is accepted. The logger "penstock.shard" notes
        it at the level INFO.

        Raises:
          ValueError: the plan was made for another step or other arguments; the message says what differs.
        """
        with automatic_axes():
            try:
                with checkpoints(self.rewriting.checkpoints):
                    traced = trace(step, args, [leaf.weak for leaf in self.inputs], kwargs)
            except Exception as error:
                refuse_other_arguments(self, step, args, kwargs, error)
                raise
        check_step(self, traced)
        return replace(self, traced=traced)

    def jit(self, step: Callable, *, donate_argnums: int | tuple[int, ...] = (), **settings: Any) -> PlannedStep:
        """Return the jitted step, with the shardings of the plan: of arguments, results and intermediates.

        Args:
          step: the function that the plan was made for.
          donate_argnums: the arguments to donate, as in `jax.jit`; arguments by keyword only are numbered after the others. The
            predicted memory assumes that the state is donated.
          **settings: other settings of `jax.jit`, `compiler_options` for example. `keep_unused` is True unless it is given.

        Returns:
          A function that is called as the step is, and has `lower`, as the result of `jax.jit`. A call traces the step, as always
          when shapes are new. Flax NNX objects among the arguments have their new values after the call. If such an argument is
          donated, no other object may hold its old arrays. Where `jax.set_mesh` has explicit axes, the results are on its mesh.

        Raises:
          TypeError: a setting of `jax.jit` is one that the plan decides (shardings), or is for names or static arguments. A call
            or `lower` raises it if a leaf of the arguments is not an array.
          ValueError: there are fewer devices than the plan needs. A call or `lower` raises it if the plan was made for another
            step or other arguments.
        """
        if refused := _DECIDED_BY_PLAN & set(settings):
            raise TypeError(
                f"plan.jit takes no {', '.join(sorted(refused))}: the plan lays out all arguments and results, which are "
                "arrays. Fix a layout with constraints= when planning; close over static values; use donate_argnums"
            )
        return PlannedStep(self, self.traced, step, self._devices_mesh(), donate_argnums=donate_argnums, **settings)

    def init(self, init: Callable, *args: Any, argument: str | None = None) -> Any:
        """Run a function that creates arguments of the step, so that each device creates only its shards.

        Args:
          init: a function that `jax.jit` accepts, but for Flax NNX objects and Equinox modules in its result. It returns one
            of the step's arguments, the state for example, or a tuple of some that follow each other: (model, optimizer).
          *args: the arguments of `init`.
          argument: the name of the step's argument, the first one of a tuple, if several have the same structure and different
            layouts.

        Returns:
          The result of `init`, with the shardings of the plan.

        Raises:
          TypeError: a leaf of the result is not an array.
          ValueError: no argument of the step has the structure of the result; the message says what differs from the nearest.
            Or there are fewer devices than the plan needs.
        """
        shared: Shared = ()
        structure: Any = None  # it may contain functions that differ each time, such as an optimizer's

        def create(*args: Any) -> list[Any]:
            nonlocal shared, structure
            created, shared = take_shared_out(mark_static(init(*args)))
            tree_leaves(created)  # raises an error about a leaf that is not an array, before JAX does
            leaves, structure = jax.tree_util.tree_flatten(created)
            return leaves

        with automatic_axes(self._devices_mesh()) as surrounding:
            args = to_automatic(args)
            abstract = jax.eval_shape(create, *args)
            shardings = self._shardings_like(jax.tree_util.tree_unflatten(structure, abstract), argument)
            leaves = jax.jit(create, out_shardings=shardings)(*args)
            created = jax.tree_util.tree_unflatten(structure, leaves)
        return self._restore(created, surrounding, shared)

    def after_placement(self) -> Callable[[Any], Any] | None:
        """Return the function that `ps.feed` applies to each placed batch, so that it is on the mesh on which `put` gives arrays.

        Returns:
          None if the mesh of `jax.set_mesh` in this thread has no explicit axes: the batch stays as it is placed.
        """
        with automatic_axes() as surrounding:
            return None if surrounding is None else functools.partial(to_explicit, mesh=surrounding)

    def put(self, tree: Any, *, argument: str | None = None) -> Any:
        """Put arguments of the step on the devices, with the shardings of the plan.

        The result shares no memory with `tree`, so a step that donates it deletes none of the caller's arrays.

        Args:
          tree: an argument of the step, or a tuple of some that follow each other, as in `init`: arrays on the host or on
            devices. This returns a copy of a Flax NNX object.
          argument: the name of the step's argument, the first one of a tuple, if several have the same structure and different
            layouts.

        Returns:
          The same tree, of sharded arrays.

        Raises:
          TypeError: a leaf of the tree is not an array.
          ValueError: no argument has this structure and these shapes, or there are fewer devices than the plan needs.
        """
        tree, shared = take_shared_out(mark_static(tree))
        leaves, structure = jax.tree_util.tree_flatten(tree)
        with automatic_axes(self._devices_mesh()) as surrounding:
            leaves = put_copy(to_automatic(leaves), self._shardings_like(tree, argument))
            put = jax.tree_util.tree_unflatten(structure, leaves)
        return self._restore(put, surrounding, shared)

    def verify(self, topology: str | None = None, *, baselines: bool = False, arguments: tuple | None = None) -> Verified:
        """Compile the step with the plan, and compare the compiler's figures with the prediction.

        Args:
          topology: devices that need not be present: "v5e:2x4" is a slice of TPUs, "2xv5e:2x4" are two slices, and "h100:4x8" are
            4 hosts of 8 GPUs. It needs `pip install "penstock[tpu]"` or `pip install "penstock[gpu-compiler]"`. None compiles
            for the devices that are present, or for virtual CPU devices in another process if there are too few.
          baselines: whether to compile the baselines (`alternatives`) too, one after the other.
          arguments: all arguments of the step, as `put` takes them, keyword arguments last. The step is run with them on the
            devices of the plan, as it was written and as planned. The result has the largest difference.

        Returns:
          The predicted cost and the compiler's figures; `print` shows them side by side, with the baselines below.

        Raises:
          ValueError: the plan was loaded and is not bound to its step or has no alternatives, there is no such topology, or it
            has another number of devices. As for `put`, if arguments are given.
          CompileError: the step does not compile, or the compiler gave no answer. A baseline that does not compile raises none.
        """
        with automatic_axes():
            verified = verify(self, self.traced, self.devices, topology, self.alternatives if baselines else {})
        if arguments is None:
            return verified
        leaves, mesh = jax.tree_util.tree_leaves(mark_static(self.put(arguments))), self._devices_mesh()
        with automatic_axes(mesh):
            return replace(verified, difference=compare_results(self, self._bound(), mesh, to_automatic(leaves)))

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, as JSON.

        Args:
          path: the file, which is replaced if it exists.

        Examples:
          >>> import tempfile
          >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
          >>> plan = ps.plan(lambda x: x @ x, x, mesh={"data": 2}, hardware="tpu-v5e", check=False)
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     plan.save(f"{folder}/plan.json")
          ...     loaded = ps.Plan.load(f"{folder}/plan.json")
          >>> loaded == plan
          True
        """
        save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path, devices: Any = None) -> Plan:
        """Read a plan that `save` wrote. `jit`, `init` and `put` work at once; `shardings` and `verify` need `bind` first.

        Args:
          path: the file.
          devices: the devices of the mesh in order, as a list or an array (mesh.devices). A file contains none, because they
            differ between processes. None takes the first that are present, in the order that `jax.make_mesh` chooses.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: the file is not a plan, has another version of the format, or needs another number of devices.
        """
        plan = cls._from_record(load(Path(path)), None, None)
        if devices is None:
            return plan
        flat, mesh = tuple(np.ravel(devices)), mesh_shapes.describe_mesh(plan.mesh_shape)
        if len(flat) != plan.device_count:
            raise ValueError(f"{path} is for {plan.device_count} devices ({mesh}), and {len(flat)} were given")
        return replace(plan, devices=flat)

    def html(self, path: str | Path) -> None:
        """Write the plan as an HTML page with drawings of the layouts: one file that needs no network.

        Args:
          path: the file, which is replaced if it exists.
        """
        from penstock.shard.present.page import plan_page

        Path(path).write_text(plan_page(self), encoding="utf-8")

    def code(self) -> str:
        """Return the plan as the source of a Python module that needs JAX and not penstock.

        The module has the mesh, tables of the layouts of arguments and results by path (`jax.tree_util.keystr`), and a table of
        the sharding constraints inside of the step, with the lines of the step in comments. Its `jit_step(step, *args, mesh=None,
        donate_argnums=())` compiles to the program of `plan.jit`, but for names. It raises a `KeyError` for an argument with
        another path, and its result a `ValueError` for a step without the operations that the plan constrains.

        Raises:
          ValueError: the plan was loaded and is not bound to its step, the step takes Flax NNX objects, or the plan changes it
            (`rewriting`).

        Examples:
          >>> w, x = jax.ShapeDtypeStruct((16, 16), "float32"), np.ones((8, 16), np.float32)
          >>> step = lambda w, x: (w - 0.1 * (x.T @ (x @ w)), 0.0)
          >>> plan = ps.plan(step, w, x, mesh={"data": jax.device_count()}, hardware="tpu-v5e", check=False)
          >>> module = {}
          >>> exec(plan.code(), module)
          >>> train = module["jit_step"](step, w, x, donate_argnums=0)
          >>> new, _ = train(jax.numpy.ones((16, 16)), x)
          >>> new.sharding == plan.shardings[0]
          True
        """
        from penstock.shard.present.code import plan_code

        return plan_code(self, self._bound(), self.devices)

    def __str__(self) -> str:
        return plan_text(self)

    def __repr__(self) -> str:
        return f"<Plan: {plan_line(self)}>"

    def _devices_mesh(self) -> Mesh:
        """Return the mesh of devices; raise a `ValueError` if there are too few."""
        return mesh_shapes.concrete_mesh(self.mesh_shape, self.devices)

    def _bound(self) -> TracedStep:
        """Return the step; raise a `ValueError` if the plan has none."""
        if self.traced is None:
            raise ValueError(
                "this plan was loaded from a file, which does not have the structure of the step's arguments and results; "
                "plan.bind(step, *args) first, with the step that it was made for and its arguments"
            )
        return self.traced

    def _shardings_like(self, tree: Any, argument: str | None) -> list[Any]:
        """Return the shardings of the leaves of the arguments that have the structure and shapes of a tree."""
        return list(named_shardings(find_arguments(self.inputs, tree, argument), self._devices_mesh()))

    @staticmethod
    def _restore(tree: Any, surrounding: Mesh | None, shared: Shared) -> Any:
        """Return a tree with its shared and static parts, on the surrounding mesh if it has explicit axes."""
        return unmark_static(put_shared_back(tree if surrounding is None else to_explicit(tree, surrounding), shared))
