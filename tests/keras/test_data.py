"""`pk.data`: a Loader, or anything else that can be fed, as Keras data."""

import itertools

import keras
import numpy as np
import pytest
from tests.keras.conftest import feeding_threads
from tests.keras.training import BATCH, assert_equal, batches, make_model, records, trained

import penstock as ps
import penstock.keras as pk


def loader(**options):
    return ps.Loader(records(), BATCH, **{"shuffle": True, "seed": 3, "remainder": "keep", **options})


def steps_of(loader, steps):
    return (loader[step] for step in range(steps))


@pytest.mark.parametrize(("workers", "threaded"), [(None, False), (2, True)])
def test_an_endless_loader_goes_on_and_an_epoch_is_one_of_its_own(workers, threaded):
    data = pk.data(loader(workers=workers))
    if threaded:
        with pk.threaded_epochs():
            ours = trained(data, epochs=3)
    else:
        ours = trained(data, epochs=3)
    # The same batches from a generator, with the length of an epoch given to Keras.
    assert_equal(ours, trained(steps_of(loader(), 18), epochs=3, steps_per_epoch=6))
    assert [stats.steps for stats in data.stats()] == [18]


def test_with_steps_per_epoch_an_endless_loader_goes_on_where_it_was():
    assert_equal(
        trained(pk.data(loader()), epochs=4, steps_per_epoch=4),
        trained(steps_of(loader(), 16), epochs=4, steps_per_epoch=4),
    )


@pytest.mark.slow
def test_a_loader_with_processes_keeps_them_between_epochs_and_ends_them():
    assert_equal(
        trained(pk.data(loader(workers="process:2")), epochs=3),
        trained(steps_of(loader(), 18), epochs=3, steps_per_epoch=6),
    )


def test_a_finite_loader_is_one_epoch_from_its_start_each_time():
    finite = loader(epochs=2)

    class Steps(keras.utils.PyDataset):
        def __len__(self):
            return len(finite)

        def __getitem__(self, step):
            return finite[step]

    assert_equal(trained(pk.data(finite), epochs=3), trained(Steps(), epochs=3))


def test_each_fit_and_each_validation_begins_at_the_start_of_a_loader():
    data = pk.data(loader())
    first, again = trained(data, epochs=2), trained(data, epochs=2)
    assert_equal(first, again)
    ours = trained(data, epochs=3, validation_data=pk.data(loader(seed=9)))
    validation = list(steps_of(loader(seed=9), 6))
    x, y = (np.concatenate(part) for part in zip(*validation, strict=True))
    theirs = trained(
        lambda: steps_of(loader(), 18), epochs=3, steps_per_epoch=6, validation_data=(x, y), validation_batch_size=BATCH
    )
    assert_equal(ours, theirs)


def test_class_weights_are_those_of_keras():
    weights = {0: 1.0, 1: 3.0}
    x, y = records()
    keras.utils.set_random_seed(7)
    model = make_model()
    theirs = model.fit(x, y, batch_size=BATCH, epochs=2, class_weight=weights, shuffle=False, verbose=0).history
    ours = trained(pk.data(loader(shuffle=False)), epochs=2, class_weight=weights)
    assert ours[0] == theirs
    with pytest.raises(ValueError, match="leave out one of them"):
        trained(pk.data(loader(), unpack=lambda b: (*b, np.ones(len(b[1])))), class_weight=weights)


def test_unpack_makes_of_dicts_what_keras_takes():
    x, y = records()
    padded = ps.Loader({"x": x, "y": y}, BATCH, remainder="pad", epochs=1)
    data = pk.data(padded, unpack=lambda batch: (batch["x"], batch["y"], batch["mask"].astype("float32")))

    def same():
        for step in range(len(padded)):
            batch = padded[step]
            yield batch["x"], batch["y"], batch["mask"].astype("float32")

    assert_equal(trained(data), trained(same, steps_per_epoch=6))
    model = make_model()
    assert model.predict(pk.data(padded, unpack=lambda batch: batch["x"]), verbose=0).shape == (48, 3)


