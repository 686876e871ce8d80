"""Axes that the planner chooses have the names of what they do; all others keep theirs."""

from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, PartitionSpec
from tests.shard.plans import leaf, plan, spec
from tests.shard.steps import array, mlp, mlp_step, rows

import penstock as ps
from penstock.shard import find_hardware
from penstock.shard.apply.sharding_constraints import ShardingConstraints
from penstock.shard.axis_names import name_axes, rename_axes
from penstock.shard.record import PlanRecord

TPU = find_hardware("tpu-v5e")
BATCH = {"batch": 1.0, "tensor": 0.0, "state": 0.0, "idle": 0.0}
MIXED = {"batch": 0.6, "tensor": 0.3, "state": 0.1, "idle": 0.0}
UPDATES = {"batch": 0.6, "tensor": 0.1, "state": 0.3, "idle": 0.0}
TENSOR = {"batch": 0.0, "tensor": 0.9, "state": 0.1, "idle": 0.0}
IDLE = {"batch": 0.0, "tensor": 0.0, "state": 0.0, "idle": 1.0}
REPLICATED = spec(None, None)


def searched(stored, sizes=(2, 2, 2), **work):
    """Return the names of the axes of a plan: those with work, of which `stored` ones shard weights that are gathered for use."""
    weights = [leaf(f"params/{axis}", (64, 64), spec(axis, None), REPLICATED) for axis in stored]
    return list(name_axes(plan(weights, dict(zip(work, sizes, strict=False)), work), kept=(), hardware=TPU).mesh_shape)


@pytest.mark.parametrize(
    ("stored", "work", "names"),
    [
        ("", {"data": BATCH}, ["data"]),
        ("m", {"m": BATCH}, ["data"]),
        ("", {"data": TENSOR}, ["model"]),
        ("", {"data": TENSOR, "model": BATCH}, ["model", "data"]),
        ("m", {"data": BATCH, "m": BATCH}, ["data", "fsdp"]),
        ("d", {"d": BATCH, "model": BATCH}, ["fsdp", "data"]),
        ("m", {"data": UPDATES, "m": UPDATES}, ["data", "fsdp"]),
        ("f", {"data": BATCH, "f": BATCH, "model": MIXED}, ["data", "fsdp", "model"]),
        ("", {"data": BATCH, "fsdp": BATCH, "model": BATCH}, ["data", "data2", "data3"]),
        ("", {"data": MIXED, "model": TENSOR}, ["model2", "model"]),
        ("", {"data": IDLE, "model": TENSOR}, ["data", "model"]),
    ],
)
def test_an_axis_is_named_after_what_it_does(stored, work, names):
    assert searched(stored, **work) == names


def test_an_axis_of_one_device_has_its_name_unless_another_takes_it():
    assert searched("", (4, 1), data=BATCH, model=IDLE) == ["data", "model"]
    assert searched("", (4, 1), data=TENSOR, model=IDLE) == ["model", "model2"]


@given(
    st.lists(st.sampled_from([BATCH, MIXED, UPDATES, TENSOR, IDLE]), min_size=1, max_size=3),
    st.sets(st.sampled_from(["data", "fsdp", "model"])),
    st.lists(st.sampled_from([1, 2, 4]), min_size=3, max_size=3),
    st.sets(st.sampled_from(["data", "fsdp", "model"])),
)
def test_names_differ_and_those_of_the_user_are_kept(work, kept, sizes, stored):
    axes = dict(zip(("data", "fsdp", "model"), work, strict=False))
    shape = dict(zip(axes, sizes, strict=False))
    weights = [leaf(f"params/{axis}", (64, 64), spec(axis, None), REPLICATED) for axis in stored & set(axes)]
    before = plan(weights, shape, axes)
    after = name_axes(before, kept, TPU)
    assert list(after.mesh_shape.values()) == list(shape.values())
    assert list(after.axis_work.values()) == work
    for old, new in zip(shape, after.mesh_shape, strict=True):
        assert old == new or old not in kept


def ordered(*layouts, mesh=("a", "b", "c"), **changed):
    """Return the axes of a plan with these layouts of stored weights, all of which keep their names."""
    weights = [leaf(f"params/{number}", (64, 64), layout) for number, layout in enumerate(layouts)]
    sizes = {axis: 2 + number for number, axis in enumerate(mesh)}
    work = {axis: BATCH | {"batch": sizes[axis]} for axis in mesh}
    found = name_axes(plan(weights, sizes, work, **changed), kept=mesh, hardware=TPU)
    assert {axis: sizes[axis] for axis in mesh} == found.mesh_shape
    assert [found.axis_work[axis]["batch"] for axis in found.mesh_shape] == list(found.mesh_shape.values())
    assert list(found.axis_work) == list(found.mesh_shape)
    assert [each.stored for each in found.inputs] == list(layouts)
    return "".join(found.mesh_shape)


@pytest.mark.parametrize(
    ("layouts", "order"),
    [
        ([], "abc"),
        ([spec("c", "b"), spec("b", "a")], "abc"),  # one axis in each dimension has no order
        ([spec(("b", "a"), None)], "bac"),
        ([spec(("c", "b", "a"), None)], "cba"),
        ([spec(("c", "a"), None), spec(None, ("b", "c"))], "bca"),
        ([spec(("b", "a"), None), spec(("a", "b"), None)], "abc"),  # a tie leaves the order
        ([spec(("b", "a"), None), spec(None, ("b", "a")), spec(("a", "b"), None)], "bac"),
        ([spec(("a", "b"), None), spec(("a", "b"), None), spec(("b", "a"), None)], "abc"),
    ],
)
def test_the_axes_have_the_order_of_most_dimensions_with_several(layouts, order):
    assert ordered(*layouts) == order


