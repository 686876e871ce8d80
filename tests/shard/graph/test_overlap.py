"""Early and late values, whose collectives can run behind products."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from penstock.shard.graph.scheduling import find_early_values, find_late_values
from penstock.shard.trace.step import trace

W, STACK, X = (jax.ShapeDtypeStruct(shape, "float32") for shape in ([16, 16], [3, 16, 16], [8, 16]))
FLAG = jax.ShapeDtypeStruct((), "bool")


def products(step, *args):
    """Return the program of a step, and its products."""
    program = trace(step, args).program
    return program, [op for op in program.ops if op.primitive == "dot_general"]


def early_operands(step, *args):
    """Return, for each product, the inputs that its operands are computed from; None for an operand that is not early."""
    program, found = products(step, *args)
    early = find_early_values(program)
    return [[program.inputs.index(early[value]) if value in early else None for value in op.operands] for op in found]


def late_results(step, *args):
    """Return, for each product, whether its result is late."""
    program, found = products(step, *args)
    late = find_late_values(program)
    return [op.results[0] in late for op in found]


def loss(w, x):
    """Return the loss of two layers that share a weight."""
    return (jnp.tanh(x @ w) @ w).sum()


def scanned_loss(stack, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack)[0].sum()


def test_a_weight_is_early_and_what_a_product_makes_is_not():
    assert early_operands(lambda w, x: jnp.tanh(x @ w) @ w, W, X) == [[1, 0], [None, 0]]


def test_a_cast_and_a_scaled_weight_are_early():
    def step(w, x):
        return x @ (w.astype(jnp.bfloat16) * 2).astype(jnp.float32)

    assert early_operands(step, W, X) == [[1, 0]]


def test_a_value_of_several_inputs_has_the_first():
    assert early_operands(lambda x, w, scale: x @ (w * scale), X, W, W) == [[0, 1]]


def test_a_sum_of_an_input_is_not_early():
    assert early_operands(lambda w, x: x @ (w / w.sum(axis=0)), W, X) == [[1, None]]


def test_a_scanned_slice_of_a_stack_is_early_and_a_carry_is_not():
    def step(stack, x):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w.astype(jnp.bfloat16).astype(h.dtype)), None), x, stack)[0]

    assert early_operands(step, STACK, X) == [[None, 0]]


def test_a_slice_in_a_loop_inside_of_a_loop_is_early():
    def inner(x, stack):
        return lax.scan(lambda h, w: (jnp.tanh(h @ (w * 2)), None), x, stack)[0]

    def step(stacks, x):
        return lax.scan(lambda h, stack: (inner(h, stack + 1), None), x, stacks)[0]

    assert early_operands(step, jax.ShapeDtypeStruct((2, 3, 16, 16), "float32"), X) == [[None, 0]]


def test_a_weight_that_a_loop_updates_is_not_early():
    def step(w, x):
        return lax.fori_loop(0, 3, lambda _, w: w - 0.1 * (x.T @ (x @ w)), w)

    program, _ = products(step, W, X)
    early = find_early_values(program)
    assert program.inputs[0] in early
    assert not {value for carry in program.loops[0].carries for value in (carry.before, carry.after, carry.result)} & set(early)


def test_a_weight_is_early_inside_of_a_branch_and_the_result_of_the_branch_is_not():
    def step(flag, w, x):
        return lax.cond(flag, lambda: x @ w.astype(jnp.bfloat16).astype(x.dtype), lambda: x * 2.0) @ w

    assert early_operands(step, FLAG, W, X) == [[2, 1], [None, 1]]


def results(step, *args):
    """Return the shape of the result of each product, with whether it is late."""
    program, found = products(step, *args)
    late = find_late_values(program)
    return sorted((program.values[op.results[0]].shape, op.results[0] in late) for op in found)


def test_the_gradient_of_a_weight_is_late_and_that_of_an_activation_is_not():
    def step(w, v, x):
        gradients = jax.grad(lambda w, v: ((jnp.tanh(x @ w) @ v) ** 2).sum(), (0, 1))(w, v)
        return w - 0.1 * gradients[0], v - 0.1 * gradients[1]

    # Two products forward, and the gradient of the hidden layer; then the gradients of both weights.
    assert results(step, W, W, X) == [((8, 16), False)] * 3 + [((16, 16), True)] * 2


def test_the_gradients_that_a_scan_stacks_are_late():
    def step(stack, x):
        return stack - 0.1 * jax.grad(scanned_loss)(stack, x)

    # The product forward and the gradient of the activation are read in the next iteration.
    assert results(step, STACK, X) == [((8, 16), False), ((8, 16), False), ((16, 16), True)]


def test_gradients_summed_in_the_carry_of_a_loop_over_microbatches_are_late():
    def step(w, batches):
        total, _ = lax.scan(lambda total, x: (total + jax.grad(loss)(w, x), None), jnp.zeros_like(w), batches)
        return w - 0.1 * total

    program, found = products(step, W, jax.ShapeDtypeStruct((4, 8, 16), "float32"))
    late = find_late_values(program)
    (total,) = (carry for carry in program.loops[0].carries if program.values[carry.result].shape == W.shape)
    gradients = [op.results[0] for op in found if program.values[op.results[0]].shape == W.shape]
    assert gradients
    assert {*gradients, total.before, total.after, total.result} <= late


def test_the_gradients_of_muon_are_not_late():
    def orthogonal(g):
        for _ in range(2):
            g = 1.5 * g - 0.5 * (g @ g.T) @ g
        return g

    def step(update):
        def run(w, x):
            return w - 0.1 * update(jax.grad(lambda w: jnp.tanh(x @ w).sum())(w))

        return run

    assert late_results(step(lambda g: g), W, X)[-1]
    forward, gradient, *iterations = late_results(step(orthogonal), W, X)
    assert not gradient
    assert iterations == [False, False, False, True]
    assert forward == late_results(step(lambda g: g), W, X)[0]


@pytest.mark.parametrize("read", [False, True])
def test_the_result_of_a_branch_is_late_if_no_product_reads_the_result_of_the_conditional(read):
    def step(flag, w, x):
        made = lax.cond(flag, lambda: x @ w, lambda: x * 2.0)
        return made @ w if read else made + 1.0

    assert late_results(step, FLAG, W, X)[0] is not read


def test_a_value_is_not_late_that_a_later_iteration_multiplies():
    def step(w, x):
        # The product of one iteration is read in the next but one.
        return lax.fori_loop(0, 4, lambda _, pair: (pair[1], pair[0] @ w), (x, x + 1.0))

    assert late_results(step, W, X) == [False]


def test_what_a_later_loop_multiplies_is_not_late_in_the_loop_that_stacks_it():
    def step(read):
        def run(w, xs):
            stacked = lax.scan(lambda carry, x: (carry, x @ w), None, xs)[1]
            return stacked, lax.scan(lambda carry, x: (carry, x @ w if read else x + 1.0), None, jnp.tanh(stacked))[1]

        return run

    xs = jax.ShapeDtypeStruct((4, 8, 16), "float32")
    assert late_results(step(read=True), W, xs) == [False, True]
    assert late_results(step(read=False), W, xs) == [True]


def test_the_result_of_a_loop_that_a_product_reads_is_not_late_inside_of_the_loop():
    def step(read):
        def run(w, xs):
            total = lax.scan(lambda total, x: (total + x @ w, None), jnp.zeros((8, 16)), xs)[0]
            return total @ w if read else total

        return run

    xs = jax.ShapeDtypeStruct((4, 8, 16), "float32")
    assert late_results(step(read=True), W, xs) == [False, True]
    assert late_results(step(read=False), W, xs) == [True]
