"""A distribution of Keras that trains a model on all devices by a plan: `AutoShardDistribution`.

Every variable, batch and intermediate lies where a plan of the model's own training step puts it. Keras asks for the layout of a
variable when it creates it, and the step to plan is known only when `fit` has a batch. Therefore variables are created in a
provisional layout, sharded over all devices (variables.py). The step is planned for the first batch (planned_function.py), and
the variables are brought into the layouts of the plan, one after the other. `AutoShardDistribution.plan` makes the plan from
shapes before, and variables are then created in its layouts.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import jax
import keras
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from keras.src.backend.config import is_nnx_enabled
from keras.src.distribution import distribution_lib
from keras.src.distribution.distribution_lib import DEFAULT_BATCH_DIM_NAME, DeviceMesh, Distribution, LayoutMap

from penstock._arguments import brief
from penstock._bytes import parse_bytes
from penstock.errors import FirstProcessError, PlanError
from penstock.keras.hooks import install
from penstock.keras.model_step import (
    ModelStep,
    StepArguments,
    abstract_batch,
    build_from_shapes,
    complete,
    explained,
    without_number,
)
from penstock.keras.planned_function import Layouts, PlannedFunction
from penstock.keras.variables import PlannedLayout, ProvisionalLayouts, keras_mesh, planned_layout, put, rows_layout
from penstock.shard import Hardware, Plan
from penstock.shard.apply.sharding_constraints import ShardingConstraints, insert_constraints
from penstock.shard.compiler import read_check
from penstock.shard.mesh.explicit_axes import automatic_axes
from penstock.shard.mesh.hardware import find_hardware
from penstock.shard.mesh.shapes import refuse_repeated
from penstock.shard.planning import Options, plan_traced, without_collection
from penstock.shard.record import named_shardings
from penstock.shard.remarks import nearest_sizes
from penstock.shard.serialization import from_json, to_json
from penstock.shard.trace.fingerprint import describe_difference
from penstock.shard.trace.step import TracedStep, trace
from penstock.train.agreement import decide

_TRAIN = "train"
_MAPPED = ("trainable", "non_trainable")  # the groups of variables for which a layout map has layouts
_MOST_SHOWN = 3  # keys of a layout map in a warning


class AutoShardDistribution(Distribution):  # type: ignore[misc]  # Keras has no types
    """A distribution of Keras that plans how each model is sharded over the devices.

    Use it as `keras.distribution.DataParallel`: in a `with distribution.scope():`, or with `keras.distribution.set_distribution`.
    No layout map is needed. `fit`, `evaluate`, `predict` and the `*_on_batch` methods plan for the first batch of each shape.

    Args:
      device_mesh: a `keras.distribution.DeviceMesh` or a `jax.sharding.Mesh`, whose shape is kept. None searches the shape too.
      devices: devices of JAX, or names that Keras gives them ("cpu:0"); all if there is no mesh either.
      hardware, memory, check: as in `penstock.plan`: the hardware, the memory limit of a device, and the compiler that decides
        whether a plan fits.
      layout_map: a `keras.distribution.LayoutMap` of layouts to keep. The plan chooses the layouts of all other variables. Its
        mesh is the `device_mesh`, if that is not given. A key that matches no variable when a function is planned is a warning.
      auto_shard_dataset: as in Keras's own distributions.

    Attributes:
      plans: the last plan of each function: "train", "evaluate", "predict".
      planning_seconds: the time spent on planning, with tracing. Functions that were planned before add nothing.

    Raises:
      TypeError, ValueError: an argument has a wrong type or value.
      RuntimeError: Keras runs on NNX variables.

    Examples:
      >>> import os; os.environ["KERAS_BACKEND"] = "jax"
      >>> import keras, numpy as np, penstock.keras as pk
      >>> distribution = pk.AutoShardDistribution()
      >>> with distribution.scope():
      ...     model = keras.Sequential([keras.layers.Dense(64, activation="relu"), keras.layers.Dense(8)])
      ...     model.compile("adam", "mse")
      ...     history = model.fit(np.ones((64, 32)), np.ones((64, 8)), verbose=0)
      >>> sorted(distribution.plans)
      ['train']
    """

    def __init__(
        self,
        device_mesh: Any = None,
        devices: Sequence[Any] | None = None,
        hardware: str | Hardware | None = None,
        memory: int | str | None = None,
        *,
        layout_map: Any = None,
        check: bool | str | None = None,
        auto_shard_dataset: bool = True,
    ):
        if is_nnx_enabled():
            raise RuntimeError(
                "Keras was started with KERAS_NNX_ENABLED, whose variables create their values whole on one device; start it "
                "without, or plan the NNX module itself: ps.plan(step, model, optimizer, batch)"
            )
        install(AutoShardDistribution)
        if layout_map is not None:
            if not isinstance(layout_map, LayoutMap):
                raise TypeError(
                    f"layout_map is of type {type(layout_map).__name__}, and a keras.distribution.LayoutMap is needed"
                )
            device_mesh = layout_map.device_mesh if device_mesh is None else device_mesh
        mesh = read_mesh(device_mesh)
        if mesh is not None and devices is not None:
            raise ValueError("device_mesh has devices of its own: give either device_mesh or devices")
        self._given_mesh = mesh
        self._given_devices = None if devices is None else read_devices(devices)
        if hardware is not None:
            find_hardware(hardware)  # it raises an error now rather than at the first batch
        if memory is not None:
            parse_bytes(memory)
        read_check(check)
        self._options: dict[str, Any] = {"hardware": hardware, "memory": memory, "check": check}
        self._layout_map = layout_map
        self._paths: set[str] = set()  # of the variables made so far
        self._warned: set[str] = set()  # keys of the layout map
        self._known = KnownPlans()
        self._ahead: dict[str, tuple[tuple[int, ...], PlannedLayout]] = {}
        self._mesh: Mesh | None = mesh
        self.plans: dict[str, Plan] = {}
        self.planning_seconds = 0.0
        order = self._device_order()
        first = keras_mesh(mesh) if mesh is not None else DeviceMesh((len(order),), [DEFAULT_BATCH_DIM_NAME], order)
        self._provisional = ProvisionalLayouts(order)
        super().__init__(first, DEFAULT_BATCH_DIM_NAME, auto_shard_dataset)

    @property
    def num_model_replicas(self) -> int:
        """Return the number of shards of a batch: each device has rows of its own where they divide."""
        return int(self.device_mesh.devices.size)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Make this the distribution of Keras inside of a `with` block.

        Raises:
          RuntimeError: another distribution is active.
        """
        self._refuse_another()
        with super().scope():
            yield

    def plan(self, build: Callable[[], Any], sample_batch: Any = None) -> Plan:
        """Plan for a model before it exists. Nothing is allocated. A model that the same function makes is created in shards.

        Args:
          build: a function without arguments that returns the model, compiled. One that is not compiled is planned for `predict`.
          sample_batch: one batch as `fit` gets it: (x, y), (x, y, sample_weight), or x where the loss needs no y. Arrays, or
            anything with a shape and a dtype.

        Returns:
          The `penstock.Plan`.

        Raises:
          PlanError: the model does not fit the devices; the message has the paths of the largest variables.
          RuntimeError: another distribution is active.
          TypeError, ValueError: there is no batch, it does not fit the model, or the model cannot be built from shapes.
        """
        self._refuse_another()
        build, sample = read_build(build), read_batch(sample_batch, "plan(build, (x, y))")
        with self.scope():
            model = build_from_shapes(build, sample)
            step = ModelStep(model, _TRAIN if model.compiled else "predict")
            arguments = step.arguments(sample)
            self._check_rows(step, arguments)
            plan, _ = self._find_plan(step, arguments)
            shardings = iter(named_shardings(plan.inputs, plan.mesh))
            mesh = keras_mesh(plan.mesh)
            found: dict[str, list[tuple[tuple[int, ...], PlannedLayout]]] = {}
            for variable in step.all_variables():
                layout = planned_layout(next(shardings), mesh, len(variable.shape), None)
                found.setdefault(variable.path, []).append((tuple(variable.shape), layout))
        self._ahead |= {path: layouts[0] for path, layouts in found.items() if len(layouts) == 1}
        return plan

    def shard(self, model: Any, sample_batch: Any = None) -> Plan:
        """Plan for a model that exists, and bring its variables into the layouts of the plan, one after the other.

        Args:
          model: the model. If it is compiled, its training step is planned, and otherwise `predict`. Layers that are not built
            are built.
          sample_batch: as for `plan`.

        Returns:
          The `penstock.Plan`. Train inside of `scope()`, where it is used.

        Raises:
          PlanError, RuntimeError, TypeError, ValueError: as for `plan`.
        """
        self._refuse_another()
        check_model(model)
        sample = read_batch(sample_batch, "shard(model, (x, y))")
        with self.scope():
            complete(model, sample)
            function = _TRAIN if model.compiled else "predict"
            layouts = PlannedFunction(self, model, function).prepare(sample)
            for variable, sharding in zip(ModelStep(model, function).all_variables(), layouts.state, strict=True):
                variable._value = jax.block_until_ready(put(variable._value, None, sharding))
        return self.plans[function]

    def explain(self, print_fn: Callable[[str], Any] | None = None) -> None:
        """Print the plan of the training step, by the paths of Keras's variables; without one, the last plan of another function.

        Args:
          print_fn: is called with the text; None prints it.

        Raises:
          ValueError: nothing is planned yet.
        """
        (print_fn or print)(str(self._latest()))

    def layout_map(self) -> LayoutMap:
        """Return the layouts of all variables of the model as a `LayoutMap` of Keras, on the mesh of the plan.

        Keras's own `ModelParallel` takes it. It gives an optimizer's variables the layouts of the model's, and shards the batch
        over one axis of the mesh. `AutoShardDistribution(layout_map=...)` keeps its layouts and plans the rest.

        Raises:
          ValueError: nothing is planned yet.
        """
        plan = self._latest()
        layout_map = LayoutMap(keras_mesh(plan.mesh))
        for leaf, sharding in zip(plan.inputs, named_shardings(plan.inputs, plan.mesh), strict=True):
            group, _, name = leaf.path.partition("/")
            if group not in _MAPPED:
                continue
            layout, path = planned_layout(sharding, layout_map.device_mesh, len(leaf.shape), None), without_number(name)
            first = None if path == name else layout_map[path]
            if first is None:
                layout_map[name] = layout
            elif first.axes != layout.axes:
                warnings.warn(
                    f"several variables have the path {path!r}, with different layouts; the LayoutMap has the first one. "
                    "Give their layers different names",
                    stacklevel=2,
                )
        return layout_map

    def get_data_layout(self, data_shape: Sequence[int]) -> Any:
        """Return the layout of a leaf of a batch: its rows are sharded over as many devices as divide them."""
        return rows_layout(data_shape, self._device_order())

    def get_variable_layout(self, variable: Any) -> Any:
        """Return the layout of a variable: the one that it has, or of a plan made before, or a provisional one."""
        if getattr(variable, "_layout", None) is not None:
            return variable._layout
        self._paths.add(variable.path)
        shape = tuple(variable.shape)
        planned, layout = self._ahead.get(variable.path, (None, None))
        return layout if planned == shape else self._provisional.of(shape)

    def get_tensor_layout(self, path: str) -> None:
        """Return None: the plan has the layouts of intermediates, and not by the paths of layers."""

    def _plan_step(self, step: ModelStep, arguments: StepArguments, keep: bool = False) -> Layouts:
        """Plan for a function of a model and a batch, and give the variables the layouts of the plan.

        With `keep`, the layouts stay that an earlier plan of the same training step has chosen.
        """
        self._check_rows(step, arguments)
        if step.function != _TRAIN and arguments.rows % len(self._device_order()):
            return self._leave_to_compiler(step, arguments)
        plan, traced = self._find_plan(step, arguments, keep)
        self._set_plan(step, plan)
        count = traced.out_tree.children()[0].num_leaves
        inputs, outputs = (named_shardings(leaves, plan.mesh) for leaves in (plan.inputs, plan.outputs[:count]))
        return _layouts(arguments, traced, inputs, outputs, plan.sharding_constraints, True)

    def _leave_to_compiler(self, step: ModelStep, arguments: StepArguments) -> Layouts:
        """Return the layouts for a batch that is not planned for, as the last of an epoch. The compiler chooses inner ones."""
        with automatic_axes():
            traced = _trace(step, arguments)
        shardings: list[NamedSharding] = []
        for variable in step.all_variables():
            variable._layout = self.get_variable_layout(variable)
            shardings.append(variable._layout.backend_layout)
        rows, devices = arguments.rows, self._device_order()
        shardings += [rows_layout(leaf.shape, devices).backend_layout for leaf in jax.tree_util.tree_leaves(arguments.data)]
        outputs = [
            rows_layout(leaf.shape if leaf.shape[:1] == (rows,) else (), devices).backend_layout
            for leaf in traced.outputs[: traced.out_tree.children()[0].num_leaves]
        ]
        return _layouts(arguments, traced, shardings, outputs, ShardingConstraints(), False)

    def _check_rows(self, step: ModelStep, arguments: StepArguments) -> None:
        """Raise ValueError if a batch to train with, the first of its model, does not divide over the devices."""
        if step.function == _TRAIN and self._is_uneven(arguments):
            rows, devices = arguments.rows, len(self._device_order())
            raise ValueError(
                f"the batch has {rows} rows, which do not divide over the {devices} devices: take a batch size of "
                f"{' or '.join(nearest_sizes(rows, devices))}. Only the last batch of several may have any size; if these are "
                "all the rows there are, add some or leave some out"
            )

    def _is_uneven(self, arguments: StepArguments) -> bool:
        """Return whether neither the rows of a batch divide over the devices, nor the devices over the rows."""
        rows, devices = arguments.rows, len(self._device_order())
        return bool(rows and rows % devices and devices % rows)

    def _find_plan(self, step: ModelStep, arguments: StepArguments, keep: bool = False) -> tuple[Plan, TracedStep]:
        """Return the plan for a function of a model, and the step that was traced for it. An equal step has been planned once."""
        self._warn_of_unused_layouts(step)
        kept, kept_on = self._kept_layouts(step, keep)
        begin = time.perf_counter()
        with automatic_axes():
            traced = _trace(step, arguments)
            fingerprint = traced.fingerprint()
            plan = self._known.find(fingerprint, kept, kept_on)
            if plan is None:
                mesh = self._given_mesh or kept_on
                devices = self._given_devices if mesh is None else None
                options = Options(mesh, devices, constraints=kept, roles=step.roles(arguments), **self._options)
                make = functools.partial(plan_traced, traced, options)
                try:
                    plan = plan_together(make, traced, devices if mesh is None else list(mesh.devices.flat))
                except (TypeError, ValueError) as error:
                    if self._layout_map is not None:
                        error.add_note(
                            "The layouts of the layout_map are constraints of the plan, by the paths of the variables."
                        )
                    raise
                self._known.add(fingerprint, kept, plan)
                self.planning_seconds += time.perf_counter() - begin
        self.plans[step.function] = plan
        return plan, traced

    def _kept_layouts(self, step: ModelStep, keep: bool) -> tuple[dict[str, PartitionSpec], Mesh | None]:
        """Return the layouts that a plan must keep, by the path of the leaf, and the mesh of other plans; None if there are none.

        They come from the user's map, and from plans of other training steps; with `keep`, also from one of the same step.
        """
        kept: dict[str, PartitionSpec] = {}
        mesh: Mesh | None = None
        names = step.names()
        for group, variables in step.variables().items():
            for path, variable in zip(names[group], variables, strict=True):
                layout = variable._layout
                owner = layout.owner if isinstance(layout, PlannedLayout) else None
                if owner is not None and (keep or not (owner is step.model and step.function == _TRAIN)):
                    kept[f"{group}/{path}"] = layout.backend_layout.spec
                    mesh = mesh or layout.backend_layout.mesh
                elif self._layout_map is not None and group in _MAPPED:
                    chosen = self._layout_map[variable.path]
                    if chosen is not None:
                        kept[f"{group}/{path}"] = PartitionSpec(*chosen.axes)
        return kept, mesh

    def _warn_of_unused_layouts(self, step: ModelStep) -> None:
        """Warn once of each key of the layout map that matches no variable of this model, nor of another one made so far.

        It is no error, because the key may be meant for a model that is made later.
        """
        if self._layout_map is None:
            return
        for group, variables in step.variables().items():
            paths = {variable.path for variable in variables}
            # The map has no say over the variables of optimizers and metrics.
            self._paths = self._paths | paths if group in _MAPPED else self._paths - paths
        unused = [key for key in self._layout_map if key not in self._warned and not _matches(key, self._paths)]
        self._warned.update(unused)
        if unused:
            shown = [f"{key!r} (the nearest are {_nearest(key, self._paths)})" for key in unused[:_MOST_SHOWN]]
            shown += [f"{len(unused) - _MOST_SHOWN} more"] * (len(unused) > _MOST_SHOWN)
            warnings.warn(
                f"layout_map has keys that match no variable so far, and their layouts are not used: {', '.join(shown)}. Keras "
                "compares a key, as a regular expression, with the whole path of a variable: '.*up/kernel' matches "
                "'sequential/up/kernel', and 'up/kernel' does not",
                stacklevel=2,
            )

    def _set_plan(self, step: ModelStep, plan: Plan) -> None:
        """Give the variables of a model the layouts of a plan."""
        self._mesh, mesh = plan.mesh, keras_mesh(plan.mesh)
        self._device_mesh = mesh
        owner = step.model if step.function == _TRAIN else None
        shardings = iter(named_shardings(plan.inputs, plan.mesh))
        for variable in step.all_variables():
            sharding, layout = next(shardings), variable._layout
            if not (isinstance(layout, PlannedLayout) and layout.owner is not None and layout.owner is not owner):
                variable._layout = planned_layout(sharding, mesh, len(variable.shape), owner)

    def _device_order(self) -> list[Any]:
        """Return the devices in the order of the mesh."""
        if self._mesh is not None:
            return list(self._mesh.devices.flat)
        return self._given_devices if self._given_devices is not None else jax.devices()

    def _latest(self) -> Plan:
        if not self.plans:
            raise ValueError(
                "nothing is planned yet: train a model in the scope of this distribution, or call plan(build, sample_batch) or "
                "shard(model, sample_batch)"
            )
        return self.plans.get(_TRAIN) or list(self.plans.values())[-1]

    def _refuse_another(self) -> None:
        """Raise RuntimeError if another distribution is active."""
        active = distribution_lib.distribution()
        if active is not None and active is not self:
            raise RuntimeError(
                f"a {type(active).__name__} is active already, and variables can follow only one distribution: leave its scope, "
                "or keras.distribution.set_distribution(None), before"
            )


