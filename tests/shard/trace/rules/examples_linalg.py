"""Examples of linear algebra and Fourier transforms."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax
from tests.shard.trace.rules.examples import even, example, examples, numbers, size


@st.composite
def _matrices(draw):
    """Draw positive definite matrices."""
    shape = (draw(even), *draw(st.sampled_from([(), (3,)])), 4, 4)
    one = numbers(shape) / 8
    return one @ np.swapaxes(one, -1, -2) + 2 * np.eye(4, dtype=np.float32)


@examples(
    "cholesky",
    "lu",
    "eigh",
    "eig",
    "svd",
    "qr",
    "householder_product",
    "ormqr",
    "schur",
    "hessenberg",
    "tridiagonal",
    "triangular_solve",
    "lu_pivots_to_permutation",
    "symmetric_product",
)
@st.composite
def factorisation(draw):
    def factors(a):
        packed, taus = lax.linalg.hessenberg(a)
        return (
            lax.linalg.cholesky(a, symmetrize_input=False),
            lax.linalg.lu_pivots_to_permutation(lax.linalg.lu(a)[1], 4),
            lax.linalg.eigh(a, symmetrize_input=False),
            lax.linalg.eig(a),
            lax.linalg.svd(a, compute_uv=False),
            lax.linalg.qr(a),
            lax.linalg.householder_product(packed, taus),
            lax.linalg.ormqr(packed, taus, a),
            lax.linalg.schur(a),
            lax.linalg.tridiagonal(a),
            lax.linalg.triangular_solve(a, a, left_side=True, lower=True),
            lax.linalg.symmetric_product(a, a),
        )

    return example(factors, draw(_matrices()))


@examples("tridiagonal_solve")
@st.composite
def band(draw):
    batch = draw(even)
    return example(
        lax.linalg.tridiagonal_solve, *[np.ones((batch, 4), "float32") * each for each in (1, 4, 1)], (batch, 4, draw(size))
    )


@examples("fft")
@st.composite
def transform(draw):
    shape = (draw(even), *draw(st.sampled_from([(), (3,)])), 4, 4)
    return example(draw(st.sampled_from([jnp.fft.rfft, jnp.fft.fft2, jnp.fft.ifft])), shape)


@examples("cholesky_update")
@st.composite
def update_of_a_factor(draw):
    count = draw(even)
    return example(lax.linalg.cholesky_update, np.eye(count, dtype="float32"), (count,))
