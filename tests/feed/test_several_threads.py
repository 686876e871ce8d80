"""Several threads that iterate one feed share its batches, and all of them stop at the end."""

import threading
import time

import numpy as np
import pytest

import penstock as ps

THREADS, BATCHES = 6, 40


def generator():
    for i in range(BATCHES):
        yield {"x": np.arange(i * 8, i * 8 + 8)}


def fails_late():
    yield from generator()
    raise ValueError("no more of this")


FEEDS = {
    "arrays": lambda: ps.feed(ps.Loader({"x": np.arange(8 * BATCHES)}, 8, epochs=1)),
    "workers": lambda: ps.feed(ps.Loader({"x": np.arange(8 * BATCHES)}, 8, epochs=1, workers=3)),
    "generator": lambda: ps.feed(generator()),
    "timeout": lambda: ps.feed(generator(), timeout=60, host_buffer=1, device_buffer=1),
    "steps": lambda: ps.feed(ps.Steps(lambda i: {"x": np.arange(i * 8, i * 8 + 8)}, length=BATCHES)),
    "transform": lambda: ps.feed(generator(), transform=lambda batch: {"x": batch["x"] + 0}),
    "stream": lambda: ps.feed(ps.stream([{"x": i} for i in range(8 * BATCHES)], 8, epochs=1)),
}


def consume(feed, threads=THREADS):
    """Iterate a feed in several threads, and return what each got and how it ended."""
    got, ends = [], []
    begin = threading.Barrier(threads)

    def work():
        begin.wait()
        try:
            for batch in feed:
                got.append(np.asarray(batch["x"]))
            ends.append(None)
        except Exception as error:
            ends.append(error)

    started = [threading.Thread(target=work) for _ in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return got, ends


@pytest.mark.parametrize("kind", FEEDS)
def test_each_batch_comes_once_and_the_end_is_the_end_for_all(kind):
    with FEEDS[kind]() as feed:
        got, ends = consume(feed)
        if kind in ("arrays", "workers", "steps"):  # the others have no state
            assert feed.state()["step"] == BATCHES
    assert sorted(np.concatenate(got).tolist()) == [*range(8 * BATCHES)]
    assert ends == [None] * THREADS
    assert feed.stats().steps == BATCHES


@pytest.mark.parametrize(
    "make", [fails_late, lambda: ps.Steps(lambda i: {"x": np.full(8, 1 // (5 - i))}), lambda: [{"x": np.ones(2)}, {"x": "text"}]]
)
def test_one_thread_gets_the_error_and_the_others_stop(make):
    with ps.feed(make()) as feed:
        _, ends = consume(feed)
    assert sum(end is None for end in ends) == THREADS - 1
    assert sum(isinstance(end, (ValueError, ZeroDivisionError, TypeError)) for end in ends) == 1


def test_closing_ends_all_threads_that_wait():
    is_reading, go_on = threading.Event(), threading.Event()

    def blocked():
        yield {"x": np.arange(8)}
        is_reading.set()
        go_on.wait()

    feed = ps.feed(blocked())
    ends = []
    watched = threading.Thread(target=lambda: ends.extend(consume(feed)[1]))
    watched.start()
    is_reading.wait()
    feed.stats()  # can be asked for while others wait
    feed.close()
    watched.join()
    go_on.set()
    assert [type(end) for end in ends] == [RuntimeError] * THREADS


def test_a_thread_waits_no_longer_than_the_timeout_for_another_one():
    is_reading, go_on = threading.Event(), threading.Event()

    def blocked():
        is_reading.set()
        go_on.wait()
        yield {"x": np.arange(8)}

    with ps.feed(blocked(), timeout=0.2) as feed:
        _, ends = consume(feed, threads=3)
        go_on.set()
        assert next(feed)["x"].tolist() == [*range(8)]
    assert [type(end) for end in ends] == [TimeoutError] * 3


def test_a_feed_that_another_thread_closes_while_it_starts_keeps_no_thread():
    class Closes:
        """An iterable whose producers are made by the thread that starts the feed."""

        def __iter__(self):
            return iter([{"x": np.arange(8)}] * 4)

    feed = ps.feed(Closes())
    make = feed._adapter.producers

    def producers(clocks):
        closing = threading.Thread(target=feed.close)
        closing.start()
        closing.join()
        return make(clocks)

    feed._adapter.producers = producers
    with pytest.raises(RuntimeError, match="closed"):
        next(feed)
    feed._pipeline.join(time.monotonic() + 60)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock-")]
