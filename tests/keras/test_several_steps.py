"""Training is the same with several steps in an execution, which some versions of Keras take at once, for any kind of data.

The data has six batches, and the last is shorter. So the second execution of four steps has two batches with different shapes.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from tests.keras.conftest import feeding_threads
from tests.keras.training import BATCH, CLASSES, Records, assert_same, batches, make_model, records

import penstock as ps
import penstock.keras as pk
from penstock.keras.versions import behaviour

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*ran out of data"),
    # From JAX 0.12 on, Keras's own code warns when it inspects a first batch of float64.
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64"),
]


def generator():
    yield from batches()


def weighted():
    for x, y in batches():
        yield x.astype("float64"), y, np.abs(x[:, 0])


def without_weights():
    for x, y in batches():
        yield jnp.asarray(x), y, None


KINDS = {
    "generator": generator,
    "weighted": weighted,
    "without_weights": without_weights,
    "py_dataset": Records,
}


@pytest.mark.parametrize(("kind", "steps"), [*((kind, 4) for kind in KINDS), ("generator", 2)])
def test_the_same_training(kind, steps):
    assert_same(
        lambda model, callbacks: model.fit(KINDS[kind](), epochs=1, shuffle=False, verbose=0, callbacks=callbacks),
        lambda: make_model(built=True, steps_per_execution=steps),
    )


@pytest.mark.slow
def test_the_same_epochs_and_validation():
    assert_same(
        lambda model, callbacks: model.fit(
            Records(), epochs=3, validation_data=Records(), shuffle=False, verbose=0, callbacks=callbacks
        ),
        lambda: make_model(steps_per_execution=4),
    )


@pytest.mark.parametrize(("shuffle", "device"), [(True, True), ("batch", False)])
def test_arrays(shuffle, device):
    x, y = map(jnp.asarray, records()) if device else records()
    assert_same(
        lambda model, callbacks: model.fit(x, y, batch_size=BATCH, epochs=3, shuffle=shuffle, verbose=0, callbacks=callbacks),
        lambda: make_model(steps_per_execution=4),
        ahead=False,
    )


@pytest.mark.slow
def test_large_arrays():
    x, y = np.random.default_rng(0).normal(size=(1344, 20_000)).astype("float32"), np.arange(1344, dtype="int32") % CLASSES

    def model():
        made = keras.Sequential([keras.layers.Dense(CLASSES, "softmax")])
        made.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=3)
        return made

    assert_same(
        lambda model, callbacks: model.fit(x, y, batch_size=64, epochs=2, verbose=0, callbacks=callbacks),
        model,
        ahead=False,
    )


@pytest.mark.slow
def test_a_model_that_runs_eagerly():
    assert_same(
        lambda model, callbacks: model.fit(generator(), shuffle=False, verbose=0, callbacks=callbacks),
        lambda: make_model(built=True, run_eagerly=True, steps_per_execution=2),
    )


@pytest.mark.slow
def test_the_order_of_the_keys_of_a_dict_in_a_stack():
    class Concatenated(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(CLASSES, "softmax")

        def call(self, inputs):
            return self.dense(keras.ops.concatenate(list(inputs.values()), axis=-1))

    def data():
        for x, y in batches():
            yield {"b": x, "a": x[:, :2]}, y

    def model():
        made = Concatenated()
        made.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True, steps_per_execution=2)
        return made

    assert_same(lambda model, callbacks: model.fit(data(), shuffle=False, verbose=0, callbacks=callbacks), model)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["arrays", "generator"])
def test_sparse_arrays_are_as_keras_has_them(where):
    """Keras 3.15 steps through them. Keras 3.16 cannot stack them, and refuses them."""
    import scipy.sparse

    x, y = records(40)
    x = scipy.sparse.csr_matrix(np.where(x < 0.5, 0, x))

    def sparse():
        for start in range(0, 40, BATCH):
            yield x[start : start + BATCH], y[start : start + BATCH]

    def fit(model, callbacks):
        if where == "arrays":
            return model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=callbacks)
        return model.fit(sparse(), shuffle=False, verbose=0, callbacks=callbacks)

    def model():
        made = keras.Sequential([keras.layers.Input((5,), sparse=True), keras.layers.Dense(CLASSES, "softmax")])
        made.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=2)
        return made

    if not behaviour().stacks:
        assert_same(fit, model, ahead=where == "generator")
        return
    with pytest.raises(ValueError, match="not supported with sparse"):
        fit(model(), [])
    with pk.threaded_epochs(), pytest.raises(ValueError, match="steps_per_execution=2 with sparse arrays"):
        fit(model(), [])
    assert not feeding_threads()


def trained(data, steps, **options):
    keras.utils.set_random_seed(7)
    model = make_model(built=True, steps_per_execution=steps)
    history = model.fit(data, shuffle=False, verbose=0, **options).history
    return history, [np.asarray(v.value) for v in model.weights]


def assert_equal(ours, theirs):
    assert ours[0] == theirs[0]
    for one, other in zip(ours[1], theirs[1], strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_loader():
    def loader(**options):
        return ps.Loader(records(), BATCH, shuffle=True, seed=3, remainder="keep", workers=2, **options)

    class Steps(keras.utils.PyDataset):
        def __len__(self):
            return 6

        def __getitem__(self, step):
            return loader()[step]

    data = pk.data(loader(epochs=1))
    assert_equal(trained(data, 4, epochs=2), trained(Steps(), 4, epochs=2))
    assert [stats.steps for stats in data.stats()] == [12]
    endless = (loader()[step] for step in range(12))
    assert_equal(
        trained(pk.data(loader()), 4, epochs=2, steps_per_epoch=4),
        trained(endless, 4, epochs=2, steps_per_epoch=4),
    )


def test_a_feed():
    x, y = records(40)
    with ps.feed(ps.Loader((x, y), BATCH)) as feed:
        ours = trained(pk.data(feed), 2, epochs=2, steps_per_epoch=4)
        assert feed.state()["step"] == 8
    theirs = (batch for batch in itertools.islice(itertools.cycle(batches(40)), 8))
    assert_equal(ours, trained(theirs, 2, epochs=2, steps_per_epoch=4))
    assert jax.device_count() == 8


def test_statistics_count_batches_and_not_executions():
    model = make_model(built=True, steps_per_execution=4)
    with pk.threaded_epochs() as epochs:
        model.fit(generator(), shuffle=False, verbose=0)
        model.fit(*records(), batch_size=BATCH, verbose=0)
    assert [stats.steps for stats in epochs.stats()] == [6, 6]


def test_another_structure_within_an_execution_ends_it():
    def data():
        for number, (x, y) in enumerate(itertools.cycle(batches(40))):
            yield (x, y) if number != 6 else (x, y, np.ones(len(y), "float32"))

    keras.utils.set_random_seed(7)
    model = make_model(built=True, steps_per_execution=4)
    with pk.threaded_epochs(), pytest.raises(ValueError, match=r"batch 6 of generator .*2: float32\[8\].*is needed"):
        model.fit(data(), steps_per_epoch=8, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations.value) == 6


@pytest.mark.slow
def test_a_batch_that_the_mesh_does_not_divide_ends_an_execution():
    distribution = keras.distribution.DataParallel(devices=[f"cpu:{i}" for i in range(8)])
    with distribution.scope(), pk.threaded_epochs():
        model = make_model(built=True, steps_per_execution=4)
        with pytest.raises(ValueError, match="needs a multiple of 8") as caught:
            model.fit(generator(), shuffle=False, verbose=0)
        assert any("batch 5 of generator" in note for note in caught.value.__notes__)
        assert int(model.optimizer.iterations.value) == 5
