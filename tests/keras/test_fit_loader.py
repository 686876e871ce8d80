"""`fit` takes a Loader, Steps or a Feed as it is under threaded epochs, and says what a dict batch lacks."""

import json
import re

import keras
import numpy as np
import pytest

import penstock as ps
import penstock.keras as pk

X, Y = np.random.default_rng(0).normal(size=(64, 4)).astype("f"), np.arange(64, dtype="f")


def model():
    keras.utils.set_random_seed(1)
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made


def test_threaded_epochs_take_a_loader_as_it_is():
    loader = ps.Loader((X, Y), 16, shuffle=True, epochs=1)
    wanted = model().fit(pk.data(loader), epochs=2, verbose=0).history["loss"]
    with pk.threaded_epochs():
        assert model().fit(loader, epochs=2, verbose=0).history["loss"] == wanted
        both = model().fit(loader, epochs=1, validation_data=loader, verbose=0).history
        assert both["loss"] == wanted[:1]
        assert len(both["val_loss"]) == 1


def test_steps_are_data_of_keras():
    steps = ps.Steps(lambda step: (X[step % 4 * 16 :][:16], Y[step % 4 * 16 :][:16]), 4)
    wanted = model().fit(X, Y, batch_size=16, shuffle=False, epochs=3, verbose=0).history["loss"]
    got = model().fit(pk.data(steps), epochs=3, verbose=0).history["loss"]
    assert got == wanted


@pytest.mark.parametrize("call", ["fit", "evaluate"])
def test_a_dict_with_labels_names_unpack(call):
    loader = ps.Loader({"image": X, "label": Y}, 16, epochs=1)
    with (
        pytest.warns(UserWarning, match=r"unpack=lambda batch: \(batch\['image'\], batch\['label'\]\)"),
        pytest.raises(ValueError, match="structure of `inputs`"),
    ):
        getattr(model(), call)(pk.data(loader), verbose=0)
    unpacked = pk.data(loader, unpack=lambda batch: (batch["image"], batch["label"]))
    assert getattr(model(), call)(unpacked, verbose=0) is not None


