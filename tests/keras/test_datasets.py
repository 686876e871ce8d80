"""Datasets of TensorFlow, torch and Grain: threaded epochs train with them as Keras does, and `pk.data` reads them."""

import pytest
from tests.extras import require
from tests.keras.training import BATCH, RAN_OUT, assert_equal, assert_same, batches, make_model, records, trained

import penstock.keras as pk


def tensorflow_data(drop_remainder=False):
    tf = require("tensorflow")
    return tf.data.Dataset.from_tensor_slices(records()).batch(BATCH, drop_remainder=drop_remainder)


def torch_data():
    torch = require("torch")
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*map(torch.from_numpy, records())), BATCH)


def grain_data():
    grain = require("grain")
    x, y = records()
    return grain.MapDataset.range(44).map(lambda i: (x[i], y[i])).batch(BATCH)


KINDS = {"tensorflow": tensorflow_data, "torch": torch_data, "grain": grain_data}


@pytest.mark.parametrize("steps_per_epoch", [None, 4])
@RAN_OUT
def test_tensorflow(steps_per_epoch):
    tf = require("tensorflow")

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
def test_torch(steps_per_epoch):
    torch = require("torch")

    def fit(model, callbacks):
        torch.manual_seed(0)
        x, y = map(torch.from_numpy, records())
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=BATCH, shuffle=True)
        return model.fit(data, epochs=3, steps_per_epoch=steps_per_epoch, shuffle=False, verbose=0, callbacks=callbacks)

    assert_same(fit)


@pytest.mark.parametrize("kind", ["MapDataset", "IterDataset", "DataLoader"])
@RAN_OUT
def test_grain(kind):
    grain = require("grain")

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


@pytest.mark.parametrize("make", [*KINDS.values(), lambda: tensorflow_data(True)], ids=[*KINDS, "tensorflow, all whole"])
@RAN_OUT
def test_several_steps_in_an_execution(make):
    data = make()
    assert_same(
        lambda model, callbacks: model.fit(data, shuffle=False, verbose=0, callbacks=callbacks),
        lambda: make_model(built=True, steps_per_execution=4),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_data_of_penstock(kind):
    adapter = pk.data(KINDS[kind]())
    assert adapter.num_batches == 6
    theirs = trained((batch for _ in range(2) for batch in batches()), epochs=2, steps_per_epoch=6)
    assert_equal(trained(adapter, epochs=2), theirs)


@pytest.mark.parametrize("kind", ["tensorflow", "tensorflow, unknown", "torch", "grain"])
def test_data_of_penstock_without_end_or_of_unknown_length(kind):
    """Each library raises another error for an unknown length, or returns a special value."""
    if kind == "torch":
        torch = require("torch")

        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                return iter(zip(*map(torch.from_numpy, records()), strict=True))

        data = torch.utils.data.DataLoader(Stream(), BATCH)
    elif kind == "grain":
        data = require("grain").MapDataset.source(batches()).repeat().to_iter_dataset()
    else:
        data = tensorflow_data(drop_remainder=True)
        data = data.repeat() if kind == "tensorflow" else data.filter(lambda x, y: True)
    adapter = pk.data(data)
    assert adapter.num_batches is None
    trained(adapter, steps_per_epoch=5)
