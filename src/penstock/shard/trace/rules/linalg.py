"""Sharding rules of linear algebra on batches of matrices [..., M, N], and of Fourier transforms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.shard.trace.rules.rule import Rule, leading_dims, replicated, rule_for


@rule_for(
    *("cholesky", "lu", "qr", "eig", "eigh", "svd", "schur", "hessenberg", "tridiagonal", "householder_product", "ormqr"),
    *("triangular_solve", "tridiagonal_solve", "symmetric_product"),
)
def matrix_batches(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `b..->b..`: the matrices of a batch are independent, and each is replicated."""
    return leading_dims(params, operands, results, count=max(len(aval.shape) for aval in operands) - 2)


@rule_for("cholesky_update")
def cholesky_update(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `..,.->..`: the operation takes a single matrix, which is replicated."""
    return replicated(params, operands, results)


@rule_for("lu_pivots_to_permutation")
def lu_pivots_to_permutation(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `b.->b.`: the vectors of pivots of a batch are independent."""
    return leading_dims(params, operands, results, count=len(operands[0].shape) - 1)


@rule_for("fft")
def fft(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `..->..`: the transforms of a batch are independent, but XLA's partitioner gathers the whole batch."""
    return replicated(params, operands, results)
