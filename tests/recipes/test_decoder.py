import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from penstock.recipes.decoder import Attention, Decoder, Linear, Sizes, rotate

SMALL = Sizes(vocabulary=11, width=32, depth=2, heads=4, kv_heads=2, hidden=48)


def _decoder(sizes: Sizes = SMALL, **settings) -> Decoder:
    decoder = Decoder(sizes, rngs=nnx.Rngs(0), **settings)
    # Larger than at the start of a training, so that the blocks change the logits visibly.
    decoder.embed.embedding[...] = jax.random.normal(jax.random.key(1), decoder.embed.embedding.shape)
    return decoder


def _tokens(batch: int, length: int) -> jax.Array:
    return jax.random.randint(jax.random.key(2), (batch, length), 0, SMALL.vocabulary)


def test_a_later_token_does_not_change_earlier_logits():
    decoder, tokens = _decoder(), _tokens(3, 12)
    before = decoder(tokens)
    for changed in (0, 5, 11):
        after = decoder(tokens.at[:, changed].add(1) % SMALL.vocabulary)
        np.testing.assert_array_equal(after[:, :changed], before[:, :changed])
        assert (jnp.abs(after - before)[:, changed:].max(axis=(0, 2)) > 1e-4).all()


def test_sequences_of_a_batch_are_independent():
    decoder, tokens = _decoder(), _tokens(3, 12)
    np.testing.assert_allclose(decoder(tokens)[1:2], decoder(tokens[1:2]), atol=1e-5)


def test_scores_of_rotated_queries_and_keys_depend_on_the_distance_only():
    query, key = (jax.random.normal(jax.random.key(k), (1, 1, 2, 16)) for k in range(2))

    def score(at: int, other: int) -> jax.Array:
        return jnp.sum(rotate(query, jnp.array([at])) * rotate(key, jnp.array([other])), axis=-1)

    for distance in (0, 1, 7, 100):
        np.testing.assert_allclose(score(distance, 0), score(distance + 29, 29), atol=1e-4)
    assert abs(score(7, 0) - score(0, 7)).max() > 0.1
    assert abs(score(7, 0) - score(8, 0)).max() > 0.1


def test_rotation_keeps_lengths_and_does_nothing_at_position_0():
    x = jax.random.normal(jax.random.key(0), (2, 9, 3, 16))
    rotated = rotate(x, jnp.arange(9))
    np.testing.assert_array_equal(rotated[:, 0], x[:, 0])
    np.testing.assert_allclose(jnp.linalg.norm(rotated, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5)


def test_rotation_turns_each_pair_of_channels_by_its_angle():
    x = jax.random.normal(jax.random.key(0), (1, 5, 1, 6))
    pairs = np.asarray(x[0, :, 0, :3]) + 1j * np.asarray(x[0, :, 0, 3:])
    angles = np.arange(5)[:, None] * 10_000.0 ** (-2 * np.arange(3) / 6)
    expected = pairs * np.exp(1j * angles)
    np.testing.assert_allclose(rotate(x, jnp.arange(5))[0, :, 0], np.hstack([expected.real, expected.imag]), atol=1e-5)


def test_grouped_queries_are_multi_head_attention_with_repeated_keys_and_values():
    grouped = Attention(SMALL, dtype=jnp.float32, rngs=nnx.Rngs(0))
    full = Attention(dataclasses.replace(SMALL, kv_heads=SMALL.heads), dtype=jnp.float32, rngs=nnx.Rngs(1))

    def repeated(kernel: jax.Array) -> jax.Array:
        heads = kernel.reshape(SMALL.width, SMALL.kv_heads, SMALL.head)
        return jnp.repeat(heads, SMALL.heads // SMALL.kv_heads, axis=1).reshape(SMALL.width, -1)

    full.query.kernel[...], full.output.kernel[...] = grouped.query.kernel[...], grouped.output.kernel[...]
    full.key.kernel[...], full.value.kernel[...] = repeated(grouped.key.kernel[...]), repeated(grouped.value.kernel[...])
    x = jax.random.normal(jax.random.key(3), (2, 10, SMALL.width))
    np.testing.assert_allclose(grouped(x), full(x), atol=1e-5)


def test_attention_is_the_formula():
    sizes = dataclasses.replace(SMALL, heads=1, kv_heads=1)
    attention = Attention(sizes, dtype=jnp.float32, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(3), (1, 6, sizes.width))
    query, key, value = (layer(x)[:, :, None] for layer in (attention.query, attention.key, attention.value))
    scores = rotate(query, jnp.arange(6))[0, :, 0] @ rotate(key, jnp.arange(6))[0, :, 0].T / np.sqrt(sizes.width)
    weights = jax.nn.softmax(jnp.where(np.tri(6, dtype=bool), scores, -jnp.inf))
    np.testing.assert_allclose(attention(x)[0], attention.output(weights @ value[0, :, 0]), atol=1e-5)


def test_logits_with_a_cache_are_those_of_the_whole_sequence():
    decoder, tokens = _decoder(), _tokens(3, 12)
    cache, logits = decoder.empty_cache(3, 12), []
    for position in range(12):
        row, cache = decoder.next(tokens[:, position], jnp.asarray(position), cache)
        logits.append(row)
    np.testing.assert_allclose(jnp.stack(logits, axis=1), decoder(tokens), atol=1e-4)


def test_a_full_cache_forgets_the_oldest_tokens():
    # In one block, keys and values are those of single tokens, so a cache of 5 rows is attention to the last 5 tokens.
    decoder, tokens = _decoder(dataclasses.replace(SMALL, depth=1)), _tokens(2, 14)
    cache = decoder.empty_cache(2, 5)
    for position in range(14):
        logits, cache = decoder.next(tokens[:, position], jnp.asarray(position), cache)
        seen = tokens[:, max(0, position - 4) : position + 1]
        np.testing.assert_allclose(logits, decoder(seen)[:, -1], atol=1e-4)


def test_bfloat16_has_parameters_and_logits_of_float32():
    decoder, exact, tokens = _decoder(dtype=jnp.bfloat16), _decoder(), _tokens(2, 12)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(decoder))} == {jnp.dtype("float32")}
    logits = decoder(tokens)
    assert logits.dtype == jnp.float32
    assert decoder.empty_cache(1, 4).keys[0].dtype == jnp.bfloat16
    error = jnp.abs(logits - exact(tokens)).max()
    assert 0 < error < 0.1 * jnp.abs(logits).max()


def test_first_logits_are_small_so_that_all_tokens_are_equally_likely():
    logits = Decoder(SMALL, rngs=nnx.Rngs(0))(_tokens(4, 12))
    assert jnp.abs(logits).max() < 1


@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8)])
def test_a_linear_layer_works_on_the_last_dimension(shape):
    layer = Linear(8, 5, dtype=jnp.float32, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), shape)
    np.testing.assert_allclose(layer(x), jnp.dot(x, layer.kernel[...]), atol=1e-5)
