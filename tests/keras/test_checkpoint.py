"""A `fit` with `pk.Checkpoint` that is broken anywhere, and run again, ends as one that was not: weights, logs and records."""

from __future__ import annotations

import logging
import shutil

import jax
import keras
import numpy as np
import pytest
from tests.extras import require
from tests.keras.broken_training import EPOCHS, VALIDATION, Broken, Training, Watch, assert_continues_exactly, assert_same, loader
from tests.keras.training import CLASSES, FEATURES, make_model, records

import penstock as ps
import penstock.keras as pk
from penstock.keras.session import Session

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras, with NumPy 2


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("save_freq", [2, slow(1), slow(7)])
def test_a_run_that_is_broken_in_epochs_ends_as_one_that_is_not(tmp_path, save_freq):
    assert_continues_exactly(Training(tmp_path, checkpoint={"save_freq": save_freq}), (3, 7, 2, 3))


@pytest.mark.parametrize("options", [{"epochs": 1}, slow({"epochs": 2}), slow({"remainder": "keep"})])
def test_with_loaders_that_end(tmp_path, options):
    assert_continues_exactly(Training(tmp_path, lambda: loader(**options)))


@pytest.mark.filterwarnings("ignore:.*ran out of data")
@pytest.mark.parametrize(("steps", "options"), [(3, {}), slow(4, {"epochs": 1}), slow(3, {"epochs": 2})])
def test_with_steps_per_epoch_that_are_not_an_epoch_of_the_data(tmp_path, options, steps):
    assert_continues_exactly(Training(tmp_path, lambda: loader(**options), steps_per_epoch=steps), (3, 2, 3))


@pytest.mark.parametrize(("steps", "data"), [(2, loader), slow(3, lambda: loader(epochs=1))])
def test_with_several_steps_in_an_execution(tmp_path, steps, data):
    training = Training(tmp_path, data, lambda: make_model(steps_per_execution=steps), checkpoint={"save_freq": 1})
    assert_continues_exactly(training, (2, 3, 1))


def fed(**options):
    return ps.feed(loader(**options))


@pytest.mark.parametrize(("built", "steps"), [(True, 1), slow(False, 2)])
def test_with_a_feed_that_is_ahead_of_the_training(tmp_path, built, steps):
    training = Training(tmp_path, fed, lambda: make_model(built, steps_per_execution=steps), steps_per_epoch=4)
    assert_continues_exactly(training, (2, 1, 3) if steps > 1 else (3, 5, 2))


@pytest.mark.slow
def test_with_a_feed_of_an_iterator_that_has_a_state(tmp_path):
    grain = require("grain")
    x, y = records()

    def batches():
        data = grain.MapDataset.source(list(zip(x, y, strict=True))).shuffle(seed=1).repeat().batch(8)
        return ps.feed(data.to_iter_dataset())

    assert_continues_exactly(Training(tmp_path, batches, steps_per_epoch=5), (3, 5, 2))


@pytest.mark.slow
def test_with_steps(tmp_path):
    batches = loader()
    assert_continues_exactly(Training(tmp_path, lambda: ps.Steps(lambda step: batches[step]), steps_per_epoch=5))


@pytest.mark.slow
def test_under_threaded_epochs_with_the_loader_as_it_is(tmp_path):
    unbroken = Training(None).run()
    with pk.threaded_epochs():
        for after in (3, 4, None):
            keras.utils.set_random_seed(7)
            model, data = make_model(), loader()
            try:
                history = model.fit(
                    data, epochs=EPOCHS, verbose=0, callbacks=[pk.Checkpoint(tmp_path, data, save_freq=2), Watch(after)]
                )
            except Broken:
                continue
    assert history.history == unbroken[0]
    assert Session.epochs is None


@pytest.mark.slow
def test_each_record_is_trained_as_often_and_in_the_same_order(tmp_path):
    seen: list[list[int]] = []

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.numbers = self.add_weight(
                shape=(EPOCHS * 5, 8), initializer=lambda shape, dtype: -np.ones(shape), trainable=False
            )
            self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)
            self.dense = keras.layers.Dense(CLASSES, activation="softmax")

        def call(self, inputs, training=False):
            if training:
                self.numbers.assign(self.numbers.value.at[self.count.value].set(inputs["id"]))
                self.count.assign_add(1)
            return self.dense(inputs["x"])

    def model():
        made = Model()
        made.compile("sgd", "sparse_categorical_crossentropy")
        return made

    def data():
        x, y = records()
        return ps.Loader(({"x": x, "id": np.arange(len(x), dtype="float32")}, y), 8, shuffle=True, seed=3)

    training = Training(tmp_path, data, model)
    assert_continues_exactly(training)
    seen = np.asarray(training.trained.numbers.value).astype(int).tolist()
    ideal = data()
    assert seen == [ideal[step][0]["id"].astype(int).tolist() for step in range(EPOCHS * 5)]