def _matches(key: str, paths: Set[str]) -> bool:
    """Return whether Keras finds a key of a layout map for one of the paths; raise ValueError if it is no pattern."""
    try:
        return key in paths or any(map(re.compile(key).fullmatch, paths))
    except re.error as error:
        raise ValueError(
            f"layout_map[{key!r}]: is no regular expression ({error}), as which Keras matches it with the whole path of a "
            "variable: write '.*' where a shell has '*'"
        ) from error


def _nearest(key: str, paths: Set[str]) -> str:
    ordered = sorted(paths)
    return ", ".join(map(repr, difflib.get_close_matches(key, ordered, n=3, cutoff=0.3) or ordered[:3]))


def _trace(step: ModelStep, arguments: StepArguments) -> TracedStep:
    """Trace a function of a model, inside of `automatic_axes`."""
    with without_collection(), explained(step):
        return trace(step.step(), (*arguments.state, arguments.data))


def _layouts(
    arguments: StepArguments,
    traced: TracedStep,
    inputs: Sequence[NamedSharding],
    outputs: Sequence[NamedSharding],
    constraints: ShardingConstraints,
    planned: bool,
) -> Layouts:
    count = sum(len(group.values) for group in arguments.state)
    return Layouts(
        state=tuple(inputs[:count]),
        data=tuple(inputs[count:]),
        outputs=tuple(outputs),
        run=insert_constraints(traced.closed, constraints, inputs[0].mesh),
        logs=traced.out_tree.children()[0],
        planned=planned,
    )


