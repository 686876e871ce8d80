"""An error comes once, at its batch. The model keeps the state of the last finished step, and no thread is left."""

import itertools
import signal
import threading
import traceback

import jax
import keras
import numpy as np
import pytest
from tests.extras import require
from tests.keras.conftest import feeding_threads
from tests.keras.training import BATCH, batches, make_model

import penstock.keras as pk
from penstock.keras.versions import behaviour


class Broken(Exception):
    pass


def endless(start=0):
    for number in itertools.count(start):
        yield batches(seed=number)[0]


def broken_at(number):
    def from_storage():
        raise Broken("no such record")

    yield from itertools.islice(endless(), number)
    from_storage()


def weights(model):
    return [np.asarray(v.value) for v in model.weights]


def assert_trained_for(model, steps, **options):
    """Check that the weights are those after this number of steps."""
    keras.utils.set_random_seed(7)
    other = make_model(built=True, **options)
    if steps:
        other.fit(endless(), epochs=1, steps_per_epoch=steps, shuffle=False, verbose=0)
    for ours, theirs in zip(weights(model), weights(other), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def fresh(**options):
    keras.utils.set_random_seed(7)
    return make_model(built=True, **options)


@pytest.mark.parametrize("number", [1, 5])
def test_an_error_of_the_data_comes_once_at_its_batch_with_its_traceback(number):
    model = fresh()
    with pk.threaded_epochs():
        with pytest.raises(Broken, match="no such record") as caught:
            model.fit(broken_at(number), shuffle=False, verbose=0)
        assert not feeding_threads()
        if number >= 2:  # Keras inspects the first two batches of a generator
            assert caught.value.__notes__ == [f"penstock: in the place of batch {number} of generator"]
        assert "from_storage" in "".join(traceback.format_exception(caught.value))
        assert_trained_for(model, 0 if number < 2 else number)
        model.fit(endless(), steps_per_epoch=3, shuffle=False, verbose=0)  # and the next one works


@pytest.mark.parametrize("number", [3, 4])
@pytest.mark.filterwarnings("ignore:.*ran out of data")
def test_within_an_execution_of_several_steps_those_before_the_error_count(number):
    model = fresh(steps_per_execution=3)
    with pk.threaded_epochs(), pytest.raises(Broken):
        model.fit(broken_at(number), shuffle=False, verbose=0)
    assert_trained_for(model, number)


class BrokenDataset(keras.utils.PyDataset):
    def __init__(self, at, **options):
        super().__init__(**options)
        self.at = at

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == self.at:
            raise Broken("no such record")
        return batches(seed=index)[0]


@pytest.mark.parametrize(("at", "workers"), [(0, 1), (3, 2), pytest.param(7, 1, marks=pytest.mark.slow)])
def test_a_py_dataset_whose_first_or_later_batch_fails(at, workers):
    model = fresh()
    with pk.threaded_epochs():
        with pytest.raises(Broken):
            model.fit(BrokenDataset(at, workers=workers), shuffle=False, verbose=0)
        # The workers stop after Keras has inspected a batch, and Keras then sees their work.
        assert_trained_for(model, at if workers == 1 else 0)
        model.fit(BrokenDataset(-1, workers=workers), shuffle=False, verbose=0)
        with pytest.raises(Broken):
            model.fit(BrokenDataset(-1), validation_data=BrokenDataset(at), shuffle=False, verbose=0)
        model.evaluate(BrokenDataset(-1), verbose=0)
        for call in (fresh().predict, fresh().evaluate):
            with pytest.raises(Broken):
                call(BrokenDataset(at, workers=workers), verbose=0)


def test_an_error_that_was_read_ahead_and_never_reached_is_not_raised():
    model = fresh()
    data = broken_at(5)
    with pk.threaded_epochs():
        model.fit(data, steps_per_epoch=4, shuffle=False, verbose=0)
        with pytest.raises(Broken) as caught:  # the next fit reaches it
            model.fit(data, steps_per_epoch=4, shuffle=False, verbose=0)
        assert not hasattr(caught.value, "__notes__")  # Keras itself reads the first two batches
        with pytest.raises(ValueError, match="empty generator"):  # once
            model.fit(data, steps_per_epoch=4, shuffle=False, verbose=0)


class _Do(keras.callbacks.Callback):
    def __init__(self, when, what):
        super().__init__()
        self.what = what
        setattr(self, when, self.at)

    def at(self, number, logs=None):
        if number == 2:
            self.what(self.model)


def _stop(model):
    model.stop_training = True


def _fail(model):
    raise Broken("in a callback")


def _interrupt(model):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("what", "when"),
    [
        (_stop, "on_train_batch_begin"),
        (_fail, "on_train_batch_end"),
        (_interrupt, "on_epoch_begin"),
        (_interrupt, "on_epoch_end"),
    ],
)
def test_however_fit_ends_the_thread_ends_before_it(what, when):
    model = fresh()
    with pk.threaded_epochs():
        try:
            model.fit(endless(), epochs=5, steps_per_epoch=5, shuffle=False, verbose=0, callbacks=[_Do(when, what)])
        except (Broken, KeyboardInterrupt) as error:  # its traceback refers to the frames of fit
            assert what is not _stop
            kept = error  # with its traceback
            assert not feeding_threads()
            del kept
        assert not feeding_threads()
        model.fit(endless(), steps_per_epoch=2, shuffle=False, verbose=0)


