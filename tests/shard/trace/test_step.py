"""What is found out about a step by tracing it."""

import collections
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from tests.shard.steps import array, mlp, mlp_step, rows

from penstock.shard.trace.step import leaf_paths, trace


def find_state(step, *args):
    """Which output leaf replaces which input leaf, by path."""
    traced = trace(step, args)
    return {traced.outputs[place].path: traced.inputs[source].path for place, source in traced.state.items()}


def test_paths_name_keys_fields_and_places():
    Point = collections.namedtuple("Point", ["x", "y"])
    tree = {"a": [1.0, (2.0, None)], "b": Point(3.0, {"c": 4.0})}
    assert leaf_paths(tree) == ["a/0", "a/1/0", "b/x", "b/y/c"]
    assert leaf_paths(1.0) == [""]


def test_inputs_begin_with_the_name_of_their_argument():
    traced = trace(lambda params, /, *rest: params["w"] + rest[0], ({"w": array(2)}, array(2)))
    assert [leaf.path for leaf in traced.inputs] == ["params/w", "1"]


def test_a_part_of_the_result_that_is_like_an_argument_replaces_it():
    params, optimizer = mlp(), {"momentum": mlp(), "count": jnp.int32(0)}

    def step(params, optimizer, batch):
        return {"optimizer": optimizer, "params": params}, jnp.sum(batch)

    found = find_state(step, params, optimizer, array(4))
    assert found == {f"0/optimizer/{path}": f"optimizer/{path}" for path in leaf_paths(optimizer)} | {
        f"0/params/{path}": f"params/{path}" for path in leaf_paths(params)
    }


def test_of_two_alike_trees_that_only_change_places_the_first_is_replaced_first():
    tree = {"w": array(3)}
    assert find_state(lambda a, b: (b, a), tree, tree) == {"0/w": "a/w", "1/w": "b/w"}


def test_one_argument_is_replaced_once():
    assert find_state(lambda a: (a, a), array(3)) == {"0": "a"}


@pytest.mark.parametrize("change", ["shape", "dtype", "structure"])
def test_what_differs_in_form_is_no_state(change):
    def step(a):
        return {"shape": {"w": a["w"][:2]}, "dtype": {"w": a["w"].astype(jnp.int32)}, "structure": [a["w"][::-1]]}[change], 0.0

    assert find_state(step, {"w": array(3)}) == {}


def test_an_empty_argument_replaces_nothing():
    assert find_state(lambda a, b: (a, b), {}, array(3)) == {"1": "b"}


def fingerprint(step, *args):
    return trace(step, args).fingerprint()


def test_the_fingerprint_is_of_what_the_program_does():
    same = fingerprint(lambda x: jnp.sin(x) + 1.0, array(4))
    assert same == fingerprint(lambda x: jnp.sin(x) + 1.0, array(4))
    others = [
        (lambda x: jnp.cos(x) + 1.0, array(4)),
        (lambda x: jnp.sin(x) + 2.0, array(4)),
        (lambda x: jnp.sin(x) + 1.0, array(5)),
        (lambda x: jnp.sin(x) + 1.0, array(4, dtype=jnp.bfloat16)),
        (lambda y: jnp.sin(y) + 1.0, array(4)),
        (lambda x: jnp.sin(x + 1.0), array(4)),
        (lambda x: (x, jnp.sin(x) + 1.0)[1] * 1.0, array(4)),
    ]
    assert len({same, *(fingerprint(*each) for each in others)}) == len(others) + 1


def loop(body, length):
    return lambda x: lax.scan(lambda carry, _: (body(carry), None), x, None, length=length)[0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (loop(jnp.sin, 3), loop(jnp.cos, 3)),
        (loop(jnp.sin, 3), loop(jnp.sin, 4)),
        (lambda x: jnp.sum(x, 0), lambda x: jnp.sum(x, 1)),
        (lambda x: x @ x, lambda x: jnp.einsum("ij,kj->ik", x, x)),
        (lambda x: x.T, lambda x: x * 1.0),
        (lambda x: lax.cumsum(x, 0), lambda x: lax.cumsum(x, 0, reverse=True)),
        (lambda x: x[:2], lambda x: x[1:3]),
        (lambda x: jnp.take(x, jnp.array([1]), axis=0).sum(), lambda x: jnp.take(x, jnp.array([1]), axis=1).sum()),
    ],
    ids=["body", "length", "axis", "contraction", "operation", "direction", "slice", "lookup"],
)
def test_the_fingerprint_tells_programs_apart_by_all_that_they_do(one, other):
    assert fingerprint(one, array(4, 4)) != fingerprint(other, array(4, 4))


def test_the_fingerprint_is_of_what_is_computed_and_not_of_how_exactly():
    as_set = fingerprint(lambda x: x @ x, array(4, 4))
    with jax.default_matmul_precision("highest"):
        assert fingerprint(lambda x: x @ x, array(4, 4)) == as_set


def test_the_fingerprint_is_of_the_program_and_not_of_a_mesh_that_is_set_around_it():
    def step(params, batch):
        return mlp_step(params, {"x": batch["x"] * jnp.ones((1, 16)), "y": batch["y"]})

    alone = fingerprint(step, mlp(), rows())
    with jax.set_mesh(jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))):
        assert fingerprint(step, mlp(), rows()) == alone


def test_the_fingerprint_tells_layouts_that_a_step_asks_for_apart():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def asking(spec):
        return lambda x: lax.with_sharding_constraint(x * 2, jax.sharding.NamedSharding(mesh, spec))

    specs = (jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec(None, "x"), jax.sharding.PartitionSpec())
    assert len({fingerprint(asking(spec), array(8, 8)) for spec in specs}) == 3


def test_a_decorated_step_is_the_step():
    bare, decorated = (trace(step, (mlp(), rows())) for step in (mlp_step, jax.jit(mlp_step, donate_argnums=0)))
    assert decorated.fingerprint() == bare.fingerprint()
    assert str(decorated.closed) == str(bare.closed)
    assert [leaf.path for leaf in decorated.inputs] == [leaf.path for leaf in bare.inputs]


_OTHER_PROCESS = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
from penstock.shard.trace.step import trace
from tests.shard.steps import random_keys, convolutions
for make in (random_keys, convolutions):
    step, state, batch = make()
    print(trace(step, (*state, batch)).fingerprint())
"""


def test_the_fingerprint_is_the_same_in_all_processes():
    said = [
        subprocess.run(
            [sys.executable, "-c", _OTHER_PROCESS],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([".", *sys.path])},
            check=True,
            timeout=240,
            capture_output=True,
            text=True,
        ).stdout.split()
        for seed in ("1", "2")
    ]
    assert said[0] == said[1]
    assert len(said[0]) == 2


def test_nothing_is_run_or_allocated():
    step = trace(lambda x: x @ x, (jax.ShapeDtypeStruct((10**6, 10**6), jnp.float32),))
    assert step.outputs[0].shape == (10**6, 10**6)


def test_shapes_alone_have_the_fingerprint_of_arrays():
    assert fingerprint(mlp_step, mlp(), rows()) == fingerprint(mlp_step, *jax.eval_shape(lambda: (mlp(), rows())))
