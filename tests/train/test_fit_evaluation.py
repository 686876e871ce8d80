"""`fit` evaluates on a second feed, keeps the best checkpoint, and ends when nothing gets better."""

import contextlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.train import models
from tests.train.training import Points, fit

import penstock as ps
from penstock import _stopping
from penstock.train.checkpoint import Checkpoints
from penstock.train.schedule import Goal


def test_evaluation_is_the_mean_over_its_records():
    points = Points()
    state = fit(20, log=[points], evaluate=models.evaluation(10))
    batch = models.data(40)
    expected = models.evaluate(state, batch)["loss"]
    last = points.of("evaluation")[-1]
    assert [point.step for point in points.of("evaluation")] == [10, 20]
    assert last.metrics["val_loss"] == pytest.approx(float(expected.total / expected.count), rel=1e-5)


@pytest.mark.parametrize("kind", ["feed", "function", "loader", "list"])
def test_evaluation_takes_every_kind_of_batches(kind):
    validation = ps.Loader(models.data(40), 8, epochs=1)
    batches = {
        "feed": ps.feed(validation),
        "function": lambda: ps.feed(validation),
        "loader": validation,
        "list": [validation[number] for number in range(5)],
    }[kind]
    points = Points()
    fit(10, step=growing, state={"count": 0}, log=[points], evaluate=ps.Evaluation(weighted, batches, 5))
    assert [point.metrics["val_count"] for point in points.of("evaluation")] == [5, 10]


@pytest.mark.parametrize(
    "batches",
    [
        lambda: ps.feed(models.loader()),
        lambda: lambda: ps.feed(models.loader()),
        models.loader,
        lambda: ps.Steps(lambda number: models.loader()[number]),
    ],
    ids=["feed", "function", "loader", "steps"],
)
def test_evaluation_without_an_end_is_refused(batches):
    with pytest.raises(ValueError, match="never end"):
        fit(10, evaluate=ps.Evaluation(models.evaluate, batches(), 5))


@pytest.mark.parametrize("batches", [None, 3, lambda: None], ids=["None", "number", "function of None"])
def test_evaluation_of_no_batches_is_refused(batches):
    with pytest.raises(TypeError, match=r"needs a Loader, a feed|has to open a feed"):
        fit(10, evaluate=ps.Evaluation(models.evaluate, batches, 5))


def test_evaluation_without_a_batch_is_an_error():
    iterator = iter([models.loader()[0]] * 3)
    with pytest.raises(ValueError, match=r"had no batch: .*open new ones"):
        fit(20, evaluate=ps.Evaluation(models.evaluate, lambda: iterator, 5))


def test_best_checkpoint_is_kept_besides_the_last(tmp_path):
    def step(state, batch):
        new, metrics = models.step(state, batch)
        return {**new, "w": jax.tree.map(lambda w: jnp.where(state["step"] < 10, w, w * 1.5), new["w"])}, metrics

    fit(30, tmp_path, step=step, evaluate=models.evaluation(5), best="min val_loss", keep=2, save_every=5)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-10", "step-25", "step-30"]


def test_early_stop_ends_after_patience_and_stays_stopped(tmp_path):
    def step(state, batch):
        new, metrics = models.step(state, batch)
        return {**new, "w": jax.tree.map(lambda w: jnp.where(state["step"] < 10, w, w * 1.5), new["w"])}, metrics

    settings = {"step": step, "evaluate": models.evaluation(5), "stop": ps.EarlyStop("min val_loss", patience=2)}
    assert int(fit(60, tmp_path, **settings)["step"]) == 20
    assert int(fit(60, tmp_path, **settings)["step"]) == 20


def test_early_stop_counts_over_a_restart(tmp_path):
    evaluation = ps.Evaluation(count, models.loader(epochs=1), 5)
    settings = {"state": {"count": 0}, "evaluate": evaluation, "stop": ps.EarlyStop("min val_count", patience=3)}
    fit(10, tmp_path, step=growing, **settings)
    assert int(fit(60, tmp_path, step=growing, **settings)["count"]) == 20


def test_metric_that_the_step_and_the_evaluation_have_is_refused():
    with pytest.raises(ValueError, match="both have a metric 'val_count'"):
        evaluation = ps.Evaluation(count, models.loader(epochs=1), 5)
        fit(5, step=lambda state, batch: (state, {"val_count": 1.0}), state={"count": 0}, evaluate=evaluation)


def growing(state, batch):
    return {"count": state["count"] + 1}, {}


def count(state, batch):
    return {"count": state["count"]}


def weighted(state, batch):
    return {"count": ps.Mean(state["count"] * len(batch["x"]), len(batch["x"]))}


def test_best_is_noted_where_the_evaluation_comes_after_the_save(tmp_path):
    settings = {"step": growing, "best": "min val_count", "keep": 1, "save_every": 5}
    with pytest.raises(SystemExit):
        fit(20, tmp_path, state={"count": 0}, evaluate=ps.Evaluation(count, stopped(1), every=5), **settings)
    fit(20, tmp_path, state={"count": 0}, evaluate=ps.Evaluation(count, stopped(None), every=5), **settings)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-20", "step-5"]


