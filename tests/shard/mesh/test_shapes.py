"""The mesh shapes that are searched, and the devices of a mesh."""

import dataclasses

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tests.shard.assertions import assert_close
from tests.shard.steps import array, mlp, mlp_step, rows

import penstock as ps
from penstock.shard.mesh.hardware import Hardware
from penstock.shard.mesh.shapes import candidate_shapes

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
    assert searched(6, machine_axes={"data": None}) == [(6,), (2, 3), (3, 2)]
    assert searched(6, machine_axes={"model": None}) == [(2, 3), (3, 2)]
    assert searched(12, constrained_axes={"fsdp"}) == [(2, 2, 3), (2, 3, 2)]
    assert searched(12, constrained_axes={"data", "fsdp", "model"}) == [(2, 2, 3), (2, 3, 2), (3, 2, 2)]


def test_a_mesh_has_the_axes_that_constraints_name_even_if_the_devices_do_not_divide():
    assert searched(7, constrained_axes={"model"}) == [(1, 7), (7, 1)]
    assert searched(1, constrained_axes={"fsdp"}) == [(1, 1, 1)]


@pytest.mark.parametrize("count", [4096, 5040, 10**6])
def test_few_meshes_are_searched(count):
    assert len(searched(count)) <= 12
    assert 0 < len(searched(count, constrained_axes={"data", "fsdp", "model"})) <= 24
    assert all(np.prod(sizes) == count for sizes in searched(count, machine_axes={"model": None}))


def test_axes_of_the_machine_are_in_each_searched_mesh():
    shapes, _ = candidate_shapes(None, 8, machine_axes={"node": None})
    assert shapes == [{"node": 2, "data": 4}, {"node": 4, "data": 2}, {"node": 2, "data": 2, "model": 2}]
    assert candidate_shapes(None, 8, machine_axes={"node": 2, "rack": 2})[0] == [{"node": 2, "rack": 2, "data": 2}]
    assert candidate_shapes(None, 8, machine_axes={"data": 8})[0] == [{"data": 8}]
    assert candidate_shapes(None, 8, machine_axes={"node": 8})[0] == [{"node": 8, "data": 1}]
    with pytest.raises(ValueError, match=r"8 devices are not a multiple of .* node 3"):
        candidate_shapes(None, 8, machine_axes={"node": 3})
    with pytest.raises(ValueError, match=r"at most three axes, and the hardware names a, b, c, model"):
        candidate_shapes(None, 8, machine_axes={"a": None, "b": None, "c": None, "model": None})


@pytest.mark.parametrize("size", [{}, {"node": 2}], ids=["any size", "two nodes"])
def test_slow_links_between_nodes_take_part_in_the_search(size):
    machine = dataclasses.replace(EAGER, axis_bandwidth={"node": 1e3}, axis_size=size)
    plan = planned(mlp_step, mlp(64, 64), rows(64, 64), devices=8, hardware=machine)
    assert "node" in plan.mesh_shape
    assert not size or plan.mesh_shape["node"] == 2
    if size:
        args = mlp(64, 64), rows(64, 64)
        assert_close(plan.jit(mlp_step)(*args), jax.jit(mlp_step)(*args), 1e-4)


@pytest.mark.parametrize(
    "changed", [{"axis_bandwidth": {"node": 1e3}}, {"axis_latency": {"node": 1.0}}, {"axis_size": {"node": 2}}]
)
def test_axes_of_the_machine_that_the_mesh_lacks_are_named(changed):
    machine = dataclasses.replace(EAGER, **changed)
    with pytest.raises(ValueError, match=r"the mesh axis 'node' .* the mesh is data 2 × model 4, with the axes 'data', 'model'"):
        planned(double, array(8, 8), mesh={"data": 2, "model": 4}, hardware=machine)
    with pytest.raises(ValueError, match=r"the mesh axis 'node' .* with the axes 'data', 'model'"):
        planned(constrained(mesh_of(jax.devices())), mlp(), rows(), hardware=machine)


def test_a_mesh_with_another_size_than_the_machine_is_refused():
    machine = dataclasses.replace(EAGER, axis_size={"node": 2})
    with pytest.raises(ValueError, match=r"axis_size 2 for the mesh axis 'node', and the mesh is node 4 × gpu 2"):
        planned(double, array(8, 8), mesh={"node": 4, "gpu": 2}, hardware=machine)


def test_a_constrained_axis_gets_a_size_that_divides():
    plan = planned(double, array(64, 32), devices=6, constraints={"w": P("model")})
    assert plan.mesh_shape == {"data": 3, "model": 2}
    assert plan.inputs[0].partition_spec == P("model", None)


@pytest.mark.filterwarnings("ignore:the batch of")
@pytest.mark.parametrize("slow", ["data", "model"])
def test_a_slow_axis_is_searched_in_both_sizes_and_comes_first(slow):
    """Rows divide by 3 and columns by 2. The sum over columns runs over the axis of 2, which should be the fast one."""
    machine = dataclasses.replace(EAGER, axis_bandwidth={slow: 1e3})
    plan = planned(lambda w: jax.numpy.tanh(w).sum(1), array(3**5, 2**8), devices=6, hardware=machine)
    assert next(iter(plan.mesh_shape.items())) == (slow, 3)
    assert list(plan.mesh_shape.values()) == [3, 2]


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
