"""Means of metrics are right over intervals of any length, in the compiled program."""

import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import penstock as ps
from penstock._clock import Clock
from penstock.train.metrics import Intervals, _as_json, _from_json, evaluation_program, read, training_program, zero

STEPS = 10**6


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def loop(program, steps, state, totals):
    return jax.lax.fori_loop(0, steps, lambda number, carry: program(*carry, None), (state, totals))


def after(metrics, steps=STEPS, nonfinite="stop"):
    """Return the interval of many steps of one compiled program. `metrics` is a function of the number of the step."""
    program = training_program(lambda n, batch: (n + 1, metrics(n)), nonfinite, "step")
    _, totals = loop(program, steps, jnp.int32(0), jax.device_put(zero(metrics(jnp.int32(0)))))
    return read(totals)


@pytest.mark.parametrize(
    ("metric", "mean"),
    [
        (lambda n: 1e5 + 0.001 * n, 1e5 + 0.001 * (STEPS - 1) / 2),
        (lambda n: n.astype(jnp.float32), (STEPS - 1) / 2),
        (lambda n: jnp.float32(0.1), float(np.float32(0.1))),
        (lambda n: jnp.where(n % 2 == 0, 3e6, -3e6 + 2), 1.0),
        (lambda n: jnp.where(n == 0, 1e9, 1e-3), (1e9 + 1e-3 * (STEPS - 1)) / STEPS),
        (lambda n: jnp.bfloat16(0.5), 0.5),
        (lambda n: n % 3 == 0, 333_334 / STEPS),
        (lambda n: ps.Mean(jnp.float32(0.3) * 1000, 1000), float(np.float32(0.3) * np.float32(1000)) / 1000),
        (lambda n: ps.Mean(jnp.sin(n.astype(jnp.float32)) + 2, jnp.float32(0.1)), 20.0),
        (lambda n: ps.Mean(n, n + 1), (STEPS - 1) / (STEPS + 1)),
    ],
)
def test_means_of_a_million_steps_are_right(metric, mean):
    assert after(lambda n: {"m": metric(n)}).metrics["m"] == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize(
    ("total", "count"),
    [(1, 1), (16_777_217, 3), (2**31 - 1, 33_333_331), (-(2**30) - 1, 2**24 + 1)],
)
@pytest.mark.parametrize("constant", [True, False], ids=["constants", "arrays"])
def test_totals_and_counts_of_whole_numbers_are_exact(total, count, constant):
    steps = 99_999
    totals = zero({"m": 0})
    more = (lambda n: 0) if constant else (lambda n: n - n)
    program = training_program(lambda n, batch: (n + 1, {"m": ps.Mean(total + more(n), count + more(n))}), "stop", "step")
    _, totals = loop(program, steps, jnp.int32(0), jax.device_put(totals))
    sums = [int(part) for part in np.asarray(totals.sums["m"])]
    assert (sums[0] + sums[1], sums[2] + sums[3]) == (total * steps, count * steps)


@pytest.mark.parametrize(("nonfinite", "mean"), [("ignore", np.inf), ("skip", 2.0)])
def test_infinite_value_makes_the_mean_infinite_unless_it_is_skipped(nonfinite, mean):
    interval = after(lambda n: {"m": jnp.where(n == 3, jnp.inf, 2.0)}, 10, nonfinite)
    assert interval.metrics["m"] == mean


def test_evaluation_adds_up_as_the_training_does():
    evaluate = jax.jit(evaluation_program(lambda state, batch: {"m": ps.Mean(batch, 1)}))
    totals = jax.device_put(zero({"m": 0}))
    for value in (1e9, *[0.25] * 400):
        totals = evaluate(None, totals, np.float32(value))
    assert read(totals).metrics["m"] == (1e9 + 100) / 401


def test_totals_come_back_from_json():
    program = jax.jit(training_program(lambda n, batch: (n, {"m": jnp.float32(1e9), "i": n}), "stop", "step"))
    totals = jax.device_put(zero({"m": 0, "i": 0}))
    for number in range(7):
        _, totals = program(jnp.int32(16_777_217 + number), totals, None)
    assert read(_from_json(_as_json(totals))) == read(totals)


@pytest.mark.parametrize("every", [1, 2, 5, 8, 10, 40])
def test_speed_is_of_steps_that_have_ended(monkeypatch, every):
    """The devices take 2 s for a step. The host dispatches steps at once, until eight are in flight."""
    points, fetched = [], itertools.count(1)
    meter = SimpleNamespace(loop=0.0, reached=lambda step, starved: None, clock=Clock())
    feed = SimpleNamespace(stats=lambda: SimpleNamespace(starved=0.0))

    def wait(totals):  # until the last step of the interval has ended
        meter.loop = max(meter.loop, 2.0 * every * next(fetched))
        return read(totals)

    monkeypatch.setattr("penstock.train.metrics.read", wait)
    intervals = Intervals(jax.device_put(zero({})), 0, 80, feed, meter, [points.append], "stop", lambda: ("", None), None)
    for step in range(1, 81):
        meter.loop = max(meter.loop, 2.0 * (step - 8)) + 1e-6
        if step % every == 0:
            intervals.end(step, int(meter.loop / 2))
    intervals.flush()
    assert [point.step for point in points] == list(range(every, 81, every))
    assert [point.speed for point in points] == pytest.approx([0.5] * len(points), rel=0.01)
