"""Threaded epochs train exactly as Keras's own iterator does, with the datasets of Keras, TensorFlow, torch and Grain."""

import pytest
from tests.keras.training import BATCH, RAN_OUT, Endless, Records, assert_same, make_model, records


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    "options", [{}, {"steps_per_epoch": 4}, {"class_weight": {0: 1.0, 1: 2.0}}], ids=["", "steps", "weights"]
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


@pytest.mark.parametrize("workers", [1, 3])
def test_an_endless_py_dataset(workers):
    assert_same(
        lambda model, callbacks: model.fit(
            Endless(workers=workers), epochs=3, steps_per_epoch=5, shuffle=False, verbose=0, callbacks=callbacks
        ),
        lambda: make_model(built=True),
    )


@pytest.mark.parametrize("steps_per_epoch", [None, 4])
@RAN_OUT
def test_tf_data(steps_per_epoch):
    tf = pytest.importorskip("tensorflow")

    def fit(model, callbacks):
        ds = tf.data.Dataset.from_tensor_slices(records()).shuffle(44, seed=3).batch(BATCH)
        ds = ds if steps_per_epoch is None else ds.repeat()
        validation = tf.data.Dataset.from_tensor_slices(records(seed=1)).shuffle(44, seed=4).batch(BATCH)
        return model.fit(
            ds,
            epochs=3,
            steps_per_epoch=steps_per_epoch,
            validation_data=validation,
            class_weight={0: 1.0, 1: 2.0, 2: 0.5},
            verbose=0,
            shuffle=False,
            callbacks=callbacks,
        )

    assert_same(fit)


@pytest.mark.parametrize("steps_per_epoch", [None, 4])
@RAN_OUT
def test_a_torch_data_loader(steps_per_epoch):
    torch = pytest.importorskip("torch")

    def fit(model, callbacks):
        torch.manual_seed(0)
        x, y = map(torch.from_numpy, records())
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=BATCH, shuffle=True)
        return model.fit(data, epochs=3, steps_per_epoch=steps_per_epoch, shuffle=False, verbose=0, callbacks=callbacks)

    assert_same(fit)


@pytest.mark.parametrize("kind", ["MapDataset", "IterDataset", "DataLoader"])
@RAN_OUT
def test_grain(kind):
    grain = pytest.importorskip("grain")

    def fit(model, callbacks):
        x, y = records()
        data = grain.MapDataset.range(44).map(lambda i: (x[i], y[i])).shuffle(seed=1).batch(BATCH)
        if kind == "IterDataset":
            data = data.to_iter_dataset()
        if kind == "DataLoader":
            source = [(x[i], y[i]) for i in range(44)]
            sampler = grain.samplers.IndexSampler(44, grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=1)
            operations = [grain.transforms.Batch(BATCH)]
            data = grain.DataLoader(data_source=source, sampler=sampler, operations=operations)
        return model.fit(data, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)

    assert_same(fit)
