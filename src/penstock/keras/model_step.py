"""The function that Keras's trainer runs for one batch, as a step of named arrays that `ps.plan` can plan: `ModelStep`.

A step maps (trainable, non_trainable, optimizer, metrics, data) to (logs, new state). Its leaves have the paths of Keras's
variables: "trainable/encoder/dense/kernel". `explained` adds to an error from tracing it the reason why JAX cannot trace a layer.

`build_from_shapes` runs a function that makes a model as JAX traces one, so that initializers and all other operations allocate
nothing. Afterwards, the counters of Keras's names and the generators of seeds are as they were, so that the same function makes
the same model again, with values.
"""

from __future__ import annotations

import contextlib
import copy
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import keras
import numpy as np
from keras.src import tree
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight

from penstock.shard.trace.step import canonical_dtype, leaf_paths

_GROUPS = {
    "train": ("trainable", "non_trainable", "optimizer", "metrics"),
    "evaluate": ("trainable", "non_trainable", "metrics"),
    "predict": ("trainable", "non_trainable"),
}
_METHODS = {"train": "train_step", "evaluate": "test_step", "predict": "predict_step"}
_ROLES = {"trainable": "parameters", "optimizer": "optimizer"}


class ModelStep:
    """One function of a model, as a step of named arrays.

    Args:
      model: the model, built, and compiled unless the function is "predict".
      function: "train", "evaluate" or "predict".
    """

    def __init__(self, model: Any, function: str):
        self.model, self.function = model, function
        self.groups = _GROUPS[function]

    def variables(self) -> dict[str, list[Any]]:
        """Return the variables of each group, in Keras's order."""
        model = self.model
        optimizer = getattr(model, "optimizer", None)
        every: dict[str, list[Any]] = {
            "trainable": model.trainable_variables,
            "non_trainable": model.non_trainable_variables,
            "optimizer": [] if optimizer is None else optimizer.variables,
            "metrics": model.metrics_variables,
        }
        return {group: every[group] for group in self.groups}

    def all_variables(self) -> list[Any]:
        """Return the variables of all groups, in the order of the leaves of the step's state."""
        return [variable for group in self.variables().values() for variable in group]

    def names(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the variables of each group: their paths. An optimizer's variables are named after the model's.

        The momentum of "dense/kernel" is "momentum/dense/kernel"; Keras calls it "adam/dense_kernel_momentum".
        """
        variables = self.variables()
        owners = {path.replace("/", "_"): path for path in _unique(each.path for each in variables["trainable"])}
        return {
            group: _unique(_optimizer_name(each, owners) if group == "optimizer" else each.path for each in members)
            for group, members in variables.items()
        }

    def arguments(self, data: Any) -> StepArguments:
        """Return the abstract arguments for a batch: a pytree of arrays, or of anything with a shape and a dtype."""
        names = self.names()
        state = tuple(
            Named(names[group], [jax.ShapeDtypeStruct(each.shape, each._dtype) for each in variables])
            for group, variables in self.variables().items()
        )
        return StepArguments(state, abstract_batch(data))

    def roles(self, arguments: StepArguments) -> dict[str, str]:
        """Return the roles of the leaves for `ps.plan`, by pattern."""
        sizes = {group: len(each.values) for group, each in zip(self.groups, arguments.state, strict=True)}
        roles = {f"{group}/*": role for group, role in _ROLES.items() if sizes.get(group)}
        return roles | {f"data/{path}" if path else "data": "batch" for path in leaf_paths(arguments.data)}

    def step(self) -> Any:
        """Return the step, from the groups by name to the logs, or the outputs of "predict", and the groups in their order."""

        def run(state: tuple[Named, ...], data: Any) -> tuple[Any, tuple[Named, ...]]:
            method = getattr(self.model, _METHODS[self.function])
            given = tuple(list(group.values) for group in state)
            if self.function == "predict":
                outputs, non_trainable = method(given, data)
                new = (given[0], non_trainable)
            else:
                outputs, new = method(given, data)
            return outputs, tuple(Named(old.names, list(each)) for old, each in zip(state, new, strict=True))

        return _STEPS[self.function](run)


def _train(run: Any) -> Any:
    def train_step(trainable: Named, non_trainable: Named, optimizer: Named, metrics: Named, data: Any) -> Any:
        return run((trainable, non_trainable, optimizer, metrics), data)

    return train_step


def _evaluate(run: Any) -> Any:
    def test_step(trainable: Named, non_trainable: Named, metrics: Named, data: Any) -> Any:
        return run((trainable, non_trainable, metrics), data)

    return test_step


def _predict(run: Any) -> Any:
    def predict_step(trainable: Named, non_trainable: Named, data: Any) -> Any:
        return run((trainable, non_trainable), data)

    return predict_step


_STEPS = {"train": _train, "evaluate": _evaluate, "predict": _predict}  # the planner names leaves after the arguments


def _unique(paths: Iterable[str]) -> tuple[str, ...]:
    """Return paths, each once. Where several variables have one path, all but the first get a number: "dense/kernel (2)"."""
    seen: Counter[str] = Counter()
    unique = []
    for path in paths:
        seen[path] += 1
        unique.append(path if seen[path] == 1 else f"{path} ({seen[path]})")
    return tuple(unique)


def without_number(name: str) -> str:
    """Return the path of a variable whose name may have got a number: "dense/kernel" for "dense/kernel (2)"."""
    return re.sub(r" \(\d+\)$", "", name)


def _optimizer_name(variable: Any, owners: Mapping[str, str]) -> str:
    """Return the name of an optimizer's variable, without the optimizer's own name, which differs each time it is made.

    Args:
      variable: its name begins with the path of the model's variable that it belongs to, with "_" for "/".
      owners: the paths of the model's variables, by these beginnings.
    """
    head, _, kind = variable.name.rpartition("_")
    while head:
        if head in owners:
            return f"{kind}/{owners[head]}"
        head, _, more = head.rpartition("_")
        kind = f"{more}_{kind}"
    return str(variable.name)


class StepArguments(NamedTuple):
    """The abstract arguments of a step: the shapes and dtypes of each group of variables, and of a batch."""

    state: tuple[Named, ...]
    data: Any

    @property
    def rows(self) -> int:
        """Return the number of rows of the batch: the first dimension of most of its leaves; 0 if it has none."""
        sizes = Counter(leaf.shape[0] for leaf in jax.tree_util.tree_leaves(self.data) if leaf.shape)
        return max(sizes, key=sizes.__getitem__, default=0)


@jax.tree_util.register_pytree_with_keys_class
class Named:
    """A list of arrays with names, all different, in the order of Keras's variables."""

    def __init__(self, names: tuple[str, ...], values: Sequence[Any]):
        self.names, self.values = names, values

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        return [(jax.tree_util.DictKey(name), value) for name, value in zip(self.names, self.values, strict=True)], self.names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: Iterable[Any]) -> Named:
        return cls(names, list(values))


