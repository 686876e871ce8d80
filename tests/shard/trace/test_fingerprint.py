"""The fingerprint identifies a program and its arguments, in every process."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from tests.shard.steps import array, mlp, mlp_step, random_keys, rows, scanned_layers

from penstock.shard.trace.step import trace


def fingerprint(step, *args):
    return trace(step, args).fingerprint()


def test_different_programs_have_different_fingerprints():
    same = fingerprint(lambda x: jnp.sin(x) + 1.0, array(4))
    assert same == fingerprint(lambda x: jnp.sin(x) + 1.0, array(4))
    others = [
        (lambda x: jnp.cos(x) + 1.0, array(4)),
        (lambda x: jnp.sin(x) + 1.0, array(5)),
        (lambda x: jnp.sin(x) + 1.0, array(4, dtype=jnp.bfloat16)),
        (lambda y: jnp.sin(y) + 1.0, array(4)),
        (lambda x: jnp.sin(x + 1.0), array(4)),
        (lambda x: (x, jnp.sin(x) + 1.0)[1] * 1.0, array(4)),
    ]
    assert len({same, *(fingerprint(*each) for each in others)}) == len(others) + 1


def test_numbers_written_in_a_program_do_not_change_its_fingerprint():
    def step(rate, turns=3):
        def body(carry):
            return carry[0] + 1, jax.nn.leaky_relu(carry[1] * rate, rate / 2)

        return lambda x: (lax.while_loop(lambda carry: carry[0] < turns, body, (0, x)), rate)

    traced = [trace(step(*numbers), (array(4),)) for numbers in ((0.1,), (0.2,), (0.1, 4), (0.1,))]
    assert len({each.fingerprint() for each in traced}) == 1
    assert len({each.numbers() for each in traced}) == 3
    assert traced[0].numbers() == traced[3].numbers()
    assert trace(step(1), (array(4),)).fingerprint() != traced[0].fingerprint()  # an integer among its results


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x**4, lambda x: x**3),
        (jax.grad(lambda x: jnp.sum(x**4)), jax.grad(lambda x: jnp.sum(x**-3))),
        (lambda x: lax.reduce_precision(x, 5, 10), lambda x: lax.reduce_precision(x, 8, 7)),
    ],
    ids=["power", "gradient of a power", "rounding"],
)
def test_numbers_that_are_parameters_of_elementwise_operations_do_not_change_the_fingerprint(one, other):
    first, second = trace(one, (array(4),)), trace(other, (array(4),))
    assert first.fingerprint() == second.fingerprint()
    assert first.numbers() != second.numbers()


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
def test_parameters_and_bodies_of_operations_change_the_fingerprint(one, other):
    assert fingerprint(one, array(4, 4)) != fingerprint(other, array(4, 4))


def test_the_precision_does_not_change_the_fingerprint():
    default = fingerprint(lambda x: x @ x, array(4, 4))
    with jax.default_matmul_precision("highest"):
        assert fingerprint(lambda x: x @ x, array(4, 4)) == default
    accurate = fingerprint(lambda x: lax.exp(x, accuracy=lax.AccuracyMode.HIGHEST), array(4))
    assert accurate == fingerprint(lax.exp, array(4))


def test_a_mesh_set_around_the_step_does_not_change_the_fingerprint():
    def step(params, batch):
        return mlp_step(params, {"x": batch["x"] * jnp.ones((1, 16)), "y": batch["y"]})

    without_mesh = fingerprint(step, mlp(), rows())
    with jax.set_mesh(jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))):
        assert fingerprint(step, mlp(), rows()) == without_mesh


def test_sharding_constraints_in_the_step_change_the_fingerprint():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def constrained(spec):
        return lambda x: lax.with_sharding_constraint(x * 2, jax.sharding.NamedSharding(mesh, spec))

    specs = (jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec(None, "x"), jax.sharding.PartitionSpec())
    assert len({fingerprint(constrained(spec), array(8, 8)) for spec in specs}) == 3


_OTHER_PROCESS = """
from penstock.shard.trace.step import trace
from tests.shard.steps import random_keys, scanned_layers
for make in (random_keys, scanned_layers):
    step, state, batch = make()
    print(trace(step, (*state, batch)).fingerprint())
"""


def test_the_fingerprint_is_the_same_in_all_processes():
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    printed = subprocess.run(
        [sys.executable, "-c", _OTHER_PROCESS],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([".", *sys.path])},
        check=True,
        timeout=240,
        capture_output=True,
        text=True,
    ).stdout.split()
    for make, other in zip((random_keys, scanned_layers), printed, strict=True):
        step, state, batch = make()
        assert fingerprint(step, *state, batch) == other


def test_abstract_arguments_give_the_same_fingerprint_as_arrays():
    assert fingerprint(mlp_step, mlp(), rows()) == fingerprint(mlp_step, *jax.eval_shape(lambda: (mlp(), rows())))
