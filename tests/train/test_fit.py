"""`fit` trains as a plain loop does, and tells its loggers what there is to tell."""

import dataclasses
import logging
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from tests.train import models
from tests.train.training import Points, fit

import penstock as ps


def test_result_is_that_of_a_plain_loop(straight):
    state, train = models.init(), jax.jit(models.step)
    for number in range(40):
        state, _ = train(state, models.loader()[number])
    np.testing.assert_allclose(straight["w"]["a"], state["w"]["a"], rtol=1e-6)
    assert np.array_equal(straight["seen"][:40], models.ideal(40))


def test_state_that_was_given_stays_usable():
    state = models.init()
    fit(3, state=state)
    assert float(state["w"]["a"].sum()) == float(models.init()["w"]["a"].sum())


def test_jitted_step_is_taken(straight):
    assert models.equal(fit(40, step=jax.jit(models.step)), straight)


def test_run_ends_with_its_feed():
    points = Points()
    state = fit(None, feed=models.loader(epochs=2), log=[points])
    assert int(state["step"]) == 24
    assert points.of("end")[0].step == 24


def test_metrics_are_means_over_the_interval():
    points = Points()
    fit(25, log=[points], log_every=10)
    state, train, losses, positive = models.init(), jax.jit(models.step), [], []
    for number in range(25):
        state, metrics = train(state, models.loader()[number])
        losses.append(float(metrics["loss"]))
        positive.append(float(metrics["positive"].total) / 8)
    assert [point.step for point in points.of("train")] == [10, 20, 25]
    for point, part in zip(points.of("train"), (slice(0, 10), slice(10, 20), slice(20, 25)), strict=True):
        assert point.metrics["loss"] == pytest.approx(np.mean(losses[part]), rel=1e-5)
        assert point.metrics["positive"] == pytest.approx(np.mean(positive[part]))


def test_digits_of_integers_are_not_lost():
    points = Points()

    def step(state, batch):
        return {"n": state["n"] + 1}, {"n": state["n"], "-n": -state["n"]}

    fit(6, step=step, state={"n": 20_000_001}, log=[points], log_every=2)
    assert [point.metrics["n"] for point in points.of("train")] == [20_000_001.5, 20_000_003.5, 20_000_005.5]
    assert [point.metrics["-n"] for point in points.of("train")] == [-20_000_001.5, -20_000_003.5, -20_000_005.5]


def restored_by_orbax(path):
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "saved", {"w": jnp.arange(3.0)})
        checkpointer.wait_until_finished()
        return lambda: orbax.checkpoint.StandardCheckpointer().restore(path / "saved")


def read_on_another_thread(path):
    return lambda: ThreadPoolExecutor(1).submit(lambda: {"w": np.asarray(jnp.arange(3.0))}).result()


@pytest.mark.parametrize(
    "make",
    [
        lambda path: lambda: {"w": np.asarray(jnp.arange(3.0))},
        lambda path: lambda: {"w": jnp.arange(3.0).block_until_ready()},
        lambda path: lambda: {"w": jnp.asarray(np.from_dlpack(jnp.arange(3.0)))},
        lambda path: lambda: {"w": jnp.asarray([float(x) for x in jnp.arange(3.0)])},
        lambda path: lambda: {"w": jnp.array({len(jnp.arange(3.0).addressable_shards): [0.0, 1, 2]}[1])},
        restored_by_orbax,
        read_on_another_thread,
    ],
    ids=["NumPy", "block_until_ready", "DLPack", "float", "shards", "Orbax", "thread"],
)
def test_function_that_cannot_be_traced_makes_the_state_too(tmp_path, make):
    state = fit(1, step=lambda s, b: ({"w": -s["w"]}, {}), state=make(tmp_path))
    assert state["w"].tolist() == [0, -1, -2]


@pytest.mark.parametrize("error", [KeyError("no weights"), FileNotFoundError("w.npz"), TypeError("two arguments")])
def test_error_of_the_function_that_makes_the_state_is_raised_as_it_is(error):
    def init():
        raise error

    with pytest.raises(type(error)) as raised:
        fit(1, state=init)
    assert raised.value is error
    assert error.__context__ is None


def test_metrics_come_one_interval_late():
    seen = []
    points = Points()

    def batches():
        for number in range(30):
            seen.append(len(points.of("train")))
            yield models.loader()[number]

    with ps.feed(batches(), host_buffer=1, device_buffer=1) as feed:
        fit(30, feed=feed, log=[points], log_every=5)
    assert [point.step for point in points.of("train")] == [5, 10, 15, 20, 25, 30]
    assert seen[9] == 0  # batch 9 is made after step 5, whose numbers come at step 10


