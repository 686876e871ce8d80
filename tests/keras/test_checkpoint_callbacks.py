"""The callbacks of a broken `fit` go on where they were: those of Keras, and those of the user that have a state."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from tests.keras.broken_training import EPOCHS, VALIDATION, Training, assert_continues_exactly, assert_same
from tests.keras.training import records

from penstock.keras import callback_state

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras, with NumPy 2


def stateful():
    return [
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=2, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, min_delta=0.05),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
    ]


@pytest.mark.parametrize("after_epochs", [3, pytest.param(None, marks=pytest.mark.slow)])
def test_with_validation_and_callbacks_of_keras_that_have_a_state(tmp_path, after_epochs):
    training = Training(tmp_path, callbacks=stateful, **VALIDATION)
    unbroken = training.run()
    assert len(unbroken[1]) < 8, "the training has to stop early"
    if after_epochs:
        assert training.run(tmp_path, after_epochs=after_epochs) is None
    for after in (8, 6):
        training.run(tmp_path, after=after)
    assert_same(training.run(tmp_path), unbroken)
    again = training.run(tmp_path)
    assert training.watch.batches == []
    assert_same(again, unbroken)


def test_a_csv_file_and_saved_models_are_those_of_an_unbroken_run(tmp_path):
    files = []

    def callbacks(folder):
        folder.mkdir(exist_ok=True)
        files.append(keras.callbacks.CSVLogger(folder / "log.csv"))
        return [
            files[-1],
            keras.callbacks.ModelCheckpoint(folder / "{epoch}.weights.h5", save_weights_only=True, save_best_only=True),
        ]

    options = {**VALIDATION, "epochs": 4}
    Training(None, callbacks=lambda: callbacks(tmp_path / "a"), **options).run()
    broken = Training(tmp_path / "run", callbacks=lambda: callbacks(tmp_path / "b"), checkpoint={"save_freq": 7}, **options)
    for breaks in ({"after": 3}, {"after": 8}, {"after_epochs": 2}, {"after": 1}, {}):
        broken.run(broken.folder, **breaks)
        files[-1].csv_file.close()
    assert (tmp_path / "b" / "log.csv").read_text() == (tmp_path / "a" / "log.csv").read_text()
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == sorted(p.name for p in (tmp_path / "b").iterdir())


class Counting(keras.callbacks.Callback):
    """A callback with a state of its own."""

    def __init__(self):
        super().__init__()
        self.losses, self.count = [], np.zeros(2, np.float64)

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])
        self.count += [1, logs["loss"]]

    def get_state(self):
        return {"losses": self.losses, "count": self.count}

    def set_state(self, state):
        self.losses, self.count = state["losses"], state["count"]


def test_a_callback_of_the_user_is_asked_for_its_state(tmp_path):
    counts = []

    def callbacks():
        counts.append(Counting())
        return [counts[-1]]

    assert_continues_exactly(Training(tmp_path, callbacks=callbacks))
    assert counts[-1].losses == counts[0].losses
    assert len(counts[0].losses) == EPOCHS * 5
    np.testing.assert_array_equal(counts[-1].count, counts[0].count)


@pytest.mark.slow
def test_a_callback_that_evaluates_changes_nothing(tmp_path):
    class Evaluates(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.model.evaluate(*records(16, seed=5), verbose=0)

        on_epoch_begin = lambda self, epoch, logs=None: self.on_train_begin()  # noqa: E731

        def on_epoch_end(self, epoch, logs=None):
            logs["mine"] = self.model.evaluate(*records(16, seed=5), verbose=0)[0]

    assert_continues_exactly(Training(tmp_path, callbacks=lambda: [Evaluates()]))


def test_a_state_that_cannot_be_saved_is_an_error_that_names_it(tmp_path):
    class Half(keras.callbacks.Callback):
        def get_state(self):
            return None

    class Odd(Counting):
        def get_state(self):
            return {"a": [object()]}

    with pytest.raises(TypeError, match="Half has only one of get_state and set_state"):
        Training(tmp_path, callbacks=lambda: [Half()]).run(tmp_path)
    with pytest.raises(TypeError, match=r"Odd 1\['a'\]\[0\] has a object"):
        Training(tmp_path, callbacks=lambda: [Odd()]).run(tmp_path)


def test_states_of_callbacks_come_back_as_they_were():
    state = {
        "a": [1, 2.5, None, True, "text", float("inf")],
        3: (np.float32(0.1), np.int64(2**60)),
        "arrays": {"x": np.arange(6.0).reshape(2, 3), "empty": np.zeros((0, 3), np.int8), "scalar": np.array(1.5)},
    }
    arrays: dict[str, Any] = {}
    back = callback_state.decode(callback_state.encode(state, arrays, "state"), arrays)
    assert back["a"] == state["a"]
    assert back[3] == state[3]
    assert [type(value) for value in back[3]] == [np.float32, np.int64]
    for name, array in state["arrays"].items():
        np.testing.assert_array_equal(back["arrays"][name], array)
        assert (back["arrays"][name].dtype, back["arrays"][name].shape) == (array.dtype, array.shape)
