"""A neural ODE (Chen et al. 2018, arXiv:1806.07366) of Diffrax, as in its documentation: adaptive steps, checkpointed adjoint.

The documentation's example has two dimensions and a width of 64; here they are 64 and 1,024.
"""

from __future__ import annotations

from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from penstock_bench.suites.shard.outside.batches import Batch
from penstock_bench.suites.shard.zoo.model import Model, PyTree
from penstock_bench.suites.shard.zoo.training import init_state, train_step
from penstock_bench.suites.shard.zoo.training_equinox import params_of, static_of

_BATCH, _DIMENSIONS, _WIDTH = 64, 64, 1024
_TIMES = np.linspace(0, 1, 16, dtype=np.float32)


class _NeuralODE(eqx.Module):
    """The first point [D] of a path → the path [T, D]."""

    field: eqx.nn.MLP

    def __init__(self, key: Array):
        self.field = eqx.nn.MLP(_DIMENSIONS, _DIMENSIONS, _WIDTH, depth=2, activation=jax.nn.softplus, key=key)

    def __call__(self, start: Array) -> Array:
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: self.field(y)),
            diffrax.Tsit5(),
            t0=_TIMES[0],
            t1=_TIMES[-1],
            dt0=_TIMES[1],
            y0=start,
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
            saveat=diffrax.SaveAt(ts=jnp.asarray(_TIMES)),
        )
        return solution.ys


def neural_ode() -> Model:
    static, optimizer = static_of(_NeuralODE), optax.adabelief(1e-4)

    def loss(params: PyTree, batch: PyTree) -> Array:
        model: Any = eqx.combine(params, static)
        return jnp.mean((jax.vmap(model)(batch["paths"][:, 0]) - batch["paths"]) ** 2)

    return Model(
        "diffrax-neural-ode",
        "Equinox",
        lambda: init_state(params_of(_NeuralODE), optimizer),
        _batch,
        train_step(loss, optimizer),
    )


def _batch(seed: int) -> Batch:
    """Return paths [B, T, D] of damped oscillators, two dimensions each."""
    rng = np.random.default_rng(seed)
    phases = rng.uniform(0, 2 * np.pi, size=(_BATCH, 1, _DIMENSIONS // 2)) + 4 * _TIMES[:, None]
    paths = np.exp(-_TIMES)[:, None] * np.concatenate([np.cos(phases), np.sin(phases)], axis=-1)
    return {"paths": paths.astype(np.float32)}
