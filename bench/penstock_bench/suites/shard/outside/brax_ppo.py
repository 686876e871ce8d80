"""Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347) of brax: the update by one minibatch.

Networks, minibatch and coefficients are those that brax trains its humanoid with: they are small, and their activations are not.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from brax.training.acme import running_statistics, specs
from brax.training.agents.ppo.losses import PPONetworkParams, compute_ppo_loss
from brax.training.agents.ppo.networks import make_ppo_networks
from brax.training.types import Transition
from jax import Array

from penstock_bench.suites.shard.zoo.model import Model, PyTree
from penstock_bench.suites.shard.zoo.training import SEED

_BATCH, _UNROLL = 1024, 10
_OBSERVATIONS, _ACTIONS = 244, 17


def ppo() -> Model:
    networks = make_ppo_networks(_OBSERVATIONS, _ACTIONS, preprocess_observations_fn=running_statistics.normalize)
    optimizer = optax.adam(3e-4)

    def init() -> PyTree:
        policy, value, key = jax.random.split(jax.random.PRNGKey(SEED), 3)
        params = PPONetworkParams(networks.policy_network.init(policy), networks.value_network.init(value))
        normalizer = running_statistics.init_state(specs.Array((_OBSERVATIONS,), jnp.dtype("float32")))
        return {"params": params, "optimizer": optimizer.init(params), "normalizer": normalizer, "key": key}

    def loss(params: Any, state: PyTree, batch: PyTree, key: Array) -> Array:
        value, _ = compute_ppo_loss(
            params,
            state["normalizer"],
            batch,
            key,
            networks,
            entropy_cost=1e-3,
            discounting=0.97,
            reward_scaling=0.1,
        )
        return value

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, Array]:
        key, next_key = jax.random.split(state["key"])
        value, gradients = jax.value_and_grad(loss)(state["params"], state, batch, key)
        updates, moments = optimizer.update(gradients, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {**state, "params": params, "optimizer": moments, "key": next_key}, value

    return Model("brax-ppo", "Linen", init, _batch, step)


def _batch(seed: int) -> Transition:
    """Return transitions [B, T, ...] of a policy that was nearly the initial one."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal((_BATCH, _UNROLL, *shape), np.float32)

    actions, truncation = normal(_ACTIONS), (rng.random((_BATCH, _UNROLL)) < 0.01).astype(np.float32)
    return Transition(
        observation=normal(_OBSERVATIONS),
        action=np.tanh(actions),
        reward=normal(),
        discount=(rng.random((_BATCH, _UNROLL)) < 0.98).astype(np.float32),
        next_observation=normal(_OBSERVATIONS),
        extras={
            "state_extras": {"truncation": truncation},
            "policy_extras": {
                "raw_action": actions,
                "log_prob": normal() - _ACTIONS,
                "distribution_params": normal(2 * _ACTIONS),
            },
        },
    )
