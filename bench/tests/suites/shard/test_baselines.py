from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.extras import require

from penstock_bench.suites.shard.baselines import Baseline, baselines, leaf_paths
from penstock_bench.suites.shard.task import Task
from penstock_bench.suites.shard.zoo import ZOO, Model, load

EVERY = ("data", "model")
MESHES = {name: Task("gpt2", name).axes for name in ("8", "2x4", "2x2x2")}


def tiny() -> Model:
    """Two matrices of a transformer's kind and a bias that nothing divides."""

    def init():
        params = {"up": jnp.zeros((16, 64)), "down": jnp.zeros((64, 16)), "bias": jnp.zeros(3)}
        return {"params": params, "optimizer": {"mu": params}}

    layout = (("up$", (None, "model")), ("down$", ("model", None)))
    return Model("tiny", "JAX", init, lambda seed: {"x": np.zeros((16, 3))}, lambda state, batch: (state, jnp.zeros(())), layout)


def layouts(model: Model, mesh: str) -> dict[str, Baseline]:
    state = jax.eval_shape(model.init)
    return {layout.name: layout for layout in baselines(model, state, model.batch(0), MESHES[mesh])}


def by_path(layout: Baseline, used: bool = False) -> dict[str, tuple]:
    specs = layout.used if used else layout.state
    return dict(zip(leaf_paths(jax.eval_shape(tiny().init)), specs, strict=True))


@pytest.mark.parametrize(("name", "mesh"), [("mlp", "8"), ("mlp", "2x4"), ("gpt2", "2x2x2")])
def test_layouts_divide_every_shape(name, mesh):
    model, axes = load(name), MESHES[mesh]
    state, batch = jax.eval_shape(model.init), model.batch(0)
    for layout in layouts(model, mesh).values():
        leaves = [*jax.tree.leaves(state), *jax.tree.leaves(batch)]
        for leaf, spec in zip(leaves, (*layout.state, *layout.batch), strict=True):
            assert len(spec) == leaf.ndim
            taken = [axis for entry in spec for axis in entry]
            assert len(set(taken)) == len(taken)
            assert all(size % math.prod(axes[axis] for axis in entry) == 0 for size, entry in zip(leaf.shape, spec, strict=True))


def test_data_parallel_has_all_of_the_state_and_a_part_of_the_batch():
    found = layouts(tiny(), "2x4")["data parallel"]
    assert set(by_path(found).values()) == {((), ()), ((),)}
    assert found.batch == ((EVERY, ()),)
    assert found.used is None


def test_fsdp_splits_the_largest_dimension_over_all_devices():
    found = by_path(layouts(tiny(), "2x4")["FSDP"])
    assert found["params/up"] == found["optimizer/mu/up"] == ((), EVERY)
    assert found["params/down"] == (EVERY, ())
    assert found["params/bias"] == ((),)


def test_parameters_are_gathered_for_use_and_moments_are_not():
    found = by_path(layouts(tiny(), "2x4")["FSDP, gathered"], used=True)
    assert found["params/up"] == ((), ())
    assert found["optimizer/mu/up"] is None


def test_megatron_follows_the_patterns_and_leaves_the_batch_to_the_other_axes():
    found = layouts(tiny(), "2x2x2")["Megatron"]
    assert by_path(found)["params/up"] == by_path(found)["optimizer/mu/up"] == ((), ("model",))
    assert by_path(found)["params/bias"] == ((),)
    assert found.batch == ((("data", "fsdp"), ()),)


def test_megatron_with_fsdp_splits_the_other_dimension_over_the_other_axes():
    found = layouts(tiny(), "2x2x2")["Megatron + FSDP, gathered"]
    assert by_path(found)["params/up"] == (("data", "fsdp"), ("model",))
    assert by_path(found, used=True)["params/up"] == ((), ("model",))


def test_on_one_axis_the_tensors_have_it_and_the_batch_is_replicated():
    found = layouts(tiny(), "8")
    assert found["Megatron"].batch == found["largest axis"].batch == (((), ()),)
    assert by_path(found["Megatron"])["params/down"] == (("data",), ())
    assert "Megatron + FSDP" not in found


def test_only_transformers_have_megatron():
    assert "Megatron" not in layouts(load("mlp"), "2x4")


# Two in plain JAX, of which one freezes weights, one in Linen, one in NNX.
_FRONT_ENDS = ("llama-gqa", "lora", "gpt2", "vit")


@pytest.mark.parametrize("name", [*_FRONT_ENDS, *(pytest.param(n, marks=pytest.mark.slow) for n in ZOO if n not in _FRONT_ENDS)])
def test_leaves_of_the_optimizer_are_known_in_every_front_end(name):
    """As many parameters as moments of one kind, or more where some are frozen or counted."""
    if name in ("unet", "lstm", "dit"):
        require("equinox")
    model = load(name)
    state = jax.eval_shape(model.init)
    used = layouts(model, "8")["FSDP, gathered"].used
    elements = [math.prod(leaf.shape) for leaf, spec in zip(jax.tree.leaves(state), used, strict=True) if spec is not None]
    everything = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state))
    share = sum(elements) / everything
    assert share > 0.8 if name == "lora" else 0.2 < share < 0.36
