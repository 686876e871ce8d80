"""Train, evaluate and sample a language model: a decoder-only transformer, which predicts the next token.

Each block is attention, then a gated two-layer network, each after a norm and added to its input. The parts and their papers:

- RMSNorm: Zhang and Sennrich 2019, arXiv:1910.07467; before each part: Xiong et al. 2020, arXiv:2002.04745.
- Rotary position embedding (RoPE): Su et al. 2021, arXiv:2104.09864.
- Grouped-query attention (GQA): Ainslie et al. 2023, arXiv:2305.13245.
- SwiGLU: Shazeer 2020, arXiv:2002.05202.
- One matrix for the embedding and for the logits: Press and Wolf 2017, arXiv:1608.05859.

In the shapes, B is the batch, T the tokens of a sequence, S the tokens attended to, and D the width. H is the query heads, K the
key and value heads, and C the channels of a head. All functions are pure, and not compiled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

import penstock as ps
from penstock.data.tree import Batch


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
          context: number of tokens that each token attends to, as in training: the model knows no greater distances.
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


# Tuned on the topics of help(), with 400 batches of 8 × 128 bytes from windows that begin anywhere. A rate of 3e-3 gives 2.34
# bits per byte, 5e-3 gives 2.51, and 8e-3 gives 2.75.
_PEAK_RATE, _WARM_UP, _WEIGHT_DECAY, _DECAY_OF_SQUARES = 3e-3, 0.1, 0.1, 0.99


def _optimizer(steps: int) -> optax.GradientTransformation:
    rate = optax.warmup_cosine_decay_schedule(0.0, _PEAK_RATE, warmup_steps=max(1, int(_WARM_UP * steps)), decay_steps=steps + 1)

    def is_matrix(parameters: Any) -> Any:  # the scales of norms do not decay
        return jax.tree.map(lambda parameter: parameter.ndim > 1, parameters)

    adamw = optax.adamw(rate, b2=_DECAY_OF_SQUARES, weight_decay=_WEIGHT_DECAY, mask=is_matrix)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


# The model.


@dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder. The defaults give 0.8 million parameters."""

    vocabulary: int = 256  # number of tokens
    width: int = 128  # channels of a token, a multiple of `heads`
    depth: int = 4  # number of blocks
    heads: int = 4  # query heads of a block, a multiple of `kv_heads`; `head` is even, because RoPE rotates pairs of channels
    kv_heads: int = 2  # key and value heads of a block
    hidden: int = 384  # channels inside of the two-layer network

    @property
    def head(self) -> int:
        """Return the channels of a head."""
        return self.width // self.heads


class Cache(NamedTuple):
    """The keys and values of the last S tokens, for each block [B, S, K, C]. The token at position p has row p modulo S."""

    keys: list[Array]
    values: list[Array]