@pytest.mark.parametrize(("data", "length"), [(batches(), 6), (itertools.cycle(batches()), None)], ids=["list", "iterator"])
def test_whatever_can_be_fed(data, length):
    adapter = pk.data(data)
    assert adapter.num_batches == length
    steps = {} if length else {"steps_per_epoch": 6}
    theirs = trained((batch for _ in range(2) for batch in batches()), epochs=2, steps_per_epoch=6)
    assert_equal(trained(adapter, epochs=2, **steps), theirs)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")  # of any batch with 64 bits
@pytest.mark.filterwarnings("ignore:.*ran out of data")  # Keras 3.15 warns once, and then knows the length
@pytest.mark.parametrize("kind", [list, iter])
def test_lists_of_numbers_are_arrays(kind):
    """Keras would take each number for an input of its own."""
    listed = kind([(x.tolist(), y.tolist()) for x, y in batches()])
    assert_equal(trained(pk.data(listed)), trained(pk.data(batches())))
    with pytest.raises(ValueError, match="leaf '0' of a batch is a list of lists of different lengths"):
        trained(pk.data(kind([([[1.0], [2.0, 3.0]], [0, 1])])))


class Listed(list):
    """Batches whose length raises an error."""

    def __init__(self, error):
        super().__init__(batches())
        self.error = error

    def __len__(self):
        raise self.error


@pytest.mark.filterwarnings("ignore:.*ran out of data")  # Keras 3.15 warns once, and then knows the length
def test_data_that_has_no_length_is_read_to_its_end():
    for error in (TypeError("infinite"), NotImplementedError()):
        adapter = pk.data(Listed(error))
        assert adapter.num_batches is None
    trained(adapter)
    assert [stats.steps for stats in adapter.stats()] == [6]


def test_an_error_in_the_length_of_the_data_comes_out():
    with pytest.raises(OSError, match="index is gone"):
        trained(pk.data(Listed(OSError("index is gone"))))


def test_a_feed_is_taken_as_it_is():
    x, y = records()
    with ps.feed(ps.Loader((x.astype("float64"), y), BATCH), transform=lambda b: (b[0] * 2, b[1])) as feed:
        ours = trained_within(feed)
        assert feed.state()["step"] == 8
    doubled = ((x[i : i + BATCH].astype("float32") * 2, y[i : i + BATCH]) for _ in range(2) for i in range(0, 40, BATCH))
    assert_equal(ours, trained(doubled, epochs=2, steps_per_epoch=4))


def trained_within(feed):
    keras.utils.set_random_seed(7)
    model = make_model()
    history = model.fit(pk.data(feed), epochs=2, steps_per_epoch=4, shuffle=False, verbose=0)
    return history.history, [np.asarray(v.value) for v in model.weights]


def test_what_belongs_into_the_batches_is_refused_beside_them():
    x, y = records()
    model = make_model(built=True)
    for wrong in ({"y": y}, {"sample_weight": np.ones(44)}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} was given beside penstock data"):
            model.fit(pk.data(loader()), verbose=0, **wrong)
    with pytest.raises(TypeError, match="iterable of batches"):
        pk.data((x, y))
    with pytest.raises(TypeError, match="unpack=3"):
        pk.data(loader(), unpack=3)


@pytest.mark.slow
def test_the_batch_size_of_the_training_data_says_nothing_of_penstock_validation_data():
    x, y = records()
    ours = trained_on_arrays(x, y, pk.data(loader(shuffle=False, epochs=1)))
    theirs = trained_on_arrays(x, y, (x, y))
    assert ours == theirs


def trained_on_arrays(x, y, validation_data):
    keras.utils.set_random_seed(7)
    return make_model().fit(x, y, batch_size=BATCH, epochs=2, verbose=0, validation_data=validation_data).history


def test_unpack_is_called_once_for_each_batch_though_some_are_read_again():
    for make, batches_of in ((lambda: itertools.cycle(batches()), batches), (loader, lambda: steps_of(loader(), 12))):
        calls = []

        def halve(batch, calls=calls):
            calls.append(batch[1][0])
            x, y = batch
            x *= 0.5  # in place
            return x, y

        data = make()
        keras.utils.set_random_seed(7)
        model = make_model(built=True)
        model.fit(pk.data(data, unpack=halve), epochs=6, steps_per_epoch=2, shuffle=False, verbose=0)
        assert len(calls) <= 12 + 1 + 7  # consumed, inspected by Keras, and read ahead at the end
        same = ((x * np.float32(0.5), y) for x, y in itertools.cycle(batches_of()))
        keras.utils.set_random_seed(7)
        other = make_model(built=True)
        other.fit(same, epochs=6, steps_per_epoch=2, shuffle=False, verbose=0)
        for ours, theirs in zip(model.weights, other.weights, strict=True):
            np.testing.assert_array_equal(ours.value, theirs.value)


