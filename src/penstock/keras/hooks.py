"""Replace the methods of Keras that ask an active `AutoShardDistribution` or a `Checkpoint`. No other file replaces methods.

Three methods of the trainer make the functions for training, evaluation and prediction, and three methods of the variable create,
convert and assign values. Each runs Keras's own method unless an `AutoShardDistribution` is active. So does the method of the
epoch iterator of Keras 3.15 that takes the layouts of all batches from the first one, which a smaller last batch may not fit.

The method `fit` of the trainer runs inside of a function of ours, which looks for a `Checkpoint` among its callbacks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
from keras.src import backend
from keras.src.distribution import distribution_lib

from penstock._jax import TRACE_STATE_CLEAN, part
from penstock.keras.planned_function import PlannedFunction
from penstock.keras.variables import PlannedLayout, assigns_by_shards, create, host_array, replace, stays_on_host
from penstock.keras.versions import keras_iterator

_MAKERS = {"train": "make_train_function", "evaluate": "make_test_function", "predict": "make_predict_function"}
_MADE = {"train": "train_function", "evaluate": "test_function", "predict": "predict_function"}


def install(kind: type) -> None:
    """Replace the methods for the class `AutoShardDistribution`, unless they are replaced already."""
    if hasattr(backend.Variable._convert_to_tensor, "__wrapped__"):
        return

    def active() -> Any:
        distribution = distribution_lib.distribution()
        return distribution if isinstance(distribution, kind) else None

    for function, name in _MAKERS.items():
        owner = next(each for each in keras.Model.__mro__ if name in vars(each))
        setattr(owner, name, _maker(getattr(owner, name), function, active))
    backend.Variable._initialize_with_initializer = _initializer(backend.Variable._initialize_with_initializer, active)
    iterator = keras_iterator()
    if hasattr(iterator, "_get_distributed_iterator"):
        iterator._get_distributed_iterator = _batches(iterator._get_distributed_iterator, active)
    backend.Variable._convert_to_tensor = _converter(backend.Variable._convert_to_tensor, active)
    backend.Variable._direct_assign = _assigner(backend.Variable._direct_assign, active)


def install_fit(fit_with: Callable[[Callable[..., Any], dict[str, Any]], Any]) -> None:
    """Replace `fit` of Keras's trainer, unless it is replaced already.

    In `model.fit(data, callbacks=[pk.Checkpoint(...)])`, Python looks up `fit` before it makes the callback that calls this. So
    the class keeps its function, which is a decorator's, and the function inside of that one is replaced.

    Args:
      fit_with: is given Keras's own `fit` and its arguments by name, with the model as "self", and returns the result.
    """
    cell = fit_cell()
    original = cell.cell_contents
    if hasattr(original, "is_of_penstock"):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        return fit_with(original, bound.arguments)

    fit.is_of_penstock = True  # type: ignore[attr-defined]  # a mark on a function
    cell.cell_contents = fit


def fit_cell() -> Any:
    """Return the variable of Keras's decorator that holds the function `fit` of its trainer."""
    decorated = next(vars(each)["fit"] for each in keras.Model.__mro__ if "fit" in vars(each))
    return decorated.__closure__[decorated.__code__.co_freevars.index("fn")]


def _maker(original: Callable, function: str, active: Callable[[], Any]) -> Callable:
    """Return the method that makes the function of a model for the trainer."""

    @functools.wraps(original)
    def make(self: Any, force: bool = False) -> Any:
        distribution = active()
        if distribution is None:
            return original(self, force)
        if self.run_eagerly or not self.jit_compile:
            raise ValueError(_not_compiled(self))
        made = getattr(self, _MADE[function])
        if force or not (isinstance(made, PlannedFunction) and made.distribution is distribution):
            setattr(self, _MADE[function], PlannedFunction(distribution, self, function))
        return None

    return make


def _not_compiled(model: Any) -> str:
    """Return why there is no program to plan for a model, and what to do."""
    layers = [layer.name for layer in model._flatten_layers() if not layer.supports_jit]
    if layers and not model.run_eagerly:
        return (
            f"the layers {', '.join(map(repr, layers[:3]))} of {model.name!r} have supports_jit=False, so that Keras does not "
            "compile the step, and there is no program to plan: apply them to the data instead, as in dataset.map"
        )
    option = "run_eagerly=True" if model.run_eagerly else "jit_compile=False"
    return (
        f"{model.name!r} was compiled with {option}, and a plan is for a step that JAX compiles: leave this out of compile(), or "
        "train outside of the scope, on one device"
    )


def _batches(original: Callable, active: Callable[[], Any]) -> Callable:
    """Return the method that places the batches of an epoch, each in the layout of its own shapes."""
    from keras.src.backend.jax.trainer import _distribute_data

    @functools.wraps(original)
    def place(self: Any, distribution: Any) -> Iterator[Any]:
        if active() is None:
            return original(self, distribution)
        return map(_distribute_data, self.data_adapter.get_jax_iterator())

    return place


def _is_traced() -> bool:
    """Return whether JAX traces a function on this thread, so that no value exists."""
    return not part(*TRACE_STATE_CLEAN)()


def _initializer(original: Callable, active: Callable[[], Any]) -> Callable:
    """Return the method that gives a variable its first value."""

    @functools.wraps(original)
    def initialize(self: Any, initializer: Callable) -> None:
        if active() is None:
            return original(self, initializer)
        if isinstance(self._layout, PlannedLayout):  # an optimizer's variable has the layout of the model's
            self._layout = None
        self._initialize_layout()
        if _is_traced():  # to plan from shapes
            self._value = jax.numpy.asarray(initializer(self._shape, dtype=self._dtype), self._dtype)
        else:
            self._value = create(initializer, self._shape, self._dtype, self._layout.backend_layout)
        return None

    return initialize


def _converter(original: Callable, active: Callable[[], Any]) -> Callable:
    """Return the method that converts the value that a variable is created from or assigned."""

    @functools.wraps(original)
    def convert(self: Any, value: Any, dtype: Any = None) -> Any:
        if active() is not None and stays_on_host(value) and not _is_traced():
            return host_array(value, dtype)
        return original(self, value, dtype)

    return convert


def _assigner(original: Callable, active: Callable[[], Any]) -> Callable:
    """Return the method that assigns a converted value."""

    @functools.wraps(original)
    def assign(self: Any, value: Any) -> None:
        layout = getattr(self._layout, "backend_layout", None)
        if active() is None or layout is None or _is_traced() or not assigns_by_shards(value, layout):
            return original(self, value)
        replace(self, value, layout)
        return None

    return assign
