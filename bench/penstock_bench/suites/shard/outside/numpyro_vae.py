"""A variational autoencoder (Kingma and Welling 2014, arXiv:1312.6114) of NumPyro: one update of variational inference.

NumPyro's example has 400 hidden units; here they are 1,024, in two layers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from flax import linen as nn
from jax import Array
from numpyro import distributions
from numpyro.contrib.module import flax_module
from numpyro.infer import SVI, Trace_ELBO

from penstock_bench.suites.shard.outside.batches import Batch
from penstock_bench.suites.shard.zoo.model import Model, PyTree
from penstock_bench.suites.shard.zoo.training import SEED

_BATCH, _PIXELS, _LATENT, _WIDTH = 256, 784, 64, 1024


class _Encoder(nn.Module):
    """Images [B, pixels] → means and scales [B, latent]."""

    @nn.compact
    def __call__(self, images: Array) -> tuple[Array, Array]:
        hidden = nn.softplus(nn.Dense(_WIDTH)(nn.softplus(nn.Dense(_WIDTH)(images))))
        return nn.Dense(_LATENT)(hidden), jnp.exp(nn.Dense(_LATENT)(hidden))


class _Decoder(nn.Module):
    """[B, latent] → logits [B, pixels]."""

    @nn.compact
    def __call__(self, latent: Array) -> Array:
        return nn.Dense(_PIXELS)(nn.softplus(nn.Dense(_WIDTH)(nn.softplus(nn.Dense(_WIDTH)(latent)))))


def _model(images: Array) -> None:
    """Describe how an image is generated."""
    decode = flax_module("decoder", _Decoder(), input_shape=(1, _LATENT))
    with numpyro.plate("batch", len(images)):
        latent = numpyro.sample("latent", distributions.Normal(jnp.zeros(_LATENT), 1).to_event(1))
        numpyro.sample("images", distributions.Bernoulli(logits=decode(latent)).to_event(1), obs=images)


def _guide(images: Array) -> None:
    """Describe the approximate posterior of what an image was generated from."""
    encode = flax_module("encoder", _Encoder(), input_shape=(1, _PIXELS))
    means, scales = encode(images)
    with numpyro.plate("batch", len(images)):
        numpyro.sample("latent", distributions.Normal(means, scales).to_event(1))


def vae() -> Model:
    svi = SVI(_model, _guide, numpyro.optim.Adam(1e-3), Trace_ELBO())

    def init() -> PyTree:
        return svi.init(jax.random.PRNGKey(SEED), jnp.zeros((_BATCH, _PIXELS)))

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, Array]:
        return svi.update(state, batch["images"])

    jax.eval_shape(init)  # `init` tells the object how parameters are constrained, which `update` needs
    return Model("numpyro-vae", "NumPyro", init, _batch, step)


def _batch(seed: int) -> Batch:
    """Return binary images [B, pixels] with one bright part each."""
    rng = np.random.default_rng(seed)
    distances = np.abs(np.arange(_PIXELS) - rng.integers(_PIXELS, size=(_BATCH, 1)))
    return {"images": (rng.random((_BATCH, _PIXELS)) < np.exp(-distances / 100)).astype(np.float32)}
