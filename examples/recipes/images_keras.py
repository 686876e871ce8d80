"""Train Keras on a folder of JPEG files, stop after the first epoch, and continue bit for bit.

pip install "penstock[keras,images,train]" && python images_keras.py
"""

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


def fit(model: keras.Model, epochs: int, folder: Path) -> None:
    """Train up to the given epoch. If the folder has a checkpoint, training continues from there."""
    train = ps.images(RUN / "photos", size=32, split="train", validation=0.2)
    held_out = ps.images(RUN / "photos", size=32, split="validation", validation=0.2)
    data = pk.data(ps.Loader(train, 32, shuffle=True, seed=1, workers=2), unpack=lambda b: (b["image"], b["label"]))
    validation = pk.data(ps.Loader(held_out, 32, epochs=1, remainder="keep"), unpack=lambda b: (b["image"], b["label"]))
    checkpoint = pk.Checkpoint(folder, data, save_freq=5, best="max val_accuracy")
    log = model.fit(data, validation_data=validation, epochs=epochs, callbacks=[checkpoint], verbose=0).history
    print(f"after {epochs} epochs: validation accuracy {log['val_accuracy'][-1]:.2f}")


fit(straight := new_model(), 4, RUN / "straight")

fit(new_model(), 1, RUN / "stopped")  # a kill in the middle of an epoch would do as well
fit(resumed := new_model(), 4, RUN / "stopped")
assert all((one == other).all() for one, other in zip(straight.get_weights(), resumed.get_weights(), strict=True))
