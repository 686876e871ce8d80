"""The private parts of Keras that `AutoShardDistribution` uses exist, and are used by Keras as it needs.

After a failure, begin with `penstock.keras.hooks`.
"""

import inspect

import keras
import pytest
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import StatelessScope
from keras.src.distribution import distribution_lib

from penstock._versions import KERAS

BOTH = "last seen in Keras {} and {}".format(*KERAS.tested)
MAKERS = {"make_train_function": "fit", "make_test_function": "evaluate", "make_predict_function": "predict"}


def parameters(function):
    return list(inspect.signature(inspect.unwrap(function)).parameters)


@pytest.mark.parametrize(("maker", "caller"), MAKERS.items())
def test_the_trainer_makes_its_functions_with_the_methods_that_are_replaced(maker, caller):
    assert parameters(getattr(keras.Model, maker)) == ["self", "force"], f"Trainer.{maker}: {BOTH}"
    code = inspect.unwrap(getattr(keras.Model, caller)).__code__
    assert maker in code.co_names, f"{caller} calls {maker}: {BOTH}"
    assert {"train_function", "test_function", "predict_function"} & set(code.co_names), f"{caller} calls what it made: {BOTH}"


def test_a_variable_is_created_converted_and_assigned_by_the_methods_that_are_replaced():
    variable = backend.Variable
    assert parameters(variable._initialize_with_initializer) == ["self", "initializer"], f"Variable: {BOTH}"
    assert parameters(variable._convert_to_tensor) == ["self", "value", "dtype"], f"Variable: {BOTH}"
    assert parameters(variable._direct_assign) == ["self", "value"], f"Variable: {BOTH}"
    assert parameters(variable._initialize_layout) == ["self"], f"Variable: {BOTH}"
    assert "_direct_assign" in variable.assign.__code__.co_names, f"Variable.assign: {BOTH}"


def test_the_attributes_of_a_variable():
    variable = keras.Variable(1.0)
    for name in ("_value", "_layout", "_shape", "_dtype"):
        assert hasattr(variable, name), f"Variable.{name}: {BOTH}"


def test_a_layout_checks_its_axes_by_the_method_that_is_replaced():
    layout = distribution_lib.TensorLayout
    assert parameters(layout._validate_axes) == ["self"], f"TensorLayout: {BOTH}"
    assert "_validate_axes" in layout.__init__.__code__.co_names, f"TensorLayout: {BOTH}"


def test_a_scope_keeps_updates_and_initializes_nothing():
    variable = keras.Variable(1.0)
    with StatelessScope(initialize_variables=False) as scope:
        variable.assign(2.0)
    assert scope.state_mapping, f"StatelessScope.state_mapping: {BOTH}"


def test_names_are_counted_in_the_global_state():
    keras.layers.Dense(1)
    assert global_state.get_global_attribute("object_name_uids"), f"object_name_uids: {BOTH}"


def test_a_model_builds_its_state_for_a_batch():
    assert "data_batch" in parameters(keras.Model._symbolic_build), f"Trainer._symbolic_build: {BOTH}"