def test_the_order_inside_of_the_step_counts_too():
    inside = (spec(("b", "a"), None),)
    for constraints in (
        ShardingConstraints(operands={(0,): (None, inside)}),
        ShardingConstraints(results={(0,): (inside, None), (1,): (inside,)}),
    ):
        assert ordered(sharding_constraints=constraints) == "bac"
    # Only the layout at the end of a chain is one that a program asks for.
    chain = (spec(("b", "a"), None), spec(("a", "b"), None))
    assert ordered(sharding_constraints=ShardingConstraints(operands={(0,): (chain,)})) == "abc"


def test_the_axis_that_comes_first_in_layouts_is_named_after_its_own_work():
    weights = [leaf("params/w", (64, 64), spec(("y", "x"), None))]
    found = name_axes(plan(weights, {"x": 2, "y": 4}, {"x": BATCH, "y": TENSOR}), kept=(), hardware=TPU)
    assert found.mesh_shape == {"model": 4, "data": 2}
    assert found.inputs[0].stored == spec(("model", "data"), None)


def test_the_axis_that_crosses_the_network_stays_first_if_the_network_is_as_fast_as_the_links():
    weights = [leaf("params/w", (64, 64), spec(("y", "x"), None))]
    nodes = replace(TPU, domain=4, network_bandwidth=TPU.link_bandwidth)
    found = name_axes(plan(weights, {"x": 2, "y": 4}, {"x": BATCH, "y": TENSOR}), kept=(), hardware=nodes)
    assert found.mesh_shape == {"data": 2, "model": 4}


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, "float32")


@pytest.mark.parametrize(
    ("changed", "width", "count"),  # of rows: other layouts are best for each
    [
        pytest.param({"network_bandwidth": 25e9}, 1024, 8192, id="bandwidth"),
        pytest.param({"network_bandwidth": 50e9, "network_latency": 1e-3}, 512, 32768, id="latency"),
    ],
)
def test_the_axis_that_crosses_the_network_is_the_first_of_the_mesh(changed, width, count):
    nodes = replace(TPU, domain=4, **changed)
    params = {"in": shape(width, 4 * width), "bias": shape(4 * width), "out": shape(4 * width, width)}
    batch = {"x": shape(count, width), "y": shape(count, width)}
    found = ps.plan(mlp_step, params, batch, devices=8, hardware=nodes, check=False)
    assert next(iter(found.mesh_shape.values())) in (2, 8)


def test_a_renamed_plan_is_the_plan_for_a_mesh_of_these_names():
    args = (mlp_step, mlp(64, 128), rows(64, 64))
    options = {"hardware": "tpu-v5e", "check": False, "constraints": {}}
    one = ps.plan(*args, mesh={"a": 2, "b": 4}, **options)
    other = ps.plan(*args, mesh={"data": 2, "model": 4}, **options)
    one, other = (replace(each, checked=replace(each.verify().measured, seconds_to_compile=0.0)) for each in (one, other))
    assert one != other
    renamed = rename_axes(one, {"a": "data", "b": "model"})
    for each in fields(PlanRecord):
        if each.name != "baselines":  # a baseline may have another mesh, with other axes
            assert getattr(renamed, each.name) == getattr(other, each.name), each.name


def big_layer_step(params, x):
    """Train a large layer on few rows, so that its weights are worth sharding and the batch is not."""

    def loss(params):
        return ((jax.nn.relu(x @ params["up"]) @ params["down"] - x) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


TENSOR_PARALLEL = ({"up": array(512, 4096), "down": array(4096, 512)}, array(8, 512))
DATA_PARALLEL = ({"up": array(16, 32), "down": array(32, 16)}, array(4096, 16))


def planned(args, **options):
    return ps.plan(big_layer_step, *args, **{"hardware": "tpu-v5e", "check": False, **options})


def test_the_axis_of_a_searched_mesh_is_named_after_the_plan():
    found = planned(TENSOR_PARALLEL, devices=2)
    assert found.mesh_shape == {"model": 2}
    assert {axis for leaf in found.inputs for axis in leaf.mesh_axes} == {"model"}
    assert planned(DATA_PARALLEL, devices=2).mesh_shape == {"data": 2}


def test_a_plan_with_renamed_axes_computes_what_one_device_computes():
    params, x = TENSOR_PARALLEL
    found = planned(TENSOR_PARALLEL, devices=2, check=True)
    assert found.checked is not None
    assert {axis for each in found.checked.collectives for axis in each.axes} <= {"model"}
    new, loss = found.jit(big_layer_step)(found.put(params), found.put(x))
    wanted, wanted_loss = jax.jit(big_layer_step)(params, x)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    np.testing.assert_allclose(new["up"], wanted["up"], rtol=1e-4, atol=1e-6)


def test_names_of_the_user_are_kept():
    assert planned(TENSOR_PARALLEL, mesh={"data": 2}).mesh_shape == {"data": 2}
    assert planned(TENSOR_PARALLEL, mesh=AbstractMesh((2,), ("data",))).mesh_shape == {"data": 2}
    assert "data" in planned(TENSOR_PARALLEL, devices=2, constraints={"*/up": PartitionSpec(None, "data")}).mesh_shape


def test_axes_that_the_step_names_are_kept():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    def step(params, x):
        up = jax.lax.with_sharding_constraint(params["up"], jax.sharding.NamedSharding(mesh, PartitionSpec(None, "data")))
        return big_layer_step({**params, "up": up}, x)

    found = ps.plan(step, *TENSOR_PARALLEL, devices=2, hardware="tpu-v5e", check=False)
    assert found.mesh_shape == {"data": 2}
    assert jnp.isfinite(found.jit(step)(found.put(TENSOR_PARALLEL[0]), found.put(TENSOR_PARALLEL[1]))[1])
