"""Rules of reductions, scans along a dimension, windows and sorting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.shard.trace.rules.rule import Rule, batched, replicated, rule_for


@rule_for("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or")
def reduce(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """What is kept keeps its layout; over what is reduced the result is partial."""
    shape, axes = tuple(operands[0].shape), params["axes"]
    dims = tuple(range(len(shape)))
    return Rule(shape, (dims,), (tuple(dim for dim in dims if dim not in axes),))


@rule_for("argmax", "argmin", "reduce_xor")
def searched(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """What is searched stays whole: an index is not the sum of partial indices. Nor is there an all-reduce of exclusive ors."""
    return _kept(operands, results, params["axes"])


@rule_for("reduce")
def reduce_any(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """A reduction by a function of the program's own, for which there is no all-reduce."""
    return _kept(operands, results, params["dimensions"])


def _kept(operands: Sequence[Any], results: Sequence[Any], axes: Sequence[int]) -> Rule:
    rank = len(operands[0].shape)
    factor = {dim: at for at, dim in enumerate(dim for dim in range(rank) if dim not in axes)}
    dims = tuple(factor.get(dim) for dim in range(rank))
    kept = tuple(range(len(factor)))
    return Rule(tuple(results[0].shape), tuple(dims if each.shape else () for each in operands), (kept,) * len(results))


@rule_for("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    return batched(params, operands, results, replicated_dims=[params["axis"]])


@rule_for("sort")
def sort(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    return batched(params, operands, results, replicated_dims=[params["dimension"]])


@rule_for("top_k")
def top_k(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Independent along all dimensions but one, and yet XLA's partitioner gathers the operand, as for any call of a library."""
    return replicated(params, operands, results)


@rule_for("approx_top_k")
def approx_top_k(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    return batched(params, operands, results, replicated_dims=[params["reduction_dimension"] % len(operands[0].shape)])


@rule_for("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min")
def reduce_window(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Pooling: what a window moves along stays whole."""
    return batched(params, operands, results, replicated_dims=_moved_along(params))


@rule_for("select_and_scatter_add", "select_and_gather_add")
def pooling_gradient(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    return batched(params, operands, results, replicated_dims=_moved_along(params))


def _moved_along(params: Mapping[str, Any]) -> list[int]:
    rank = len(params["window_dimensions"])
    # The gradients of pooling have no dilation: JAX gives none to them.
    ones = ((1,) * rank, params["window_dimensions"], params["window_strides"], params.get("base_dilation") or (1,) * rank)
    return [dim for dim, sizes in enumerate(zip(*ones, strict=True)) if max(sizes) > 1 or any(params["padding"][dim])]