# Plans.


_MOST_PLANS = 64


class KnownPlans:
    """The plans that were made last."""

    def __init__(self) -> None:
        self._plans: dict[tuple[str, frozenset[tuple[str, str]]], Plan] = {}

    def find(self, fingerprint: str, kept: Mapping[str, PartitionSpec], mesh: Mesh | None) -> Plan | None:
        """Return a plan for an equal step that has the layouts to keep; None if there is none.

        A plan that had to keep fewer layouts, and has the others too, is as good as one that had to keep all. An example is the
        plan of `fit` for `train_on_batch` afterwards.

        Args:
          kept: the layouts to keep, by the path of the leaf.
          mesh: the mesh of these layouts; None for any.
        """
        entries = _entries(kept)
        for (other, free), plan in self._plans.items():
            if other == fingerprint and free <= entries and mesh in (None, plan.mesh) and _has(plan, kept):
                return plan
        return None

    def add(self, fingerprint: str, kept: Mapping[str, PartitionSpec], plan: Plan) -> None:
        """Remember a plan, and forget the oldest if there are too many."""
        if len(self._plans) >= _MOST_PLANS:
            del self._plans[next(iter(self._plans))]
        self._plans[fingerprint, _entries(kept)] = plan


def _entries(kept: Mapping[str, PartitionSpec]) -> frozenset[tuple[str, str]]:
    return frozenset((path, str(spec)) for path, spec in kept.items())


