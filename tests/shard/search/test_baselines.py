"""The layouts that people write by hand."""

import math

import jax
import jax.numpy as jnp
import pytest
from tests.shard.search.programs import FAST_LINKS, MESHES, array, model_of, steps, training

from penstock.shard.graph.roles import find_batch_dims
from penstock.shard.mesh.compiler_models import CPU, TPU
from penstock.shard.mesh.hardware import find_hardware
from penstock.shard.mesh.resharding import union
from penstock.shard.search.baselines import (
    DATA_PARALLEL,
    FSDP,
    MEGATRON,
    MEGATRON_FSDP,
    ZERO_1,
    by_largest_dim,
    data_parallel,
    find_baselines,
    split_storage,
)
from penstock.shard.search.costs import build_costs, project
from penstock.shard.search.solver import prepare_meshes
from penstock.shard.trace.step import trace

meshes = pytest.mark.parametrize("mesh", MESHES, ids=str)
TWO = {"data": 2, "model": 4}
D, F, T, V, B, LAYERS = 64, 256, 32, 512, 16, 4


def problem_of(step, mesh):
    model = model_of(step)
    *kept, batch = model.inputs
    return model, build_costs(model, mesh, FAST_LINKS, [batch]), kept, batch


def found(step, mesh):
    model, costs, kept, _ = problem_of(step, mesh)
    return costs, find_baselines(costs, model, [*["parameters"] * len(kept), "batch"])


def two_layers(mesh, rows=4096):
    if rows == 4096:
        return steps(MESHES[0])["two_layers"]
    return training(lambda w, x: ((x @ w) ** 2).mean()), (array(64, 64), array(rows, 64))


def block(params, x):
    h = jax.nn.relu(x @ params["up"])
    return x + h @ params["down"]


def layers(scanned, remat):
    """A step of some layers over a residual stream, and its arguments."""
    each = jax.checkpoint(block) if remat else block

    def loss(params, x):
        if scanned:
            x, _ = jax.lax.scan(lambda x, params: (each(params, x), None), x, params)
        else:
            for layer in params:
                x = each(layer, x)
        return (x**2).mean()

    one = {"up": array(D, F), "down": array(F, D)}
    stacked = {"up": array(LAYERS, D, F), "down": array(LAYERS, F, D)}
    return training(loss), (stacked if scanned else [one] * LAYERS, array(B * 8, D))


def collectives(costs, assignment, kind):
    """Return pairs (edge, number in a step) of the edges whose collectives are of a kind."""
    found = costs.all_reshard_steps(assignment)
    return [(edge, edge.count) for edge, way, times in found for _ in range(times) if kind in {step.kind for step in way}]


@meshes
def test_data_parallelism_shards_the_batch_over_all_axes_and_stores_all_else_replicated(mesh):
    _, costs, kept, batch = problem_of(two_layers(mesh), mesh)
    assignment = data_parallel(costs, find_batch_dims(costs.graph, [batch]), (1 << len(mesh)) - 1)
    assert costs.links.shards(assignment[batch][0]) == math.prod(mesh.values())
    assert not any(any(assignment[leaf]) for leaf in kept)
    kinds = {step.kind for _, way, _ in costs.all_reshard_steps(assignment) for step in way}
    assert kinds == {"all-reduce"}


@meshes
def test_fsdp_stores_all_state_in_parts_gathers_weights_for_use_and_scatters_gradients(mesh):
    model, costs, kept, _ = problem_of(two_layers(mesh), mesh)
    made = find_baselines(costs, model, [*["parameters"] * len(kept), "batch"])
    assignment, devices = made[FSDP], math.prod(mesh.values())
    assert all(costs.links.shards(union(assignment[leaf])) == devices for leaf in kept)
    kinds = {step.kind for edge, way, _ in costs.all_reshard_steps(assignment) for step in way if edge.bytes > 4}
    assert kinds == {"all-gather", "reduce-scatter"}
    assert costs.compute_seconds(assignment) <= costs.compute_seconds(made[DATA_PARALLEL])