class Decoder(nnx.Module):
    """A decoder-only transformer: tokens int [B, T] → logits float32 [B, T, vocabulary]. Parameters are float32.

    Args:
      dtype: dtype of matrix products and of what is between the blocks. Norms, softmax and logits are computed in float32.
    """

    def __init__(self, sizes: Sizes, *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        self.sizes, self.dtype = sizes, dtype
        # Small, because the same matrix makes the logits, which should be near 0 at first. The first norm scales the tokens up.
        embedding = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(sizes.vocabulary, sizes.width, dtype=dtype, embedding_init=embedding, rngs=rngs)
        self.blocks = nnx.List([Block(sizes, dtype=dtype, rngs=rngs) for _ in range(sizes.depth)])
        self.norm = nnx.RMSNorm(sizes.width, dtype=jnp.float32, rngs=rngs)

    def __call__(self, tokens: Array) -> Array:
        """Return the logits [B, T, vocabulary] of the token after each of the tokens [B, T], which attend to those before."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self._logits(x)

    def empty_cache(self, batch: int, length: int) -> Cache:
        """Return a cache for `batch` sequences, in which each token attends to itself and to `length - 1` before it."""
        shape = (batch, length, self.sizes.kv_heads, self.sizes.head)
        return Cache(*([jnp.zeros(shape, self.dtype) for _ in self.blocks] for _ in range(2)))

    def next(self, token: Array, position: Array, cache: Cache) -> tuple[Array, Cache]:
        """Return the logits [B, vocabulary] after one more token, and the cache with it.

        Args:
          token: int [B], the token at `position` of each sequence.
          position: int [], 0 for the first token.
          cache: the cache after the tokens before.
        """
        x, keys, values = self.embed(token[:, None]), [], []
        for block, key, value in zip(self.blocks, cache.keys, cache.values, strict=True):
            x, key, value = block.next(x, position, key, value)
            keys.append(key)
            values.append(value)
        return self._logits(x)[:, 0], Cache(keys, values)

    def _logits(self, x: Array) -> Array:
        rows = self.norm(x.astype(jnp.float32)).astype(self.dtype).reshape(-1, x.shape[-1])
        matrix = self.embed.embedding[...].astype(self.dtype)
        return jnp.matmul(rows, matrix.T, preferred_element_type=jnp.float32).reshape(*x.shape[:2], -1)


class Block(nnx.Module):
    """A transformer block: attention between tokens, then a gated network on each token. [B, T, D] → [B, T, D]."""

    def __init__(self, sizes: Sizes, *, dtype: Any, rngs: nnx.Rngs):
        self.norm1 = nnx.RMSNorm(sizes.width, dtype=dtype, rngs=rngs)
        self.attention = Attention(sizes, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.RMSNorm(sizes.width, dtype=dtype, rngs=rngs)
        self.network = GatedNetwork(sizes, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = x + self.attention(self.norm1(x))
        return x + self.network(self.norm2(x))

    def next(self, x: Array, position: Array, keys: Array, values: Array) -> tuple[Array, Array, Array]:
        """Return the output for one more token [B, 1, D], and the cached keys and values with it."""
        attended, keys, values = self.attention.next(self.norm1(x), position, keys, values)
        x = x + attended
        return x + self.network(self.norm2(x)), keys, values


class Attention(nnx.Module):
    """Causal attention of H query heads, of which H/K in a row share the keys and values of one head. [B, T, D] → [B, T, D]."""

    def __init__(self, sizes: Sizes, *, dtype: Any, rngs: nnx.Rngs):
        self.sizes = sizes
        self.query = Linear(sizes.width, sizes.heads * sizes.head, dtype=dtype, rngs=rngs)
        self.key = Linear(sizes.width, sizes.kv_heads * sizes.head, dtype=dtype, rngs=rngs)
        self.value = Linear(sizes.width, sizes.kv_heads * sizes.head, dtype=dtype, rngs=rngs)
        self.output = Linear(sizes.heads * sizes.head, sizes.width, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        query, key, value = self._heads(x, jnp.arange(x.shape[1]))
        return self._merge(jax.nn.dot_product_attention(query, key, value, is_causal=True))

    def next(self, x: Array, position: Array, keys: Array, values: Array) -> tuple[Array, Array, Array]:
        """Return the output for one more token [B, 1, D], and the keys and values [B, S, K, C] with its own.

        They replace the rows of the token S before it. Rows are not in the order of the tokens, which does not matter: keys were
        rotated by their positions, and softmax sums over rows.
        """
        query, key, value = self._heads(x, position[None])
        length = keys.shape[1]
        keys = jax.lax.dynamic_update_slice_in_dim(keys, key, position % length, axis=1)
        values = jax.lax.dynamic_update_slice_in_dim(values, value, position % length, axis=1)
        written = (jnp.arange(length) <= position)[None, None, None, :]
        return self._merge(jax.nn.dot_product_attention(query, keys, values, mask=written)), keys, values

    def _heads(self, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        """Return queries [B, T, H, C], keys [B, T, K, C] and values [B, T, K, C]; queries and keys are rotated."""
        query, key, value = (layer(x).reshape(*x.shape[:2], -1, self.sizes.head) for layer in (self.query, self.key, self.value))
        return rotate(query, positions), rotate(key, positions), value

    def _merge(self, attended: Array) -> Array:
        return self.output(attended.reshape(*attended.shape[:2], -1))


class GatedNetwork(nnx.Module):
    """SwiGLU: two layers, the first of which is multiplied by a gate. [B, T, D] → [B, T, D]."""

    def __init__(self, sizes: Sizes, *, dtype: Any, rngs: nnx.Rngs):
        self.gate = Linear(sizes.width, sizes.hidden, dtype=dtype, rngs=rngs)
        self.widen = Linear(sizes.width, sizes.hidden, dtype=dtype, rngs=rngs)
        self.narrow = Linear(sizes.hidden, sizes.width, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.narrow(jax.nn.silu(self.gate(x)) * self.widen(x))


class Linear(nnx.Module):
    """A matrix product with x viewed as a matrix of all its tokens. [..., inputs] → [..., outputs].

    From the gradients of a product [B, T, D] × [D, outputs], XLA's CPU compiler (jaxlib 0.12) makes transposed copies, which are
    slower than the product itself. With a product [B·T, D] × [D, outputs], the gated network takes half to a third of the time.
    """

    def __init__(self, inputs: int, outputs: int, *, dtype: Any, rngs: nnx.Rngs):
        self.dtype = dtype
        self.kernel = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (inputs, outputs)))

    def __call__(self, x: Array) -> Array:
        rows = x.reshape(-1, x.shape[-1]).astype(self.dtype)
        return (rows @ self.kernel[...].astype(self.dtype)).reshape(*x.shape[:-1], -1)


_ROPE_BASE = 10_000.0  # of arXiv:2104.09864, section 3.2.2


def rotate(x: Array, positions: Array) -> Array:
    """Rotate pairs of channels by angles proportional to the position: RoPE, equation 34 of arXiv:2104.09864.

    The dot product of a rotated query and a rotated key then depends on the difference of their positions, and not on the
    positions. Pair i is channels i and i + C/2, as in GPT-NeoX and Llama; its angle is position · 10000^(-2i/C).

    Args:
      x: float [B, T, heads, C], C even.
      positions: int [T].

    Returns:
      The rotated x, with its shape and dtype. Angles are float32, as bfloat16 has 8 bits for positions.
    """
    half = x.shape[-1] // 2
    frequencies = _ROPE_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = (positions[:, None] * frequencies)[:, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
