"""Transforms of a Loader over arrays, which may run on the thread that calls `next()`: errors, closing, limits and settings."""

import contextlib
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import penstock as ps
from penstock import _pace

DATA = {"x": np.arange(64, dtype=np.uint8)}


@pytest.fixture(autouse=True)
def consumer_works(monkeypatch):
    monkeypatch.setattr(_pace, "TINY", -1.0)
    monkeypatch.setattr(_pace, "SHORT", 10.0)
    monkeypatch.setattr(_pace, "IDLE", 10.0)
    monkeypatch.setattr(_pace, "_FIRST", 10**9)  # no trials


def noting(threads, fn=lambda batch: batch):
    def transform(batch):
        threads.append(threading.current_thread())
        return fn(batch)

    return transform


def options():
    threads = []
    yield "transform", threads, {"transform": noting(threads)}
    yield "per_record", threads, {"transform": ps.per_record(noting(threads))}
    yield "collate", threads, {"collate": noting(threads, lambda records: {"x": np.array([r["x"] for r in records])})}


@pytest.mark.parametrize(("threads", "given"), [pytest.param(t, g, id=name) for name, t, g in options()])
def test_the_consumer_transforms_and_collates(threads, given):
    loader = ps.Loader(DATA, 8, shuffle=True, **given)
    with ps.feed(loader) as feed:
        for step in range(100):
            assert np.array_equal(next(feed)["x"], loader[step]["x"])
        del threads[:]
        next(feed)
        assert set(threads) == {threading.current_thread()}


def test_a_limit_of_time_keeps_the_work_off_the_consumers_thread():
    threads = []
    with ps.feed(ps.Loader(DATA, 8, transform=noting(threads)), timeout=60) as feed:
        for _ in range(100):
            next(feed)
    assert threading.current_thread() not in threads


def test_a_source_of_the_user_stays_on_the_feeds_thread():
    class Source:
        def __len__(self):
            return 64

        def read(self, indices):
            threads.append(threading.current_thread())
            return {"x": indices.copy()}

    threads = []
    with ps.feed(ps.Loader(Source(), 8)) as feed:
        for _ in range(100):
            next(feed)
    assert threading.current_thread() not in threads


def test_an_error_comes_at_its_batch_and_names_it():
    calls = itertools.count()

    def fail(batch):
        if next(calls) == 70:
            raise KeyError("seventy")
        return batch

    had = []
    with ps.feed(ps.Loader(DATA, 8, transform=fail)) as feed:
        with pytest.raises(KeyError, match="seventy") as caught:
            had.extend(feed)
        assert len(had) == 70
        assert feed.state()["step"] == 70
        assert "while making batch 70" in " ".join(caught.value.__notes__)
        with pytest.raises(StopIteration):
            next(feed)


def test_ctrl_c_in_a_transform_comes_at_once():
    def stop(batch):
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return batch

    with ps.feed(ps.Loader(DATA, 8, transform=stop)) as feed, pytest.raises(KeyboardInterrupt):
        for _ in range(10_000):
            next(feed)


def test_a_transform_may_close_its_feed():
    calls = itertools.count()

    def close(batch):
        if next(calls) == 70:
            feed.close()
        return batch

    feed = ps.feed(ps.Loader(DATA, 8, transform=close))
    with pytest.raises(RuntimeError, match="closed"):
        for _ in range(1000):
            next(feed)


def test_a_transform_may_call_next_of_another_feed():
    with ps.feed(ps.Loader(DATA, 8)) as other:

        def add(batch):
            return {"x": batch["x"] + np.asarray(next(other)["x"])}

        with ps.feed(ps.Loader(DATA, 8, transform=add)) as feed:
            for step in range(100):
                assert np.array_equal(next(feed)["x"], 2 * ps.Loader(DATA, 8)[step]["x"])


def test_a_state_counts_what_the_consumer_had():
    with ps.feed(ps.Loader(DATA, 8, transform=lambda b: b)) as feed:
        for step in range(100):
            assert feed.state()["step"] == step
            next(feed)


SETTINGS = {
    "another default device": lambda: jax.default_device(jax.devices()[5]),
    "another precision": lambda: jax.default_matmul_precision("float32"),
    "64 bits": lambda: jax.enable_x64(True),
    "no jit": jax.disable_jit,
    "a mesh": lambda: jax.set_mesh(jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_transform_with_jax_gives_the_same_whatever_the_consumer_entered(settings):
    def transform(batch):
        return {"x": jnp.asarray(batch["x"], dtype=float) / 3}

    with ps.feed(ps.Loader(DATA, 8, transform=transform)) as feed:
        first = next(feed)["x"]
        for k in range(100):
            with settings() if k % 3 else contextlib.nullcontext():
                batch = next(feed)["x"]
            assert (batch.dtype, batch.sharding, batch.committed) == (first.dtype, first.sharding, first.committed)


def test_a_trace_of_the_consumer_does_not_reach_a_transform():
    with ps.feed(ps.Loader(DATA, 8, transform=lambda b: {"x": jnp.sin(b["x"])})) as feed:
        for _ in range(30):
            next(feed)
        jax.eval_shape(lambda: next(feed))
        assert np.asarray(next(feed)["x"]).shape == (8,)


def test_a_placed_batch_shares_no_memory_with_the_host_batch():
    """The identity donates the buffers of the transfer, and never those of the user."""
    hosts = [{"x": np.full(1 << 18, k, np.float32)} for k in range(8)]
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    with ps.feed(hosts) as feed:
        for k, batch in enumerate(feed):
            assert step(batch["x"])[0] == k + 1
    assert all((host["x"] == k).all() for k, host in enumerate(hosts))
