"""Rules of reductions, scans along a dimension, windows and sorting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.shard.rules.rule import Rule, batched, rule_for, whole


@rule_for("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor")
def reduce(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """What is kept keeps its layout; over what is reduced the result is partial."""
    shape, axes = tuple(operands[0].shape), params["axes"]
    dims = tuple(range(len(shape)))
    return Rule(shape, (dims,), (tuple(dim for dim in dims if dim not in axes),))


@rule_for("argmax", "argmin")
def argmax(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """An index is not the sum of partial indices: what is searched stays whole."""
    shape, axes = tuple(operands[0].shape), params["axes"]
    dims = tuple(None if dim in axes else dim for dim in range(len(shape)))
    return Rule(shape, (dims,), (tuple(dim for dim in dims if dim is not None),))


@rule_for("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    return batched(params, operands, results, whole_dims=[params["axis"]])


@rule_for("sort")
def sort(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    return batched(params, operands, results, whole_dims=[params["dimension"]])


@rule_for("top_k")
def top_k(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    return batched(params, operands, results, whole_dims=[params.get("axis", -1) % len(operands[0].shape)])


@rule_for("approx_top_k")
def approx_top_k(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    return batched(params, operands, results, whole_dims=[params["reduction_dimension"] % len(operands[0].shape)])


@rule_for("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def reduce_window(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Pooling: dimensions whose window is one are independent."""
    moving = [dim for dim, size in enumerate(params["window_dimensions"]) if size > 1 or params["window_strides"][dim] > 1]
    return batched(params, operands, results, whole_dims=moving)


@rule_for("reduce_window")
def reduce_window_any(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    return reduce_window(params, operands, results)


@rule_for("select_and_scatter_add", "select_and_gather_add")
def pooling_gradient(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    moving = [dim for dim, size in enumerate(params["window_dimensions"]) if size > 1 or params["window_strides"][dim] > 1]
    return batched(params, operands, results, whole_dims=moving)


@rule_for("cholesky", "triangular_solve", "eigh", "qr", "householder_product", "lu", "svd", "fft", "tridiagonal_solve")
def last_two_whole(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Linear algebra of many matrices [..., M, N], and Fourier transforms of the last dimensions."""
    count = len(params["fft_lengths"]) if "fft_lengths" in params else 2
    rank = len(operands[0].shape)
    leading = tuple(range(max(rank - count, 0)))
    if any(tuple(each.shape[: len(leading)]) != tuple(operands[0].shape[: len(leading)]) for each in (*operands, *results)):
        return whole(params, operands, results)
    sizes = tuple(operands[0].shape[: len(leading)])

    def dims(each: Any) -> tuple[int | None, ...]:
        return (*leading, *(None,) * (len(each.shape) - len(leading)))

    return Rule(sizes, tuple(map(dims, operands)), tuple(map(dims, results)))
