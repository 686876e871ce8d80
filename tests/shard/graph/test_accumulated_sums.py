import jax
import jax.numpy as jnp
import pytest
from jax import lax

from penstock.shard.graph.scheduling import find_accumulated
from penstock.shard.graph.step_model import build_step_model
from penstock.shard.mesh.compiler_models import CPU, GPU, TPU
from penstock.shard.mesh.hardware import find_hardware
from penstock.shard.search.baselines import DATA_PARALLEL, FSDP
from penstock.shard.search.costs import predict_cost
from penstock.shard.search.solver import prepare_meshes
from penstock.shard.trace.step import trace

STEPS, ROWS, WIDTH = 16, 64, 256
W = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
XS = jax.ShapeDtypeStruct((STEPS, ROWS, WIDTH), jnp.float32)


def rnn(w, xs):
    """Return the weights of an RNN after a step of gradient descent, and the loss."""

    def loss(w):
        return jnp.mean(lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), jnp.zeros((ROWS, WIDTH)), xs)[0] ** 2)

    value, gradient = jax.value_and_grad(loss)(w)
    return w - gradient, value


def accumulated(step, *args):
    program = trace(step, args).program
    return [(program.values[value].shape, count) for value, count in find_accumulated(program).items()]


def test_the_gradient_of_a_weight_that_each_iteration_reads_is_summed_once():
    assert accumulated(rnn, W, XS) == [((WIDTH, WIDTH), 1)]


@pytest.mark.parametrize(
    "body",
    [
        lambda carry, x: (carry + x.T @ x, carry),  # something else reads the carry
        lambda carry, x: (2 * carry + x.T @ x, None),  # not added alone
        lambda carry, x: (carry + jnp.tanh(x.T @ x), None),  # not the sum is added, but what is computed from it
        lambda carry, x: (lambda y: (carry + y, y))(x.T @ x),  # something else reads the sum
    ],
)
def test_other_carries_are_not(body):
    assert accumulated(lambda xs: lax.scan(body, jnp.zeros((WIDTH, WIDTH)), xs), XS) == []


def test_a_loop_of_unknown_length_is_not():
    def step(x):
        return lax.while_loop(
            lambda state: state[1].sum() < 3, lambda state: (state[0], state[1] + state[0].T @ state[0]), (x, x)
        )

    assert accumulated(step, W) == []


@pytest.mark.parametrize(("compiler", "times"), [(CPU, STEPS), (GPU, 1), (TPU, 1)])
def test_an_all_reduce_is_priced_once_if_the_compiler_moves_it_and_a_reduce_scatter_each_time(compiler, times):
    traced = trace(rnn, (W, XS))
    (mesh,) = prepare_meshes(traced, [{"data": 8}], find_hardware("tpu-v5e"), {"xs": jax.P(None, "data")}, {}, compiler)

    def sent(name, kind):
        cost = predict_cost(mesh.costs, mesh.baselines[name], mesh.roles, mesh.model.inputs, ())
        return sum(each.bytes_on_wire for each in cost.collectives if each.kind == kind)

    weights = 4 * WIDTH * WIDTH
    assert sent(DATA_PARALLEL, "all-reduce") == pytest.approx(times * 2 * weights * 7 / 8, rel=0.01)
    assert sent(FSDP, "reduce-scatter") in (0, pytest.approx(STEPS * weights * 7 / 8, rel=0.01))


def test_an_all_reduce_of_which_a_slice_is_added_stays_in_the_loop():
    (mesh,) = prepare_meshes(trace(rnn, (W, XS)), [{"data": 2, "model": 4}], find_hardware("h100"), None, {}, GPU)
    (edge,) = (edge for edge in mesh.model.graph.edges if edge.all_reduce_count is not None)
    nothing, both = (0, 0), mesh.costs.links.bits(("data", "model"))
    whole = mesh.costs.links.reshard_steps(nothing, nothing, both, edge.bytes)
    slices = mesh.costs.links.reshard_steps(nothing, (1, 2), both, edge.bytes)
    assert [step.kind for step in (*whole, *slices)] == ["all-reduce"] * 2
    assert (edge.times(whole), edge.times(slices)) == (1, STEPS)


def test_loops_change_no_edge_without_a_sum():
    model = build_step_model(trace(lambda x: lax.scan(lambda h, _: (h @ x, None), x, None, length=3)[0], (W,)), {}, TPU)
    assert all(edge.all_reduce_count is None for edge in model.graph.edges)
