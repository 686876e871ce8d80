"""Compute the reference for the variants' outputs: the same training in float64, written independently as plain functions.

It shares only the weights and batches with the variants, so a mistake in either shows as a difference.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from penstock_bench.model import Measurement, Outputs
from penstock_bench.suites.frameworks.experiment import (
    ADAMW_EPSILON,
    BETAS,
    LAYER_NORM_EPSILON,
    LEARNING_RATE,
    PARITY_STEPS,
    WEIGHT_DECAY,
    Experiment,
    Geometry,
    Size,
)
from penstock_bench.suites.frameworks.weights import fixed_batch, initial, updates

Params = dict[str, Any]


def measure(size: Size) -> Measurement:
    raise NotImplementedError("the reference is never timed")


def outputs(experiment: Experiment, size: Size) -> Outputs:
    """Compute the same outputs as `measure.outputs`, always on the CPU."""
    import jax

    # JAX_PLATFORMS may name only a GPU. If JAX has started already, this has no effect and is not needed.
    jax.config.update("jax_platforms", "cpu")  # JAX's own, without annotations
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]), jax.default_matmul_precision("highest"):
        return _train(experiment, size.geometry)


def _train(experiment: Experiment, geometry: Geometry) -> Outputs:
    import jax

    before = initial(geometry)
    params = {name: value.astype(np.float64) for name, value in before.items()}
    moments = {name: (np.zeros_like(value), np.zeros_like(value)) for name, value in params.items()}
    batches = [fixed_batch(geometry, experiment.parity_batch, number) for number in range(PARITY_STEPS)]
    gradient = jax.jit(jax.value_and_grad(partial(_loss, geometry=geometry), has_aux=True))
    logits, losses = [], []
    for step, (images, labels) in enumerate(batches, start=1):
        (loss, found), gradients = gradient(params, images.astype(np.float64), labels)
        losses.append(float(loss))
        logits.append(np.asarray(found))
        for name, value in params.items():
            params[name], moments[name] = _update(experiment.optimizer, value, np.asarray(gradients[name]), moments[name], step)
    return {"logits": logits[0], "loss": np.asarray(losses), **updates(before, params, experiment.optimizer)}


def _logits(params: Params, images: Any, geometry: Geometry) -> Any:
    import jax
    import jax.numpy as jnp

    patch, side = geometry.patch, geometry.image // geometry.patch
    squares = images.reshape(-1, side, patch, side, patch, 3)
    patches = jnp.einsum("biyjxc,yxcd->bijd", squares, params["patch/kernel"]) + params["patch/bias"]
    patches = patches.reshape(len(images), side * side, -1)
    x = jnp.concatenate([jnp.tile(params["cls"], (len(images), 1, 1)), patches], axis=1) + params["position"]
    # Only one block is compiled, and its activations are recomputed for the gradient. Together, the two halve the time.
    names = [name.removeprefix("blocks/0/") for name in params if name.startswith("blocks/0/")]
    blocks = {name: jnp.stack([params[f"blocks/{number}/{name}"] for number in range(geometry.depth)]) for name in names}
    one = jax.checkpoint(partial(_block, heads=geometry.heads))
    x, _ = jax.lax.scan(lambda x, block: (one(block, x), None), x, blocks)
    return _linear(params, "head", _norm(params, "norm", x)[:, 0])


def _block(block: Params, x: Any, heads: int) -> Any:
    x = x + _linear(block, "out", _attention(_linear(block, "qkv", _norm(block, "norm1", x)), heads))
    return x + _linear(block, "narrow", _gelu(_linear(block, "widen", _norm(block, "norm2", x))))


def _linear(params: Params, name: str, x: Any) -> Any:
    return x @ params[f"{name}/kernel"] + params[f"{name}/bias"]


def _norm(params: Params, name: str, x: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred / (x.var(-1, keepdims=True) + LAYER_NORM_EPSILON) ** 0.5 * params[f"{name}/scale"] + params[f"{name}/bias"]


def _attention(qkv: Any, heads: int) -> Any:
    import jax.numpy as jnp

    mixed = []
    for head in range(heads):
        q, k, v = (jnp.split(part, heads, axis=-1)[head] for part in jnp.split(qkv, 3, axis=-1))
        weights = jnp.exp(q @ k.mT / q.shape[-1] ** 0.5)  # in float64 nothing overflows
        mixed.append(weights / weights.sum(-1, keepdims=True) @ v)
    return jnp.concatenate(mixed, axis=-1)


def _gelu(x: Any) -> Any:
    from jax.scipy.special import erf

    return x * (1 + erf(x / 2**0.5)) / 2


def _loss(params: Params, images: Any, labels: Any, geometry: Geometry) -> tuple[Any, Any]:
    """Return the loss and the logits."""
    import jax.numpy as jnp

    logits = _logits(params, images, geometry)
    return (jnp.log(jnp.exp(logits).sum(-1)) - logits[jnp.arange(len(labels)), labels]).mean(), logits


def _update(optimizer: str, value: Any, gradient: Any, moments: tuple[Any, Any], step: int) -> tuple[Any, tuple[Any, Any]]:
    """Return a weight after a step, rounded to float32 as all variants store it: the rounding matters for small updates."""
    if optimizer == "sgd":
        return _stored(value - LEARNING_RATE * gradient), moments
    b1, b2 = BETAS
    first, second = b1 * moments[0] + (1 - b1) * gradient, b2 * moments[1] + (1 - b2) * gradient**2
    direction = first / (1 - b1**step) / (np.sqrt(second / (1 - b2**step)) + ADAMW_EPSILON)
    return _stored(value - LEARNING_RATE * (direction + WEIGHT_DECAY * value)), (first, second)


def _stored(value: np.ndarray) -> np.ndarray:
    return value.astype(np.float32).astype(np.float64)
