"""A batch that does not divide over the devices is named, with the nearest sizes that do."""

import warnings

import jax
import numpy as np
import pytest

import penstock as ps


def step(w, x):
    value, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
    return w - 0.1 * gradient, value


def planned(rows, **options):
    w, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((64, 64), (rows, 64)))
    return ps.plan(step, w, x, hardware="tpu-v5e", check=False, **options)


@pytest.mark.parametrize(
    ("rows", "used", "sizes", "options"),
    [
        (30, "", "24 and 32", {"mesh": {"data": 2, "model": 4}}),
        (12, "only 4 of them", "8 and 16", {"devices": 8}),
        (7, "cannot shard it", "is 8", {"devices": 8}),
    ],
)
def test_a_batch_that_does_not_divide_gets_a_warning_and_a_line(rows, used, sizes, options):
    with pytest.warns(UserWarning, match=f"batch of {rows} rows .*'x', dimension 0.* over 8 devices") as caught:
        plan = planned(rows, **options)
    text = str(caught[0].message)
    assert used in text
    assert text.endswith(sizes)
    assert sizes in " ".join(str(plan).split())
    (remark,) = plan.remarks
    assert remark == text


def test_a_batch_that_divides_gets_none():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert planned(32, devices=8).remarks == ()


def test_the_remark_is_kept_in_a_file(tmp_path):
    with pytest.warns(UserWarning, match="does not divide"):
        plan = planned(30, devices=8)
    plan.save(tmp_path / "plan.json")
    assert ps.Plan.load(tmp_path / "plan.json").remarks == plan.remarks


def test_rows_of_microbatches_count_and_not_their_number():
    def accumulated(w, x):
        def add(total, rows):
            return total + jax.grad(lambda w: ((rows @ w) ** 2).mean())(w), None

        total, _ = jax.lax.scan(add, w * 0, x)
        return w - 0.1 * total, np.float32(0)

    w, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((64, 64), (3, 12, 64)))
    with pytest.warns(UserWarning, match=r"batch of 12 rows \('x', dimension 1\)"):
        ps.plan(accumulated, w, x, devices=8, hardware="tpu-v5e", check=False)


def test_rows_are_those_of_most_leaves():
    """A batch may have a table that all its rows share."""

    def step(w, table, x, y):
        return w - 0.1 * jax.grad(lambda w: ((x @ w + table.mean(0) - y) ** 2).mean())(w), np.float32(0)

    arguments = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((64, 64), (11, 64), (32, 64), (32, 64))]
    roles = {"table": "batch", "x": "batch", "y": "batch"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ps.plan(step, *arguments, devices=8, hardware="tpu-v5e", check=False, roles=roles).remarks == ()
