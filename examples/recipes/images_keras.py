"""Train Keras on a folder of JPEG files, stop after the first epoch, and continue bit for bit.

pip install "penstock[keras,images]" && python images_keras.py
"""

import json
import os
import tempfile
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np
from PIL import Image

import penstock as ps
import penstock.keras as pk

RUN = Path(tempfile.mkdtemp())
for name, least in (("bright", 90), ("dark", 0)):  # photos/bright/0.jpg … photos/dark/149.jpg
    (RUN / "photos" / name).mkdir(parents=True)
    for i in range(150):
        pixels = np.random.default_rng(i).integers(least, least + 160, (60, 80, 3), np.uint8)
        Image.fromarray(pixels).save(RUN / "photos" / name / f"{i}.jpg")


def new_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Rescaling(1 / 255), keras.layers.Conv2D(8, 3, strides=2, activation="relu")]
    layers += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(2, activation="softmax")]
    model = keras.Sequential([keras.Input((32, 32, 3)), *layers])
    model.compile(keras.optimizers.Adam(0.03), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def fit(model: keras.Model, first: int, last: int, state: dict | None = None) -> dict:
    """Train from epoch `first` up to `last`, on the batches after `state`; return the new state of the data."""
    train = ps.images(RUN / "photos", size=32, split="train", validation=0.2)
    held_out = ps.images(RUN / "photos", size=32, split="validation", validation=0.2)
    loader = ps.Loader(train, batch_size=32, shuffle=True, seed=1, workers=2)
    validation = pk.data(ps.Loader(held_out, 32, epochs=1, remainder="keep"), unpack=lambda b: (b["image"], b["label"]))
    with ps.feed(loader) as batches:
        if state:
            batches.restore(state)
        data = pk.data(batches, unpack=lambda b: (b["image"], b["label"]))
        span = {"initial_epoch": first, "epochs": last, "steps_per_epoch": loader.steps_per_epoch}
        log = model.fit(data, validation_data=validation, verbose=0, **span).history
        print(f"after {last} epochs and {batches.state()['step']} steps: validation accuracy {log['val_accuracy'][-1]:.2f}")
        return batches.state()


fit(straight := new_model(), 0, 4)  # a run that is not stopped

state = fit(stopped := new_model(), 0, 1)
stopped.save(RUN / "model.keras")  # the weights and the optimizer
(RUN / "data.json").write_text(json.dumps(state))

fit(resumed := keras.models.load_model(RUN / "model.keras"), 1, 4, json.loads((RUN / "data.json").read_text()))
assert all((one == other).all() for one, other in zip(straight.get_weights(), resumed.get_weights(), strict=True))