def stopped(at):
    """Return a function that opens the batches of an evaluation, and sends a signal the given time that it is called."""
    calls = []

    def batches():
        if len(calls) == at:
            _stopping.Stopping.current.request("SIGTERM")
        calls.append(None)
        return iter(models.loader(epochs=1))

    return batches


class Batches:
    """An iterable whose iterators have a state, as a Grain dataset."""

    def __init__(self, loader):
        self._batches = list(loader)

    def __iter__(self):
        return StatefulIterator(self._batches)


class StatefulIterator:
    def __init__(self, batches):
        self._batches, self._next = batches, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self._next == len(self._batches):
            raise StopIteration
        self._next += 1
        return self._batches[self._next - 1]

    def get_state(self):
        return self._next

    def set_state(self, state):
        self._next = state


@pytest.mark.parametrize(
    ("kind", "steps"), [(lambda loader: loader, 12), (list, None), (Batches, None)], ids=["Loader", "list", "iterable"]
)
def test_evaluation_left_out_after_the_last_step_is_made_up_for_once(tmp_path, kind, steps):
    """The feed ends after 12 steps, which the run may know or not."""
    log, points = tmp_path / "metrics.jsonl", Points()

    def run(at, **settings):
        evaluation = ps.Evaluation(count, stopped(at), every=5)
        settings |= {"feed": kind(models.loader(epochs=1)), "evaluate": evaluation, "log": [ps.log.jsonl(log), points]}
        return fit(steps, tmp_path / "run", step=growing, state={"count": 0}, best="max val_count", **settings)

    with pytest.raises(SystemExit):
        run(3)  # fit looks at the first batch, and evaluates at steps 5, 10 and 12
    for _ in range(3):
        assert int(run(None)["count"]) == 12
    assert [point.step for point in points.of("evaluation")] == [5, 10, 12]
    assert [line["val_count"] for line in map(json.loads, log.read_text().splitlines()) if "val_count" in line] == [5, 10, 12]
    assert points[-1].text.startswith("nothing left to train")
    with contextlib.closing(Checkpoints(tmp_path / "run/checkpoints", goal=Goal.parse("max val_count", "best"))) as checkpoints:
        assert checkpoints.best().step == 12


def test_best_of_a_run_that_began_from_a_checkpoint_of_another_folder_is_kept(tmp_path):
    settings = {"step": growing, "state": {"count": 0}, "best": "min val_count", "keep": 1, "save_every": 10}
    with pytest.raises(SystemExit):
        fit(20, tmp_path / "a", evaluate=ps.Evaluation(count, stopped(1), every=5), **settings)
    evaluation = ps.Evaluation(count, stopped(None), every=5)
    fit(20, tmp_path / "b", restore=tmp_path / "a/checkpoints/step-5", evaluate=evaluation, **settings)
    assert sorted(path.name for path in (tmp_path / "b/checkpoints").iterdir()) == ["step-20", "step-5"]


def test_best_is_noted_where_the_feed_ends_at_a_save(tmp_path):
    settings = {
        "step": growing,
        "best": "max val_count",
        "save_every": 12,
        "evaluate": ps.Evaluation(count, models.loader(epochs=1), 9),
    }
    assert int(fit(None, tmp_path, feed=models.loader(epochs=1), state={"count": 0}, **settings)["count"]) == 12
    goal = Goal.parse("max val_count", "best")
    with contextlib.closing(Checkpoints(tmp_path / "checkpoints", goal=goal)) as checkpoints:
        assert checkpoints.best().step == 12


def test_early_stop_with_more_patience_or_none_goes_on(tmp_path):
    settings = {"step": growing, "state": {"count": 0}, "evaluate": ps.Evaluation(count, models.loader(epochs=1), every=5)}
    assert int(fit(40, tmp_path, stop=ps.EarlyStop("min val_count", patience=1), **settings)["count"]) == 10
    assert int(fit(40, tmp_path, stop=ps.EarlyStop("min val_count", patience=3), **settings)["count"]) == 20
    assert int(fit(40, tmp_path, **settings)["count"]) == 40


def test_best_of_another_goal_is_not_taken_for_the_best(tmp_path):
    def measure(state, batch):
        return {"loss": 100.0 - state["n"], "good": jnp.where(state["n"] == 30, 0.9, 0.1)}

    def run(steps, best):
        evaluation = ps.Evaluation(measure, ps.Loader({"x": np.zeros(4)}, 4, epochs=1), 5)
        fit(
            steps,
            tmp_path,
            step=lambda s, b: ({"n": s["n"] + 1}, {}),
            state={"n": 0},
            save_every=100,
            keep=1,
            best=best,
            evaluate=evaluation,
        )

    run(20, "min val_loss")
    run(50, "max val_good")
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-30", "step-50"}


def test_another_goal_after_a_restart_is_not_compared_with_the_old_one(tmp_path):
    evaluation = ps.Evaluation(count, models.loader(epochs=1), 5)
    settings = {"step": growing, "state": {"count": 0}, "evaluate": evaluation, "save_every": 100, "keep": 1}
    fit(10, tmp_path, best="min val_count", **settings)
    fit(30, tmp_path, best="max val_count", **settings)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-30"]
