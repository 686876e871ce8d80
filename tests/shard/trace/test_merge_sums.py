import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from penstock.shard.trace.flat_program import merge_sums
from penstock.shard.trace.step import trace

X = jnp.arange(4 * 6 * 2 * 3, dtype=jnp.float32).reshape(4, 6, 2, 3)


def merged(step, *args):
    """Return the primitives and axes of a merged step, after its results were compared with those of the step."""
    closed = jax.make_jaxpr(step)(*args)
    after = merge_sums(closed)
    expected = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args)
    for found, wanted in zip(jax.core.eval_jaxpr(after.jaxpr, after.consts, *args), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    return [(each.primitive.name, each.params.get("axes")) for each in after.jaxpr.eqns]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda x: x.sum(0).sum(1), [("reduce_sum", (0, 2))]),
        (lambda x: x.sum(2).sum(0).sum((0, 1)), [("reduce_sum", (0, 1, 2, 3))]),
        (lambda x: x.sum(0)[None].sum(0).sum((1, 2)), [("reduce_sum", (0, 2, 3))]),
        (lambda x: jnp.squeeze(x.sum(3, keepdims=True), 3).sum(1), [("reduce_sum", (1, 3))]),
    ],
)
def test_a_sum_of_a_sum_is_one_sum(step, expected):
    assert merged(step, X) == expected


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.sum(0).reshape(3, 4, 3).sum(1),  # other dimensions
        lambda x: x.sum(0).T.sum(1),  # another order
        lambda x: x.max(0).sum(1),  # not a sum
        lambda x: (x.sum(0) * 2).sum(1),  # between them is more than a sum
    ],
)
def test_other_operations_on_a_sum_stay(step):
    before = [each.primitive.name for each in jax.make_jaxpr(step)(X).jaxpr.eqns]
    assert [name for name, _ in merged(step, X)] == before


def test_a_sum_that_something_else_reads_stays():
    def both(x):
        inner = x.sum(0)
        return inner.sum(1), jnp.tanh(inner)

    def returned(x):
        inner = x.sum(0)
        return inner.sum(1), inner

    assert ("reduce_sum", (0,)) in merged(both, X)
    assert merged(returned, X) == [("reduce_sum", (0,)), ("reduce_sum", (1,))]


def test_sums_are_merged_inside_of_loops_branches_and_calls():
    def inside(x):
        return x.sum(0).sum(1)

    def step(x):
        carry, _ = lax.scan(lambda carry, _: (carry + inside(x), None), jnp.zeros((6, 3)), None, length=2)
        carry = lax.while_loop(lambda carry: carry.sum() < 0, lambda carry: carry + inside(x), carry)
        return lax.cond(x[0, 0, 0, 0] > 0, lambda: carry + inside(x), lambda: carry) + jax.jit(inside)(x)

    merged(step, X)
    axes = [each.rule.operands for each in trace(step, (X,)).program.ops if each.primitive == "reduce_sum"]
    assert len(axes) == 5  # four times the same, and the condition
    assert sum(len(operands[0]) == 4 for operands in axes) == 4


def test_the_gradient_of_a_broadcast_parameter_is_summed_over_the_batch_and_its_other_dimensions_at_once():
    def loss(scale, x):
        return jnp.sum(jnp.sin(jax.vmap(lambda each: each * scale[:, None, None])(x)))

    program = trace(jax.grad(loss), (jnp.ones(6), X)).program
    sums = [op for op in program.ops if op.primitive == "reduce_sum"]
    assert [program.values[op.operands[0]].shape for op in sums] == [X.shape]
    assert program.values[sums[0].results[0]].shape == (6,)
