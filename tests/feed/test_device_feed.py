"""The batches, errors and statistics that a feed gives its consumer."""

import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.extras import require
from tests.feed.batches import X, loader, values

import penstock as ps


@pytest.mark.parametrize(("workers", "buffers"), [(None, (1, 1)), (2, (1, 1)), (2, (2, 7)), ("process:1", (4, 2))])
def test_batches_are_those_of_the_loader_on_the_device(workers, buffers):
    made = loader(workers=workers)
    with ps.feed(made, host_buffer=buffers[0], device_buffer=buffers[1]) as feed:
        batches = list(feed)
    assert all(isinstance(batch["x"], jax.Array) for batch in batches)
    assert values(batches) == values(loader())


def test_the_transform_runs_on_the_device():
    seen = []

    def scale(batch):
        seen.append(type(batch["x"]))
        return {"x": batch["x"].astype(jnp.float32) / 2, "n": batch["x"].sum()}

    with ps.feed(loader(), transform=scale) as feed:
        batches = list(feed)
    assert values(batches) == [[v / 2 for v in batch] for batch in values(loader())]
    assert batches[0]["n"].shape == ()
    assert len(seen) == 1  # traced once, and not called for each batch


def test_an_iterable_may_fill_one_buffer_again_and_again():
    def batches():
        buffer = np.zeros(1000, np.float32)
        for i in range(50):
            buffer[:] = i
            yield {"x": buffer}

    with ps.feed(batches()) as feed:
        got = list(feed)
    assert [np.unique(batch["x"]).tolist() for batch in got] == [[i] for i in range(50)]


def test_an_error_of_the_source_comes_after_the_good_batches_once():
    def batches():
        for i in range(5):
            yield np.full(3, i)
        raise OSError("disk on fire")

    feed = ps.feed(batches())
    assert [int(next(feed)[0]) for _ in range(5)] == list(range(5))
    with pytest.raises(OSError, match="disk on fire") as caught:
        next(feed)
    assert "generator made batch 5" in caught.value.__notes__[0]
    assert any(entry.name == "batches" for entry in caught.traceback)
    assert list(feed) == []


def test_an_error_of_a_record_is_named_after_the_good_batches():
    class Bad:
        def __len__(self):
            return 20_000

        def __getitem__(self, i):
            if i == 12_345:
                raise OSError("disk on fire")
            return {"x": i}

    seen = 0
    feed = ps.feed(ps.Loader(Bad(), 100))
    with pytest.raises(OSError, match="disk on fire") as caught:
        for _ in feed:
            seen += 1
    assert seen == 123
    assert "record 12345" in "".join(caught.value.__notes__)


def test_an_error_of_the_transform_names_the_batch():
    def bad(batch):
        raise ValueError("wrong shape for me")

    with pytest.raises(ValueError, match="wrong shape for me") as caught:
        next(ps.feed(loader(), transform=bad))
    assert "placing batch 0" in "".join(caught.value.__notes__)


def test_a_read_that_takes_too_long_is_told_and_may_be_waited_on():
    release = threading.Event()

    def batches():
        yield np.zeros(1)
        release.wait()
        yield np.ones(1)

    with ps.feed(batches(), timeout=0.05) as feed:
        next(feed)
        with pytest.raises(TimeoutError, match=r"batch 1 .*timeout=0\.05 s.*generator"):
            next(feed)
        release.set()
        assert float(next(ps_retry(feed))[0]) == 1


def ps_retry(feed):
    """Yield the next batch after any number of timeouts, as the message allows."""
    while True:
        try:
            yield next(feed)
        except TimeoutError:
            continue


def test_with_a_timeout_nothing_is_read_on_the_consumers_thread():
    """Otherwise the consumer could not be told that a read takes too long."""
    threads = set()

    class Tiny:
        def __len__(self):
            return 400

        def read(self, indices):
            threads.add(threading.current_thread())
            return {"x": indices}

    with ps.feed(ps.Loader(Tiny(), 2, epochs=1), timeout=60) as feed:
        assert len(list(feed)) == 200
    assert threading.current_thread() not in threads


def test_a_timeout_error_of_the_source_is_its_own():
    def batches():
        raise TimeoutError("the socket's")
        yield

    with pytest.raises(TimeoutError, match="the socket's"):
        next(ps.feed(batches(), timeout=60))


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"x": X},
        lambda: X,
        lambda: "abc",
        lambda: jnp.zeros(3),
        lambda: (X, X[:, None]),
        lambda: require("torch").zeros(3),
        lambda: require("pandas").DataFrame({"x": [1]}),
    ],
    ids=["dict", "array", "str", "jax array", "inputs and labels", "tensor", "table"],
)
def test_what_is_no_iterable_of_batches_is_refused_with_a_way_out(make):
    with pytest.raises(TypeError, match=r"ps\.feed\(ps\.Loader\((arrays|ps\.images)"):
        ps.feed(make())


def test_a_generator_is_fed_once():
    def batches():
        yield np.zeros(1)
        yield np.zeros(1)

    fed = batches()
    with ps.feed(fed) as feed:
        next(feed)
    with pytest.raises(ValueError, match="generator was started or fed before"):
        ps.feed(fed)
    twice = batches()
    first, second = ps.feed(twice), ps.feed(twice)  # neither has begun
    assert len(list(first)) == 2
    with pytest.raises(ValueError, match="fed before"):
        next(second)
    started = batches()
    next(started)
    with pytest.raises(ValueError, match="started"):
        ps.feed(started)


@pytest.mark.parametrize("wrong", [{"host_buffer": 0}, {"to": "cpu"}, {"timeout": -1}, {"transform": 3}])
def test_a_generator_is_not_used_up_by_a_call_that_fails(wrong):
    generator = (np.zeros(1) for _ in range(3))
    with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
        ps.feed(generator, **wrong)
    assert len(list(ps.feed(generator))) == 3


