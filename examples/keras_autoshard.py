"""Train a Keras model on eight devices: two lines more than on one, and no layout map.

pip install "penstock[keras]" && python examples/keras_autoshard.py

The devices are virtual CPUs; on a machine with accelerators, leave out the line that makes them.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
from keras import layers

import penstock.keras as pk

jax.config.update("jax_num_cpu_devices", 8)

VOCABULARY, LENGTH, WIDTH = 4_096, 64, 256
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, VOCABULARY, (512, LENGTH), "int32")
LABELS = (TOKENS[:, 0] % 8).astype("int32")


def build() -> keras.Model:
    """Return a compiled classifier of texts, a transformer of two blocks."""
    keras.utils.set_random_seed(0)
    tokens = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.Embedding(VOCABULARY, WIDTH, name="embedding")(tokens)
    for number in range(2):
        attended = layers.MultiHeadAttention(8, WIDTH // 8, name=f"attention_{number}")(hidden, hidden)
        hidden = layers.LayerNormalization(name=f"norm_{number}")(hidden + attended)
        inner = layers.Dense(4 * WIDTH, "gelu", name=f"up_{number}")(hidden)
        hidden = hidden + layers.Dense(WIDTH, name=f"down_{number}")(inner)
    model = keras.Model(tokens, layers.Dense(8, "softmax", name="classes")(hidden[:, 0]))
    model.compile(keras.optimizers.AdamW(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def main() -> None:
    """Train on one device and on eight, and compare."""
    alone = build().fit(TOKENS, LABELS, batch_size=64, epochs=3, shuffle=False, verbose=0).history["loss"]

    distribution = pk.AutoShardDistribution(memory="48MiB")  # the first line: a limit, to see the model sharded
    with distribution.scope():  # the second
        model = build()
        planned = model.fit(TOKENS, LABELS, batch_size=64, epochs=3, shuffle=False, verbose=0).history["loss"]

    distribution.explain()
    total = sum(variable.value.nbytes for variable in model.variables)
    held = sum(variable.value.addressable_shards[0].data.nbytes for variable in model.variables)
    print(f"loss on one device {alone[-1]:.5f}, on eight {planned[-1]:.5f}")
    print(f"a device holds {held / 2**20:.2f} of {total / 2**20:.2f} MiB of parameters")
    assert np.allclose(alone, planned, rtol=1e-3)


if __name__ == "__main__":
    main()