def abstract_batch(data: Any) -> Any:
    """Return the shapes and dtypes of a batch, as Keras passes it to JAX.

    Raises:
      TypeError: a leaf has no shape or no dtype.
      ValueError: a dimension is unknown.
    """
    return jax.tree_util.tree_map(_abstract, data)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise TypeError(f"a batch has a leaf of type {type(leaf).__name__}, and arrays are needed, or their shapes and dtypes")
    if None in tuple(leaf.shape):
        raise ValueError(f"a batch has a leaf of shape {tuple(leaf.shape)}: replace None by a number, such as the batch size")
    return jax.ShapeDtypeStruct(tuple(leaf.shape), canonical_dtype(leaf))


NEED_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
)


@contextlib.contextmanager
def explained(step: ModelStep) -> Iterator[None]:
    """Add to an error from tracing a step its meaning for the user.

    Raises:
      TypeError: instead of an error of JAX about a value that a layer keeps or needs.
    """
    name, function = step.model.name, step.function
    try:
        yield
    except Exception as error:
        found = list(_causes(error))
        if any(isinstance(each, jax.errors.UnexpectedTracerError) for each in found):
            raise TypeError(
                f"a layer of {name!r} keeps a tensor from one call and uses it in another, which JAX cannot trace: return the "
                "tensor, or keep it in a variable made with self.add_weight(..., trainable=False) and assign it"
            ) from error
        if any(isinstance(each, NEED_VALUES) for each in found):
            raise TypeError(
                f"a layer of {name!r} needs the values of a tensor in Python, with float(), if, or NumPy, which JAX cannot "
                "trace: use keras.ops instead (keras.ops.cond for an if)"
            ) from error
        error.add_note(
            f"This happened while the function {function!r} of the model {name!r} was traced or compiled. If the model was "
            "changed after it was compiled (layers added, LoRA enabled, other layers trainable), compile it again."
        )
        raise


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes. Keras fails to add its own words to some errors of JAX, and raises another."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


_NAMES = "object_name_uids"  # the attribute of Keras's global state that counts the names of each kind of layer


def build_from_shapes(build: Callable[[], Any], sample: Any) -> Any:
    """Return the model that a function makes, built for a batch, with its optimizer and metrics. Its variables have no values.

    Raises:
      TypeError: the result is not a model, or the function needs values that it does not have here.
    """
    made: list[Any] = []

    def trace() -> None:
        model = build()
        if not isinstance(model, keras.Model):
            raise TypeError(f"build() returned {type(model).__name__}, and a keras.Model is needed")
        complete(model, sample)
        made.append(model)

    with _unchanged_names_and_seeds():
        try:
            jax.eval_shape(trace)
        except NEED_VALUES as error:
            raise TypeError(
                "build() computes with values of variables or arrays, and it is run from shapes, where there are none. Leave "
                "out what needs values, such as loading weights or adapt(), or make the model in scope(), for fit to plan it"
            ) from error
    return made[0]


def complete(model: Any, sample: Any) -> None:
    """Build the parts of a model that are not built, its loss, metrics and optimizer, as `fit` does at its first batch."""
    if model.compiled:
        model._symbolic_build(data_batch=sample)
    elif not model.built:
        x, _, _ = unpack_x_y_sample_weight(sample)
        inputs = tree.map_structure(lambda leaf: keras.KerasTensor(leaf.shape, keras.backend.standardize_dtype(leaf.dtype)), x)
        keras.src.backend.compute_output_spec(model, inputs)


@contextlib.contextmanager
def _unchanged_names_and_seeds() -> Iterator[None]:
    """Restore the counters of names and the generators of seeds, which making a model changes."""
    names = copy.deepcopy(global_state.get_global_attribute(_NAMES))
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    seed = None if generator is None else generator.state._value
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        global_state.set_global_attribute(_NAMES, names)
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
        if generator is not None:
            generator.state._value = seed
        random.setstate(python)
        np.random.set_state(numpy)