@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_a_run_continues_at_the_step_of_its_optimizer(tmp_path):
    loader = ps.Loader((X, Y), 16, shuffle=True, seed=3, epochs=None)
    wanted = model()
    losses = wanted.fit(pk.data(loader), epochs=2, steps_per_epoch=6, verbose=0).history["loss"]
    first = model()
    assert first.fit(pk.data(loader), epochs=1, steps_per_epoch=6, verbose=0).history["loss"] == losses[:1]
    first.save(tmp_path / "model.keras")

    second = keras.saving.load_model(tmp_path / "model.keras")
    done = int(second.optimizer.iterations)
    assert done == 6
    data = pk.data(ps.Steps(lambda step: loader[done + step]))
    assert second.fit(data, epochs=1, steps_per_epoch=6, verbose=0).history["loss"] == losses[1:]
    for ours, theirs in zip(second.get_weights(), wanted.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


NO_LABELS = {
    "a dict": ({"pixels": X, "klass": Y}, "'pixels'.*unpack=lambda batch"),
    "a dict with a known name": ({"pixels": X, "target": Y}, r"batch\['pixels'\], batch\['target'\]"),
    "x alone": (X, r"give batches \(x, y\)"),
    "(x,)": ((X,), r"give batches \(x, y\)"),
}


def with_note(error, pattern):
    return any(re.search(pattern, note) for note in error.__notes__ if note.startswith("penstock"))


@pytest.mark.filterwarnings("ignore:a batch is a dict")
@pytest.mark.parametrize(
    ("kind", "built"),
    [("a dict", True), ("a dict", False), ("a dict with a known name", True), ("x alone", True), ("(x,)", False)],
)
def test_an_error_of_keras_without_labels_names_unpack(kind, built):
    data, pattern = NO_LABELS[kind]
    made = model() if built else keras.Sequential([keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    with pytest.raises((ValueError, AttributeError), match=r"struct|input|None") as caught:  # the second is of Keras 3.16
        made.fit(pk.data(ps.Loader(data, 16, epochs=1)), verbose=0)
    assert with_note(caught.value, pattern)


def test_an_error_in_the_step_names_unpack():
    class Trained(keras.Sequential):
        def train_step(self, state, data):
            x, y = data
            return super().train_step(state, (x, y))

    made = Trained([keras.Input((4,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    made.fit(X, Y, verbose=0)
    with pytest.raises((ValueError, TypeError)) as caught:
        made.fit(pk.data(ps.Loader({"pixels": X, "klass": Y}, 16, epochs=1)), verbose=0)
    assert with_note(caught.value, "unpack")


def test_errors_with_another_cause_get_no_note():
    def fail(epoch, logs):
        raise ValueError("of a callback")

    data = pk.data(ps.Loader({"a": X}, 16, epochs=1), unpack=lambda batch: (batch["a"], batch["a"][:, :1]))
    with pytest.raises(ValueError, match="of a callback") as caught:
        model().fit(data, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=fail)], verbose=0)
    assert not any(note.startswith("penstock") for note in getattr(caught.value, "__notes__", ()))


WAYS_OUT = {
    "ps.mix": (lambda: ps.mix([(X, Y)] * 2, [0.5, 0.5], seed=1), r"pk.data\(ps.Loader\(source"),
    "ps.windows": (lambda: ps.windows(X, 4), r"pk.data\(ps.Loader\(source"),
    "a class": (lambda: np.float32, "class float32.*object is needed"),
}


@pytest.mark.parametrize(("make", "message"), WAYS_OUT.values(), ids=WAYS_OUT)
def test_sources_and_other_things_in_fit_name_what_is_needed(make, message):
    with pk.threaded_epochs():
        with pytest.raises(TypeError, match=message):
            model().fit(make(), verbose=0)
        with pytest.raises(TypeError, match=message):
            model().fit(X, Y, validation_data=make(), verbose=0)


NO_BATCHES = {
    "a folder": ("folder", r"pk.data\(ps.Loader\(ps.images"),
    "a dict": ({"x": X, "y": Y}, r"pk.data\(ps.Loader\(arrays"),
    "a number": (3, r"pk.data\(ps.Loader\(arrays"),
}


@pytest.mark.parametrize(("data", "message"), NO_BATCHES.values(), ids=NO_BATCHES)
def test_what_is_no_data_names_pk_data(data, message):
    with pytest.raises(TypeError, match=message) as caught:
        pk.data(data)
    assert "ps.feed" not in str(caught.value)


def collate(records):
    return np.array([record["x"] for record in records], "f"), np.array([record["y"] for record in records], "f")


def streamed(folder, epochs):
    file = folder / "records.jsonl"
    file.write_text("\n".join(json.dumps({"x": x.tolist(), "y": float(y)}) for x, y in zip(X, Y, strict=True)))
    return ps.stream(ps.jsonl(str(file)), 16, epochs=epochs, collate=collate)


@pytest.mark.filterwarnings("ignore:.*ran out of data")
def test_threaded_epochs_take_a_stream_as_it_is(tmp_path):
    wanted = model().fit(X, Y, batch_size=16, shuffle=False, epochs=2, verbose=0).history["loss"]
    with pk.threaded_epochs():
        assert model().fit(streamed(tmp_path, 1), epochs=2, verbose=0).history["loss"] == wanted
        endless = model().fit(streamed(tmp_path, None), epochs=2, steps_per_epoch=4, verbose=0)
        assert endless.history["loss"] == wanted
        with pytest.raises(TypeError, match=r"pk.data\(ps.stream"):
            model().fit(ps.jsonl(str(tmp_path / "records.jsonl")), verbose=0)


@pytest.mark.filterwarnings("ignore:.*ran out of data")
@pytest.mark.parametrize("kind", ["Steps", "Stream"])
def test_data_without_end_needs_a_number_of_steps(kind, tmp_path):
    data = pk.data(ps.Steps(lambda step: (X[:16], Y[:16])) if kind == "Steps" else streamed(tmp_path, None))
    made = model()
    for call in (made.fit, made.evaluate, made.predict):
        with pytest.raises(ValueError, match=f"the {kind} would never end.*steps_per_epoch"):
            call(data, verbose=0)
    with pytest.raises(ValueError, match="validation_steps"):
        made.fit(X, Y, validation_data=data, verbose=0)
    assert made.fit(X, Y, validation_data=data, validation_steps=2, verbose=0).history["val_loss"]
    assert made.predict(data, steps=2, verbose=0).shape == (32, 1)


def test_a_dict_of_inputs_is_no_reason_to_warn():
    inputs = {"a": keras.Input((4,), name="a"), "b": keras.Input((4,), name="b")}
    made = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Add()([inputs["a"], inputs["b"]])))
    assert made.predict(pk.data(ps.Loader({"a": X, "b": X}, 16, epochs=1)), verbose=0).shape == (64, 1)
