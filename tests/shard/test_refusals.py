"""A refusal says how many bytes are missing, and which arrays take them, with the line that makes each."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from tests.shard.limits import AT_HAND, compile_to, plan_of, unchecked_plan
from tests.shard.steps import array, sgd

from penstock.errors import PlanError
from penstock.shard import compiler


def block(w, x):
    hidden = jnp.exp(x @ w)  # this line makes the largest activations
    return jax.nn.silu(hidden) @ w.T


def train_layers(layer):
    """Return a step that trains a chain of layers, which are in a list, or stacked and scanned."""

    def step(params, x):
        def loss(params):
            if isinstance(params, list):
                hidden = x
                for w in params:
                    hidden = layer(w, hidden)
            else:
                hidden, _ = jax.lax.scan(lambda hidden, w: (layer(w, hidden), None), x, params)
            return (hidden**2).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        return sgd(params, gradients), value

    return step


def refusal(monkeypatch, step, *args, **options):
    """Return the message of the refusal of all plans of a step by a made-up compiler."""
    compile_to(monkeypatch, lambda plan: 2**40)
    with pytest.raises(PlanError) as refused:
        plan_of(step, *args, memory="1GiB", check=True, **options)
    return str(refused.value)


def largest(message):
    """Return the arguments and the activations that a refusal names."""
    arguments, rest = (
        message.split("The largest on each device: ")[1].split(". More than")[0].split(". It was predicted to need ")
    )
    return arguments.split("; "), rest.split("The largest activations of this prediction: ")[1].split("; ")


LINE = block.__code__.co_firstlineno + 1
UNROLLED = ([array(64, 256) for _ in range(4)], array(8192, 64))


@pytest.mark.parametrize("wrap", [lambda layer: layer, jax.checkpoint, jax.jit])
def test_a_refusal_names_the_line_that_makes_an_activation(wrap, monkeypatch):
    _, activations = largest(refusal(monkeypatch, train_layers(wrap(block)), *UNROLLED))
    assert any(f"float32[8192, 256] made at test_refusals.py:{LINE} (block)" in each for each in activations)


def test_activations_of_all_layers_are_named_together(monkeypatch):
    _, activations = largest(refusal(monkeypatch, train_layers(block), *UNROLLED))
    assert len(set(activations)) == len(activations) == 3
    kinds = [each.partition(" activation")[2] for each in activations]
    assert len(set(kinds)) == len(kinds), f"one line is named twice: {activations}"
    assert any(" activations float32[8192, 256] made at" in each for each in activations)


def test_a_stack_that_a_scan_collects_has_the_line_inside_of_the_scan(monkeypatch):
    stacked = (array(4, 64, 256), array(8192, 64))
    _, activations = largest(refusal(monkeypatch, train_layers(block), *stacked))
    assert any(f"float32[4, 8192, 256] made at test_refusals.py:{LINE} (block)" in each for each in activations)


def test_an_array_and_its_transpose_are_one_activation(monkeypatch):
    def step(w, x):
        hidden = jnp.exp(x @ w)
        return hidden.T @ hidden, hidden.T @ jnp.tanh(hidden), hidden.T[:, ::2]

    constraints = {"x": PartitionSpec("data", None)}
    _, activations = largest(refusal(monkeypatch, step, array(64, 256), array(8192, 64), constraints=constraints))
    line = step.__code__.co_firstlineno + 1
    hidden = [each for each in activations if f"made at test_refusals.py:{line} " in each]
    assert len(hidden) == 1
    assert " of an activation float32[" in hidden[0]


def test_a_function_of_jax_counts_as_the_line_that_calls_it(monkeypatch):
    """Check calls of a jitted function of JAX, which is traced once, and so has a line of its own only at the call."""

    def step(w, x):
        def loss(w):
            first = jax.nn.silu(x @ w)
            return (jax.nn.silu(first * 2.0) ** 2).sum()

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * gradient, value

    message = refusal(monkeypatch, step, array(64, 256), array(8192, 64))
    assert "made at test_refusals.py:" in message
    assert "jax/" not in message
    assert "functions.py" not in message


def test_a_line_of_a_package_comes_with_the_line_that_calls_it(monkeypatch):
    import flax.linen as nn

    layer = nn.Dense(256)

    def step(params, x):
        def loss(params):
            return (jnp.exp(layer.apply(params, x)) ** 2).sum()

        value, gradients = jax.value_and_grad(loss)(params)
        return sgd(params, gradients), value

    x = array(8192, 64)
    message = refusal(monkeypatch, step, jax.eval_shape(layer.init, jax.random.key(0), x), x)
    assert "test_refusals.py" in message
    assert "site-packages" not in message


def test_arguments_of_a_tpu_have_the_bytes_of_their_tiles(monkeypatch):
    """Check a vector of 9 numbers, which a TPU stores as one tile."""
    monkeypatch.setattr(compiler, "describe_missing_compiler", lambda topology: "")

    def step(w, x):
        return w - 0.1 * (x.T @ (x @ w)), jnp.float32(0)

    arguments, _ = largest(refusal(monkeypatch, step, array(9), array(512, 9), hardware="tpu-v5e"))
    assert "of 'w' float32[9]" in arguments[1]
    assert not arguments[1].startswith("36 B")


def read_bytes(words):
    number, unit = re.match(r"([\d.]+) ([KMG]?i?B)", words).groups()
    return float(number) * {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]


@pytest.mark.parametrize("hardware", ["tpu-v5e", AT_HAND], ids=["tpu", "cpu"])
def test_the_activations_of_a_refusal_fit_into_the_memory_that_it_says_was_predicted(hardware, monkeypatch):
    """Check arrays larger than all that is predicted, as a TPU keeps temporary arrays in its vector memory."""
    monkeypatch.setattr(compiler, "describe_missing_compiler", lambda topology: "")
    message = refusal(monkeypatch, train_layers(block), *UNROLLED, hardware=hardware)
    arguments, activations = largest(message)
    said = re.search(r"predicted to need ([\d.]+ \w+)(?:, and ([\d.]+ \w+) of the chip's vector memory)?", message)
    assert (said[2] is not None) == (hardware == "tpu-v5e")
    room = read_bytes(said[1]) + (read_bytes(said[2]) if said[2] else 0)
    listed = sum(map(read_bytes, (*arguments, *activations)))
    assert listed <= 1.01 * room  # the numbers are rounded
    assert said[2] is None or listed > read_bytes(said[1]), "all fits without the vector memory: take larger arrays"


def test_no_activations_of_a_plan_that_is_left_to_the_compiler_are_named(monkeypatch):
    compile_to(monkeypatch, lambda plan: 2**30 + (1 if plan.left_to_compiler else 2**20))
    with pytest.raises(PlanError) as refused:
        plan_of(train_layers(block), *UNROLLED, memory="1GiB", check=True)
    assert "The largest on each device: " in str(refused.value)
    assert "activations" not in str(refused.value)


def test_the_warning_about_an_unchecked_plan_has_the_accuracy_that_was_measured():
    _, said = unchecked_plan(memory="20KiB", check=False)
    assert "factor of two" not in said
    assert "10%" in said
