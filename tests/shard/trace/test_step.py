"""Tracing a step: paths, state, and steps under jit."""

import collections

import jax
import jax.numpy as jnp
import pytest
from tests.shard.steps import array, mlp, mlp_step, rows

import penstock as ps
from penstock.shard.trace.step import leaf_paths, trace


def test_paths_name_keys_fields_and_indices():
    Point = collections.namedtuple("Point", ["x", "y"])
    tree = {"a": [1.0, (2.0, None)], "b": Point(3.0, {"c": 4.0})}
    assert leaf_paths(tree) == ["a/0", "a/1/0", "b/x", "b/y/c"]
    assert leaf_paths(1.0) == [""]


def test_inputs_begin_with_the_name_of_their_argument():
    traced = trace(lambda params, /, *rest: params["w"] + rest[0], ({"w": array(2)}, array(2)))
    assert [leaf.path for leaf in traced.inputs] == ["params/w", "1"]


def test_a_step_under_jit_traces_as_the_step_itself():
    plain, jitted = (trace(step, (mlp(), rows())) for step in (mlp_step, jax.jit(mlp_step, donate_argnums=0)))
    assert jitted.fingerprint() == plain.fingerprint()
    assert str(jitted.closed) == str(plain.closed)
    assert [leaf.path for leaf in jitted.inputs] == [leaf.path for leaf in plain.inputs]


def test_tracing_allocates_nothing():
    step = trace(lambda x: x @ x, (jax.ShapeDtypeStruct((10**6, 10**6), jnp.float32),))
    assert step.outputs[0].shape == (10**6, 10**6)


def test_options_that_are_trees_of_arrays_give_short_errors():
    tree = {f"layer {number}": array(16, 16) for number in range(50)}
    for options in ({"mesh": [tree]}, {"devices": [tree]}, {"hardware": tree}, {"memory": tree}):
        with pytest.raises((TypeError, ValueError)) as caught:
            ps.plan(mlp_step, mlp(), rows(), **{"mesh": {"x": 8}, "hardware": "v5e", "check": False, **options})
        assert len(str(caught.value)) < 1000


def test_the_error_for_a_leaf_that_is_no_array_has_its_path():
    with pytest.raises(TypeError, match="'options/kind'"):
        trace(lambda p, options: p, (array(2), {"kind": "train"}))
