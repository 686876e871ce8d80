"""State: the results of a step that replace its arguments."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.shard.steps import mlp

import penstock as ps
from penstock.shard.trace.step import leaf_paths, trace


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


X = array(16, 32)
W = {"w": array(32, 64)}


def state_paths(step, *args):
    """Return the path of the input that each output replaces, by path of the output."""
    traced = trace(step, args)
    return {traced.outputs[output].path: traced.inputs[index].path for output, index in traced.state.items()}


def update(p, m, x):
    return {"w": p["w"] - m["w"]}, {"w": m["w"] + x.T @ x @ p["w"]}, (x @ p["w"]).sum()


def test_the_keys_of_an_ordered_dict_keep_their_order():
    def step(p, x):
        return OrderedDict(state=p * 2, loss=x.sum())

    assert state_paths(step, array(64), X) == {"state": "p"}


class Both(NamedTuple):
    p: dict
    m: dict


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Result:
    p: dict
    loss: jax.Array


def test_state_is_found_inside_of_any_container():
    assert state_paths(lambda p, m, x: (update(p, m, x)[2], Both(*update(p, m, x)[:2])), W, W, X) == {
        "1/p/w": "p/w",
        "1/m/w": "m/w",
    }
    assert state_paths(lambda p, m, x: Result(update(p, m, x)[0], update(p, m, x)[2]), W, W, X) == {"p/w": "p/w"}


def test_each_of_two_arguments_of_equal_structure_is_replaced_by_its_own_update():
    def step(p, m, x):
        gradient = jax.grad(lambda p: ((x @ p["w"]) ** 2).mean())(p)
        m = jax.tree.map(lambda m, g: 0.9 * m + g, m, gradient)
        return m, jax.tree.map(lambda w, m: w - 0.1 * m, p, m)

    assert state_paths(step, W, W, X) == {"0/w": "m/w", "1/w": "p/w"}


def test_only_a_part_of_an_argument_may_be_state():
    def step(s, x):
        loss, gradient = jax.value_and_grad(lambda t: ((x @ s["frozen"] @ t) ** 2).mean())(s["trained"])
        return s["trained"] - 0.1 * gradient, loss

    assert state_paths(step, {"trained": array(32, 64), "frozen": array(32, 32)}, array(1024, 32)) == {"0": "s/trained"}


def test_a_result_that_only_looks_like_an_argument_is_not_state():
    def step(p, x, y, rate):
        def out(p):
            return jax.nn.relu(x @ p["up"]) @ p["down"]

        loss, gradient = jax.value_and_grad(lambda p: ((out(p) - y) ** 2).mean())(p)
        return jax.tree.map(lambda w, g: w - rate * g, p, gradient), loss, out(p)

    args = {"up": array(64, 128), "down": array(128, 64)}, array(512, 64), array(512, 64), array()
    assert state_paths(step, *args) == {"0/down": "p/down", "0/up": "p/up"}
    plan = ps.plan(step, *args, mesh={"x": 8}, hardware="tpu-v5e", check=False)
    assert {leaf.path: leaf.role for leaf in plan.inputs} == {
        "p/down": "parameters", "p/up": "parameters", "x": "batch", "y": "batch", "rate": "batch"
    } | {"rate": next(leaf.role for leaf in plan.inputs if leaf.path == "rate")}  # fmt: skip


def test_a_role_that_the_user_gives_takes_an_argument_out_of_the_state():
    def step(p, x):
        return p - x.sum(), x * 2

    plan = ps.plan(step, array(8, 8), X, mesh={"x": 8}, hardware="tpu-v5e", check=False, roles={"x": "batch"})
    assert plan.state == {0: 0}


def test_constants_of_a_function_inside_of_checkpoint_are_kept():
    constant = np.arange(64, dtype=np.float32)
    inner = jax.jit(lambda h: h * constant)

    def step(w, x):
        loss, gradient = jax.value_and_grad(lambda w: jax.checkpoint(lambda w: inner(x @ w))(w).sum())(w)
        return w - gradient, loss

    args = jnp.ones((32, 64)), jnp.ones((16, 32))
    plan = ps.plan(step, *args, mesh={"x": 8}, hardware="tpu-v5e", check=False)
    np.testing.assert_allclose(plan.jit(step)(*args)[0], jax.jit(step)(*args)[0], rtol=1e-5)


@pytest.mark.parametrize("number", [0.1, np.float32(0.1)], ids=["Python's", "NumPy's"])
def test_a_number_may_come_back_with_another_kind_of_type(number):
    def step(s, rate):
        return {"w": s["w"] - rate * 0.9 ** s["n"], "n": s["n"] + 1}, s["w"].sum()

    def init():
        return {"w": jnp.ones((32, 64)), "n": 0}

    plan = ps.plan(step, jax.eval_shape(init), 0.1, mesh={"x": 8}, hardware="tpu-v5e", check=False)
    restored = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), plan.init(init))
    state, _ = plan.jit(step)(restored, number)
    assert int(state["n"]) == 1
    assert float(plan.put(0.1)) == pytest.approx(0.1)


def test_a_result_of_the_structure_of_an_argument_replaces_it():
    params, optimizer = mlp(), {"momentum": mlp(), "count": jnp.int32(0)}

    def step(params, optimizer, batch):
        return {"optimizer": optimizer, "params": params}, jnp.sum(batch)

    found = state_paths(step, params, optimizer, array(4))
    assert found == {f"0/optimizer/{path}": f"optimizer/{path}" for path in leaf_paths(optimizer)} | {
        f"0/params/{path}": f"params/{path}" for path in leaf_paths(params)
    }


def test_two_both_trees_of_equal_structure_are_replaced_in_order():
    tree = {"w": array(3)}
    assert state_paths(lambda a, b: (b, a), tree, tree) == {"0/w": "a/w", "1/w": "b/w"}


def test_an_argument_is_replaced_only_once():
    assert state_paths(lambda a: (a, a), array(3)) == {"0": "a"}


@pytest.mark.parametrize("change", ["shape", "dtype", "structure"])
def test_a_result_of_another_shape_dtype_or_structure_is_no_state(change):
    def step(a):
        return {"shape": {"w": a["w"][:2]}, "dtype": {"w": a["w"].astype(jnp.int32)}, "structure": [a["w"][::-1]]}[change], 0.0

    assert state_paths(step, {"w": array(3)}) == {}


def test_an_empty_argument_replaces_nothing():
    assert state_paths(lambda a, b: (a, b), {}, array(3)) == {"1": "b"}