@pytest.mark.parametrize("remat", [False, True])
def test_fsdp_gathers_the_weights_of_a_scanned_layer_inside_of_the_scan(remat):
    costs, made = found(layers(scanned=True, remat=remat), TWO)
    gathers = collectives(costs, made[FSDP], "all-gather")
    assert {count for _, count in gathers} == {LAYERS}
    assert len(gathers) == 4  # each of two weights: in the forward pass, and in the backward pass
    assert all(edge.bytes == D * F * 4 for edge, _ in gathers)
    scatters = collectives(costs, made[FSDP], "reduce-scatter")
    assert [count for _, count in scatters] == [LAYERS, LAYERS]
    # At the peak one layer is gathered, not all of them.
    stack = 2 * LAYERS * D * F * 4
    assert costs.memory(made[FSDP])[0] < costs.memory(made[DATA_PARALLEL])[0] - stack


def test_fsdp_gathers_a_weight_again_where_the_backward_pass_computes_the_layer_again():
    costs, made = found(layers(scanned=False, remat=True), TWO)
    forward = LAYERS * 2
    assert len(collectives(costs, made[FSDP], "all-gather")) == 2 * forward
    costs, made = found(layers(scanned=False, remat=False), TWO)
    assert len(collectives(costs, made[FSDP], "all-gather")) == forward


def test_zero_1_shards_the_optimizer_and_gathers_new_parameters_once():
    def step(params, momentum, x):
        value, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(params)
        momentum = 0.9 * momentum + gradient
        return params - 0.1 * momentum, momentum, value

    arguments = (array(D, F), array(D, F), array(128, D))
    model, costs, (weight, moment), _ = problem_of((step, arguments), TWO)
    made = find_baselines(costs, model, ["parameters", "optimizer", "batch"])
    assignment = made[ZERO_1]
    assert not any(assignment[weight])
    assert costs.links.shards(union(assignment[moment])) == 8
    sent = [(edge.kind, [step.kind for step in way]) for edge, way, _ in costs.all_reshard_steps(assignment)]
    assert ("result", ["reduce-scatter"]) in sent
    assert ("store", ["all-gather"]) in sent
    assert not [kind for kind, way in sent if kind in ("use", "operand", "shared_reshard")]


@pytest.mark.parametrize("scanned", [False, True])
def test_megatron_shards_pairs_of_weights_and_sums_once_for_each_pair_in_each_direction(scanned):
    step = layers(scanned, remat=False)
    costs, made = found(step, TWO)
    assignment = made[MEGATRON]
    tensor = {axis for axis in (0b01, 0b10) if any(union(assignment[leaf]) & axis for leaf in range(len(assignment)))}
    leaves = [node for node in range(len(assignment)) if costs.graph.nodes[node].kind == "leaf"][:-1]
    (axis,) = {union(assignment[leaf]) for leaf in leaves}
    assert axis in tensor
    for leaf in leaves:
        sizes, layout = costs.graph.nodes[leaf].sizes, assignment[leaf]
        assert [size for size, mask in zip(sizes, layout, strict=True) if mask] == [F]
    found_steps = costs.all_reshard_steps(assignment)
    sent = [(edge, way, times) for edge, way, times in found_steps if way[0].axes == axis and edge.kind != "use"]
    assert {step.kind for _, way, _ in sent for step in way} == {"all-reduce"}
    # Unrolled, no gradient of the first layer's input is needed.
    assert sum(times * edge.count for edge, _, times in sent) == (2 * LAYERS if scanned else 2 * LAYERS - 1)


def test_megatron_with_fsdp_shards_the_stored_weights_over_the_other_axes():
    costs, made = found(layers(scanned=True, remat=True), TWO)
    leaves = [node for node in range(len(made[FSDP])) if costs.graph.nodes[node].kind == "leaf"][:-1]
    for leaf in leaves:
        assert union(made[MEGATRON_FSDP][leaf]) == 0b11
        assert union(made[MEGATRON][leaf]).bit_count() == 1
    assert costs.memory(made[MEGATRON_FSDP])[0] < costs.memory(made[MEGATRON])[0]


