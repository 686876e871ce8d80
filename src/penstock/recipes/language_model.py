"""The functions that train, evaluate and sample a language model. They are pure, and not compiled.

States and batches of tokens go in; states, metrics, and sampled tokens come out.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

import penstock as ps
from penstock.data.tree import Batch
from penstock.recipes.decoder import Cache, Decoder, Sizes

# Tuned on the topics of help(), with 400 batches of 8 × 128 bytes from windows that begin anywhere. A rate of 3e-3 gives 2.34
# bits per byte, 5e-3 gives 2.51, and 8e-3 gives 2.75.
_PEAK_RATE, _WARM_UP, _WEIGHT_DECAY, _DECAY_OF_SQUARES = 3e-3, 0.1, 0.1, 0.99


class State(NamedTuple):
    """The values that training changes: the number of steps done int32 [], the parameters float32, and the optimizer's state."""

    step: Array
    parameters: Any
    optimizer: Any


class LanguageModel:
    """A decoder with its training by AdamW.

    A batch has `tokens` uint8 [B, T + 1]: the first T are inputs, the last T are targets. If it has a `mask` bool [B], only its
    true rows count. The metric is the mean cross-entropy of the targets in bits: as a token is a byte, `bits_per_byte`.

    Args:
      sizes: the sizes of the decoder.
      steps: number of steps after which the learning rate is 0.
      dtype: dtype of the decoder's matrix products, float32 or bfloat16; parameters and optimizer are float32 with both.
    """

    def __init__(self, sizes: Sizes, steps: int, dtype: Any = jnp.float32):
        self._sizes, self._dtype = sizes, dtype
        self._structure = nnx.graphdef(nnx.eval_shape(lambda: self._decoder(jax.random.key(0))))
        self._optimizer = _optimizer(steps)

    def start(self, key: Array) -> State:
        """Return the state at step 0, with random parameters."""
        parameters = nnx.state(self._decoder(key))
        return State(jnp.zeros((), jnp.int32), parameters, self._optimizer.init(parameters))

    def train(self, state: State, batch: Batch) -> tuple[State, dict[str, ps.Mean]]:
        """Return the state after one step, and the metrics of the batch before it."""

        def loss(parameters: Any) -> tuple[Array, dict[str, ps.Mean]]:
            metrics = self._metrics(parameters, batch)
            bits = metrics["bits_per_byte"]
            return bits.total / bits.count * math.log(2), metrics

        gradients, metrics = jax.grad(loss, has_aux=True)(state.parameters)
        updates, moments = self._optimizer.update(gradients, state.optimizer, state.parameters)
        return State(state.step + 1, optax.apply_updates(state.parameters, updates), moments), metrics

    def evaluate(self, state: State, batch: Batch) -> dict[str, ps.Mean]:
        """Return the metrics of a batch."""
        return self._metrics(state.parameters, batch)

    def sample(self, state: State, prompt: Array, key: Array, length: int, context: int, temperature: float = 0.8) -> Array:
        """Return tokens that continue a prompt.

        Args:
          prompt: int [P], P >= 1.
          key: key of the random draws.
          length: number of tokens to draw.
          context: number of tokens that each token attends to: that of the training, as the model knows no greater distances.
          temperature: logits are divided by it, so less than 1 prefers likely tokens.

        Returns:
          int32 [length].
        """
        decoder: Decoder = nnx.merge(self._structure, state.parameters)
        given = jnp.pad(prompt.astype(jnp.int32), (0, length))

        def draw(carry: tuple[Array, Cache], position: Array) -> tuple[tuple[Array, Cache], Array]:
            token, cache = carry
            logits, cache = decoder.next(token, position, cache)
            drawn = jax.random.categorical(jax.random.fold_in(key, position), logits / temperature)
            token = jnp.where(position + 1 < len(prompt), given[position + 1], drawn).astype(jnp.int32)
            return (token, cache), token[0]

        positions = jnp.arange(len(prompt) + length - 1)
        _, tokens = jax.lax.scan(draw, (given[:1], decoder.empty_cache(1, context)), positions)
        return tokens[len(prompt) - 1 :]

    def _decoder(self, key: Array) -> Decoder:
        return Decoder(self._sizes, dtype=self._dtype, rngs=nnx.Rngs(key))

    def _metrics(self, parameters: Any, batch: Batch) -> dict[str, ps.Mean]:
        tokens = batch["tokens"].astype(jnp.int32)
        logits = nnx.merge(self._structure, parameters)(tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        mask = jnp.broadcast_to(batch.get("mask", jnp.ones(len(tokens), bool))[:, None], losses.shape)
        nats, count = jnp.sum(losses, where=mask), jnp.sum(mask, dtype=jnp.float32)
        return {"bits_per_byte": ps.Mean(nats / math.log(2), count)}  # a nat is 1 / ln 2 bits


def _optimizer(steps: int) -> optax.GradientTransformation:
    rate = optax.warmup_cosine_decay_schedule(0.0, _PEAK_RATE, warmup_steps=max(1, int(_WARM_UP * steps)), decay_steps=steps + 1)
    adamw = optax.adamw(rate, b2=_DECAY_OF_SQUARES, weight_decay=_WEIGHT_DECAY, mask=_is_matrix)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def _is_matrix(parameters: Any) -> Any:
    """Return which parameters decay: not the scales of norms."""
    return jax.tree.map(lambda parameter: parameter.ndim > 1, parameters)
