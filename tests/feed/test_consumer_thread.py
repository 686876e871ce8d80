"""The thread that calls `next()` may place batches, and make tiny ones of arrays: errors, closing and settings."""

import contextlib
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import penstock as ps

DATA = {"x": np.arange(64, dtype=np.uint8)}


def test_transforms_stay_on_the_feeds_thread_where_the_consumer_must_not_wait():
    threads = []

    def transform(batch):
        threads.append(threading.current_thread())
        return batch

    with ps.feed(ps.Loader(DATA, 8, transform=transform), timeout=60) as feed:
        for _ in range(20):
            next(feed)
    assert threading.current_thread() not in threads


def test_your_own_source_runs_on_the_feeds_thread():
    def batches():
        for _ in range(20):
            yield {"thread": np.array([threading.current_thread() is threading.main_thread()])}

    with ps.feed(batches()) as feed:
        assert not any(bool(batch["thread"][0]) for batch in feed)


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
