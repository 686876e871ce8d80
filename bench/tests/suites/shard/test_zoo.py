from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from bench.tests.suites.shard.batches import two_batches
from bench.tests.suites.shard.layouts import assert_layout_fits, paths
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from tests.extras import require

from penstock_bench.suites.shard.zoo import ZOO, Model, load

# The reason why each model is in the zoo.
PRIMITIVES = {
    "mlp": {"dot_general"},
    "cnn-batchnorm": {"conv_general_dilated", "reduce_window_max", "select_and_scatter_add"},
    "resnet": {"conv_general_dilated", "rsqrt"},
    "unet": {"conv_general_dilated", "concatenate", "select_and_scatter_add"},
    "vit": {"conv_general_dilated", "concatenate", "dot_general"},
    "gpt2": {"gather", "scatter-add", "tanh"},
    "llama-gqa": {"broadcast_in_dim", "cos", "logistic", "split"},
    "llama-mqa": {"broadcast_in_dim", "cos", "logistic", "split"},
    "llama-scan": {"scan", "remat2"},
    "moe-dense": {"top_k", "cumsum", "dot_general"},
    "moe-sorted": {"top_k", "sort", "gather", "scatter-add", "ragged_dot_general"},
    "encoder-decoder": {"gather", "scatter-add", "select_n"},
    "lstm": {"scan", "gather", "scatter-add"},
    "graph": {"gather", "scatter-add"},
    "dit": {"random_split", "random_bits", "conv_general_dilated", "cumprod"},
    "two-tower": {"gather", "scatter-add"},
    "lora": {"dot_general", "gather"},
}
TRANSFORMERS = [
    "vit",
    "gpt2",
    "llama-gqa",
    "llama-mqa",
    "llama-scan",
    "moe-dense",
    "moe-sorted",
    "encoder-decoder",
    "dit",
    "lora",
]
EQUINOX = ["unet", "lstm", "dit"]
WHOLE = ["graph"]  # whose batch has no dimension of records to take a part of


class Trace(NamedTuple):
    model: Model
    state: Any
    after: Any  # state
    loss: jax.ShapeDtypeStruct
    primitives: set[str]


def load_installed(name: str, **more) -> Model:
    """Load a model; skip the test where its front end is missing."""
    if name in EQUINOX:
        require("equinox")
    return load(name, **more)


@cache
def trace(name: str) -> Trace:
    """The facts about a model's step that need no compiler."""
    model = load_installed(name)
    step, arguments = jax.jit(model.step), (jax.eval_shape(model.init), model.batch(0))
    after, loss = jax.eval_shape(step, *arguments)
    found = equations(step.trace(*arguments).jaxpr.jaxpr)
    return Trace(model, arguments[0], after, loss, {equation.primitive.name for equation in found})


def avals(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yield the equations of the jaxpr and of all jaxprs inside of it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: isinstance(x, (Jaxpr, ClosedJaxpr))):
            if isinstance(inner, (Jaxpr, ClosedJaxpr)):
                yield from equations(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)


each = pytest.mark.parametrize("name", ZOO)


@each
def test_a_step_gives_the_state_that_it_takes_and_has_what_the_model_is_there_for(name):
    model, state, after, loss, primitives = trace(name)
    assert model.name == name
    assert avals(after) == avals(state)
    assert loss.shape == ()
    assert loss.dtype == np.float32
    assert primitives >= PRIMITIVES[name]
    first, other = two_batches(model)
    assert not any(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@each
def test_hand_written_layouts_fit_what_they_name(name):
    model, state = trace(name).model, trace(name).state
    assert bool(model.megatron) == (name in TRANSFORMERS)
    assert_layout_fits(model, state)
    if name == "lora":
        return
    # With a parameter, its moments are named.
    leaves = paths(state)
    for pattern, _ in model.megatron:
        found = [path for path in leaves if re.search(pattern, path)]
        counts = {moment: sum(f"/{moment}/" in path for path in found) for moment in ("mu", "nu")}
        copies = 2 if name == "dit" else 1  # the average
        assert counts["mu"] == counts["nu"] == len(found) // (2 + copies)


@pytest.mark.slow
@each
def test_init_is_one_computation(name):
    assert load_installed(name).init.lower().as_text() == load(name).init.lower().as_text()


@pytest.mark.slow
@each
def test_a_model_learns_a_batch(name):
    model = load_installed(name, **({"rows": 4096} if name == "two-tower" else {}))
    batch = model.batch(0) if name in WHOLE else jax.tree.map(lambda leaf: leaf[:8], model.batch(0))
    init = model.init.lower().compile(compiler_options={"xla_backend_optimization_level": 0})  # in a third of the time
    step = jax.jit(model.step, donate_argnums=0)
    state, losses = init(), []
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    for _ in range(3):
        state, loss = step(state, batch)
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    assert all(np.isfinite(losses))


def test_the_larger_table_is_described_and_not_made():
    shapes = paths(jax.eval_shape(load("two-tower").init))
    assert shapes["params/user/table"].shape == (10_000_000, 16)
    assert load("two-tower", rows=64).batch(0)["user"]["id"].max() < 64


def test_rows_are_for_the_model_that_has_a_table():
    with pytest.raises(ValueError, match="rows=64 is for two-tower: mlp has no table"):
        load("mlp", rows=64)


def test_a_name_that_is_none_is_an_error_that_lists_them():
    with pytest.raises(ValueError, match=r"'gpt3' is not in the zoo, .*lora\."):
        load("gpt3")


def test_a_model_in_plain_jax_imports_no_front_end():
    plain = ["mlp", "llama-gqa", "llama-mqa", "llama-scan", "moe-sorted", "graph", "two-tower", "lora"]
    code = f"""
import sys
from penstock_bench.suites.shard.zoo import load
assert {{load(name).front_end for name in {plain}}} == {{"JAX"}}
assert not {{"flax", "equinox"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
