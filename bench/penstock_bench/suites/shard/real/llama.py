"""Llama (Touvron et al. 2023, arXiv:2302.13971) in its published sizes: the feed-forward part is a SwiGLU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from penstock_bench.suites.shard.real.step import Constrain, Size, weight
from penstock_bench.suites.shard.zoo.model import PyTree
from penstock_bench.suites.shard.zoo.training import normal

LLAMA_7B = Size(width=4096, layers=32, heads=32, key_value_heads=32, hidden=11008, vocabulary=32_000)
LLAMA_13B = Size(width=5120, layers=40, heads=40, key_value_heads=40, hidden=13824, vocabulary=32_000)
# Llama 2 (Touvron et al. 2023, arXiv:2307.09288).
LLAMA_70B = Size(width=8192, layers=80, heads=64, key_value_heads=8, hidden=28672, vocabulary=32_000)
# As a Llama, for a quick run.
LLAMA_SMALL = Size(width=256, layers=2, heads=8, key_value_heads=8, hidden=512, vocabulary=1024, length=128)
# Llama 3.2 (Meta, 2024; huggingface.co/meta-llama/Llama-3.2-3B).
LLAMA_3B = Size(width=3072, layers=28, heads=24, key_value_heads=8, hidden=8192, vocabulary=128_256, tied=True)


def init_swiglu(key: Array, size: Size) -> PyTree:
    first, second = jax.random.split(jax.random.fold_in(key, 1))
    return {
        "w_gate_up": normal(first, size.width, 2, size.hidden),
        "w_down": normal(second, size.hidden, size.width),
    }


def swiglu(layer: PyTree, x: Array, constrain: Constrain) -> tuple[Array, None]:
    """Apply the feed-forward part (Shazeer 2020, arXiv:2002.05202): [B, T, D] → the same."""
    both = constrain("gate_up", jnp.einsum("btd,dcf->btcf", x, weight(layer, "w_gate_up", x.dtype, constrain)))
    hidden = constrain("hidden", jax.nn.silu(both[:, :, 0]) * both[:, :, 1])
    return hidden @ weight(layer, "w_down", x.dtype, constrain), None
