"""Threaded epochs train exactly as Keras's own iterator does, with arrays, generators and Keras's datasets."""

import itertools
import random

import keras
import numpy as np
import pytest
from tests.keras.training import BATCH, RAN_OUT, Endless, Records, assert_same, batches, compiled, make_model, records

from penstock.keras.versions import behaviour

SHUFFLE_IGNORED = pytest.mark.filterwarnings("ignore:.*shuffle=True.*:UserWarning")


@pytest.mark.parametrize(("shuffle", "built"), [(True, False), (False, True), ("batch", True)])
def test_arrays(shuffle, built):
    x, y = records()
    assert_same(
        lambda model, callbacks: model.fit(x, y, batch_size=BATCH, epochs=3, shuffle=shuffle, verbose=0, callbacks=callbacks),
        lambda: make_model(built),
        ahead=False,
    )


def test_large_arrays():
    # int32: from JAX 0.12 on, an unbuilt model warns of int64 labels, with Keras's own iterator too.
    x, y = np.random.default_rng(0).normal(size=(768, 20_000)).astype("float32"), np.arange(768, dtype="int32") % 3
    assert_same(
        lambda model, callbacks: model.fit(x, y, batch_size=64, epochs=2, verbose=0, callbacks=callbacks),
        lambda: compiled(keras.Sequential([keras.layers.Dense(3, "softmax")])),
        ahead=False,
    )


def test_an_array_in_a_file_is_read_ahead(tmp_path):
    x, y = records()
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert_same(lambda model, callbacks: model.fit(mapped[2:], y[2:], batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks))


@pytest.mark.parametrize(
    "options",
    [
        {
            "class_weight": {0: 1.0, 1: 2.0, 2: 0.5},
            "validation_data": records(20, 1),
            "validation_batch_size": 6,
            "validation_freq": 2,
        },
        pytest.param({"sample_weight": np.linspace(0, 1, 44), "validation_split": 0.3}, marks=pytest.mark.slow),
        {"steps_per_epoch": 4},
    ],
    ids=lambda options: next(iter(options)),
)
@RAN_OUT
def test_arrays_with(options):
    x, y = records()
    assert_same(
        lambda model, callbacks: model.fit(x, y, batch_size=BATCH, epochs=4, verbose=0, callbacks=callbacks, **options),
        ahead=False,
    )


@pytest.mark.parametrize(("steps", "steps_per_epoch"), [(3, 5), pytest.param(7, 5, marks=pytest.mark.slow)])
@RAN_OUT
def test_several_steps_per_execution(steps, steps_per_epoch):
    def data():
        yield from batches() if steps_per_epoch is None else itertools.cycle(batches())

    assert_same(
        lambda model, callbacks: model.fit(
            data(), epochs=3, steps_per_epoch=steps_per_epoch, shuffle=False, verbose=0, callbacks=callbacks
        ),
        lambda: make_model(steps_per_execution=steps),
    )


@RAN_OUT
def test_a_finite_generator():
    assert_same(
        lambda model, callbacks: model.fit(
            (batch for batch in batches()), epochs=2, shuffle=False, verbose=0, callbacks=callbacks
        )
    )


@pytest.mark.parametrize("steps_per_epoch", [1, 20])
def test_an_endless_generator(steps_per_epoch):
    def data():
        for number in itertools.count():
            yield batches(seed=number)[0]

    assert_same(
        lambda model, callbacks: model.fit(
            data(), epochs=3, steps_per_epoch=steps_per_epoch, shuffle=False, verbose=0, callbacks=callbacks
        )
    )


@RAN_OUT
def test_generators_as_validation_data_go_on_from_epoch_to_epoch():
    def data(seed):
        for number in itertools.count(seed):
            yield batches(seed=number)[0]

    assert_same(
        lambda model, callbacks: model.fit(
            data(0),
            epochs=4,
            steps_per_epoch=3,
            validation_data=data(100),
            validation_steps=4,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )
    )


