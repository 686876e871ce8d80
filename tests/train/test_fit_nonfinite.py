"""`fit` stops at values that are not finite, skips such steps, or goes on, as it was told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.train import models
from tests.train.training import Points, fit

import penstock as ps


def bad_at(numbers):
    def step(state, batch):
        new, metrics = models.step(state, batch)
        bad = jnp.isin(state["step"], jnp.asarray(numbers))
        return new, {**metrics, "loss": jnp.where(bad, jnp.nan, metrics["loss"])}

    return step


def test_nan_stops_and_names_step_and_checkpoint(tmp_path):
    with pytest.raises(ps.NonfiniteError, match=r"loss is not finite at step 17 .*checkpoint is of step 15") as caught:
        fit(40, tmp_path, step=bad_at([17]), save_every=5)
    assert (caught.value.step, caught.value.checkpoint) == (17, 15)
    assert max(int(path.name[5:]) for path in (tmp_path / "checkpoints").iterdir()) == 15


def test_nan_stops_without_checkpoints():
    with pytest.raises(ps.NonfiniteError, match="no checkpoint"):
        fit(40, step=bad_at([3]))


def test_state_with_nan_is_not_saved(tmp_path):
    def step(state, batch):
        new, metrics = models.step(state, batch)
        return {**new, "w": jax.tree.map(lambda w: jnp.where(state["step"] == 9, jnp.inf, w), new["w"])}, metrics

    with pytest.raises(ps.NonfiniteError, match=r"state is not finite after 10 steps, in 2 leaves: w/a") as caught:
        fit(10, tmp_path, step=step, save_every=5)
    assert caught.value.checkpoint == 5


def test_skipped_steps_have_no_effect_and_are_counted():
    def step(state, batch):  # its count goes on, so that the next step is not skipped too
        new, metrics = bad_at([])(state, batch)
        bad = jnp.isin(batch["id"][0], models.ideal(12)[[4, 11], 0])
        return new, {**metrics, "loss": jnp.where(bad, jnp.inf, metrics["loss"])}

    points = Points()
    state = fit(12, step=step, nonfinite="skip", log=[points], log_every=6)
    kept = [number for number in range(12) if number not in (4, 11)]
    assert np.array_equal(state["seen"][:10], models.ideal(12)[kept])
    assert [point.metrics["skipped"] for point in points.of("train")] == [1, 1]
    assert all(np.isfinite(point.metrics["loss"]) for point in points.of("train"))


def test_step_that_makes_the_state_infinite_is_skipped():
    def step(state, batch):
        new, metrics = models.step(state, batch)
        bad = batch["id"][0] == models.ideal(12)[4, 0]
        return {**new, "w": jax.tree.map(lambda w: jnp.where(bad, jnp.nan, w), new["w"])}, metrics

    state = fit(12, step=step, nonfinite="skip")
    assert np.isfinite(state["w"]["a"]).all()
    assert int(state["step"]) == 11


def test_training_that_skips_everything_ends():
    def step(state, batch):
        new, metrics = models.step(state, batch)
        return new, {**metrics, "loss": jnp.nan * metrics["loss"]}

    with pytest.raises(ps.NonfiniteError, match="100 steps were all left out"):
        fit(200, step=step, nonfinite="skip")


def test_nan_can_be_ignored():
    points = Points()
    fit(10, step=bad_at([3]), nonfinite="ignore", log=[points])
    assert np.isnan(points.of("train")[0].metrics["loss"])


def test_infinite_values_of_the_initial_state_are_no_error(tmp_path):
    def step(state, batch):
        new, metrics = models.step(state["inner"], batch)
        return {"inner": new, "best": jnp.minimum(state["best"], metrics["loss"]), "never": state["never"]}, metrics

    state = {"inner": models.init(), "best": np.inf, "never": np.float32(np.nan)}
    assert np.isfinite(fit(10, tmp_path, step=step, state=state, nonfinite="skip")["best"])
