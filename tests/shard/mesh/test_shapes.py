"""The mesh shapes that are searched, and the devices of a mesh."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tests.shard.assertions import assert_close
from tests.shard.steps import array, mlp, mlp_step, rows

import penstock as ps
from penstock.shard.mesh.hardware import Hardware
from penstock.shard.mesh.shapes import candidate_shapes, inner_sizes

# Compute is slow and links are fast, so that the best plan of a small step shards every dimension that it can.
EAGER = Hardware("eager", {"float32": 1e6}, 1 << 30, 1e6, 1e12, 1e-12, "made up")


def planned(step, *args, **options):
    return ps.plan(step, *args, **{"hardware": "v5e", "check": False, **options})


def searched(count, **named):
    return [tuple(shape.values()) for shape in candidate_shapes(None, count, **named)[0]]


def double(w):
    return w * 2.0


# Searched shapes.


def test_equivalent_axes_have_ascending_sizes():
    assert searched(12) == [(12,), (2, 6), (3, 4), (2, 2, 3)]
    assert searched(1) == [(1,)]


def test_a_distinct_axis_takes_each_of_the_sizes():
    assert searched(6, constrained_axes={"model"}) == [(2, 3), (3, 2)]
    assert searched(12, constrained_axes={"fsdp"}) == [(2, 2, 3), (2, 3, 2)]
    assert searched(12, constrained_axes={"data", "fsdp", "model"}) == [(2, 2, 3), (2, 3, 2), (3, 2, 2)]


def test_a_mesh_has_the_axes_that_constraints_name_even_if_the_devices_do_not_divide():
    assert searched(7, constrained_axes={"model"}) == [(1, 7), (7, 1)]
    assert searched(1, constrained_axes={"fsdp"}) == [(1, 1, 1)]


@pytest.mark.parametrize("count", [4096, 5040, 10**6])
def test_few_meshes_are_searched(count):
    assert len(searched(count)) <= 12
    assert 0 < len(searched(count, constrained_axes={"data", "fsdp", "model"})) <= 24
    assert all(np.prod(sizes) == count for sizes in searched(count, constrained_axes={"model"}))
    across = searched(count, domain_of=lambda devices: 8)
    assert (count // 8, 8) in across or count % 8
    assert all(np.prod(sizes) == count for sizes in across)


def test_searched_axes_are_within_the_domains_or_across_them():
    assert searched(8, domain_of=lambda devices: 4) == [(8,), (2, 4), (2, 2, 2)]
    assert searched(32, domain_of=lambda devices: 8) == [(32,), (4, 8), (4, 2, 4), (2, 2, 8)]
    assert searched(32, constrained_axes={"model"}, domain_of=lambda devices: 8) == [(4, 8), (4, 2, 4), (4, 4, 2), (2, 2, 8)]
    assert searched(6, constrained_axes={"data", "fsdp", "model"}, domain_of=lambda devices: 3) == [
        (1, 2, 3),
        (2, 1, 3),
        (2, 3, 1),
    ]


def test_a_slow_network_between_hosts_takes_part_in_the_search():
    machine = dataclasses.replace(EAGER, domain=4, network_bandwidth=1e3)
    plan = planned(mlp_step, mlp(64, 64), rows(64, 64), devices=8, hardware=machine)
    assert next(iter(plan.mesh_shape.values())) == 2
    sent = {axis: sum(each.bytes_on_wire for each in plan.cost.collectives if axis in each.axes) for axis in plan.mesh_shape}
    assert next(iter(sent.values())) == min(sent.values())
    args = mlp(64, 64), rows(64, 64)
    assert_close(plan.jit(mlp_step)(*args), jax.jit(mlp_step)(*args), 1e-4)


def test_a_constrained_axis_gets_a_size_that_divides():
    plan = planned(double, array(64, 32), devices=6, constraints={"w": P("model")})
    assert plan.mesh_shape == {"data": 3, "model": 2}
    assert plan.inputs[0].partition_spec == P("model", None)


def test_the_error_for_an_unknown_axis_names_the_axes_of_searched_meshes():
    with pytest.raises(ValueError, match=r"axis 'tensor', .* searched are data, fsdp, model: .* mesh={'tensor': 8}"):
        planned(double, array(64, 32), devices=8, constraints={"w": P("tensor")})
    plan = planned(double, array(64, 32), mesh={"tensor": 8}, constraints={"w": P("tensor")})
    assert plan.mesh_shape == {"tensor": 8}


def test_searched_meshes_over_which_a_constraint_does_not_divide_are_skipped():
    def step(p, x):
        return {"w": p["w"] - x.T @ (x @ p["w"])}, x.sum()

    plan = ps.plan(
        step, {"w": array(2, 64)}, array(16, 2), devices=8, hardware="tpu-v5e", check=False, constraints={"p/w": P("model")}
    )
    assert plan.mesh_shape["model"] == 2


# The devices of a mesh.


def mesh_of(devices, names=("data", "model")):
    return Mesh(np.array(devices).reshape(2, -1), names, axis_types=(AxisType.Auto,) * 2)


def test_a_device_is_given_once():
    device = jax.devices()[0]
    with pytest.raises(ValueError, match=r"devices has .*0 twice"):
        planned(double, array(8, 8), devices=[device, device])


def test_devices_that_are_not_those_of_the_mesh_are_refused():
    devices = jax.devices()
    for other in (devices[4:], devices[:4][::-1]):
        said = f"is of the devices 0, 1, 2, 3 in this order, and devices= are {', '.join(str(each.id) for each in other)}"
        with pytest.raises(ValueError, match=said):
            planned(double, array(8, 8), mesh=mesh_of(devices[:4]), devices=other)
    assert planned(double, array(8, 8), mesh=mesh_of(devices[:4]), devices=devices[:4]).devices == tuple(devices[:4])
    abstract = AbstractMesh((2, 2), ("data", "model"))
    assert planned(double, array(8, 8), mesh=abstract, devices=devices[4:]).devices == tuple(devices[4:])


def constrained(*meshes):
    def step(params, batch):
        for mesh in meshes:
            batch = {**batch, "x": lax.with_sharding_constraint(batch["x"], NamedSharding(mesh, P("data", "model")))}
        return mlp_step(params, batch)

    return step


def mapped(mesh):
    def step(params, batch):
        x = jax.shard_map(lambda x: x * 1.0, mesh=mesh, in_specs=P("data", "model"), out_specs=P("data", "model"))(batch["x"])
        return mlp_step(params, {**batch, "x": x})

    return step


BACKWARDS = jax.devices()[::-1]


@pytest.mark.parametrize("form", [constrained, mapped])
def test_the_devices_of_a_mesh_inside_of_the_step_are_used(form):
    step = form(mesh_of(BACKWARDS))
    for mesh in ({"data": 2, "model": 4}, AbstractMesh((2, 4), ("data", "model")), None):
        plan = planned(step, mlp(), rows(), mesh=mesh)
        assert plan.mesh == mesh_of(BACKWARDS), mesh
    assert_close(plan.jit(step)(plan.put(mlp()), rows()), jax.jit(mlp_step)(mlp(), rows()))


def test_devices_in_another_order_than_the_step_names_are_refused():
    step = constrained(mesh_of(BACKWARDS))
    assert planned(step, mlp(), rows(), mesh=mesh_of(BACKWARDS)).mesh_shape == {"data": 2, "model": 4}
    for options in ({"mesh": mesh_of(jax.devices())}, {"devices": jax.devices()}):
        with pytest.raises(ValueError, match=r"of the devices 7, 6, .* has 0, 1, .* plan with the step's mesh"):
            planned(step, mlp(), rows(), **options)
    with pytest.raises(ValueError, match=r"of the devices 0, 1, .* has 7, 6, .* name one mesh"):
        planned(constrained(mesh_of(BACKWARDS), mesh_of(jax.devices())), mlp(), rows(), mesh={"data": 2, "model": 4})


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(1, 40))
def test_a_domain_is_a_block_of_the_mesh_or_cuts_it_unevenly(sizes, domain):
    count = int(np.prod(sizes))
    assume(count % domain == 0)
    inner = inner_sizes(sizes, domain)
    first = np.argwhere(np.arange(count).reshape(sizes) < domain)
    is_block = all(len(np.unique(column)) == column.max() + 1 for column in first.T)
    is_block = is_block and np.prod(first.max(0) + 1) == domain
    if inner is None:
        assert not is_block or any(size % (length + 1) for size, length in zip(sizes, first.max(0), strict=True))
    else:
        assert is_block
        assert tuple(first.max(0) + 1) == inner
