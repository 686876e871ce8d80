from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock._jax import program_text
from penstock.shard.compiler import FAST_COMPILE
from penstock.shard.hlo.analysis import measure
from penstock.shard.hlo.parse import parse_hlo
from penstock.shard.mesh.shapes import abstract_mesh, concrete_mesh
from penstock_bench.suites.shard.real import REAL, Size, jit_layout, load, measure_layout
from penstock_bench.suites.shard.zoo.training import text

SMALL = Size(
    width=64, layers=2, heads=8, key_value_heads=4, hidden=128, vocabulary=256, length=32, dtype=jnp.float32
)  # in float32, so that the order of sums hardly matters
SIZES = {
    "llama-7b-8": SMALL,
    "llama-3b-8": Size(**{**vars(SMALL), "tied": True}),
    "moe-dense-8": Size(**{**vars(SMALL), "experts": 8}),
    "moe-sorted-8": Size(**{**vars(SMALL), "experts": 8}),
}
STEPS = 3
FAST: dict = dict(FAST_COMPILE)


def small(name: str, **more):
    return load(name, size=SIZES[name], sequences=2, **more)


def batches(case):
    rows, length = case.batch["tokens"].shape
    return [text(seed, rows, length, SMALL.vocabulary) for seed in range(STEPS)]


def find(case, name: str):
    return next(layout for layout in case.layouts if layout.name == name)


@functools.cache
def losses_alone(name: str, unrolled: bool = False) -> list[float]:
    """Return the losses of some steps on one device."""
    case = small(name, unrolled=unrolled)
    state, losses = jax.tree.unflatten(jax.tree.structure(jax.eval_shape(case.init)), first_state(case)), []
    step = jax.jit(case.step).lower(state, case.batch).compile(FAST)
    for batch in batches(case):
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses


def losses_in(case, layout) -> list[float]:
    """Return the losses of the same steps in a layout, on 8 devices."""
    jitted, arguments = jit_layout(case, layout, concrete_mesh(layout.mesh))
    step = jitted.lower(*arguments).compile(FAST)
    state, losses = first_state(case), []
    for batch in batches(case):
        leaves = [*state, *jax.tree.leaves(batch)]
        placed = [jax.device_put(leaf, at.sharding) for leaf, at in zip(leaves, arguments, strict=True)]
        *state, loss = step(*placed)
        losses.append(float(loss))
    return losses


def first_state(case) -> list[jax.Array]:
    return jax.tree.leaves(jax.jit(case.init).lower().compile(FAST)())


@functools.cache
def compiled(name: str, layout: str):
    case = small(name)
    found = find(case, layout)
    jitted, arguments = jit_layout(case, found, concrete_mesh(found.mesh))
    return jitted.lower(*arguments).compile(FAST)


@pytest.mark.parametrize(
    ("model", "published"),
    # Touvron et al. (2023), table 2; the model card of Llama 3.2.
    [("llama-7b-16", 6.74e9), ("llama-13b-32", 13.02e9), ("llama-3b-16", 3.21e9)],
)
def test_parameters_are_as_many_as_published(model, published):
    params = jax.eval_shape(load(model).init)["params"]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == pytest.approx(published, rel=2e-3)


@pytest.mark.parametrize(
    ("model", "published"),
    # Dosovitskiy et al. (2020), table 1; the checkpoint of T5 large.
    [("vit-large-8", 307e6), ("t5-large-8", 737.7e6)],
)
@pytest.mark.parametrize("policy", [None, "dots_saveable"])
def test_models_that_encode_are_as_large_as_published_and_train(model, published, policy):
    case = load(model, policy=policy)
    state = jax.eval_shape(case.init)
    assert sum(leaf.size for leaf in jax.tree.leaves(state["params"])) == pytest.approx(published, rel=0.01)
    new, loss = jax.eval_shape(case.step, state, case.batch)
    assert (jax.tree.map(jnp.shape, new), loss.shape) == (jax.tree.map(jnp.shape, state), ())


@pytest.mark.parametrize("name", REAL)
def test_layouts_divide_every_shape_and_share_out_the_state(name):
    case = load(name)
    state = jax.eval_shape(case.init)
    total = sum(leaf.size for leaf in jax.tree.leaves(state))
    assert len({layout.name for layout in case.layouts}) == len(case.layouts)
    for layout in case.layouts:
        assert math.prod(layout.mesh.values()) == case.devices
        mesh = abstract_mesh(layout.mesh)
        shardings = jax.tree.leaves(layout.state_shardings(state, mesh))
        parts = [at.shard_shape(leaf.shape) for leaf, at in zip(jax.tree.leaves(state), shardings, strict=True)]
        copies = layout.mesh.get("domain", 1)  # each domain has all of the state, if it is sharded within them
        assert sum(map(math.prod, parts)) < 1.05 * total * copies / case.devices
        rows = layout.batch_shardings(case.batch, mesh)["tokens"].shard_shape(case.batch["tokens"].shape)
        assert rows[0] * math.prod(layout.mesh[axis] for axis in _axes(layout.batch)) == case.batch["tokens"].shape[0]