def test_heads_and_the_vocabulary_are_sharded_by_megatron_and_not_the_residual_stream():
    heads = 8

    def loss(params, tokens):
        x = params["embedding"][tokens]
        q, k, v = jnp.einsum("btd,dchk->cbthk", x, params["qkv"])
        p = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k))
        x = x + jnp.einsum("bqhk,hkd->bqd", jnp.einsum("bhqs,bshk->bqhk", p, v), params["out"])
        x = block(params, x)
        logits = x @ params["head"]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1).mean()

    params = {
        "embedding": array(V, D),
        "qkv": array(D, 3, heads, D // heads),
        "out": array(heads, D // heads, D),
        "up": array(D, F),
        "down": array(F, D),
        "head": array(D, V),
    }
    model, costs, kept, _ = problem_of((training(loss), (params, array(B * 8, T, dtype="int32"))), TWO)
    assignment = find_baselines(costs, model, [*["parameters"] * len(kept), "batch"])[MEGATRON]
    sharded = [
        [size for size, mask in zip(costs.graph.nodes[leaf].sizes, assignment[leaf], strict=True) if mask] for leaf in kept
    ]
    assert sharded == [[F], [], [V], [heads], [heads], [F]] or sharded == [[F], [V], [V], [heads], [heads], [F]]


def test_the_residual_stream_is_sharded_by_megatron_not_even_where_that_is_cheaper():
    width, heads, rows = 48, 6, 4  # gathered activations are smaller than sums of them

    def loss(params, x):
        def layer(x, params):
            x = x + jax.nn.relu(x @ params["up"]) @ params["down"]
            q, k, v = jnp.einsum("bd,dch->cbh", x, params["qkv"])
            return x + (q * k * v) @ params["out"], None

        return (jax.lax.scan(layer, x, params)[0] ** 2).mean()

    shapes = {"up": (width, 2 * width), "down": (2 * width, width), "qkv": (width, 3, heads), "out": (heads, width)}
    params = {name: array(LAYERS, *shape) for name, shape in shapes.items()}
    model, costs, kept, _ = problem_of((training(loss), (params, array(rows, width))), {"x": 2})
    assignment = find_baselines(costs, model, [*["parameters"] * len(kept), "batch"])[MEGATRON]
    sharded = {size for leaf in kept for size, mask in zip(costs.graph.nodes[leaf].sizes, assignment[leaf], strict=True) if mask}
    assert sharded == {2 * width, heads}


def test_the_hidden_layer_of_two_is_sharded_by_megatron_and_not_their_inputs_and_outputs():
    params = {"up": array(D, F), "down": array(F, D)}

    def loss(params, x):
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)

    model, costs, kept, _ = problem_of((training(loss), (params, array(B, D))), {"x": 8})
    assignment = find_baselines(costs, model, [*["parameters"] * len(kept), "batch"])[MEGATRON]
    assert [assignment[leaf] for leaf in kept] == [(1, 0), (0, 1)]


def test_two_layers_are_a_pair():
    _, made = found(two_layers(TWO), TWO)
    assert MEGATRON in made


def test_weights_that_read_the_same_array_are_no_pair():
    def loss(params, x):
        return ((x @ params["one"]) ** 2).mean() + ((x @ params["other"]) ** 2).mean()

    _, made = found((training(loss), ({"one": array(64, 128), "other": array(64, 256)}, array(4096, 64))), TWO)
    assert list(made) == [DATA_PARALLEL, FSDP]


def test_a_step_without_pairs_has_no_megatron():
    _, made = found((training(lambda w, x: ((x @ w) ** 2).mean()), (array(64, 64), array(4096, 64))), TWO)
    assert list(made) == [DATA_PARALLEL, FSDP]


@meshes
@pytest.mark.parametrize("rows", [7, 6, 12], ids=str)
def test_a_batch_is_sharded_over_those_axes_that_divide_it(mesh, rows):
    _, costs, _, batch = problem_of(two_layers(mesh, rows), mesh)
    assignment = data_parallel(costs, find_batch_dims(costs.graph, [batch]), (1 << len(mesh)) - 1)
    assert rows % costs.links.shards(assignment[batch][0]) == 0
    left = [size for axis, size in enumerate(mesh.values()) if not assignment[batch][0] >> axis & 1]
    assert all(rows % (size * costs.links.shards(assignment[batch][0])) for size in left)


@meshes
def test_every_baseline_divides_every_dimension(mesh):
    for step in steps(mesh).values():
        costs, made = found(step, mesh)
        for assignment in made.values():
            for node, layout in zip(costs.graph.nodes, assignment, strict=True):
                for size, mask in zip(node.sizes, layout, strict=True):
                    assert size % costs.links.shards(mask) == 0
                assert sum(mask.bit_count() for mask in layout) == union(layout).bit_count()
            for edge in costs.graph.edges:
                project(edge.source, assignment[edge.a])


@pytest.mark.parametrize(("shape", "dim"), [((64, 1024), 1), ((64, 512), 0), ((64, 3, 512), 0), ((16, 512), 1)])
@pytest.mark.parametrize("compiler", [TPU, CPU], ids=lambda compiler: compiler.name)
def test_storage_is_sharded_where_shards_fill_tiles_of_tpus(shape, dim, compiler):
    def loss(weight, x):
        return jnp.tanh(x @ weight.reshape(shape[0], -1)).mean()

    step, args = training(loss), (array(*shape), array(4096, shape[0]))
    traced = trace(step, args)
    (mesh,) = prepare_meshes(traced, [{"data": 8}], find_hardware("tpu-v5e"), None, {}, compiler)
    ((leaf, _), *_) = mesh.costs.stored
    sharded = [at for at, axes in enumerate(mesh.baselines[FSDP][leaf]) if axes]
    assert sharded == [dim if compiler is TPU else shape.index(max(shape))]


@meshes
def test_split_storage_shards_state_over_some_axes_and_the_batch_over_the_others(mesh):
    step = two_layers(mesh)
    model, costs, kept, batch = problem_of(step, mesh)
    every = (1 << len(mesh)) - 1
    splits = list(split_storage(costs, model, [*["parameters"] * len(kept), "batch"]))
    assert len(splits) == every
    for axes, assignment in enumerate(splits, start=1):
        large = [node for node in kept if math.prod(costs.graph.nodes[node].sizes) >= 1024]
        assert all(union(assignment[node]) == axes for node in large)
        rows = 0
        for node, dims in find_batch_dims(costs.graph, [batch]).items():
            if node not in costs.pinned:
                rows |= union(tuple(assignment[node][dim] for dim in dims))
        assert rows == every & ~axes


@meshes
def test_the_largest_dimension_of_each_leaf_is_sharded_also_of_small_ones(mesh):
    def loss(params, x):
        return jnp.mean((jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"]) ** 2)

    params = {"bias": array(F), "down": array(F, D), "odd": array(7, 9), "up": array(D, F)}
    model, costs, kept, batch = problem_of((training(lambda p, x: loss(p, x) + p["odd"].sum()), (params, array(128, D))), mesh)
    assignment, every = by_largest_dim(costs, model, [*["parameters"] * len(kept), "batch"]), (1 << len(mesh)) - 1
    assert [assignment[leaf] for leaf in kept] == [(every,), (every, 0), (0, 0), (0, every)]
    assert assignment[batch][0] == every
    made = find_baselines(costs, model, [*["parameters"] * len(kept), "batch"])
    assert not any(made[FSDP][kept[0]])  # FSDP leaves small leaves replicated
