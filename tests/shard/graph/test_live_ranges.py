"""Live ranges and the peak memory that they give, counted by hand."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from penstock.shard.graph.step_model import build_step_model
from penstock.shard.mesh.compiler_models import CPU, GPU, TPU
from penstock.shard.mesh.hardware import find_hardware
from penstock.shard.search.costs import build_costs
from penstock.shard.trace.step import trace

MB = 1 << 20


def square(dtype=jnp.float32):
    """Return a matrix of 1 MiB in float32."""
    return jax.ShapeDtypeStruct((512, 512), dtype)


def build(step, *args):
    return build_costs(build_step_model(trace(step, args), {}, CPU), {"data": 2}, find_hardware("tpu-v5e"))


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


def gradients(compiler):
    """Return the sums of the gradients of five products, of 1 MiB each, by their edges, and the last product.

    A sum is a pair: the operation that computes it, and the last whose result the same all-reduce sends.
    """

    def step(weights, x):
        def loss(weights):
            first, *others = weights
            y = x @ first
            for each in others:
                y = jax.nn.softmax(y @ each.reshape(8, 64, 512).reshape(512, 512)) @ first.T
            return jnp.sum(y @ first)

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    model = build_step_model(trace(step, ([square()] * 3, jax.ShapeDtypeStruct((256, 512), jnp.float32))), {}, compiler)
    last = max(time for time, op in enumerate(model.program.ops) if op.primitive == "dot_general")
    live_ranges, rows = model.live_ranges, model.graph.leaf[model.program.inputs[3]]
    sums: dict[int, tuple[int, int]] = {}
    for edge, form, start, end in zip(live_ranges.edge, live_ranges.form, live_ranges.start, live_ranges.end, strict=True):
        sent = model.graph.edges[edge]
        large = model.program.values[sent.value].shape == (512, 512)
        if form == 2 and large and _reduces_rows(model.graph, sent, rows):
            sums.setdefault(int(edge), (int(start), int(end)))  # rows that follow are of its result
    assert len(sums) >= 5  # three readers of the first weights, and one of each other
    return sums, last


@pytest.mark.parametrize("compiler", [CPU, TPU, GPU])
def test_the_sums_of_all_gradients_wait_for_the_last(compiler):
    sums, last = gradients(compiler)
    assert {end for _, end in sums.values()} == {last}


def test_the_sums_of_gradients_wait_only_for_as_many_as_one_all_reduce_sends():
    sums, last = gradients(replace(TPU, combines={"all-reduce": 2 * MB}))
    sent = Counter(end for _, end in sums.values())
    assert max(sent.values()) == 2
    assert max(sent) == last
    assert all(start <= end for start, end in sums.values())
    alone, _ = gradients(replace(TPU, combines={"all-reduce": 0}))
    assert all(start == end for start, end in alone.values())


def test_copies_of_state_exist_in_part_where_its_gradient_waits_for_others():
    def step(weights, momenta, x):
        gradients = jax.grad(lambda weights: jnp.sum(jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1])))(weights)
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, gradients)
        return jax.tree.map(lambda w, m: w - m, weights, momenta), momenta

    state = [jax.ShapeDtypeStruct((512, 1024), jnp.float32), jax.ShapeDtypeStruct((1024, 512), jnp.float32)]
    rows = jax.ShapeDtypeStruct((256, 512), jnp.float32)

    def waiting(combines):
        model = build_step_model(trace(step, (state, state, rows)), {}, replace(TPU, combines={"all-reduce": combines}))
        live_ranges, inputs = model.live_ranges, model.program.inputs
        return sum(
            int(size)
            for value, edge, size in zip(live_ranges.value, live_ranges.edge, live_ranges.bytes, strict=True)
            if value in inputs[:4] and edge >= 0 and model.graph.edges[edge].kind == "result"
        )

    assert 0 < waiting(100 * MB) < 8 * MB * TPU.packing  # two weights and two momenta of 2 MiB
    assert waiting(0) < waiting(100 * MB)


SLICING = replace(TPU, slices_sums=True)
"""A compiler without reduce-scatters, which fuses as little as possible of what is counted here."""


def scattered_sums(compiler, update):
    """Return the live ranges of the gradients of two weights of 1 MiB, if the sums are scattered: (weight, start, end, bytes).

    Args:
      compiler: the compiler.
      update: weights, gradients → new weights.
    """

    def step(weights, x):
        gradients = jax.grad(lambda weights: jnp.sum(jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1])))(weights)
        return update(weights, gradients)

    model = build_step_model(trace(step, ([square()] * 2, jax.ShapeDtypeStruct((256, 512), jnp.float32))), {}, compiler)
    live_ranges, rows = model.live_ranges, model.graph.leaf[model.program.inputs[2]]
    edges = model.graph.edges
    found = [
        (edges[edge].value, int(start), int(end), round(size / compiler.packing))
        for edge, form, start, end, size in zip(
            *(getattr(live_ranges, name).tolist() for name in ("edge", "form", "start", "end", "bytes")), strict=True
        )
        if form == 1
        and model.program.values[edges[edge].value].shape == (512, 512)
        and _reduces_rows(model.graph, edges[edge], rows)
    ]
    assert len({value for value, *_ in found}) == 2
    return found


def descend(weights, gradients):
    return jax.tree.map(lambda w, g: w - g, weights, gradients)


def clip(weights, gradients):
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in gradients))
    return jax.tree.map(lambda w, g: w - g / norm, weights, gradients)


def test_a_scattered_sum_is_in_memory_in_full_where_there_is_no_reduce_scatter():
    with_one, without = scattered_sums(TPU, descend), scattered_sums(SLICING, descend)
    assert len(with_one) == 2  # a gradient each, before it is sent
    assert len(without) == 4  # and the sum
    assert {size for *_, size in without} == {MB}
    assert len({end for _, _, end, _ in without}) == 1  # of one all-reduce, of which slices are taken


def test_scattered_gradients_of_which_the_norm_is_computed_are_summed_one_by_one():
    ends = {
        value: {end for each, _, end, _ in scattered_sums(SLICING, clip) if each == value}
        for value, *_ in scattered_sums(SLICING, clip)
    }
    assert [len(each) for each in ends.values()] == [1, 1]
    assert len(set.union(*ends.values())) == 2


@pytest.mark.parametrize(("compiler", "early"), [(CPU, True), (TPU, False)])
def test_a_partial_gradient_of_a_lookup_exists_as_long_as_its_zeros(compiler, early):
    def step(table, rows):
        return table - jax.grad(lambda table: jnp.sum(jnp.tanh(table[rows]) ** 2))(table)

    model = build_step_model(trace(step, (square(), jax.ShapeDtypeStruct((256,), jnp.int32))), {}, compiler)
    live_ranges, edges = model.live_ranges, model.graph.edges
    starts = [
        int(start)
        for edge, form, start in zip(live_ranges.edge, live_ranges.form, live_ranges.start, strict=True)
        if form and model.program.values[edges[edge].value].shape == (512, 512)
    ]
    scatter = next(time for time, op in enumerate(model.program.ops) if op.primitive == "scatter-add")
    assert (min(starts) < scatter) == early


def _reduces_rows(graph, edge, leaf):
    """Return whether an edge sums over the rows of an input."""
    components = graph.components
    return components[leaf, 0] in {components[edge.a, dim] for dim in edge.partial}
