"""Steps of other packages are complete steps. Most need packages of the extra `outside`, and their tests are slow."""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from bench.tests.suites.shard.batches import two_batches
from bench.tests.suites.shard.layouts import assert_layout_fits

import penstock_bench
from penstock_bench.suites.shard.outside import OUTSIDE, Model, load, needs

SOURCES = Path(penstock_bench.__file__).parents[1]
SUITE = "penstock_bench.suites.shard"
GIVEN = {*sys.stdlib_module_names, "jax", "numpy", "penstock"}
WITHOUT_LAYOUT = {
    "regnet",
    "brax-ppo",
    "jraph-graph-net",
    "haiku-lstm",
    "haiku-resnet",
    "e3nn-force-field",
    "diffrax-neural-ode",
    "numpyro-vae",
    "equinox-gru",
}


QUICK = ("equinox-gru",)  # Equinox is in other extras too

each = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in OUTSIDE]
)


def load_installed(name: str) -> Model:
    """Load a model; skip the test where a package of it is missing."""
    for package in needs(name):
        # Releases of transformers from 5 on have no Flax models.
        module = "transformers.modeling_flax_utils" if package == "transformers" else package
        pytest.importorskip(module, reason=f'needs {package}: pip install -e "bench[outside]"')
    return load(name)


class Traced(NamedTuple):
    model: Model
    state: Any
    after: Any  # state
    loss: jax.ShapeDtypeStruct


@cache
def traced(name: str) -> Traced:
    """The facts about a model's step that need no compiler."""
    model = load_installed(name)
    state = jax.eval_shape(model.init)
    return Traced(model, state, *jax.eval_shape(model.step, state, model.batch(0)))


def avals(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)


def packages_imported(module: str) -> set[str]:
    """The packages that a module of the suite imports at its top, by itself or through another of the suite."""
    found = set()
    for node in ast.parse((SOURCES / module.replace(".", "/")).with_suffix(".py").read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        for name in names:
            found |= packages_imported(name) if name.startswith(SUITE) else {name.split(".")[0]}
    return found - GIVEN


def test_the_packages_that_a_step_imports_are_those_that_it_needs():
    from penstock_bench.suites.shard.outside import _MAKERS

    for name in OUTSIDE:
        module, function = _MAKERS[name][0].split(":")
        text = (SOURCES / SUITE.replace(".", "/") / "outside" / f"{module}.py").read_text()
        assert f"\ndef {function}() -> Model:" in text
        assert packages_imported(f"{SUITE}.outside.{module}") == set(needs(name)), name


def test_a_name_that_is_none_is_an_error_that_lists_them():
    for function in (load, needs):
        with pytest.raises(ValueError, match=r"'gpt3' is no step .*equinox-gru\."):
            function("gpt3")


@each
def test_a_step_gives_the_state_that_it_takes_and_its_layout_by_hand_fits(name):
    model, state, after, loss = traced(name)
    assert model.name == name
    assert avals(after) == avals(state)
    assert loss.shape == ()
    assert loss.dtype == np.float32
    first, other = two_batches(model)
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    assert bool(model.megatron) == (name not in WITHOUT_LAYOUT)
    assert_layout_fits(model, state)


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_model_learns_a_batch(name):
    model = load_installed(name)
    batch = model.batch(0)
    init = model.init.lower().compile(compiler_options={"xla_backend_optimization_level": 0})  # in a third of the time
    step = jax.jit(model.step, donate_argnums=0)
    state, losses = init(), []
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    for _ in range(4):
        state, loss = step(state, batch)
        losses.append(float(loss))
    assert all(np.isfinite(losses))
    assert min(losses[1:]) < losses[0]