def test_a_generator_that_outlives_fit():
    def twice(model, callbacks):
        def data():
            for number in itertools.count():
                yield batches(seed=number)[0]

        endless = data()
        for _ in range(3):
            model.fit(endless, epochs=2, steps_per_epoch=3, shuffle=False, verbose=0)
        model.evaluate(endless, steps=2, verbose=0)
        return model.fit(endless, epochs=1, steps_per_epoch=3, shuffle=False, verbose=0, callbacks=callbacks)

    assert_same(twice)


def test_one_generator_for_training_and_validation():
    def fit(model, callbacks):
        def data():
            for number in itertools.count():
                yield batches(seed=number)[0]

        both = data()
        return model.fit(
            both,
            epochs=3,
            steps_per_epoch=3,
            validation_data=both,
            validation_steps=2,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )

    assert_same(fit)


@pytest.mark.parametrize(("kind", "when"), [("generator", "on_train_batch_end"), ("dataset", "on_train_batch_begin")])
def test_evaluating_the_data_of_the_training_in_a_callback(when, kind):
    def fit(model, callbacks):
        def endless():
            for number in itertools.count():
                yield batches(seed=number)[0]

        data, other = endless() if kind == "generator" else Endless(), make_model(built=True)

        def evaluate(batch, logs=None):
            if batch == 2:
                other.evaluate(data, steps=4, verbose=0)

        callback = keras.callbacks.LambdaCallback(**{when: evaluate})
        return model.fit(data, epochs=2, steps_per_epoch=5, shuffle=False, verbose=0, callbacks=[callback, *callbacks])

    assert_same(fit, lambda: make_model(built=True))


@pytest.mark.slow
def test_the_order_of_the_keys_of_a_dict():
    """A model that runs eagerly may depend on it."""

    class Concatenated(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3, "softmax")

        def call(self, inputs):
            return self.dense(keras.ops.concatenate(list(inputs.values()), axis=-1))

    def data():
        for x, y in itertools.cycle(batches()):
            yield {"b": x, "a": x[:, :2]}, y

    def model():
        made = Concatenated()
        made.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
        return made

    assert_same(
        lambda model, callbacks: model.fit(data(), epochs=2, steps_per_epoch=3, shuffle=False, verbose=0, callbacks=callbacks),
        model,
    )


def test_a_generator_that_fills_one_buffer_again_and_again():
    def data():
        x, y = np.empty((BATCH, 5), "float32"), np.empty(BATCH, "int32")
        for number in itertools.count():
            x[...], y[...] = batches(seed=number)[0]
            yield x, y

    def wait(batch, logs):  # otherwise the buffer is filled while the step of Keras alone reads it
        return float(logs["loss"])

    waiting = keras.callbacks.LambdaCallback(on_train_batch_end=wait)
    assert_same(
        lambda model, callbacks: model.fit(
            data(), epochs=3, steps_per_epoch=9, shuffle=False, verbose=0, callbacks=[*callbacks, waiting]
        )
    )


@RAN_OUT
def test_a_generator_that_draws_from_the_global_generators():
    def data():
        for x, y in batches():
            x = x + np.random.normal(size=x.shape) + random.random() + np.asarray(keras.random.normal(x.shape))
            yield x.astype("float32"), y

    def fit(model, callbacks):
        model.fit(data(), shuffle=False, verbose=0)
        return model.fit(data(), shuffle=False, verbose=0, callbacks=callbacks)

    assert_same(fit, lambda: make_model(built=True))


def test_a_generator_of_dicts_and_sample_weights():
    def data():
        for x, y in itertools.cycle(batches()):
            yield {"a": x, "b": x[:, :2]}, y, np.abs(x[:, 0])

    def two_inputs():
        a, b = keras.Input((5,), name="a"), keras.Input((2,), name="b")
        return compiled(keras.Model({"a": a, "b": b}, keras.layers.Dense(3, "softmax")(keras.layers.Concatenate()([a, b]))))

    assert_same(
        lambda model, callbacks: model.fit(data(), epochs=2, steps_per_epoch=5, shuffle=False, verbose=0, callbacks=callbacks),
        two_inputs,
    )