def _has(plan: Plan, kept: Mapping[str, PartitionSpec]) -> bool:
    """Return whether the arguments of a plan have these layouts."""
    return all(
        sharding.is_equivalent_to(NamedSharding(plan.mesh, kept[leaf.path]), len(leaf.shape))
        for leaf, sharding in zip(plan.inputs, named_shardings(plan.inputs, plan.mesh), strict=True)
        if leaf.path in kept
    )


_calls = itertools.count()


def plan_together(make: Callable[[], Plan], traced: TracedStep, devices: Any) -> Plan:
    """Return a plan that is the same in all processes. All of them call this for the same steps in the same order.

    Args:
      make: makes the plan. Only process 0 calls it.
      devices: the given devices, in order, or None.

    Raises:
      PlanError: in all processes, if process 0 found no plan.
      RuntimeError: in the others, if process 0 raised another error, or if they run another step.
    """
    if jax.process_count() == 1:
        return make()
    made: list[Plan] = []

    def text() -> str:
        made.append(make())
        return to_json(made[0])

    try:
        received = decide(text, f"plan/{next(_calls)}")
    except FirstProcessError as error:
        if error.kind == PlanError.__name__:
            raise PlanError(error.reason) from None
        raise
    if made:
        return made[0]
    record = from_json(received, "the plan of process 0")
    if record.fingerprint != traced.fingerprint():
        difference = describe_difference(record.inputs, record.outputs, traced.inputs, traced.outputs)
        raise RuntimeError(f"process {jax.process_index()} runs another step than process 0: {difference}")
    return Plan._from_record(record, traced, devices)