@pytest.mark.slow
def test_initial_epoch_is_where_a_run_begins_and_the_checkpoint_where_it_continues(tmp_path):
    training = Training(tmp_path, initial_epoch=2, epochs=4)
    assert_continues_exactly(training, (3, 6))
    assert training.watch.epochs == [3]


def test_a_finished_run_trains_nothing_and_more_epochs_continue_it(tmp_path, capsys):
    unbroken, training = Training(None, epochs=5).run(), Training(tmp_path)
    training.run(tmp_path)
    training.options["verbose"] = 2
    training.run(tmp_path)
    assert training.watch.batches == []
    assert "nothing left to train" in capsys.readouterr().err
    training.options["epochs"] = 5
    assert_same(training.run(tmp_path), unbroken)
    assert training.watch.epochs == [3, 4]


def test_an_error_of_the_data_leaves_a_checkpoint_of_all_batches_before_it(tmp_path):
    broken = [True]

    seventh = loader()[6][0]

    def transform(batch):
        if broken[0] and np.array_equal(batch[0], seventh):
            raise OSError("unreadable")
        return batch

    training = Training(tmp_path, lambda: loader(transform=transform), checkpoint={"save_freq": 100})
    with pytest.raises(OSError, match="unreadable"):
        training.run(tmp_path)
    assert len(training.watch.batches) == 6
    broken[0] = False
    training.run(tmp_path)
    assert len(training.watch.batches) == EPOCHS * 5 - 6


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path, caplog):
    training = Training(tmp_path)
    unbroken = training.run()
    training.run(tmp_path, after=8)
    newest = max((tmp_path / "checkpoints").iterdir(), key=lambda path: int(path.name[5:]))
    shutil.rmtree(newest / "state")
    with caplog.at_level(logging.WARNING, "penstock.train"):
        assert_same(training.run(tmp_path), unbroken)
    assert f"{newest} is passed over" in caplog.text


@pytest.mark.slow
def test_the_best_epoch_is_kept_and_can_be_loaded(tmp_path):
    checkpoint = {"best": "min val_loss", "keep": 1, "save_freq": 3}
    training = Training(tmp_path, checkpoint=checkpoint, callbacks=lambda: [keras.callbacks.History()], **VALIDATION)
    history, _, _ = training.run(tmp_path)
    best = int(np.argmin(history["val_loss"]))
    model = make_model(built=True)
    record = pk.Checkpoint(tmp_path, loader(), best="min val_loss").load(model)
    assert record["metric"] == history["val_loss"][best]
    assert record["epoch"] == best + 1
    assert model.evaluate(*VALIDATION["validation_data"], verbose=0)[0] == pytest.approx(record["metric"])
    assert len(list((tmp_path / "checkpoints").iterdir())) <= 2


def test_the_best_value_of_another_metric_is_not_compared(tmp_path):
    checkpoint = {"best": "min val_loss", "keep": 1, "save_freq": 1000}
    Training(tmp_path, checkpoint=checkpoint, **{**VALIDATION, "epochs": 2}).run(tmp_path)
    training = Training(tmp_path, checkpoint={**checkpoint, "best": "max val_accuracy"}, **{**VALIDATION, "epochs": 5})
    history, _, _ = training.run(tmp_path)
    record = pk.Checkpoint(tmp_path, loader(), best="max val_accuracy").load(make_model(built=True))
    assert record["metric"] == max(history["val_accuracy"][2:])


