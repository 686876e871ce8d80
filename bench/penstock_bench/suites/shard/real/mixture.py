"""A mixture of 8 experts, each as large as the feed-forward part of a Llama with 1B parameters, of which a token uses two.

The experts have a fixed capacity in each sequence. Tokens are dispatched by products with one-hot matrices (GShard: Lepikhin et
al. 2020, arXiv:2006.16668), or sorted by expert and gathered (as MegaBlocks sorts: Gale et al. 2022, arXiv:2211.15841).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array

from penstock_bench.suites.shard.real.step import Constrain, Size, weight
from penstock_bench.suites.shard.zoo.model import PyTree
from penstock_bench.suites.shard.zoo.training import normal

# Width, heads and hidden size of Llama 3.2 1B, with the experts and the vocabulary of Mixtral (Jiang et al. 2024,
# arXiv:2401.04088).
MIXTURE = Size(width=2048, layers=16, heads=32, key_value_heads=8, hidden=8192, vocabulary=32_000, experts=8)

_CHOSEN, _CAPACITY_FACTOR = 2, 1.25


def init_experts(key: Array, size: Size) -> PyTree:
    router, wide, narrow = jax.random.split(jax.random.fold_in(key, 1), 3)
    return {
        "router": normal(router, size.width, size.experts),
        "experts_gate_up": jax.random.normal(wide, (size.experts, size.width, 2, size.hidden)) * size.width**-0.5,
        "experts_down": jax.random.normal(narrow, (size.experts, size.hidden, size.width)) * size.hidden**-0.5,
    }


def dense(layer: PyTree, x: Array, constrain: Constrain) -> tuple[Array, Array]:
    """Dispatch by one-hot products: [B, T, D] → the same, and how unevenly the experts are used []."""
    probabilities, weights, experts = _route(layer, x, constrain)
    combine, first_choice = _places(weights, experts, probabilities.shape[-1])
    combine = constrain("combine", combine.astype(x.dtype))  # [B, T, E, C]
    sent = jnp.einsum("btec,btd->becd", (combine > 0).astype(x.dtype), x)
    done = _apply_experts(layer, sent, constrain)
    return jnp.einsum("btec,becd->btd", combine, done), _unevenness(probabilities, first_choice)


def by_sorting(layer: PyTree, x: Array, constrain: Constrain) -> tuple[Array, Array]:
    """Dispatch by sorting the tokens of each sequence: [B, T, D] → the same, and how unevenly the experts are used []."""
    probabilities, weights, experts = _route(layer, x, constrain)
    tokens, shares = jax.vmap(_slots, in_axes=(0, 0, None))(weights, experts, probabilities.shape[-1])
    tokens, shares = constrain("slots", tokens), constrain("slots", shares)  # [B, E, C]
    done = _apply_experts(layer, jax.vmap(lambda rows, index: rows[index])(x, tokens), constrain)
    done *= shares[..., None].astype(x.dtype)
    first_choice = jax.nn.one_hot(experts[..., 0], probabilities.shape[-1])
    mixed = jax.vmap(lambda index, rows: jnp.zeros(x.shape[1:], x.dtype).at[index].add(rows))(tokens, done)
    return mixed, _unevenness(probabilities, first_choice)


def _route(layer: PyTree, x: Array, constrain: Constrain) -> tuple[Array, Array, Array]:
    """Return the probabilities of experts [B, T, E], and the weights and numbers of the chosen ones [B, T, 2]."""
    probabilities = jax.nn.softmax(constrain("routing", x.astype(jnp.float32) @ layer["router"]))
    weights, experts = jax.lax.top_k(probabilities, _CHOSEN)
    return probabilities, weights / jnp.sum(weights, axis=-1, keepdims=True), experts


def _capacity(length: int, experts: int) -> int:
    """Return the number of tokens of a sequence that an expert takes; it drops the others."""
    return math.ceil(_CHOSEN * length / experts * _CAPACITY_FACTOR)


def _places(weights: Array, experts: Array, count: int) -> tuple[Array, Array]:
    """Return the combine weights of each token [B, T, E, C], and its first choice [B, T, E] of 0 and 1."""
    batch, length, _ = weights.shape
    chosen = jax.nn.one_hot(experts, count)  # [B, T, 2, E]
    # First choices take capacity before second ones.
    in_turn = chosen.swapaxes(1, 2).reshape(batch, _CHOSEN * length, count)
    ahead = (jnp.cumsum(in_turn, axis=1) - in_turn).reshape(batch, _CHOSEN, length, count).swapaxes(1, 2)
    place = jnp.sum(ahead * chosen, axis=-1).astype(jnp.int32)  # [B, T, 2]; past C, one_hot is zero
    slots = jax.nn.one_hot(place, _capacity(length, count))
    return jnp.einsum("btk,btke,btkc->btec", weights, chosen, slots), chosen[:, :, 0]


def _slots(weights: Array, experts: Array, count: int) -> tuple[Array, Array]:
    """Return for each slot of each expert the token in it and the token's weight, for one sequence: [T, 2] → [E, C].

    An empty slot has some token, with a weight of 0.
    """
    capacity = _capacity(len(experts), count)
    order = jnp.argsort(experts.reshape(-1))  # row 2 t + j is token t on its way to the expert of its choice j
    sizes = jnp.bincount(experts.reshape(-1), length=count)
    places = jnp.arange(capacity)
    rows = order.at[(jnp.cumsum(sizes) - sizes)[:, None] + places].get(mode="clip")
    return rows // _CHOSEN, jnp.where(places < sizes[:, None], weights.reshape(-1)[rows], 0.0)


def _apply_experts(layer: PyTree, sent: Array, constrain: Constrain) -> Array:
    """Apply each expert to its slots: [B, E, C, D] → the same."""
    both = jnp.einsum("becd,edgf->becgf", constrain("sent", sent), weight(layer, "experts_gate_up", sent.dtype, constrain))
    hidden = constrain("expert_hidden", jax.nn.silu(both[..., 0, :]) * both[..., 1, :])
    return constrain("returned", jnp.einsum("becf,efd->becd", hidden, weight(layer, "experts_down", sent.dtype, constrain)))


def _unevenness(probabilities: Array, first_choice: Array) -> Array:
    """Return the loss that keeps experts evenly used (Fedus et al. 2021, arXiv:2101.03961): [B, T, E] twice → []."""
    shares = probabilities.mean(axis=1) * first_choice.mean(axis=1)
    return probabilities.shape[-1] * jnp.mean(jnp.sum(shares, axis=-1))
