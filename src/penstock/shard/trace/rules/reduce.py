"""Sharding rules of reductions, cumulative operations, windows and sorting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.shard.trace.rules.rule import Rule, batched, replicated, rule_for


@rule_for("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or")
def reduce(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `ij->i`: the result is partial over the reduced dimensions."""
    shape, axes = tuple(operands[0].shape), params["axes"]
    dims = tuple(range(len(shape)))
    return Rule(shape, (dims,), (tuple(dim for dim in dims if dim not in axes),))


@rule_for("argmax", "argmin", "reduce_xor")
def reduce_without_all_reduce(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `i.->i`: reduced dimensions are replicated, as no all-reduce combines partial indices or exclusive ors."""
    return _replicate_reduced(operands, results, params["axes"])


@rule_for("reduce")
def reduce_any(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `i.,i.->i,i`: a reduction by a function of the user, for which there is no all-reduce."""
    return _replicate_reduced(operands, results, params["dimensions"])


def _replicate_reduced(operands: Sequence[Any], results: Sequence[Any], axes: Sequence[int]) -> Rule:
    """Return `i.->i`: the dimensions in `axes` are replicated, the others are independent."""
    rank = len(operands[0].shape)
    factor = {dim: number for number, dim in enumerate(dim for dim in range(rank) if dim not in axes)}
    dims = tuple(factor.get(dim) for dim in range(rank))
    kept = tuple(range(len(factor)))
    return Rule(tuple(results[0].shape), tuple(dims if aval.shape else () for aval in operands), (kept,) * len(results))


@rule_for("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `i.->i.`: the dimension that is accumulated along is replicated."""
    return batched(params, operands, results, replicated_dims=[params["axis"]])


@rule_for("sort")
def sort(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `i.,i.->i.,i.`: the sorted dimension is replicated."""
    return batched(params, operands, results, replicated_dims=[params["dimension"]])


@rule_for("top_k")
def top_k(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `..->..,..`: XLA's partitioner gathers the operand, as for any library call.

    The other dimensions are independent, but nothing may be sharded.
    """
    return replicated(params, operands, results)


@rule_for("approx_top_k")
def approx_top_k(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `i.->i.,i.`: the dimension that is searched is replicated."""
    return batched(params, operands, results, replicated_dims=[params["reduction_dimension"] % len(operands[0].shape)])


@rule_for("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min")
def reduce_window(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `n..c->n..c`: pooling. The dimensions that a window spans or moves along are replicated."""
    return batched(params, operands, results, replicated_dims=_window_dims(params))


@rule_for("select_and_scatter_add", "select_and_gather_add")
def pooling_gradient(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `n..c,n..c->n..c`: the dimensions that a window spans or moves along are replicated."""
    return batched(params, operands, results, replicated_dims=_window_dims(params))


def _window_dims(params: Mapping[str, Any]) -> list[int]:
    """Return the dimensions along which windows span more than one element, or have a stride, a dilation or padding."""
    rank = len(params["window_dimensions"])
    # The gradients of pooling have no parameter for a dilation.
    extents = ((1,) * rank, params["window_dimensions"], params["window_strides"], params.get("base_dilation") or (1,) * rank)
    return [dim for dim, sizes in enumerate(zip(*extents, strict=True)) if max(sizes) > 1 or any(params["padding"][dim])]