# Arguments of `AutoShardDistribution`.


def read_mesh(given: Any) -> Mesh | None:
    """Return a mesh of JAX for a mesh of Keras or of JAX; None for None. Anything else is a TypeError."""
    if given is None or isinstance(given, Mesh):
        return given
    if isinstance(given, DeviceMesh):
        return given.backend_mesh
    raise TypeError(
        f"device_mesh is of type {type(given).__name__}, and a keras.distribution.DeviceMesh or a jax.sharding.Mesh is needed"
    )


def read_devices(given: Sequence[Any]) -> list[Any]:
    """Return the devices of JAX for a list of them, or of the names that Keras gives them.

    Raises:
      TypeError: it is not such a list.
      ValueError: it is empty, has a device twice, or a device does not exist.
    """
    ordered = not isinstance(given, (str, dict, set, frozenset)) and hasattr(given, "__iter__")
    named = list(given) if ordered else []
    if not ordered or not all(isinstance(each, (str, jax.Device)) for each in named):
        raise TypeError(f'devices={brief(given)} is not a list of devices, such as jax.devices() or ["cpu:0", "cpu:1"]')
    if not named:
        raise ValueError("devices is empty; a plan needs at least one device")
    found = [_find_device(each) if isinstance(each, str) else each for each in named]
    refuse_repeated(found)
    return found


