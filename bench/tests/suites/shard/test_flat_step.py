from __future__ import annotations

import json

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from penstock.shard.hlo.analysis import Measured, measure
from penstock.shard.mesh.shapes import abstract_mesh
from penstock_bench.suites.shard import flat_step as module
from penstock_bench.suites.shard.flat_step import FlatStep, compile_elsewhere, flat_step

AXES = {"data": 2, "model": 4}


def square_step(rate: float = 0.1, mesh=None) -> FlatStep:
    """A step with a matrix product whose weight is split over `model`, and its batch over `data`."""
    mesh = mesh or abstract_mesh(AXES)

    def step(state, batch):
        value, gradient = jax.value_and_grad(lambda w: ((batch["x"] @ w) ** 2).mean())(state["w"])
        return {"w": state["w"] - rate * gradient}, value

    state = {"w": jax.ShapeDtypeStruct((64, 128), jnp.float32)}
    batch = {"x": jax.ShapeDtypeStruct((32, 64), jnp.float32)}
    shardings = ({"w": NamedSharding(mesh, PartitionSpec(None, "model"))}, {"x": NamedSharding(mesh, PartitionSpec("data"))})
    return flat_step(step, state, batch, *shardings, mesh)


def here() -> FlatStep:
    return square_step(mesh=jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(AxisType.Auto,) * 2))


def without_time(measured: Measured) -> dict:
    return {**json.loads(measured.to_json()), "seconds_to_compile": 0}


def step_that_calls_the_host() -> FlatStep:
    mesh = abstract_mesh(AXES)
    whole = NamedSharding(mesh, PartitionSpec())

    def step(state, batch):
        product = batch @ state
        checked = jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), product.mean())
        return product - checked, checked

    arrays = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2
    return flat_step(step, *arrays, whole, whole, mesh)


def test_a_step_is_the_same_program_here_and_in_another_process():
    step = square_step()
    found, calling = compile_elsewhere([step, step_that_calls_the_host()], None)
    assert calling.flops >= 2 * 64**3
    assert step.mesh == AXES
    alone = here()
    assert without_time(found) == without_time(measure(alone.jitted.lower(*alone.arguments).compile(), AXES))
    assert found.arguments == 4 * (64 * 128 // 4 + 32 * 64 // 2)
    assert found.aliased == 4 * 64 * 128 // 4


def change(folder, **figures) -> None:
    """Change the kept figures, so that a compilation would be seen."""
    (kept,) = folder.glob("*.json")
    kept.write_text(json.dumps({**json.loads(kept.read_text()), **figures}))


def test_kept_figures_are_used_for_the_same_program_and_compiler_only(tmp_path, monkeypatch):
    (first,) = compile_elsewhere([square_step()], None, tmp_path)
    change(tmp_path, temporaries=12345)
    again, other = compile_elsewhere([square_step(), square_step(rate=0.2)], None, tmp_path)
    assert again.temporaries == 12345
    assert without_time(other) == without_time(first)
    assert len(list(tmp_path.glob("*.json"))) == 2
    monkeypatch.setattr(module, "_version", lambda package: "0.0.1")  # of the compiler
    (found,) = compile_elsewhere([square_step()], None, tmp_path)
    assert found.temporaries != 12345


def test_of_no_step_there_is_no_result():
    assert compile_elsewhere([], None) == []
