"""The verdict of Keras loops is the one of arithmetic, also in short epochs whose steps are all started before one has ended."""

import time

import keras
import numpy as np
import pytest

import penstock as ps
import penstock.keras as pk
from penstock.feed.starvation import Meter
from penstock_bench.suites.feed.device_times import DeviceTimes
from penstock_bench.suites.feed.known_times import ATTEMPTS, difference, sleep_on_device

pytestmark = pytest.mark.slow  # measured times are compared with known ones

STEPS, EPOCHS = 15, 2
COUNTED = 3  # runs, of which most need the right verdict if the first has not: a busy machine may disturb one of them
LONG, SHORT = 0.045, 0.005
STEP = {LONG: 0.015, SHORT: 0.025}
BATCH = (np.ones((8, 4), np.float32), np.ones((8, 1), np.float32))


@pytest.fixture(autouse=True)
def _take_notes(monkeypatch):
    """Note when Keras takes a batch, as its loop is its own."""

    def hand_over(self, batch, placing):
        DeviceTimes.newest().take()
        return original(self, batch, placing)

    original = Meter.hand_over
    monkeypatch.setattr(Meter, "hand_over", hand_over)


class Sleep(keras.layers.Layer):
    """A layer that passes its input on after a known time. The time counts in the forward pass only."""

    def __init__(self, seconds):
        super().__init__()
        self._seconds = seconds

    def call(self, inputs):
        return inputs + keras.ops.stop_gradient(sleep_on_device(keras.ops.stop_gradient(inputs), self._seconds, is_step=True))


class Source:
    def __init__(self, seconds):
        self._seconds = seconds

    def __len__(self):
        return 8 * 1000

    def read(self, indices):
        time.sleep(self._seconds)
        return BATCH


def batches(seconds):
    while True:
        time.sleep(seconds)
        yield BATCH


def unpack_slowly(seconds):
    def unpack(batch):
        time.sleep(seconds)
        return batch

    return unpack


def model(seconds, **options):
    made = keras.Sequential([keras.Input((4,)), Sleep(seconds), keras.layers.Dense(1)])
    made.compile("sgd", "mse", **options)
    # Compile the steps beforehand, of a complete execution and of a single batch.
    x, y = (np.concatenate([part] * 3) for part in BATCH)
    made.fit(x, y, batch_size=8, verbose=0)
    DeviceTimes()
    return made


def fit(data, seconds, **options):
    callbacks = options.pop("callbacks", [])
    model(seconds, **options).fit(data, steps_per_epoch=STEPS, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks)


def threaded(seconds, **options):
    with pk.threaded_epochs() as epochs:
        fit(batches(seconds), STEP[seconds], **options)
    return epochs.stats()[-1]


def threaded_synchronous(seconds):
    fetch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: float(logs["loss"]))
    return threaded(seconds, callbacks=[fetch])


def threaded_three_steps_per_execution(seconds):
    return threaded(seconds, steps_per_execution=3)


def loader(seconds):
    data = pk.data(ps.Loader(Source(seconds), 8))
    fit(data, STEP[seconds])
    return data.stats()[0]


def unpacked_loader(seconds):
    data = pk.data(ps.Loader(Source(0.0), 8), unpack=unpack_slowly(seconds))
    fit(data, STEP[seconds])
    return data.stats()[0]


def feed(seconds):
    with ps.feed(batches(seconds)) as inner:
        data = pk.data(inner)
        fit(data, STEP[seconds])
    return data.stats()[0]


PARTS = {
    threaded: "iterate",
    threaded_synchronous: "iterate",
    threaded_three_steps_per_execution: "iterate",
    loader: "read",
    unpacked_loader: "unpack",
    feed: "iterate",
}


@pytest.mark.parametrize(
    ("loop", "seconds"),
    [
        (threaded, LONG),
        (threaded, SHORT),
        (threaded_synchronous, LONG),
        (threaded_three_steps_per_execution, SHORT),
        (loader, LONG),
        (unpacked_loader, SHORT),
        (feed, LONG),
    ],
)
def test_short_epochs(loop, seconds):
    def attempts():
        for _ in range(ATTEMPTS):
            stats = loop(seconds)
            assert stats.steps == STEPS * EPOCHS
            # The first batch of each epoch is not part of the time that the verdict is about.
            assert stats.seconds > (STEPS - 1) * EPOCHS * max(seconds, STEP[seconds]) * 0.9
            yield stats, DeviceTimes.newest()

    assert difference(attempts(), seconds, STEP[seconds], PARTS[loop], COUNTED) == ""


def test_arrays_in_fit_keep_up():
    made = model(0.02)
    x, y = (np.concatenate([part] * STEPS) for part in BATCH)
    with pk.threaded_epochs() as epochs:
        made.fit(x, y, batch_size=8, epochs=EPOCHS, verbose=0)
    (stats,) = epochs.stats()
    assert stats.seconds > (STEPS - 1) * EPOCHS * 0.02
    assert stats.verdict.startswith("keeps up")
