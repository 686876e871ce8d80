"""Two LSTMs (Hochreiter and Schmidhuber 1997) of Haiku, over characters, as Haiku's own example of recurrent networks has them.

The width is twice the example's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from jax import Array

from penstock_bench.suites.shard.zoo.model import Model, PyTree
from penstock_bench.suites.shard.zoo.training import SEED, cross_entropy, init_state, text, train_step

_BATCH, _LENGTH, _VOCABULARY, _WIDTH = 32, 128, 128, 512


def lstm() -> Model:
    network: Any = hk.without_apply_rng(hk.transform(_logits))
    optimizer = optax.adam(1e-3)

    def init() -> PyTree:
        return init_state(network.init(jax.random.PRNGKey(SEED), jnp.zeros((1, _LENGTH), jnp.int32)), optimizer)

    def loss(params: PyTree, batch: PyTree) -> Array:
        return cross_entropy(network.apply(params, batch["tokens"]), batch["targets"])

    batch = partial(text, batch=_BATCH, length=_LENGTH, vocabulary=_VOCABULARY)
    return Model("haiku-lstm", "Haiku", init, batch, train_step(loss, optimizer))


def _logits(tokens: Array) -> Array:
    """Return the logits of the next character at each: [B, T] → [B, T, V]."""
    core = hk.DeepRNN([hk.LSTM(_WIDTH), jax.nn.relu, hk.LSTM(_WIDTH), hk.nets.MLP([_WIDTH, _VOCABULARY])])
    inputs = jax.nn.one_hot(tokens.T, _VOCABULARY)
    logits, _ = hk.dynamic_unroll(core, inputs, core.initial_state(len(tokens)))
    return jnp.swapaxes(logits, 0, 1)
