"""Layouts that are written by hand: data parallelism, and fully sharded data parallelism."""

import math

import pytest
from tests.shard.search.programs import FAST_LINKS, MESHES, array, model_of, steps, training

from penstock.shard.mesh.resharding import union
from penstock.shard.search.baselines import data_parallel, fully_sharded
from penstock.shard.search.problem import build_problem

meshes = pytest.mark.parametrize("mesh", MESHES, ids=str)


def two_layers(mesh, rows=4096):
    model = model_of(
        steps(MESHES[0])["two_layers"] if rows == 4096 else (training(lambda w, x: ((x @ w) ** 2).mean()), _odd(rows))
    )
    *kept, batch = model.inputs
    return build_problem(model, mesh, FAST_LINKS), kept, batch


def _odd(rows):
    return array(64, 64), array(rows, 64)


@meshes
def test_data_parallelism_shards_the_batch_over_all_axes_and_stores_all_else_replicated(mesh):
    problem, kept, batch = two_layers(mesh)
    assignment = data_parallel(problem, [batch])
    assert problem.links.shards(assignment[batch][0]) == math.prod(mesh.values())
    assert not any(any(assignment[leaf]) for leaf in kept)
    kinds = {step.kind for _, way in problem.all_reshard_steps(assignment) for step in way}
    assert kinds == {"all-reduce"}


@meshes
def test_fully_sharded_stores_all_state_in_parts_and_gathers_it_for_use(mesh):
    problem, kept, batch = two_layers(mesh)
    assignment = fully_sharded(problem, [batch], kept)
    devices = math.prod(mesh.values())
    assert all(problem.links.shards(union(assignment[leaf])) == devices for leaf in kept)
    replicated = data_parallel(problem, [batch])
    assert problem.local_bytes(assignment)[1] < problem.local_bytes(replicated)[1]
    kinds = {step.kind for _, way in problem.all_reshard_steps(assignment) for step in way}
    assert {"all-gather", "reduce-scatter"} <= kinds


@meshes
@pytest.mark.parametrize("rows", [7, 6, 12], ids=str)
def test_a_batch_is_sharded_over_those_axes_that_divide_it(mesh, rows):
    problem, _, batch = two_layers(mesh, rows)
    assignment = data_parallel(problem, [batch])
    assert rows % problem.links.shards(assignment[batch][0]) == 0
    left = [size for axis, size in enumerate(mesh.values()) if not assignment[batch][0] >> axis & 1]
    assert all(rows % (size * problem.links.shards(assignment[batch][0])) for size in left)


@meshes
def test_every_baseline_divides_every_dimension(mesh):
    for step in steps(mesh).values():
        model = model_of(step)
        problem = build_problem(model, mesh, FAST_LINKS)
        *kept, batch = model.inputs
        for assignment in (data_parallel(problem, [batch]), fully_sharded(problem, [batch], kept)):
            for node, layout in zip(problem.graph.nodes, assignment, strict=True):
                for size, mask in zip(node.sizes, layout, strict=True):
                    assert size % problem.links.shards(mask) == 0
                assert sum(mask.bit_count() for mask in layout) == union(layout).bit_count()
