"""Plans near their memory limits, and compilers that count or are made up."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from tests.shard.steps import array, mlp, mlp_step, rows, sgd

import penstock as ps
from penstock.errors import CompileError
from penstock.shard import compiler, find_hardware
from penstock.shard.compiler import compile_plans
from penstock.shard.hlo.analysis import Measured
from penstock.shard.hlo.collectives import Collective

AT_HAND = replace(find_hardware("tpu-v5e"), name="a chip whose compiler is that of this machine", platform="cpu")
COMPILED_HERE = "the CPU compiler for 8 of this process's devices"


def plan_of(step, *args, **options):
    return ps.plan(step, *args, **{"mesh": {"data": 8}, "hardware": AT_HAND, **options})


def unchecked_plan(*args, **options):
    """Return a plan of an MLP that was not compiled, although it is near its limit or above, and its warning."""
    with pytest.warns(UserWarning, match="the plan is unchecked") as said:
        plan = plan_of(mlp_step, mlp(64, 128), rows(64, 64), *args, **options)
    assert plan.checked is None
    assert plan.unchecked
    assert "unchecked" in str(plan)
    (warning,) = said
    assert warning.filename == __file__
    message = str(warning.message)
    assert "\n" not in message
    return plan, message


LEAST = 4 * (2 * 64 * 128 + 128 + 2 * 64 * 64) // 8
"""Bytes of the arguments of that MLP on each of 8 devices, if all are sharded."""


def count_compilations(monkeypatch):
    """Return a list to which each compilation adds its figures."""
    compiled = []

    def compile_and_count(*args):
        compiled.extend(compile_plans(*args))
        return compiled[-len(args[0]) :]

    monkeypatch.setattr(compiler, "compile_plans", compile_and_count)
    return compiled


def compile_by(monkeypatch, compile_one):
    """Replace the compiler by a function that returns the figures of a plan, or raises a `CompileError`."""

    def attempt(plan):
        try:
            return compile_one(plan)
        except CompileError as error:
            return error

    monkeypatch.setattr(compiler, "compile_plans", lambda plans, *_: [attempt(plan) for plan in plans])


def compile_to(monkeypatch, bytes_of, sent_by=None):
    """Replace the compiler by one whose programs need `bytes_of(plan)`; return the plans that it compiles.

    With `sent_by`, they compute what is predicted, and send `sent_by(plan)` bytes in an all-reduce.
    """
    compiled = []

    def made_up(plan):
        compiled.append(plan)
        arguments = plan.cost.memory.arguments
        collectives, flops = (), 1.0
        if sent_by is not None:
            flops = plan.cost.flops
            collectives = (Collective("all-reduce", sent_by(plan), plan.device_count, count=1.0, axes=tuple(plan.mesh_shape)),)
        return Measured(arguments, 0, int(bytes_of(plan)) - arguments, 0, flops, collectives, 1.0, (), "a made-up compiler")

    compile_by(monkeypatch, made_up)
    return compiled


def deep_step(params, batch):
    """Train a chain of layers: gathering weights for each saves memory and takes time."""

    def loss(params):
        x = batch
        for w in params:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    return sgd(params, gradients), value


DEEP = ([array(512, 512) for _ in range(4)], array(2048, 512))
