"""Each mesh shape is searched, and the best plan of all is taken."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from tests.shard.search.programs import FAST_LINKS, array, solve, steps, training

from penstock.shard.mesh.compiler_models import CPU, TPU
from penstock.shard.mesh.hardware import find_hardware
from penstock.shard.search.costs import GAP
from penstock.shard.search.solver import prepare_meshes, search_meshes
from penstock.shard.trace.step import trace

SHAPES = [{"data": 8}, {"data": 2, "model": 4}, {"data": 2, "fsdp": 2, "model": 2}]


def prepared(name="two_layers", constraints=None, shapes=SHAPES):
    return prepare_meshes(trace(*steps(shapes[0])[name]), shapes, FAST_LINKS, constraints, {}, CPU)


def alone(each, limit):
    return solve(each.costs, limit, list(each.baselines.values()))[0]


@pytest.mark.parametrize("part", [1.0, 0.3])
def test_the_plan_is_the_best_of_the_meshes_within_the_limit(part):
    meshes = prepared()
    limit = part * meshes[0].costs.memory(meshes[0].costs.start())[0]
    found = search_meshes(meshes, limit)
    single = [alone(each, limit) for each in meshes]
    fitting = [each.seconds for each in single if each.memory <= limit]
    assert fitting
    assert found.candidate.memory <= limit
    assert found.candidate.seconds <= 1.08 * 1.02 * min(fitting)


@pytest.mark.parametrize("part", [1.0, 0.3])
def test_what_is_proved_holds_for_each_mesh(part):
    meshes = prepared()
    limit = part * meshes[0].costs.memory(meshes[0].costs.start())[0]
    proof = search_meshes(meshes, limit).proof
    for each in prepared():
        each.search.bound(limit)
        fitting = [found.seconds for found in each.search.found.values() if found.memory <= limit]
        assert min(fitting) >= proof.seconds * (1 - 1e-9)
        assert proof.fastest <= min(fitting) * (1 + GAP)


def test_a_plan_that_uses_two_axes_together_is_a_plan_of_the_coarser_mesh():
    meshes = prepared()
    search_meshes(meshes, float("inf"))
    one_axis, *finer = meshes
    fastest = min(found.seconds for found in one_axis.search.found.values())
    for each in finer:
        alike = [found for found in each.search.found.values() if found.seconds == pytest.approx(fastest, rel=1e-9)]
        assert alike or min(found.seconds for found in each.search.found.values()) < fastest


def test_where_no_plan_fits_it_is_the_fastest_of_the_smallest():
    meshes = prepared(shapes=SHAPES[:2])
    found = search_meshes(meshes, 0.0)
    least = min(alone(each, 0.0).memory for each in meshes)
    assert found.candidate.memory <= 1.05 * least * (1 + GAP)
    assert found.candidate.seconds <= 1.08 * 1.02 * search_meshes(prepared(shapes=SHAPES[:2]), 1.05 * least).proof.fastest
    assert found.proof.fastest is None
    assert found.proof.seconds is None
    assert 0 < found.proof.memory <= found.candidate.memory


def test_a_limit_that_a_plan_keeps_is_kept_by_a_search_that_does_not_know_the_plan():
    def loss(weights, x):
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    traced = trace(training(loss), ([array(128, 128)] * 4, array(256, 128)))
    before, after = (prepare_meshes(traced, SHAPES[1:2], find_hardware("tpu-v5e"), None, {}, TPU)[0].search for _ in range(2))
    before.begin()
    before.bound(0.8 * before.least())
    limit = before.least() * (1 + 1e-5)
    after.begin()
    assert after.least() > limit
    after.bound(limit)
    assert after.least() <= limit


def test_a_mesh_that_a_constraint_does_not_fit_is_left_out():
    meshes = prepared(constraints={"params/0": P("model")})
    assert [each.mesh_shape for each in meshes] == SHAPES[1:]
    with pytest.raises(ValueError, match="the mesh has no axis 'x'"):
        prepared(constraints={"params/0": P("x")})


def test_each_mesh_has_the_batch_and_the_baselines_and_the_same_model():
    meshes = prepared()
    assert len({id(each.model) for each in meshes}) == 1
    for each, shape in zip(meshes, SHAPES, strict=True):
        assert each.costs.links.names == tuple(shape)
        assert each.roles == ["parameters", "parameters", "batch"]
        assert each.batch == [each.model.inputs[-1]]
        assert list(each.baselines)[:2] == ["data parallel", "FSDP"]


@pytest.mark.parametrize(("kept", "last_is_major"), [(0b01, False), (0b10, True)])
def test_the_axis_that_stays_while_the_other_is_gathered_is_the_major_one(kept, last_is_major):
    x = jax.ShapeDtypeStruct((64, 64), "float32")
    step = trace(lambda x: jnp.sort(x, axis=0), (x,))
    (mesh,) = prepare_meshes(step, [{"data": 2, "model": 4}], FAST_LINKS, None, {}, CPU)
    (stored,), (sort,), (read, made) = (
        [at for at, node in enumerate(mesh.model.graph.nodes) if node.kind == kind] for kind in ("leaf", "op", "group")
    )
    layouts = {stored: mesh.costs.pinned[stored], read: (0, 0b11), sort: (kept,), made: (0, kept)}
    found = mesh.search.evaluate_assignment([layouts[at] for at in range(4)])
    assert found.last_is_major == last_is_major
    assert mesh.plan(found).prepared.costs.seconds(found.assignment) == pytest.approx(found.seconds)


def test_the_order_of_axes_in_a_constraint_is_that_of_the_plan():
    axes = ("model", "data")
    meshes = prepared(constraints={"params/0": P(axes)}, shapes=SHAPES[1:2])
    found = search_meshes(meshes, float("inf"))
    assert found.prepared.costs.links.last_is_major


def test_a_step_without_operations_has_a_plan():
    meshes = prepare_meshes(trace(lambda x: x, (jax.ShapeDtypeStruct((8,), "float32"),)), SHAPES, FAST_LINKS, None, {}, CPU)
    assert search_meshes(meshes, 1e9).candidate.seconds == 0


@pytest.mark.parametrize("shape", [{"data": 8}, {"data": 2, "model": 4}])
def test_every_leaf_of_the_batch_is_stored_by_rows_over_all_axes_that_divide_them(shape):
    def step(w, tokens, labels, rest):
        def loss(w):
            return ((w[tokens] @ w.T)[jnp.arange(16), labels] ** 2).mean() + (rest @ w).sum()

        return w - jax.grad(loss)(w), loss(w)

    arrays = [jax.ShapeDtypeStruct(*each) for each in (((64, 8), "float32"), ((16,), "int32"), ((16,), "int32"))]
    prepared = prepare_meshes(
        trace(step, (*arrays, jax.ShapeDtypeStruct((12, 64), "float32"))), [shape], FAST_LINKS, None, {}, CPU
    )
    found = search_meshes(prepared, 1e12)
    stored = {leaf: found.candidate.assignment[node] for leaf, node in enumerate(found.prepared.model.inputs)}
    every = (1 << len(shape)) - 1
    assert found.prepared.roles[1:3] == ["batch", "batch"]
    assert stored[1] == stored[2] == (every,)
