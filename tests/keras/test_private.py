"""The private parts of Keras that penstock.keras uses exist, and behave as it needs.

A release of Keras may change any of them without notice. Each has a test here, whose failure names the versions in which the part
was last seen. After a failure, begin with `penstock.keras.versions` and the docstring of `penstock.keras.epoch_iterator`.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import threading

import jax
import keras
import numpy as np
import pytest
from keras.src.backend.jax import trainer
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from tests.keras.training import BATCH, batches, make_model, records

from penstock._versions import KERAS, keras_version
from penstock.keras import versions
from penstock.keras.versions import behaviour

BOTH = "last seen in Keras {} and {}".format(*KERAS.tested)
LAST = f"last seen in Keras {KERAS.tested[-1]}"
FIRST = f"last seen in Keras {KERAS.tested[0]}"


@pytest.fixture(autouse=True)
def _the_iterator_is_that_of_keras(monkeypatch):
    monkeypatch.setattr(trainer, "JAXEpochIterator", versions.keras_iterator())


def parameters(function):
    return list(inspect.signature(function).parameters)


def made(x=None, y=None, **options):
    x, y = records() if x is None else (x, y)
    return trainer.JAXEpochIterator(x, y, **options)


@pytest.mark.parametrize(
    ("module", "names"),
    {
        "keras.src.tree": ["map_structure", "is_nested", "flatten"],
        "keras.src.backend.common.global_state": ["get_global_attribute", "set_global_attribute"],
        "keras.src.backend.config": ["_MAX_STEPS_PER_EPOCH"],
        "keras.src.backend.jax.trainer": ["JAXEpochIterator"],
        "keras.src.distribution.distribution_lib": ["distribution", "GLOBAL_ATTRIBUTE_NAME", "TensorLayout"],
        "keras.src.random.seed_generator": ["GLOBAL_SEED_GENERATOR"],
        "keras.src.trainers.data_adapters.array_data_adapter": ["ArrayDataAdapter"],
        "keras.src.trainers.data_adapters.data_adapter": ["DataAdapter"],
        "keras.src.trainers.data_adapters.data_adapter_utils": [
            "class_weight_to_sample_weights",
            "get_jax_iterator",
            "unpack_x_y_sample_weight",
        ],
        "keras.src.trainers.data_adapters.tf_dataset_adapter": ["TFDatasetAdapter"],
        "keras.src.trainers.epoch_iterator": ["EpochIterator"],
        "keras.src.utils.rng_utils": ["GLOBAL_RANDOM_SEED"],
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_modules_and_names(module, names):
    found = importlib.import_module(module)
    for name in names:
        assert hasattr(found, name), f"{module}.{name}: {BOTH}"


def test_functions_build_a_model_with_the_method_that_is_replaced():
    owner, name = versions.build_method()
    assert parameters(getattr(owner, name))[:2] == ["self", "iterator"], f"Trainer.{name}: {BOTH}"
    for function in (keras.Model.fit, keras.Model.evaluate):
        code = inspect.unwrap(function).__code__
        assert name in code.co_names, f"{function.__name__} calls {name}: {BOTH}"


def test_the_version_of_the_package_is_read_without_importing_it():
    assert keras_version() == keras.__version__, f"__version__ in keras/src/version.py: {BOTH}"
    assert keras.__version__ in KERAS


def test_functions_look_up_the_iterator_in_their_module():
    for function in (keras.Model.fit, keras.Model.evaluate, keras.Model.predict):
        code = inspect.unwrap(function).__code__
        assert "JAXEpochIterator" in code.co_names, f"{function.__name__} makes a JAXEpochIterator: {BOTH}"
        assert inspect.unwrap(function).__globals__ is vars(trainer), f"{function.__name__} is of {trainer.__name__}: {BOTH}"


def test_the_iterator_is_made_with_the_arguments_that_ours_takes():
    from penstock.keras.epoch_iterator import ThreadedEpochIterator

    theirs = parameters(trainer.JAXEpochIterator.__init__)
    assert parameters(ThreadedEpochIterator.__init__) == theirs, f"arguments of EpochIterator: {BOTH}"


def test_the_attributes_of_the_iterator():
    iterator = made(batch_size=BATCH, steps_per_epoch=4, steps_per_execution=2)
    values = {"steps_per_epoch": 4, "steps_per_execution": 2, "_num_batches": 6, "_epoch_iterator": None}
    for name, value in values.items():
        assert getattr(iterator, name, "absent") == value, f"JAXEpochIterator.{name}: {BOTH}"
    assert isinstance(iterator.data_adapter, DataAdapter), f"JAXEpochIterator.data_adapter: {BOTH}"
    assert iterator.data_adapter.num_batches == 6, f"DataAdapter.num_batches: {BOTH}"


def test_an_epoch_is_steps_and_the_iterator_that_was_asked_for_when_it_began():
    asked = []

    class Iterator(trainer.JAXEpochIterator):
        def _get_iterator(self):
            asked.append(iter(batches()))
            return asked[-1]

    iterator = Iterator(*records(), batch_size=BATCH, steps_per_execution=4)
    epoch = iter(iterator)
    assert epoch is iterator, f"JAXEpochIterator.__iter__ returns itself: {BOTH}"
    assert not asked, f"JAXEpochIterator asks for batches at the first step: {BOTH}"
    assert list(iterator._epoch_iterator)[:2] == [(0, 3, asked[0]), (4, 7, asked[0])], f"steps of _epoch_iterator: {BOTH}"


def test_the_end_of_the_data_and_a_reset():
    iterator = made(batch for batch in batches())
    iterator._steps_seen = 6
    # Keras 3.15 warns at the end of data of unknown length, and 3.16 does not.
    with contextlib.nullcontext() if behaviour().stacks else pytest.warns(UserWarning, match="ran out of data"):
        with iterator.catch_stop_iteration():
            raise StopIteration
    assert iterator._num_batches == 6, f"catch_stop_iteration notes how many batches there were: {BOTH}"
    iterator.reset()
    assert iterator._num_batches is None, f"reset asks the adapter for its number of batches: {BOTH}"


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_loops_are_within_catch_stop_iteration(call, monkeypatch):
    seen = []

    class Iterator(trainer.JAXEpochIterator):
        def reset(self):
            seen.append("reset")
            super().reset()

        def catch_stop_iteration(self):
            seen.append("begin")
            return super().catch_stop_iteration()

        def __next__(self):
            seen.append("next")
            return super().__next__()

    monkeypatch.setattr(trainer, "JAXEpochIterator", Iterator)
    model = make_model(built=True)
    model.fit(*records(8), verbose=0)  # builds the optimizer
    seen.clear()
    x, y = records(16)
    getattr(model, call)(*((x,) if call == "predict" else (x, y)), batch_size=BATCH, verbose=0)
    expected = ["begin", "next", "next", "next"]
    assert seen == (expected if call == "predict" else ["reset", *expected]), f"the loop of {call} over its iterator: {BOTH}"


def test_a_model_that_is_not_built_takes_one_batch_outside_of_the_loop(monkeypatch):
    seen = []

    class Adapter(DataAdapter):
        num_batches = batch_size = has_partial_batch = partial_batch_size = None

        def get_jax_iterator(self, super_batch=None):
            seen.append("adapter")
            return iter(batches())

    class Iterator(trainer.JAXEpochIterator):
        def catch_stop_iteration(self):
            seen.append("loop")
            return super().catch_stop_iteration()

    monkeypatch.setattr(trainer, "JAXEpochIterator", Iterator)
    make_model().fit(Adapter(), steps_per_epoch=2, verbose=0)
    assert seen == ["adapter", "loop", "adapter"], f"fit looks at one batch of an unbuilt model: {BOTH}"


def test_the_hooks_of_an_adapter():
    for name in ("on_epoch_begin", "on_epoch_end"):
        assert parameters(getattr(DataAdapter, name)) == ["self"], f"DataAdapter.{name}(): {BOTH}"
    py_dataset = data_adapters.PyDatasetAdapter
    assert py_dataset.on_epoch_end is not DataAdapter.on_epoch_end, f"PyDatasetAdapter.on_epoch_end: {BOTH}"
    assert data_adapters.GeneratorDataAdapter.on_epoch_end is DataAdapter.on_epoch_end, f"a generator has no hooks: {BOTH}"


def test_an_adapter_that_is_given_as_data_is_used_as_it_is():
    class Adapter(DataAdapter):
        num_batches = 3

    adapter = Adapter()
    assert data_adapters.get_data_adapter(adapter) is adapter, f"get_data_adapter of a DataAdapter: {BOTH}"


def test_the_adapter_of_a_generator():
    given = batches()
    adapter = data_adapters.get_data_adapter(batch for batch in given)
    same = [x is y for x, y in zip(adapter._first_batches, given[:2], strict=True)]
    assert same == [True, True], f"GeneratorDataAdapter._first_batches: {BOTH}"
    adapter.generator = lambda: iter(given[3:])
    (x, _), *rest = adapter.get_jax_iterator()
    assert len(rest) == 2, f"GeneratorDataAdapter.get_jax_iterator calls .generator: {BOTH}"
    np.testing.assert_array_equal(x, given[3][0], err_msg=BOTH)


def test_global_state_is_kept_by_thread_under_the_names_that_are_taken_along():
    from keras.src.backend.common import global_state

    from penstock.keras.batch_iterator import _SHARED

    distribution = keras.distribution.DataParallel(devices=["cpu:0"])
    before = keras.config.dtype_policy()
    keras.utils.set_random_seed(3)
    keras.random.normal((1,))
    keras.config.set_dtype_policy("mixed_bfloat16")
    elsewhere = []
    try:
        with distribution.scope():
            here = [global_state.get_global_attribute(name) for name in _SHARED]
            thread = threading.Thread(
                target=lambda: elsewhere.extend(global_state.get_global_attribute(name) for name in _SHARED)
            )
            thread.start()
            thread.join()
    finally:
        keras.config.set_dtype_policy(before)
    assert here[0] is distribution, f"global_state['{_SHARED[0]}'] is the distribution: {BOTH}"
    assert here[1].name == "mixed_bfloat16", f"global_state['{_SHARED[1]}'] is the dtype policy: {BOTH}"
    assert here[2] == 3, f"global_state['{_SHARED[2]}'] is the seed: {BOTH}"
    assert isinstance(here[3], keras.random.SeedGenerator), f"global_state['{_SHARED[3]}'] is the generator: {BOTH}"
    assert elsewhere == [None] * 4, f"global_state is kept by thread: {BOTH}"


def test_the_layout_of_a_batch():
    distribution = keras.distribution.DataParallel(devices=[f"cpu:{i}" for i in range(8)])
    layout = distribution.get_data_layout((8, 5))
    assert isinstance(layout.backend_layout, jax.sharding.Sharding), f"TensorLayout.backend_layout: {BOTH}"
    assert tuple(layout.axes) == ("batch", None), f"TensorLayout.axes: {BOTH}"
    assert layout.device_mesh is distribution.device_mesh, f"TensorLayout.device_mesh: {BOTH}"


def test_trees_of_keras_keep_the_order_of_keys_and_leave_out_none():
    tree = keras.tree.map_structure(lambda x: x, {"b": 1, "a": None})
    assert list(tree) == ["b", "a"], f"tree.map_structure keeps the order of keys: {BOTH}"
    assert keras.src.tree.map_structure(abs, (-1, None), none_is_leaf=False) == (1, None), f"none_is_leaf: {BOTH}"


def test_what_a_version_takes_at_one_next():
    """`behaviour` checks by these attributes that a build behaves as its version number says."""
    assert hasattr(data_adapter_utils, "PartialBatchList") == behaviour().stacks, f"PartialBatchList: {LAST}"
    places = hasattr(trainer.JAXEpochIterator, "_get_distributed_iterator")
    assert places != behaviour().on_device, f"JAXEpochIterator._get_distributed_iterator: {FIRST}"
    takes = "super_batch" in parameters(DataAdapter.get_jax_iterator)
    assert takes == behaviour().stacks, f"DataAdapter.get_jax_iterator(super_batch): {LAST}"


@pytest.mark.parametrize("steps", [1, 4])
def test_keras_takes_what_is_made_for_it(steps):
    """Keras takes stacks of batches, and a list of the remaining ones."""
    taken = list(made(batch_size=BATCH, steps_per_execution=steps)._get_iterator())
    seen = BOTH if steps == 1 else LAST
    if steps == 1 or not behaviour().stacks:
        assert [x.shape for x, _ in taken] == [(8, 5)] * 5 + [(4, 5)], f"batches of JAXEpochIterator: {seen}"
        taken = [x for x, _ in taken]
    else:
        (x, _), rest = taken
        assert x.shape == (4, 8, 5), f"a stack of batches: {seen}"
        assert versions.is_partial(rest), f"PartialBatchList of JAXEpochIterator: {seen}"
        assert [len(batch) for batch in rest] == [2, 2], f"batches in it: {seen}"
        taken = [x, *(x for x, _ in rest)]
    assert all(isinstance(x, jax.Array) == behaviour().on_device for x in taken), f"batches are on the device: {seen}"


def test_the_stacks_of_an_iterator():
    if not behaviour().stacks:  # Keras 3.15 has no such function, and needs none
        assert "super_batch" not in parameters(DataAdapter.get_jax_iterator), FIRST
        return
    stack, rest = versions.super_batches(iter(batches(24)), 2)
    assert stack[0].shape == (2, 8, 5), f"super_batch_iterator(batches, steps, stack_fn): {LAST}"
    assert len(rest) == 1, f"PartialBatchList of super_batch_iterator: {LAST}"


def test_checkpoints_find_the_function_inside_of_the_decorated_fit():
    from penstock.keras import hooks

    cell = hooks.fit_cell()
    original = inspect.unwrap(cell.cell_contents)
    assert original.__name__ == "fit", BOTH
    assert {"self", "x", "callbacks", "verbose", "epochs", "initial_epoch", "steps_per_epoch", "validation_freq"} <= set(
        parameters(original)
    ), BOTH


def test_fit_takes_a_list_of_callbacks_as_it_is_and_begins_with_initial_epoch_after_resetting_metrics():
    told = []

    class Told(keras.callbacks.CallbackList):
        def __init__(self):
            super().__init__([], add_history=True)

        def on_train_begin(self, logs=None):
            self.set_model(model)
            self.set_params({"epochs": 3, "steps": 6, "verbose": 0})
            super().on_train_begin(logs)

        def on_epoch_begin(self, epoch, logs=None):
            super().on_epoch_begin(epoch, logs)
            told.append((epoch, [float(metric.result()) for metric in model.metrics[:1]]))

    model = make_model(built=True)
    history = model.fit(*records(), epochs=3, initial_epoch=1, verbose=0, callbacks=Told())
    assert told == [(1, [0.0]), (2, [0.0])], BOTH
    assert history.epoch == [1, 2], BOTH
    assert callable(keras.callbacks.CallbackList._flush_futures), BOTH


def test_in_an_epoch_the_trainer_holds_the_state_and_says_whether_the_variables_have_it():
    model = make_model()

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            assert not model._jax_state_synced, BOTH  # self.model would sync it
            state = model._jax_state
            for group in ("trainable_variables", "non_trainable_variables", "metrics_variables"):
                assert len(state[group]) == len(getattr(model, group)), BOTH
            assert len(state["optimizer_variables"]) == len(model.optimizer.variables), BOTH

    model.fit(*records(), verbose=0, callbacks=[Look()])


def test_an_enumeration_counts_its_steps_when_it_yields():
    iterator = made(batch_size=BATCH, steps_per_execution=2)
    steps = []
    for begin, end, _ in iterator._enumerate_iterator():
        steps.append((begin, end, iterator._steps_seen))
    assert steps == [(0, 1, 2), (2, 3, 4), (4, 5, 6)], BOTH