def test_loop_does_not_transfer_to_the_host_between_log_points():
    with jax.transfer_guard_device_to_host("disallow"):
        fit(9, log_every=100, log=[lambda point: None])


def test_share_of_waiting_is_one_also_where_the_feed_takes_back_what_it_guessed(monkeypatch):
    original, guesses = ps.Feed.stats, iter(range(1000, 0, -1))
    monkeypatch.setattr(ps.Feed, "stats", lambda feed: dataclasses.replace(original(feed), starved=float(next(guesses))))
    points = Points()
    fit(20, log_every=5, log=[points])
    assert [point.step for point in points.of("train")] == [5, 10, 15, 20]
    assert all(0 <= point.input_wait <= 1 for point in points.of("train"))


def test_time_of_evaluations_and_loggers_is_no_time_of_steps():
    nap = 0.3
    points = Points()

    def sleep(point):
        if point.kind in ("begin", "train"):
            time.sleep(nap)

    def batches():
        time.sleep(nap)
        yield models.data(8)

    fit(20, log=[points, sleep], evaluate=ps.Evaluation(models.evaluate, lambda: ps.feed(batches()), 10))
    goodput = points.of("end")[0].goodput
    assert goodput.parts["log"] >= 3 * nap
    assert goodput.parts["evaluation"] >= 3 * nap  # one to look at a batch
    assert sum(goodput.parts.values()) == pytest.approx(goodput.seconds, rel=1e-6)
    assert goodput.parts["restore"] < goodput.parts["init"]


def test_verdict_has_the_denominator_of_the_goodput(monkeypatch):
    spans = []
    monkeypatch.setattr("penstock.feed.stats.verdict", lambda steps, seconds, share, *more: spans.append((seconds, share)) or "")
    points = Points()
    fit(20, log=[points, lambda point: time.sleep(0.1)], evaluate=models.evaluation(10))
    parts = points.of("end")[0].goodput.parts
    ((seconds, share),) = spans
    assert 0 <= share * seconds <= seconds <= parts["step"] + parts["input"]


@pytest.mark.parametrize(("records", "steps"), [(64, 1000), (8, 2), (200, 10**12)])
def test_feed_that_ends_before_the_run_is_said_once(tmp_path, caplog, records, steps):
    def run(steps, **more):
        loader = ps.Loader(models.data(records), 8, epochs=1)
        return fit(steps, tmp_path, feed=loader, step=lambda n, batch: (n + 1, {}), state=0, **more)

    for _ in range(2):  # the second one has nothing left to train
        with caplog.at_level(logging.WARNING):
            assert int(run(steps)) == records // 8
        assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
            f"the feed ended after {records // 8} of {steps:,} steps"
        ]
        caplog.clear()
    run(None)
    run(records // 8)
    assert not caplog.records


@pytest.mark.parametrize(
    "feed",
    [models.loader, lambda: ps.feed(models.loader()), lambda: ps.Steps(lambda number: models.loader()[number])],
    ids=["loader", "feed", "steps"],
)
def test_run_without_an_end_is_refused_unless_it_stops_early(feed):
    with pytest.raises(ValueError, match=r"steps=None trains to the end of the feed, and this one has no end: give steps="):
        fit(None, feed=feed())
    evaluation = ps.Evaluation(lambda state, batch: {"n": state}, models.loader(epochs=1), 5)
    settings = {"evaluate": evaluation, "stop": ps.EarlyStop("min val_n", patience=1)}
    assert int(fit(None, feed=feed(), step=lambda n, batch: (n + 1, {}), state=0, **settings)) == 10


def test_profile_is_written(tmp_path):
    fit(8, tmp_path, profile=(3, 4))
    assert list((tmp_path / "profile").rglob("perfetto_trace.json.gz"))


def test_each_logger_is_told_of_the_end_also_if_another_one_fails(tmp_path):
    points = Points()

    def interrupt(point):
        if point.kind == "train":
            raise KeyboardInterrupt

    def fail_at(kind):
        def fail(point):
            if point.kind == kind:
                raise KeyError(kind)

        return fail

    with pytest.raises(KeyboardInterrupt):
        fit(20, log=[interrupt, fail_at("train")])
    for kind in ("begin", "end"):
        with pytest.raises(KeyError):
            fit(5, log=[fail_at(kind), points])
    assert len(points.of("end")) == 2
