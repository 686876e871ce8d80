"""Examples of reductions, scans along a dimension, windows and sorting."""

from __future__ import annotations

import jax
import numpy as np
from hypothesis import strategies as st
from jax import lax
from tests.shard.trace.rules.examples import distinct, even, example, examples, shapes, size

ALONG = st.integers(0, 7)


@examples("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin", "reduce")
@st.composite
def reduction(draw):
    shape = draw(shapes(2, 3))
    axes = tuple(sorted({draw(ALONG) % len(shape), draw(ALONG) % len(shape)}))

    def reduce(x):
        own = lax.reduce((x, x), (0.0, 1.0), lambda a, b: (a[0] + b[0], a[1] * b[1] + 0 * b[0]), axes)
        return x.sum(axes), x.max(axes), x.min(axes), x.prod(axes), x.argmax(axes[0]), x.argmin(axes[0]), own

    return example(reduce, np.minimum(distinct(shape) % 7 + 1, 2.0))


@examples("reduce_and", "reduce_or", "reduce_xor")
@st.composite
def logical_reduction(draw):
    shape = draw(shapes(2, 3))
    axis = draw(ALONG) % len(shape)
    return example(lambda x: (x.all(axis), x.any(axis), lax.reduce_xor(x, (axis,))), distinct(shape) % 3 > 0)


@examples("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
@st.composite
def scan_along_a_dimension(draw):
    shape = draw(shapes(2, 3))
    axis, reverse = draw(ALONG) % len(shape), draw(st.booleans())

    def scan(x):
        return tuple(
            each(x, axis, reverse=reverse) for each in (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp)
        )

    return example(scan, distinct(shape) % 3)


@examples("sort")
@st.composite
def sorting(draw):
    shape = draw(shapes(2, 3))
    axis, count = draw(ALONG) % len(shape), draw(st.integers(1, 3))
    return example(lambda *x: lax.sort(x, dimension=axis, num_keys=min(2, count)), *[distinct(shape)] * count)


@examples("top_k", "approx_top_k")
@st.composite
def largest(draw):
    shape = (*draw(shapes(1, 2)), draw(even))
    k = draw(st.integers(1, shape[-1]))
    return example(lambda x: (lax.top_k(x, k), lax.approx_max_k(x, k)), distinct(shape))


@examples("top_k")
@st.composite
def largest_along_another_dimension(draw):
    return example(lambda x: lax.top_k(x, 2, axis=0), distinct((draw(even), draw(even))))


def _pooling(reduce, start):
    def pool(window, strides, padding):
        return lambda x: lax.reduce_window(x, start, reduce, window, strides, padding)

    return pool


WINDOWS = st.sampled_from(
    [((1, 2, 2, 1), (1, 2, 2, 1)), ((1, 3, 1, 1), (1, 1, 1, 1)), ((1, 1, 3, 1), (1, 2, 3, 1)), ((1, 3, 3, 1), (1, 2, 2, 1))]
)


@examples("reduce_window_max", "reduce_window_min", "reduce_window_sum", "reduce_window")
@st.composite
def pooling(draw):
    shape = (draw(even), draw(st.sampled_from([4, 6, 8])), draw(st.sampled_from([4, 6, 8])), draw(size))
    window, strides = draw(WINDOWS)
    padding = draw(st.sampled_from(["SAME", "VALID", ((0, 0), (1, 1), (0, 1), (2, 0))]))

    def pool(x):
        known = tuple(
            lax.reduce_window(x, start, reduce, window, strides, padding)
            for reduce, start in [(lax.max, -np.inf), (lax.min, np.inf), (lax.add, 0.0)]
        )
        return *known, lax.reduce_window(x, 0.0, lambda a, b: a + b + 0 * a, window, strides, padding)

    return example(pool, shape)


@examples("select_and_scatter_add", "select_and_gather_add")
@st.composite
def gradient_of_pooling(draw):
    shape = (draw(even), draw(st.sampled_from([4, 6, 8])), draw(st.sampled_from([4, 8])), draw(size))
    window, strides = draw(WINDOWS)
    padding = draw(st.sampled_from(["SAME", "VALID"]))

    def pool(x):
        return lax.reduce_window(x, -np.inf, lax.max, window, strides, padding)

    return example(lambda x: (jax.vjp(pool, x)[1](pool(x)), jax.jvp(pool, (x,), (x,))), distinct(shape))
