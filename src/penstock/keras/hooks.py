"""Replace methods of Keras, so that they ask an active `AutoShardDistribution` or a `Checkpoint`.

Three methods of the trainer make the functions for training, evaluation and prediction, and three methods of the variable create,
convert and assign values. Each runs Keras's own method unless an `AutoShardDistribution` is active. So does a method of the
epoch iterator of Keras 3.15: it takes the layouts of all batches from the first one, and a smaller last batch may not fit them.

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

    def replace_method(owner: type, name: str, method: Callable) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def either(self: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(distribution_lib.distribution(), kind):
                return method(original, self, *args, **kwargs)
            return original(self, *args, **kwargs)

        setattr(owner, name, either)

    for function, name in _MAKERS.items():
        owner = next(each for each in keras.Model.__mro__ if name in vars(each))
        replace_method(owner, name, functools.partial(_make, function))
    replace_method(backend.Variable, "_initialize_with_initializer", _initialize)
    replace_method(backend.Variable, "_convert_to_tensor", _convert)
    replace_method(backend.Variable, "_direct_assign", _assign)
    if hasattr(keras_iterator(), "_get_distributed_iterator"):
        replace_method(keras_iterator(), "_get_distributed_iterator", _place_batches)


def _make(function: str, original: Callable, model: Any, force: bool = False) -> None:
    """Make a function of a model for the trainer."""
    distribution, attribute = distribution_lib.distribution(), _MADE[function]
    if model.run_eagerly or not model.jit_compile:
        raise ValueError(_not_compiled(model))
    made = getattr(model, attribute)
    if force or not (isinstance(made, PlannedFunction) and made.distribution is distribution):
        setattr(model, attribute, PlannedFunction(distribution, model, function))


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


def _place_batches(original: Callable, iterator: Any, distribution: Any) -> Iterator[Any]:
    """Place the batches of an epoch, each in the layout of its own shapes."""
    from keras.src.backend.jax.trainer import _distribute_data

    return map(_distribute_data, iterator.data_adapter.get_jax_iterator())


def _initialize(original: Callable, variable: Any, initializer: Callable) -> None:
    """Give a variable its first value."""
    if isinstance(variable._layout, PlannedLayout):  # an optimizer's variable has the layout of the model's
        variable._layout = None
    variable._initialize_layout()
    if _is_traced():  # to plan from shapes
        variable._value = jax.numpy.asarray(initializer(variable._shape, dtype=variable._dtype), variable._dtype)
    else:
        variable._value = create(initializer, variable._shape, variable._dtype, variable._layout.backend_layout)


def _convert(original: Callable, variable: Any, value: Any, dtype: Any = None) -> Any:
    """Convert the value that a variable is created from or assigned."""
    if stays_on_host(value) and not _is_traced():
        return host_array(value, dtype)
    return original(variable, value, dtype)


def _assign(original: Callable, variable: Any, value: Any) -> None:
    """Assign a converted value to a variable."""
    layout = getattr(variable._layout, "backend_layout", None)
    if layout is None or _is_traced() or not assigns_by_shards(value, layout):
        original(variable, value)
    else:
        replace(variable, value, layout)


def _is_traced() -> bool:
    """Return whether JAX traces a function on this thread, so that no value exists."""
    return not part(*TRACE_STATE_CLEAN)()


# The method `fit`.


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