class KeepsItsGenerator:
    def __init__(self):
        self.generator = (np.zeros(1) for _ in range(20))

    def __iter__(self):
        return self.generator


@pytest.mark.parametrize(
    "make",
    [
        lambda batches: map(np.copy, batches),
        lambda batches: zip(batches, batches, strict=True),
        enumerate,
        iter,
        lambda batches: KeepsItsGenerator(),
    ],
    ids=["map", "zip", "enumerate", "list iterator", "an iterable that keeps its generator"],
)
def test_an_iterator_that_was_fed_loses_nothing_in_silence(make):
    iterator = make([np.zeros(1)] * 20)
    with ps.feed(iterator) as feed:
        next(feed)
    with pytest.raises(ValueError, match="fed before"):
        next(ps.feed(iterator))


@pytest.mark.parametrize("timeout", [0, -1, "5", True, float("nan")])
def test_a_timeout_that_is_none_is_refused(timeout):
    with pytest.raises(ValueError, match=r"timeout=.*seconds > 0"):
        ps.feed([np.zeros(1)], timeout=timeout)


@pytest.mark.parametrize("timeout", [np.float32(60), 10**11, float("inf")])
def test_a_timeout_may_be_as_long_as_one_likes(timeout):
    assert len(list(ps.feed([np.zeros(1)] * 3, timeout=timeout))) == 3


def test_a_batch_of_a_class_that_jax_does_not_know_says_which():
    class Mine:
        pass

    with pytest.raises(TypeError, match=r"Mine.*register_dataclass"):
        next(ps.feed([Mine()]))


def test_strict_sees_another_structure_with_the_same_leaves():
    with ps.feed([{"x": (X,)}, {"x": [X]}], strict=True) as feed:
        next(feed)
        with pytest.raises(ValueError, match="batch 1: the structure was"):
            next(feed)


def test_a_source_that_fails_to_close_takes_no_batch_with_it():
    class Batches:
        def __iter__(self):
            return Closing(range(5))

    class Closing:
        def __init__(self, numbers):
            self.numbers = iter(numbers)

        def __iter__(self):
            return self

        def __next__(self):
            return np.full(1, next(self.numbers))

        def close(self):
            raise OSError("close failed")

    with pytest.warns(RuntimeWarning, match="close failed"), ps.feed(Batches(), host_buffer=8) as feed:
        assert [int(batch[0]) for batch in feed] == [0, 1, 2, 3, 4]


def test_a_list_is_fed_as_often_as_one_likes():
    batches = [np.zeros(1)] * 3
    assert [len(list(ps.feed(batches))) for _ in range(3)] == [3, 3, 3]


def test_a_change_of_shape_is_reported_once():
    sizes = [3, 3, 2, 3, 2]
    with ps.feed([{"x": np.zeros(n), "y": np.zeros(1)} for n in sizes]) as feed:
        with pytest.warns(UserWarning, match=r"batch 2: leaf 'x' was float64\[3\] and is float64\[2\];.*compiles") as caught:
            got = list(feed)
    assert [len(batch["x"]) for batch in got] == sizes
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.filterwarnings("error")
def test_lengths_that_pad_to_chooses_are_not_reported():
    records = [{"x": np.ones(n)} for n in (1, 2, 3, 4)]
    loader = ps.Loader(records, 1, collate=ps.pad_to([2, 4]), epochs=1)
    stream = ps.stream(records, 1, collate=ps.pad_to([2, 4]), epochs=1)
    for batches in (loader, stream):
        with ps.feed(batches) as feed:
            assert [batch["x"].shape[1] for batch in feed] == [2, 2, 4, 4]
    with ps.feed(loader, strict=True) as feed, pytest.raises(ValueError, match=r"batch 2: .*strict=True refuses"):
        list(feed)


def test_a_change_of_dtype_or_structure_is_reported():
    with ps.feed([{"x": np.zeros(1, np.int8)}, {"y": np.zeros(1, np.int16)}]) as feed:
        with pytest.warns(UserWarning, match=r"leaf 'x' was int8\[1\] and is absent, leaf 'y' was absent and is int16\[1\]"):
            list(feed)


def test_a_change_of_shape_is_refused_when_strict():
    with ps.feed([np.zeros(3), np.zeros(2)], strict=True) as feed:
        next(feed)
        with pytest.raises(ValueError, match=r"batch 1: .*strict=True refuses"):
            next(feed)


def test_a_kept_last_batch_is_the_only_change_of_an_epoch():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(ps.feed(loader(batch_size=7, remainder="keep")))
    assert len(caught) == 1


def test_a_closed_feed_says_so():
    feed = ps.feed(loader())
    next(feed)
    feed.close()
    feed.close()
    with pytest.raises(RuntimeError, match="feed is closed"):
        next(feed)


@pytest.mark.parametrize(
    ("name", "value"), [("host_buffer", 0), ("host_buffer", True), ("device_buffer", -1), ("device_buffer", 1.5)]
)
def test_buffers_are_positive(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        ps.feed(loader(), **{name: value})


def test_stats_count_batches_bytes_and_time():
    with ps.feed(loader(transform=lambda b: b)) as feed:
        assert "no verdict yet" in feed.stats().verdict
        list(feed)
        stats = feed.stats()
    assert stats.steps == 20
    assert stats.bytes == 20 * 4 * 4
    assert set(stats.host) == {"read", "transform"}
    assert 0 <= stats.wait <= stats.seconds
    assert 0 <= stats.wait_share <= 1
    assert stats.verdict in str(stats)
