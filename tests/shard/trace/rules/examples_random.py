"""Examples of random numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax import lax
from tests.shard.trace.rules.examples import even, example, examples, shapes, size


@examples("random_bits")
@st.composite
def bits(draw):
    shape = draw(shapes(1, 3))
    return example(lambda key: jax.random.bits(key, shape), jax.random.key(0))


@examples("random_bits", "random_split", "random_fold_in", "random_unwrap", "random_wrap", "random_clone")
@st.composite
def many_keys(draw):
    keys = jax.random.split(jax.random.key(0), draw(even))
    shape = (draw(size),)

    def use(keys):
        return (
            jax.vmap(lambda key: jax.random.bits(key, shape))(keys),
            jax.vmap(lambda key: jax.random.split(key, shape))(keys),
            jax.vmap(jax.random.fold_in)(keys, jnp.arange(len(keys))),
            jax.random.wrap_key_data(jax.random.key_data(keys)),
            jax.random.clone(keys),
        )

    return example(use, keys)


@examples("random_split")
@st.composite
def one_key(draw):
    return example(lambda key: jax.random.split(key, (4, 2)), jax.random.key(draw(size)))


@examples("random_seed")
@st.composite
def seeds(draw):
    return example(jax.random.key, jnp.uint32(draw(size)))


@examples("threefry2x32")
@st.composite
def counts(draw):
    shape = (draw(even),)
    from jax.extend.random import threefry2x32_p

    words = jnp.arange(shape[0], dtype="uint32")
    return example(threefry2x32_p.bind, words, words + 1, words + 2, words + 3)


@examples("rng_bit_generator")
@st.composite
def generator(draw):
    shape = draw(shapes(1, 2))
    return example(lambda key: lax.rng_bit_generator(key, shape), jnp.arange(4, dtype="uint32"))


@examples("rng_uniform")
@st.composite
def stateful(draw):
    """Draw a generator without a seed. Its range is tiny, so that all its numbers are equal within the tolerance."""
    shape = draw(shapes(1, 2))
    return example(lambda a, b: lax.rng_uniform(a, b, shape), jnp.float32(0), jnp.float32(1e-9))


@examples("random_gamma")
@st.composite
def gamma(draw):
    return example(jax.random.gamma, jax.random.key(0), draw(st.sampled_from([(1, 2), (2, 3)])))
