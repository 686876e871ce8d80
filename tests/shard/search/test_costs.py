"""The predicted cost of a plan: its parts add up to what the search compares."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from tests.shard.search.programs import FAST_LINKS, MESHES, SLOW_LINKS, anything, array, model_of, random_step, steps, training

import penstock as ps
from penstock.shard.graph.roles import find_batch_dims
from penstock.shard.mesh.hardware import find_hardware
from penstock.shard.search.baselines import data_parallel
from penstock.shard.search.costs import axis_work, build_costs, live_values_at_peak, predict_cost


@st.composite
def plans(draw):
    """A problem of a random program with any assignment, and the role and node of each of its inputs."""
    seed, mesh = draw(st.integers(0, 2**16)), draw(st.sampled_from(MESHES))
    model = model_of(random_step(seed, 3))
    costs = build_costs(model, mesh, FAST_LINKS)
    roles = draw(st.lists(st.sampled_from(["parameters", "optimizer", "batch", "other"]), min_size=2, max_size=2))
    return costs, anything(costs, np.random.default_rng(seed)), roles, model.inputs


@settings(max_examples=15)
@given(plans())
def test_the_parts_add_up_to_the_seconds_and_bytes_of_the_search(plan):
    costs, assignment, roles, inputs = plan
    cost = predict_cost(costs, assignment, roles, inputs, ("a loop",))
    assert cost.compute == costs.compute_seconds(assignment)
    assert cost.communication == pytest.approx(sum(each.seconds for each in cost.collectives))
    assert cost.seconds == pytest.approx(costs.seconds(assignment), rel=1e-9)
    assert cost.memory.total == pytest.approx(costs.memory(assignment)[0], rel=1e-6, abs=8)
    assert cost.memory.total == cost.memory.arguments + cost.memory.activations
    assert 0 <= cost.hidden <= cost.communication
    assert cost.unknown == ("a loop",)


@settings(max_examples=15)
@given(plans())
def test_collectives_are_one_for_each_kind_and_axes_the_longest_first(plan):
    costs, assignment, roles, inputs = plan
    found = predict_cost(costs, assignment, roles, inputs, ()).collectives
    assert len({(each.kind, each.axes) for each in found}) == len(found)
    assert [each.seconds for each in found] == sorted((each.seconds for each in found), reverse=True)
    sent = sum(
        times * edge.count * step.bytes_on_wire for edge, way, times in costs.all_reshard_steps(assignment) for step in way
    )
    assert sum(each.bytes_on_wire for each in found) == pytest.approx(sent, rel=1e-9)
    assert {axis for each in found for axis in each.axes} <= set(costs.links.names)


@settings(max_examples=15)
@given(plans())
def test_the_values_live_at_the_peak_come_with_the_largest_first(plan):
    costs, assignment, *_ = plan
    found = live_values_at_peak(costs, assignment)
    _, peak = costs.memory(assignment)
    alive = set(costs.live_ranges.value[(costs.live_ranges.start <= peak) & (costs.live_ranges.end >= peak)].tolist())
    assert {value for value, _ in found} == alive
    assert [size for _, size in found] == sorted((size for _, size in found), reverse=True)


@settings(max_examples=15)
@given(plans())
def test_what_each_axis_does_are_parts_of_one(plan):
    costs, assignment, _, inputs = plan
    for parts in axis_work(costs, assignment, inputs[:1]).values():
        assert set(parts) == {"batch", "tensor", "state", "idle"}
        assert all(0 <= part <= 1 + 1e-9 for part in parts.values())
        assert sum(parts.values()) == pytest.approx(1) or not costs.compute_seconds(costs.start())


def test_where_nothing_is_sharded_all_axes_are_idle_and_with_data_parallelism_none_is():
    model = model_of(steps(MESHES[0])["two_layers"])
    costs = build_costs(model, MESHES[0], FAST_LINKS)
    batch = [model.inputs[-1]]
    idle = axis_work(costs, costs.start(), batch)
    assert all(parts == {"batch": 0, "tensor": 0, "state": 0, "idle": 1} for parts in idle.values())
    every = (1 << len(costs.links.sizes)) - 1
    parallel = axis_work(costs, data_parallel(costs, find_batch_dims(costs.graph, batch), every), batch)
    assert all(parts["batch"] > 0.9 for parts in parallel.values())


@pytest.mark.parametrize(("normalised", "waits"), [(False, 0), (True, 1)])
def test_gradients_are_summed_in_one_collective_and_what_a_product_waits_for_in_its_own(normalised, waits):
    """As the CPU compiler does: the mean over the batch is a collective of its own, for the products that follow."""

    def loss(w, x):
        hidden = x @ w[0]
        return jnp.mean(((hidden - jnp.mean(hidden, 0) if normalised else hidden) @ w[1]) ** 2)

    model = model_of((training(loss), ((array(256, 512), array(512, 256)), array(1024, 256))))
    costs = build_costs(model, {"data": 8}, SLOW_LINKS)
    parallel = data_parallel(costs, find_batch_dims(costs.graph, model.inputs[2:]), 1)
    cost = predict_cost(costs, parallel, ["parameters"] * 2 + ["batch"], model.inputs, ())
    (summed,) = cost.collectives
    assert summed.kind == "all-reduce"
    latency = summed.seconds - summed.bytes_on_wire / SLOW_LINKS.link_bandwidth
    # The gradient of the mean is a sum over the batch, too.
    assert latency / SLOW_LINKS.link_latency == pytest.approx(2 * waits, abs=1e-6)


@pytest.mark.parametrize(("hardware", "apart"), [("h100", set()), ("tpu-v5e", {"all-gather"})])
def test_collectives_of_weights_share_a_latency_where_the_compiler_combines_them(hardware, apart):
    slow = dataclasses.replace(find_hardware(hardware), link_latency=1.0)
    step = training(lambda w, x: jnp.mean(jnp.tanh(x @ w[0]) @ w[1]))
    args = (array(256, 512), array(512, 256)), array(1024, 256)
    found = ps.plan(step, *args, mesh={"data": 8}, hardware=slow, check=False).baselines["FSDP"].collectives
    latencies = {each.kind: round(each.seconds) for each in found if each.count > 1}
    assert latencies == {"all-gather": 0, "reduce-scatter": 0} | dict.fromkeys(apart, 2)


@pytest.mark.parametrize(
    ("step", "combined"),
    [
        (lambda x, w: (x - x.mean(0)) * lax.rsqrt((x * x).mean(0) + 1) @ w, [2, 2]),  # a batch norm
        (lambda x, w: lax.rsqrt(((x - x.mean(0)) ** 2).mean(0) + 1) @ w, [1, 1]),  # the second sum needs the first
        (lambda x, w: jnp.tanh(x @ w) @ w.T + jnp.sin(x @ w) @ w.T, [2, 2]),
        (lambda x, w: x.max(0) * x.sum(0) @ w, [1, 1]),  # a maximum and a sum
        (lambda x, w: lax.scan(lambda h, _: (jnp.tanh(h - h.mean(0)) @ w, None), x @ w, None, 3)[0].sum(0) @ w, [1, 1, 1, 1]),
    ],
)
def test_partial_results_that_do_not_depend_on_each_other_share_a_latency(step, combined):
    graph = model_of((step, (array(64, 32), array(32, 32)))).graph
    assert sorted(edge.combined for edge in graph.edges if edge.partial and not edge.together) == combined


def test_a_weight_that_is_gathered_again_is_not_sent_with_others():
    model = model_of((training(lambda w, x: jnp.mean(jnp.tanh(x @ w[0]) @ w[1])), ((array(8, 16), array(16, 8)), array(32, 8))))
    again = [edge.together for edge in model.graph.edges if edge.kind == "operand" and edge.value == model.program.inputs[1]]
    assert again == [True, False]


def compute_of(step, *args, hardware="tpu-v5e"):
    return ps.plan(step, *args, mesh={"data": 8}, hardware=hardware, check=False).baselines["data parallel"].compute


def test_an_operation_takes_a_least_time_however_many_devices_share_it():
    assert compute_of(lambda w, x: w - jax.grad(lambda w: (x @ w).sum())(w), array(8, 8), array(64, 8)) >= 2 * 1.2e-6
    assert compute_of(lambda x: jnp.tanh(x) + 1, array(64, 8)) == pytest.approx(1.2e-6)  # one fused operation


def test_products_do_not_move_temporary_arrays_that_fit_into_the_vector_memory():
    hardware = find_hardware("tpu-v5e")
    args = array(128, 8192), array(8192, 128), array(8192, 128)
    with_memory, without = (
        compute_of(lambda w, v, x: (x @ w) @ v, *args, hardware=dataclasses.replace(hardware, fast_memory=size))
        for size in (1 << 30, 0)
    )
    hidden = 8192 * 8192 * 4 / 8  # the array between both products, on one device
    assert without > with_memory
    assert without - with_memory <= 2 * hidden / hardware.memory_bandwidth * 1.001


def test_rows_that_a_tpu_adds_one_by_one_are_shared_out():
    def step(table, rows, look_up):
        return table - jax.grad(lambda table: (look_up(table, rows) ** 2).sum())(table)

    args = array(2048, 256), jax.ShapeDtypeStruct((4096,), jnp.int32)

    def by_scalars(table, rows):
        return jax.vmap(lambda row: table[row])(rows)

    assert compute_of(lambda *args: step(*args, by_scalars), *args) > 4096 / 8 * 4.8e-6
    assert compute_of(lambda *args: step(*args, lambda table, rows: table[rows]), *args) < 1e-4
