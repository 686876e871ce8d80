"""Leaves of Equinox modules that are not arrays are a part of the structure, and come back as they were."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests.extras import require
from tests.shard.steps import array

from penstock.shard.trace.modules import StaticLeaf, drop_static, has_equinox_module, mark_static, unmark_static
from penstock.shard.trace.step import trace

eqx = require("equinox")

MODEL = eqx.nn.Sequential([eqx.nn.Linear(4, 4, key=jax.random.key(0)), eqx.nn.Lambda(jnp.tanh), eqx.nn.Dropout(0.5)])


@pytest.mark.parametrize("tree", [MODEL, {"nets": [MODEL, (MODEL, 1.0)]}, eqx.filter_eval_shape(lambda: MODEL)])
def test_static_leaves_come_back(tree):
    marked = mark_static(tree)
    assert all(hasattr(leaf, "dtype") or leaf == 1.0 for leaf in jax.tree.leaves(marked))
    assert jax.tree.structure(marked) == jax.tree.structure(mark_static(tree))
    assert eqx.tree_equal(unmark_static(marked), tree)
    assert StaticLeaf(0.5) in jax.tree.leaves(marked, is_leaf=lambda node: isinstance(node, StaticLeaf))


def test_static_leaves_are_dropped_as_equinox_filters():
    assert eqx.tree_equal(drop_static(mark_static(MODEL)), eqx.filter(MODEL, eqx.is_array))


def test_structures_with_other_static_leaves_differ():
    other = eqx.tree_at(lambda model: model.layers[2].p, MODEL, 0.25)
    assert jax.tree.structure(mark_static(other)) != jax.tree.structure(mark_static(MODEL))


def test_trees_without_equinox_modules_stay_the_same_objects():
    tree = {"w": np.ones(2), "kind": "train", "net": nnx.Linear(2, 2, rngs=nnx.Rngs(0))}
    assert mark_static(tree) is tree
    assert unmark_static(tree) is tree
    assert not has_equinox_module(tree)


def test_variables_beside_equinox_modules_stay_the_same_objects():
    variable = nnx.Variable(jnp.ones(2))
    assert unmark_static(mark_static((MODEL, variable)))[1] is variable


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: {"nets": [model]}], ids=["module", "in a dict"])
def test_an_equinox_module_with_functions_has_its_arrays_as_leaves(wrap):
    model = eqx.nn.MLP(16, 16, 32, 2, key=jax.random.key(0))
    whole = trace(lambda net, x: jax.vmap(jax.tree.leaves(net, is_leaf=callable)[0])(x), (wrap(model), array(4, 16)))
    assert {leaf.path.rpartition("/")[2] for leaf in whole.inputs[:-1]} == {"weight", "bias"}
    params, static = eqx.partition(model, eqx.is_array)
    traced = trace(lambda net, x: jax.vmap(eqx.combine(net, static))(x), (params, array(4, 16)))
    assert "net/layers/0/weight" in [leaf.path for leaf in traced.inputs]