def _axes(spec) -> tuple[str, ...]:
    return (spec[0],) if isinstance(spec[0], str) else spec[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    # Layouts over 2 devices differ from those over 4 in the size of an axis only.
    [(name, layout.name) for name in ("llama-7b-8", "moe-sorted-8") for layout in small(name).layouts if " 2" not in layout.name],
)
def test_a_layout_computes_the_losses_of_one_device(name, layout):
    case, alone = small(name), losses_alone(name)
    assert len(set(alone)) == STEPS
    np.testing.assert_allclose(losses_in(case, find(case, layout)), alone, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-7b-8", "moe-dense-8"])
def test_unrolled_layers_compute_the_same(name):
    case = small(name, unrolled=True)
    assert "scan[" not in str(jax.make_jaxpr(case.step)(jax.eval_shape(case.init), case.batch))
    np.testing.assert_allclose(losses_alone(name, unrolled=True), losses_alone(name), rtol=2e-5)
    np.testing.assert_allclose(losses_in(case, find(case, "FSDP")), losses_alone(name), rtol=2e-5)


def test_fsdp_gathers_the_weights_of_a_layer_in_the_loops_over_layers():
    program = parse_hlo(program_text(compiled("llama-7b-8", "FSDP")))
    loops = [each for computation in program.computations.values() for each in computation if each.opcode == "while"]
    inside = [gathers(program, [part.name for part in program.loop_computations(loop)]) for loop in loops]
    # The forward loop gathers wqkv, wo, w_gate_up and w_down, and the backward loop gathers them again.
    weights = sorted([64 * 4 * 32, 64 * 64, 64 * 2 * 128, 128 * 64])
    assert [sizes for sizes in inside if sizes] == [weights, weights]
    assert gathers(program, [program.entry.name]) == [64 * 256]  # the head


def gathers(program, names: list[str]) -> list[int]:
    """Return the elements of the matrices that computations gather, without the loops in them, sorted."""
    found = []
    for name in names:
        for each in program.computations[name]:
            if each.opcode.removesuffix("-start") == "all-gather" and each.arrays[-1].dtype == "f32":
                found.append(each.arrays[-1].elements)
            found += gathers(program, list(each.called))
    return sorted(found)


@pytest.mark.parametrize("layout", ["FSDP", pytest.param("Megatron 4 with sequence parallelism + FSDP", marks=pytest.mark.slow)])
def test_gradients_of_weights_are_reduced_to_shards(layout):
    found = measure(compiled("llama-7b-8", layout), find(small("llama-7b-8"), layout).mesh).collectives
    assert max(each.bytes for each in found if each.kind == "all-reduce") < 4 * 64 * 64 / 4
    assert [each for each in found if each.kind == "reduce-scatter" and "data" in each.axes]


@pytest.mark.slow
def test_sequence_parallelism_stores_a_part_of_the_tokens_between_layers():
    def carried(layout: str) -> list[str]:
        return re.findall(r"= \((?:[^()]|\([^()]*\))*\) while\(", program_text(compiled("llama-7b-8", layout)))

    full, part = "f32[2,8,32,64]", "f32[2,8,8,64]"  # 2 layers, a half of the batch, all tokens or a quarter of them
    assert any(full in each for each in carried("Megatron 4 + FSDP"))
    split = carried("Megatron 4 with sequence parallelism + FSDP")
    assert any(part in each for each in split)
    assert not any(full in each for each in split)


@pytest.mark.slow
def test_experts_are_reached_by_all_to_all():
    found = measure(compiled("moe-sorted-8", "experts over 4 + FSDP"), {"data": 2, "model": 4}).collectives
    sent = [each for each in found if each.kind == "all-to-all" and each.axes == ("model",)]
    # A device has 2 sequences, and each of 8 experts has room for 10 tokens of each.
    assert sum(each.count for each in sent if each.bytes == 4 * 2 * 8 * 10 * 64) >= 2 * 6


def test_only_a_layout_puts_constraints_into_the_step():
    case = small("moe-dense-8")
    state = jax.eval_shape(case.init)
    assert "sharding_constraint" not in str(jax.make_jaxpr(case.step)(state, case.batch))
    for layout in (case.layouts[0], case.layouts[-1]):
        constrained = case.make_step(layout.constrain(abstract_mesh(layout.mesh)))
        assert "sharding_constraint" in str(jax.make_jaxpr(constrained)(state, case.batch))


@pytest.mark.slow
def test_a_layout_is_measured_without_its_devices():
    case = small("llama-3b-8")
    layout = find(case, "Megatron 4 with sequence parallelism + FSDP")
    measured = measure_layout(case, layout, None)
    here, arguments = jit_layout(case, layout, concrete_mesh(layout.mesh))
    assert measured.flops == measure(here.lower(*arguments).compile(FAST), layout.mesh).flops
    shards = [at.sharding.shard_shape(at.shape) for at in arguments]
    assert measured.arguments == pytest.approx(4 * sum(map(math.prod, shards)), rel=0.01)


def test_sizes_can_be_changed():
    case = load("llama-7b-64", layers=3, sequences=4, unrolled=True)
    assert len(jax.eval_shape(case.init)["params"]["layers"]) == 3
    assert case.batch["tokens"].shape == (256, 2048)
    assert (case.devices, case.topology) == (64, "v5e:8x8")


@pytest.mark.parametrize("name", ["llama-8b-16", "llama-7b-17", "llama-7b"])
def test_a_case_that_there_is_not_is_refused_with_those_that_there_are(name):
    with pytest.raises(ValueError, match=rf"'{name}' is no case: .* llama-13b, .* 64"):
        load(name)
