import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from penstock.recipes.language_model import Attention, Decoder, Linear, Sizes, rotate

pytestmark = pytest.mark.usefixtures("programs_are_compiled_fast")

SMALL = Sizes(vocabulary=11, width=32, depth=2, heads=4, kv_heads=2, hidden=48)


def _decoder(sizes: Sizes = SMALL, **settings) -> Decoder:
    decoder = Decoder(sizes, rngs=nnx.Rngs(0), **settings)
    # Larger than at the start of a training, so that the blocks change the logits visibly.
    decoder.embed.embedding[...] = jax.random.normal(jax.random.key(1), decoder.embed.embedding.shape)
    return decoder


def _tokens(batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(2).integers(0, SMALL.vocabulary, (batch, length), np.int32)


# Operations that are not compiled together take seconds, because each is a program.
_rotate = jax.jit(rotate)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return _decoder()


@pytest.fixture(scope="module")
def logits(decoder):
    """The logits of tokens [3, 12]."""
    return jax.jit(decoder)


def test_a_later_token_does_not_change_earlier_logits(logits):
    tokens = _tokens(3, 12)
    before = np.asarray(logits(tokens))
    for changed in (0, 5, 11):
        other = tokens.copy()
        other[:, changed] = (other[:, changed] + 1) % SMALL.vocabulary
        after = np.asarray(logits(other))
        np.testing.assert_array_equal(after[:, :changed], before[:, :changed])
        assert (np.abs(after - before)[:, changed:].max(axis=(0, 2)) > 1e-4).all()


def test_sequences_of_a_batch_are_independent(logits):
    tokens = _tokens(3, 12)
    before = np.asarray(logits(tokens))
    after = np.asarray(logits(tokens[[1, 1, 2]]))
    np.testing.assert_allclose(after, before[[1, 1, 2]], atol=1e-5)
    assert np.abs(before[1] - before[0]).max() > 0.1


def test_scores_of_rotated_queries_and_keys_depend_on_the_distance_only():
    query, key = np.random.default_rng(0).normal(size=(2, 1, 1, 2, 16)).astype(np.float32)

    def score(at: int, other: int) -> np.ndarray:
        return np.sum(np.asarray(_rotate(query, np.array([at]))) * np.asarray(_rotate(key, np.array([other]))), axis=-1)

    for distance in (0, 1, 7, 100):
        np.testing.assert_allclose(score(distance, 0), score(distance + 29, 29), atol=1e-4)
    assert abs(score(7, 0) - score(0, 7)).max() > 0.1
    assert abs(score(7, 0) - score(8, 0)).max() > 0.1


def test_rotation_turns_each_pair_of_channels_by_its_angle():
    x = np.random.default_rng(0).normal(size=(1, 5, 1, 6)).astype(np.float32)
    pairs = x[0, :, 0, :3] + 1j * x[0, :, 0, 3:]
    angles = np.arange(5)[:, None] * 10_000.0 ** (-2 * np.arange(3) / 6)
    expected = pairs * np.exp(1j * angles)
    np.testing.assert_allclose(_rotate(x, np.arange(5))[0, :, 0], np.hstack([expected.real, expected.imag]), atol=1e-5)


def test_grouped_queries_are_multi_head_attention_with_repeated_keys_and_values():
    grouped = Attention(SMALL, dtype=jnp.float32, rngs=nnx.Rngs(0))
    full = Attention(dataclasses.replace(SMALL, kv_heads=SMALL.heads), dtype=jnp.float32, rngs=nnx.Rngs(1))

    def repeated(kernel: jax.Array) -> jax.Array:
        heads = kernel.reshape(SMALL.width, SMALL.kv_heads, SMALL.head)
        return jnp.repeat(heads, SMALL.heads // SMALL.kv_heads, axis=1).reshape(SMALL.width, -1)

    full.query.kernel[...], full.output.kernel[...] = grouped.query.kernel[...], grouped.output.kernel[...]
    full.key.kernel[...], full.value.kernel[...] = repeated(grouped.key.kernel[...]), repeated(grouped.value.kernel[...])
    x = jax.random.normal(jax.random.key(3), (2, 10, SMALL.width))
    np.testing.assert_allclose(*jax.jit(lambda x: (grouped(x), full(x)))(x), atol=1e-5)


def test_attention_is_the_formula():
    sizes = dataclasses.replace(SMALL, heads=1, kv_heads=1)
    attention = Attention(sizes, dtype=jnp.float32, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(3), (1, 6, sizes.width))

    def formula(x: jax.Array) -> jax.Array:
        query, key, value = (layer(x)[:, :, None] for layer in (attention.query, attention.key, attention.value))
        scores = rotate(query, jnp.arange(6))[0, :, 0] @ rotate(key, jnp.arange(6))[0, :, 0].T / np.sqrt(sizes.width)
        weights = jax.nn.softmax(jnp.where(np.tri(6, dtype=bool), scores, -jnp.inf))
        return attention.output(weights @ value[0, :, 0])

    np.testing.assert_allclose(*jax.jit(lambda x: (attention(x)[0], formula(x)))(x), atol=1e-5)


def test_logits_with_a_cache_are_those_of_the_whole_sequence(decoder, logits):
    tokens, draw = _tokens(3, 12), jax.jit(decoder.next)
    cache, rows = decoder.empty_cache(3, 12), []
    for position in range(12):
        row, cache = draw(tokens[:, position], np.int32(position), cache)
        rows.append(row)
    np.testing.assert_allclose(np.stack(rows, axis=1), logits(tokens), atol=1e-4)


def test_a_full_cache_forgets_the_oldest_tokens():
    # In one block, keys and values are those of single tokens, so a cache of 5 rows is attention to the last 5 tokens.
    decoder, tokens = _decoder(dataclasses.replace(SMALL, depth=1)), _tokens(2, 14)
    draw, logits = jax.jit(decoder.next), jax.jit(lambda tokens: decoder(tokens)[:, -1])
    cache = decoder.empty_cache(2, 5)
    for position in range(14):
        row, cache = draw(tokens[:, position], np.int32(position), cache)
        if position >= 4:
            np.testing.assert_allclose(row, logits(tokens[:, position - 4 : position + 1]), atol=1e-4)


def test_bfloat16_has_parameters_and_logits_of_float32(logits):
    decoder, tokens = _decoder(dtype=jnp.bfloat16), _tokens(3, 12)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(decoder))} == {jnp.dtype("float32")}
    rounded, exact = jax.jit(decoder)(tokens), np.asarray(logits(tokens))
    assert rounded.dtype == jnp.float32
    assert decoder.empty_cache(1, 4).keys[0].dtype == jnp.bfloat16
    assert 0 < np.abs(rounded - exact).max() < 0.1 * np.abs(exact).max()


def test_first_logits_are_small_so_that_all_tokens_are_equally_likely():
    fresh = Decoder(SMALL, rngs=nnx.Rngs(0))
    assert np.abs(jax.jit(fresh)(_tokens(3, 12))).max() < 1


def test_a_linear_layer_works_on_the_last_dimension():
    layer = Linear(8, 5, dtype=jnp.float32, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)
    np.testing.assert_allclose(layer(x), x @ np.asarray(layer.kernel[...]), atol=1e-5)