@pytest.mark.slow
def test_sparse_arrays():
    import scipy.sparse

    x, y = records()
    x[x < 0.5] = 0

    def fit(model, callbacks):
        return model.fit(scipy.sparse.csr_matrix(x), y, batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks)

    assert_same(fit, lambda: compiled(keras.Sequential([keras.layers.Dense(3, "softmax")])), ahead=False)


@pytest.mark.slow
@RAN_OUT
def test_a_generator_of_sparse_arrays_with_a_shorter_last_one():
    import scipy.sparse

    def data():
        for x, y in batches():
            yield scipy.sparse.csr_matrix(np.where(x < 0.5, 0, x)), y

    assert_same(
        lambda model, callbacks: model.fit(data(), shuffle=False, verbose=0, callbacks=callbacks),
        lambda: compiled(keras.Sequential([keras.layers.Dense(3, "softmax")])),
    )


@pytest.mark.slow
def test_a_model_that_runs_eagerly():
    assert_same(
        lambda model, callbacks: model.fit(
            (batch for batch in itertools.cycle(batches())),
            epochs=2,
            steps_per_epoch=3,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        ),
        lambda: make_model(run_eagerly=True),
    )


@pytest.mark.parametrize("kind", ["arrays", "generator"])
def test_where_batches_are_put_on_the_device_first(kind, monkeypatch):
    """Keras's own iterator does so on an accelerator, one batch ahead."""
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    x, y = records(40)

    def fit(model, callbacks):
        if kind == "arrays":
            return model.fit(x.astype("float64"), y, batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks)
        data = ((x, y, None) for x, y in itertools.cycle(batches(40)))
        return model.fit(data, epochs=2, steps_per_epoch=4, shuffle=False, verbose=0, callbacks=callbacks)

    assert_same(fit)


@pytest.mark.parametrize(("built", "steps_per_execution"), [(False, 1), (True, 4)])
@RAN_OUT
def test_predict_and_evaluate(built, steps_per_execution):
    import penstock.keras as pk

    def run():
        keras.utils.set_random_seed(3)
        model = make_model(built, steps_per_execution=steps_per_execution)
        if behaviour().stacks and steps_per_execution > 1:  # `predict` of Keras 3.16 builds a model with the shape of a stack
            model.build((None, 5))
        predicted = model.predict((batch for batch in batches()), verbose=0)
        return [predicted, model.predict(records()[0], verbose=0), model.evaluate((batch for batch in batches()), verbose=0)]

    default = run()
    with pk.threaded_epochs() as epochs:
        threaded = run()
    for ours, theirs in zip(threaded, default, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert [stats.steps for stats in epochs.stats()] == [6, 2, 6]


@pytest.mark.parametrize(
    ("workers", "options"),
    [(1, {"class_weight": {0: 1.0, 1: 2.0}}), pytest.param(3, {"steps_per_epoch": 4}, marks=pytest.mark.slow)],
    ids=["shuffled", "with workers"],
)
@RAN_OUT
def test_a_py_dataset(workers, options):
    shuffle = workers == 1  # with several workers, Keras draws the order on a thread of its own, at any time
    assert_same(
        lambda model, callbacks: model.fit(
            Records(workers=workers), epochs=3, shuffle=shuffle, verbose=0, callbacks=callbacks, **options
        ),
        lambda: make_model(built=True),
    )


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_an_endless_py_dataset(workers):
    assert_same(
        lambda model, callbacks: model.fit(
            Endless(workers=workers), epochs=3, steps_per_epoch=5, shuffle=False, verbose=0, callbacks=callbacks
        ),
        lambda: make_model(built=True),
    )
