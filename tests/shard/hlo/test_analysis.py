"""The compiler's figures for a program are its memory, FLOPs and collectives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.shard.hlo.train_step import PARAMETERS, directly

from penstock._jax import program_text
from penstock.errors import CompileError
from penstock.shard.hlo.analysis import Measured, measure
from penstock.shard.hlo.collectives import Collective
from penstock.shard.mesh.hardware import Hardware


def test_figures_of_a_step_are_those_computed_by_hand():
    found = directly()
    assert found.arguments == PARAMETERS + 16 * 64 * 4
    assert found.aliased == PARAMETERS
    assert found.outputs >= PARAMETERS + 4
    assert found.memory == found.arguments + found.temporaries + found.outputs - found.aliased
    # Three products of [16, 64] and [64, 32] for each of two layers, three times: forwards, and twice backwards.
    assert found.flops == pytest.approx(3 * 3 * 2 * (2 * 16 * 64 * 32), rel=0.1)
    assert {c.count for c in found.collectives if c.bytes > 4} == {3.0}


def test_constants_of_up_to_a_million_elements_are_printed():
    compiled = jax.jit(lambda i: jnp.array(range(7, 23))[i]).lower(3).compile()
    assert "{...}" in compiled.as_text()
    assert "{7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22}" in program_text(compiled)
    with_weights = np.random.default_rng(0).random((1 << 20) + 1)
    compiled = jax.jit(lambda i: jnp.array(range(16))[i] + jnp.array(with_weights)[i]).lower(3).compile()
    assert len(program_text(compiled)) < 1 << 20


def test_a_compiler_that_does_not_report_memory_is_an_error(monkeypatch):
    program = jax.jit(lambda x: x * 2).lower(3.0).compile()
    monkeypatch.setattr(type(program), "memory_analysis", lambda self: None)
    with pytest.raises(CompileError, match="does not report how much memory a program needs"):
        measure(program, {"x": 1})


def test_seconds_are_flops_at_the_peak_and_bytes_over_the_links():
    network = {"domain": 4, "network_bandwidth": 1.0, "network_latency": 3.0}
    machine = Hardware("m", {"float32": 100.0, "bfloat16": 200.0}, 1, 1.0, 10.0, 0.5, "", **network)
    found = Measured(
        arguments=7,
        outputs=5,
        temporaries=3,
        aliased=4,
        flops=400.0,
        collectives=(
            Collective("all-gather", 80, 4, 2.0, ("model",)),  # 60 bytes, twice, at 10/s
            Collective("all-reduce", 8, 2, 1.0, ("nodes",), guessed=True),  # 8 bytes at 1/s
        ),
        seconds_to_compile=1.5,
        unknown=("how long it takes",),
    )
    assert found.memory == 11
    assert found.bytes_on_wire == 128
    mesh = {"nodes": 2, "model": 4}
    assert found.seconds(machine, "float32", mesh) == 4 + 12 + 8
    assert found.seconds(machine, "bfloat16", mesh) == 2 + 12 + 8
    assert found.seconds(machine, "float32", mesh, latency=True) == 4 + 12 + 8 + 2 * 0.5 + 3
    assert Measured.from_json(found.to_json()) == found
