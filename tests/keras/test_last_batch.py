"""The weights that docs/keras.md names for padded batches give the loss and the metrics of the records."""

import keras
import numpy as np
import pytest

import penstock as ps
import penstock.keras as pk


def make_data(records: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(records)
    return {
        "x": rng.normal(size=(records, 8)).astype("float32"),
        "kind": rng.integers(0, 3, records).astype("int32"),
        "size": rng.normal(size=(records, 1)).astype("float32"),
    }


def make_model(outputs: tuple[str, ...]) -> keras.Model:
    keras.utils.set_random_seed(0)
    given = keras.Input((8,))
    made = {"kind": keras.layers.Dense(3, "softmax", name="kind")(given), "size": keras.layers.Dense(1, name="size")(given)}
    losses = {"kind": "sparse_categorical_crossentropy", "size": "mse"}
    metrics = {"kind": ["accuracy"], "size": ["mae"]}
    model = keras.Model(given, {name: made[name] for name in outputs})
    model.compile("adam", {name: losses[name] for name in outputs}, weighted_metrics={name: metrics[name] for name in outputs})
    return model


@pytest.mark.parametrize("outputs", [("kind",), ("size",), ("kind", "size")])
@pytest.mark.parametrize(("records", "batch"), [(200, 64), (65, 32), (7, 16), (64, 16)])
def test_padded_evaluation_equals_the_one_that_keeps_the_last_batch(outputs, records, batch):
    data, model = make_data(records), make_model(outputs)
    kept = ps.Loader(data, batch, remainder="keep", epochs=1)
    padded = ps.Loader(data, batch, remainder="pad", epochs=1)
    scale = np.float32(batch * len(padded) / records)

    def targets(b):
        return {name: b[name] for name in outputs}

    kept = pk.data(kept, unpack=lambda b: (b["x"], targets(b)))
    padded = pk.data(padded, unpack=lambda b: (b["x"], targets(b), b["mask"] * scale))
    whole = model.evaluate(data["x"], targets(data), batch_size=batch, verbose=0, return_dict=True)
    for batches in (kept, padded):
        found = model.evaluate(batches, verbose=0, return_dict=True)
        assert found == pytest.approx(whole, rel=1e-5)


def test_padded_validation_of_fit_equals_the_one_that_keeps_the_last_batch():
    data, history = make_data(200), []
    padded = ps.Loader(data, 64, remainder="pad", epochs=1)
    scale = np.float32(64 * len(padded) / 200)
    for validation in (
        pk.data(ps.Loader(data, 64, remainder="keep", epochs=1), unpack=lambda b: (b["x"], {"kind": b["kind"]})),
        pk.data(padded, unpack=lambda b: (b["x"], {"kind": b["kind"]}, b["mask"] * scale)),
    ):
        training = pk.data(ps.Loader(data, 64, remainder="keep"), unpack=lambda b: (b["x"], {"kind": b["kind"]}))
        history.append(make_model(("kind",)).fit(training, epochs=2, validation_data=validation, verbose=0).history)
    assert history[0].keys() == history[1].keys() >= {"loss", "accuracy", "val_loss", "val_accuracy"}
    for name, values in history[0].items():
        assert history[1][name] == pytest.approx(values, rel=1e-5), name
