"""Run the same Keras training three times: unchanged, with threaded epochs, and with data from a penstock Loader.

pip install "penstock[keras]" && python examples/keras_threaded.py

The records are from a storage with a latency of 5 ms, like an object store or a network disk. Like TensorBoard's, a callback
reads the loss of each step, so Keras waits for each step.
"""

import os
import time

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

import penstock as ps
import penstock.keras as pk

RECORDS, BATCH, LATENCY = 6_400, 64, 5e-3
IMAGES = np.random.default_rng(0).integers(0, 256, (RECORDS, 28, 28, 1), np.uint8)
LABELS = (IMAGES.reshape(RECORDS, -1).mean(1) > 127.5).astype("int32")


class Storage(keras.utils.PyDataset):
    """Batches from the storage, one at a time, and the seconds that reading them took."""

    waited = 0.0

    def __len__(self) -> int:
        return RECORDS // BATCH

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        begin = time.perf_counter()
        batch = read(np.arange(index * BATCH, (index + 1) * BATCH))
        self.waited += time.perf_counter() - begin
        return batch


def read(indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Read records from the slow storage."""
    time.sleep(LATENCY)
    return IMAGES[indices].astype("float32") / 255, LABELS[indices]


class Source:
    """The same storage for a Loader: a length, and one read for all records of a batch."""

    def __len__(self) -> int:
        return RECORDS

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return read(indices)


def train(data: object) -> tuple[list[float], float]:
    """Train for three epochs.

    Returns:
      The loss after each step, and the seconds of the last two epochs. The first one compiles.
    """
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Input((28, 28, 1)),
            keras.layers.Conv2D(32, 3, strides=2, activation="relu"),
            keras.layers.Conv2D(32, 3, strides=2, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(2, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy")
    steps: list[float] = []
    ends: list[float] = []
    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: steps.append(logs["loss"]),
        on_epoch_end=lambda epoch, logs: ends.append(time.perf_counter()),
    )
    model.fit(data, epochs=3, shuffle=False, verbose=0, callbacks=[callback])
    return steps, ends[-1] - ends[0]


def main() -> None:
    storage = Storage()
    losses, seconds = train(storage)
    print(f"Keras alone       {seconds:.2f} s, of which {2 / 3 * storage.waited:.2f} s waiting for the storage")

    with pk.threaded_epochs() as epochs:
        threaded_losses, seconds = train(Storage())
    (stats,) = epochs.stats()
    print(f"threaded epochs   {seconds:.2f} s; waits {stats.starved_share:.0%} of the time\n  {stats}")
    assert threaded_losses == losses, "the same training, bit for bit"

    data = pk.data(ps.Loader(Source(), BATCH, epochs=1, workers=4))
    loader_losses, seconds = train(data)
    (stats,) = data.stats()
    print(f"Loader, 4 workers {seconds:.2f} s; waits {stats.starved_share:.0%} of the time\n  {stats}")
    assert loader_losses == losses


if __name__ == "__main__":
    main()