def test_ctrl_c_while_fit_waits_for_a_batch():
    stepped, goes_on, main = threading.Event(), threading.Event(), threading.main_thread()

    def data():
        yield from itertools.islice(endless(), 4)
        assert stepped.wait(60)
        signal.pthread_kill(main.ident, signal.SIGINT)
        goes_on.wait(60)

    def step(batch, logs=None):
        if batch == 3:
            stepped.set()

    model, callback = fresh(), keras.callbacks.LambdaCallback(on_train_batch_end=step)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    with pk.threaded_epochs():
        try:
            with pytest.raises(KeyboardInterrupt):
                model.fit(data(), epochs=1, steps_per_epoch=9, shuffle=False, verbose=0, callbacks=[callback])
        finally:
            signal.signal(signal.SIGINT, before)
            goes_on.set()
        assert_trained_for(model, 4)
        model.fit(endless(), steps_per_epoch=3, shuffle=False, verbose=0)


def test_stopping_and_going_on_loses_no_batch():
    class Again(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = False

    def run():
        model = fresh()
        history = model.fit(endless(), epochs=4, steps_per_epoch=5, shuffle=False, verbose=0, callbacks=[Again()])
        return history.history, weights(model)

    default = run()
    with pk.threaded_epochs():
        threaded = run()
    assert threaded[0] == default[0]
    for ours, theirs in zip(threaded[1], default[1], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_source_that_hangs_does_not_hold_back_an_error():
    hangs, goes_on = threading.Event(), threading.Event()

    def data():
        yield from itertools.islice(endless(), 4)
        hangs.set()
        goes_on.wait()
        yield from endless(4)

    def fail(model):
        assert hangs.wait(60)
        raise Broken("while a read hangs")

    model, generator = fresh(), data()
    with pk.threaded_epochs():
        with pytest.raises(Broken, match="while a read hangs"):
            model.fit(generator, steps_per_epoch=9, shuffle=False, verbose=0, callbacks=[_Do("on_train_batch_end", fail)])
        goes_on.set()
        # Three were consumed, the fourth is kept, and a thread that outlived fit was reading the fifth.
        model.fit(generator, steps_per_epoch=5, shuffle=False, verbose=0)
    assert_trained_for(model, 8)


def test_a_stopped_evaluation_and_prediction_end_their_threads():
    class Stop(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            self.model.stop_evaluating = True

        def on_predict_batch_end(self, batch, logs=None):
            self.model.stop_predicting = True

    model = fresh()
    with pk.threaded_epochs():
        model.evaluate(endless(), steps=5, verbose=0, callbacks=[Stop()])
        assert not feeding_threads()
        assert len(model.predict(endless(), steps=5, verbose=0, callbacks=[Stop()])) == BATCH
        assert not feeding_threads()


class Nothing(keras.utils.PyDataset):
    def __len__(self):
        return 0

    def __getitem__(self, index):
        raise IndexError(index)


@pytest.mark.filterwarnings("ignore:.*ran out of data")
@pytest.mark.parametrize("kind", ["PyDataset", "tensorflow"])
def test_data_without_a_batch_says_so_and_leaves_the_model_as_it_was(kind):
    model = fresh()
    data = Nothing()
    if kind == "tensorflow":
        data = require("tensorflow").data.Dataset.from_tensor_slices(batches()[0]).take(0).batch(BATCH)
    with pk.threaded_epochs():
        # Keras 3.16 itself reads the first batch until everything is built, also the optimizer.
        with pytest.raises(ValueError, match="dataset is empty" if behaviour().stacks else "no batch 0"):
            model.fit(data, shuffle=False, verbose=0)
        assert_trained_for(model, 0)
        model.fit(endless(), steps_per_epoch=1, shuffle=False, verbose=0)
        for call in (model.fit, model.evaluate, model.predict):
            with pytest.raises(ValueError, match="no batch 0"):
                call(data, verbose=0, **({"shuffle": False} if call == model.fit else {}))


def test_another_structure_in_the_middle_says_which_batch_what_it_had_and_what_was_needed():
    def data():
        for number, (x, y) in enumerate(endless()):
            yield (x, y) if number < 4 else (x, y, np.ones(len(y), "float32"))

    model = fresh()
    with pk.threaded_epochs(), pytest.raises(ValueError, match=r"batch 4 of generator .*2: float32\[8\].*is needed"):
        model.fit(data(), steps_per_epoch=9, shuffle=False, verbose=0)
    assert_trained_for(model, 4)


@pytest.mark.parametrize("given", ["generator", pytest.param("arrays", marks=pytest.mark.slow)])
def test_a_batch_that_the_mesh_does_not_divide_says_which(given):
    x, y = np.zeros((44, 5), "float32"), np.zeros(44, "int32")
    distribution = keras.distribution.DataParallel(devices=[f"cpu:{i}" for i in range(8)])
    with distribution.scope(), pk.threaded_epochs():
        model = make_model(built=True)
        before = weights(model)
        with pytest.raises(ValueError, match=r"dimension 0 has size 4.*multiple of 8") as caught:
            if given == "arrays":
                model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
            else:
                model.fit(((x[i : i + 8], y[i : i + 8]) for i in range(0, 44, 8)), shuffle=False, verbose=0)
        assert all("batch 5" in note for note in caught.value.__notes__)
        assert any((ours != theirs).any() for ours, theirs in zip(weights(model), before, strict=True))
        model.fit(x[:40], y[:40], batch_size=8, verbose=0)
    assert jax.device_count() == 8