def test_what_unpack_raises_is_not_taken_for_the_end():
    def ends(batch):
        raise StopIteration

    with pytest.raises(RuntimeError, match="unpack raised StopIteration"):
        make_model(built=True).fit(pk.data(loader(), unpack=ends), verbose=0)
    with pytest.raises(IndexError):
        make_model().fit(pk.data(loader(), unpack=lambda batch: (batch[0], batch[2])), verbose=0)


@pytest.mark.parametrize("kind", ["generator", "iterator", "feed"])
def test_one_iterator_may_be_the_data_of_several_runs(kind):
    """Each continues where the one before it ended, as with Keras alone."""

    def numbered():
        for number in itertools.count():
            yield batches(seed=number)[0]

    def run(endless):
        keras.utils.set_random_seed(7)
        model = make_model(built=True)
        wrap = (lambda data: data) if endless is None else pk.data
        source = numbered() if endless is None else endless
        history = model.fit(wrap(source), epochs=2, steps_per_epoch=3, shuffle=False, verbose=0).history
        again = model.fit(wrap(source), epochs=2, steps_per_epoch=3, shuffle=False, verbose=0).history
        return history, again, [np.asarray(v.value) for v in model.weights]

    class Numbered:
        def __init__(self):
            self.of = numbered()

        def __iter__(self):
            return self

        def __next__(self):
            return next(self.of)

    theirs = run(None)
    with ps.feed(numbered()) as feed:
        ours = run({"generator": numbered(), "iterator": Numbered(), "feed": feed}[kind])
    assert_equal(ours[:1] + ours[2:], theirs[:1] + theirs[2:])
    assert ours[1] == theirs[1]


def test_an_iterator_of_which_nobody_knows_what_was_read_ahead_is_refused():
    data = map(tuple, batches())
    pk.data(data)
    with pytest.raises(ValueError, match="started or fed before"):
        pk.data(data)


def test_an_execution_ends_with_the_epoch_of_an_endless_loader():
    seen = []

    def see(batch):
        seen.append(float(batch[0][0, 0]))
        return batch

    keras.utils.set_random_seed(7)
    model = make_model(built=True, steps_per_execution=4)
    model.fit(pk.data(loader(), unpack=see), epochs=3, verbose=0)
    assert int(model.optimizer.iterations.value) == 18
    assert seen[1:19] == [float(loader()[step][0][0, 0]) for step in range(18)]  # Keras inspected the first


@pytest.mark.slow
def test_steps_that_keras_is_limited_to_are_steps_per_epoch(monkeypatch):
    monkeypatch.setattr("keras.src.backend.config._MAX_STEPS_PER_EPOCH", 4)
    with pytest.warns(UserWarning, match="Limiting steps_per_epoch to 4"):
        limited = trained(pk.data(loader()), epochs=3)
    monkeypatch.undo()
    assert_equal(limited, trained(pk.data(loader()), epochs=3, steps_per_epoch=4))


def test_an_error_in_the_loader_comes_at_its_batch():
    def fail(batch, rng):
        if fail.calls == 3:
            raise OSError("disk is gone")
        fail.calls += 1
        return batch

    fail.calls = 0
    model = make_model(built=True)
    with pytest.raises(OSError, match="disk is gone") as caught:
        model.fit(pk.data(loader(transform=fail, workers=1)), verbose=0)
    assert not feeding_threads()
    assert any("batch 2" in note for note in caught.value.__notes__)  # Keras inspected one before it


def test_other_data_is_left_to_keras_while_threaded_epochs_are_off():
    pk.data(loader())
    seen = []

    def data():
        import threading

        for batch in batches():
            seen.append(threading.current_thread() is threading.main_thread())
            yield batch

    make_model().fit(data(), steps_per_epoch=5, shuffle=False, verbose=0)
    assert all(seen)