def _find_device(name: str) -> jax.Device:
    """Return the device that Keras calls "cpu:0"."""
    platform, _, number = name.partition(":")
    try:
        devices = jax.devices(platform)
    except RuntimeError:
        devices = []
    for device in devices:
        if number == str(device.id):
            return device
    there = [f"{device.platform}:{device.id}" for device in devices or jax.devices()]
    raise ValueError(f"there is no device {name!r}; there are {brief(there)}")


def read_build(given: Any) -> Callable[[], Any]:
    """Return a function that makes a model. Anything else, such as the model, is a TypeError."""
    if isinstance(given, keras.Model):
        raise TypeError("build is a model, and a function that returns one is needed; for a model: shard(model, (x, y))")
    if not callable(given):
        raise TypeError(f"build={brief(given)} is not a function that returns a model")
    return given


def check_model(given: Any) -> None:
    """Raise TypeError for anything but a Keras model."""
    if not isinstance(given, keras.Model):
        also = "; for a function that makes one: plan(build, (x, y))" if callable(given) else ""
        raise TypeError(f"model is of type {type(given).__name__}, and a keras.Model is needed{also}")


def read_batch(given: Any, usage: str) -> Any:
    """Return the shapes and dtypes of a batch. `usage` is the call with a batch, for the message.

    Raises:
      ValueError: there is none, it has no rows, or a dimension is unknown.
      TypeError: a leaf is not an array.
    """
    if given is None:
        raise ValueError(
            "the shapes of the layers and the cost of a step depend on the data, and there is no sample: give one batch as fit "
            f"gets it, {usage}. Shapes are enough, such as jax.ShapeDtypeStruct((32, 128), 'int32')"
        )
    batch = abstract_batch(given)
    for leaf in jax.tree_util.tree_leaves(batch):
        if leaf.shape[:1] == (0,):
            raise ValueError(
                f"the sample has no rows, but an array of shape {leaf.shape}: give one batch as fit gets it, {usage}"
            )
    return batch
