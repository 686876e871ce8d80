"""Rules of linear algebra on many matrices [..., M, N], and of Fourier transforms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.shard.trace.rules.rule import Rule, leading, replicated, rule_for


@rule_for(
    *("cholesky", "lu", "qr", "eig", "eigh", "svd", "schur", "hessenberg", "tridiagonal", "householder_product", "ormqr"),
    *("triangular_solve", "tridiagonal_solve", "symmetric_product"),
)
def of_matrices(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Matrices are independent of each other; each stays whole."""
    return leading(params, operands, results, count=max(len(each.shape) for each in operands) - 2)


@rule_for("cholesky_update")
def of_one_matrix(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    return replicated(params, operands, results)


@rule_for("lu_pivots_to_permutation")
def of_vectors(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    return leading(params, operands, results, count=len(operands[0].shape) - 1)


@rule_for("fft")
def fft(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """The transforms of a batch are independent, but XLA's partitioner gathers the whole batch for them."""
    return replicated(params, operands, results)
