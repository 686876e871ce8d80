"""Live ranges and the peak memory that they give, counted by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from penstock.shard.graph.step_model import build_step_model
from penstock.shard.mesh.compiler_models import CPU
from penstock.shard.mesh.lookup import find_hardware
from penstock.shard.search.problem import build_problem
from penstock.shard.trace.step import trace

MB = 1 << 20


def square(dtype=jnp.float32):
    """Return a matrix of 1 MiB in float32."""
    return jax.ShapeDtypeStruct((512, 512), dtype)


def build(step, *args):
    return build_problem(build_step_model(trace(step, args), {}, CPU), {"data": 2}, find_hardware("tpu-v5e"))


def temporary_peak(step, *args):
    """Return the bytes beside stored arrays at the peak, if nothing is sharded."""
    built = build(step, *args)
    start = built.start()
    return (built.memory(start)[0] - built.local_bytes(start)[1]) / CPU.packing


def test_a_result_lives_beside_the_stored_inputs():
    assert temporary_peak(lambda x: x @ x, square()) == pytest.approx(MB, rel=1e-3)


def test_fused_elementwise_operations_take_no_memory():
    assert temporary_peak(lambda x: jnp.sum(jnp.tanh(x) * 2 + 1), square()) < MB / 100


def test_a_chain_of_products_holds_two_at_a_time():
    def chain(x):
        for _ in range(6):
            x = x @ x
        return x

    assert temporary_peak(chain, square()) == pytest.approx(2 * MB, rel=1e-3)


def test_a_value_lives_until_its_last_read():
    def three_products(x):
        first = x @ x
        second = first @ x
        third = second @ x
        return third @ first

    assert temporary_peak(three_products, square()) == pytest.approx(3 * MB, rel=1e-3)


def test_new_state_takes_the_memory_of_the_old():
    def step(w, x):
        gradient = x @ x
        return w - gradient, 0.0

    assert temporary_peak(step, square(), square()) == pytest.approx(MB, rel=1e-3)


def test_bfloat16_takes_half():
    assert temporary_peak(lambda x: x @ x, square(jnp.bfloat16)) == pytest.approx(MB / 2, rel=1e-3)


def test_a_stack_that_a_scan_writes_is_in_memory_in_full():
    def step(x):
        return lax.scan(lambda h, _: (h @ x, h @ x), x, None, length=8)[1]

    assert 8 * MB <= temporary_peak(step, square()) <= 12 * MB


def test_the_peak_is_never_below_the_stored_bytes():
    for step, args in ((lambda x: x, (square(),)), (lambda x, y: x.sum(), (square(), square())), (lambda: 1.0, ())):
        built = build(step, *args)
        start = built.start()
        assert built.memory(start)[0] >= built.local_bytes(start)[1] == sum(4 * np.prod(each.shape) for each in args)


def test_no_array_ends_before_it_starts():
    def step(w, x):
        def loss(w):
            return jnp.mean(lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), h)), x, w)[0] ** 2)

        return jax.grad(loss)(w)

    live_ranges = build(
        step, jax.ShapeDtypeStruct((3, 64, 64), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32)
    ).live_ranges
    assert (live_ranges.start <= live_ranges.end).all()
    assert (live_ranges.start >= 0).all()
    assert (live_ranges.end < live_ranges.steps).all()


def test_the_sums_of_all_gradients_wait_for_the_last_on_cpu():
    def step(weights, x):
        def loss(weights):
            first, *others = weights
            y = x @ first
            for each in others:
                y = jax.nn.softmax(y @ each.reshape(8, 64, 512).reshape(512, 512)) @ first.T
            return jnp.sum(y @ first)

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    model = build_step_model(trace(step, ([square()] * 3, jax.ShapeDtypeStruct((256, 512), jnp.float32))), {}, CPU)
    products = [op for op in model.program.ops if op.primitive == "dot_general"]
    last = max(time for time, op in enumerate(model.program.ops) if op in products)
    live_ranges, rows = model.live_ranges, model.graph.leaf[model.program.inputs[3]]
    sums = [
        end
        for edge, form, end in zip(live_ranges.edge, live_ranges.form, live_ranges.end, strict=True)
        if form == 2
        and model.program.values[model.graph.edges[edge].value].shape == (512, 512)
        and _reduces_rows(model.graph, model.graph.edges[edge], rows)
    ]
    assert len(sums) >= 5  # three readers of the first weights, and one of each other
    assert set(sums) == {last}


def _reduces_rows(graph, edge, leaf):
    """Return whether an edge sums over the rows of an input."""
    components = graph.components
    return components[leaf, 0] in {components[edge.a, dim] for dim in edge.partial}