def compiled_wide():
    model = keras.Sequential([keras.layers.Dense(7), keras.layers.Dense(CLASSES, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("model", {"model": compiled_wide}, ps.OtherStateError, "belongs to another model.*dense/kernel"),
        ("data", {"data": lambda: loader(seed=4)}, ps.OtherRunError, "step-.*something else: .*seed"),
        ("feed", {"data": lambda: fed(seed=4)}, ps.OtherRunError, "step-.*something else: .*seed"),
        ("steps", {"steps_per_epoch": 4}, ps.OtherRunError, "steps_per_epoch was None and is 4"),
    ],
)
def test_what_does_not_belong_to_the_run_is_refused(tmp_path, name, change, error, message):
    Training(tmp_path).run(tmp_path, after=3)
    with pytest.raises(error, match="(?s)" + message):
        Training(tmp_path, **change).run(tmp_path)


def test_a_run_whose_checkpoints_are_all_out_of_reach_is_refused_and_keeps_them(tmp_path):
    training = Training(tmp_path)
    training.run(tmp_path, after=5)
    folders = sorted((tmp_path / "checkpoints").iterdir())
    for folder in folders:
        (folder / "state").rename(tmp_path / folder.name)
        (folder / "state").symlink_to("nowhere")
    with pytest.raises(ps.CheckpointError, match=r"(?s)no checkpoint in .* can be used:\n  step-.* remove "):
        training.run(tmp_path)
    assert sorted((tmp_path / "checkpoints").iterdir()) == folders


def test_the_folder_of_another_kind_of_run_is_refused(tmp_path):
    def step(state, batch):
        return state + batch[0].sum(), {"loss": state}

    ps.fit(step, np.float32(0), loader(), steps=2, checkpoint=tmp_path, log=[])
    with pytest.raises(ps.OtherRunError, match=r"kind was None and is 'model\.fit of Keras'"):
        Training(tmp_path).run(tmp_path)


def test_arguments_that_cannot_work_are_refused(tmp_path):
    data = loader()
    for x in (pk.data(loader()), records()[0]):
        with pytest.raises(TypeError, match=r"pk\.Checkpoint.*Loader.*same object"):
            make_model().fit(
                x,
                *(() if not isinstance(x, np.ndarray) else (records()[1],)),
                verbose=0,
                callbacks=[pk.Checkpoint(tmp_path, data)],
            )
    with pytest.raises(TypeError, match="list, whose position"):
        pk.Checkpoint(tmp_path, [1, 2])
    with pytest.raises(ValueError, match="mount the bucket"):
        pk.Checkpoint("gs://bucket/run", data)
    for directory in ("", None):
        with pytest.raises((ValueError, TypeError), match="directory="):
            pk.Checkpoint(directory, data)
    with pytest.raises(ValueError, match=r"'newest'.*latest, best"):
        pk.Checkpoint(tmp_path, data).load(make_model(), "newest")
    with pytest.raises(ValueError, match="save_freq"):
        pk.Checkpoint(tmp_path, data, save_freq=0)
    with pytest.raises(ValueError, match="'min' or 'max'"):
        pk.Checkpoint(tmp_path, data, best="val_loss")
    with pytest.raises(ValueError, match="2 callbacks"):
        make_model().fit(pk.data(data), verbose=0, callbacks=[pk.Checkpoint(tmp_path, data), pk.Checkpoint(tmp_path, data)])
    with pytest.raises(ValueError, match=r"'min loss2'.*loss, accuracy"):
        make_model().fit(pk.data(data), verbose=0, callbacks=[pk.Checkpoint(tmp_path, data, best="min loss2")])
    with pytest.raises(ValueError, match="leave that one out"):
        other = keras.callbacks.BackupAndRestore(str(tmp_path / "other"))
        make_model().fit(pk.data(data), verbose=0, callbacks=[pk.Checkpoint(tmp_path, data), other])


def planned(devices):
    """Return a function that trains under a plan for some devices."""

    def model():
        keras.distribution.set_distribution(pk.AutoShardDistribution(devices=jax.devices()[:devices]))
        layers = [keras.layers.Input((FEATURES,)), keras.layers.Dense(64, "relu"), keras.layers.Dropout(0.3, seed=1)]
        made = keras.Sequential([*layers, keras.layers.Dense(CLASSES, "softmax")])
        made.compile("adam", "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
        return made

    return model


@pytest.fixture
def _no_distribution_is_left():
    yield
    keras.distribution.set_distribution(None)


@pytest.mark.slow
@pytest.mark.usefixtures("_no_distribution_is_left")
def test_under_a_plan_and_on_another_number_of_devices(tmp_path):
    training = Training(
        tmp_path / "same", model=planned(4), callbacks=lambda: [keras.callbacks.EarlyStopping("loss", patience=5)]
    )
    assert_continues_exactly(training, (3, 5))
    unbroken = training.run(tmp_path / "same")
    for number, devices in enumerate((8, 4, 2, 1)):
        training.model = planned(devices)
        training.run(tmp_path / "other", after=4 if number < 3 else None)
    again = training.run(tmp_path / "other")
    np.testing.assert_allclose(again[0]["loss"], unbroken[0]["loss"], rtol=1e-4)
    for ours, theirs in zip(again[2], unbroken[2], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("_no_distribution_is_left")
def test_with_the_data_parallel_distribution_of_keras(tmp_path):
    def model():
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=keras.distribution.list_devices()[:4]))
        return make_model()

    assert_continues_exactly(Training(tmp_path, model=model), (3, 5))
