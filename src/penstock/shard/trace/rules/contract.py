"""Sharding rules of matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.shard.trace.rules.rule import Rule, replicated, rule_for


class _Factors:
    """The factors of a rule that is being built, numbered in order."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def new(self, size: int) -> int:
        """Add a factor and return its number."""
        self.sizes.append(size)
        return len(self.sizes) - 1


@rule_for("dot_general")
def dot_general(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `bmk,bkn->bmn`: batch, free and contracted dimensions in any number. The result is partial over k."""
    (contract_left, contract_right), (batch_left, batch_right) = params["dimension_numbers"]
    left, right = operands[0].shape, operands[1].shape
    factors = _Factors()
    dims_left: list[int | None] = [None] * len(left)
    dims_right: list[int | None] = [None] * len(right)
    result: list[int] = []
    for one, other in zip(batch_left, batch_right, strict=True):
        dims_left[one] = dims_right[other] = factors.new(left[one])
        result.append(dims_left[one])
    for one, other in zip(contract_left, contract_right, strict=True):
        dims_left[one] = dims_right[other] = factors.new(left[one])
    for dims, shape in ((dims_left, left), (dims_right, right)):
        for dim, size in enumerate(shape):
            if dims[dim] is None:
                dims[dim] = factors.new(size)
                result.append(dims[dim])  # type: ignore[arg-type]
    return Rule(tuple(factors.sizes), (tuple(dims_left), tuple(dims_right)), (tuple(result),))


@rule_for("ragged_dot_general")
def ragged_dot_general(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `mk,gkn,.->mn`: rows [M, K] in groups, weights [G, K, N], group sizes [G] → [M, N], partial over k and g.

    This holds for the form that JAX uses where there is no kernel: a product over K and G of masked rows. If the weights are
    sharded along G (experts), each device computes the rows of its own groups, so that the result is partial. The group sizes
    are exchanged as well, which are few bytes. If the ragged dimension is contracted (the gradient of the weights), the rule is
    `mk,mn,.->gkn`, partial over m. Group sizes are replicated.
    """
    numbers = params["ragged_dot_dimension_numbers"]
    (contract_left, contract_right), (batch_left, _) = numbers.dot_dimension_numbers
    ragged, groups = set(numbers.lhs_ragged_dimensions), set(numbers.rhs_group_dimensions)
    left, right = operands[0].shape, operands[1].shape
    factors = _Factors()
    dims_left: list[int | None] = [None] * len(left)
    dims_right: list[int | None] = [None] * len(right)
    result: list[int | None] = []
    if batch_left:
        return replicated(params, operands, results)
    group = factors.new(operands[2].shape[-1])
    for one, other in zip(contract_left, contract_right, strict=True):
        dims_left[one] = dims_right[other] = factors.new(left[one])
    if ragged & set(contract_left):
        result.append(group)
    for dim in groups:
        dims_right[dim] = group
    for dims, shape in ((dims_left, left), (dims_right, right)):
        for dim, size in enumerate(shape):
            if dims[dim] is None:
                dims[dim] = factors.new(size)
                result.append(dims[dim])
    if len(result) != len(results[0].shape):
        return replicated(params, operands, results)
    return Rule(tuple(factors.sizes), (tuple(dims_left), tuple(dims_right), (None,) * len(operands[2].shape)), (tuple(result),))


@rule_for("conv_general_dilated")
def conv_general_dilated(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `n..c,..co->n..o`: batch, input features (over which the result is partial) and output features.

    Positions and windows are replicated, with two exceptions:

    - the window is one element, `nhwc,..co->nhwo`: positions are independent;
    - the window is the whole image, as in the gradient of the case above, `nhwc,hwco->n..o`: the result is partial over h and w.

    Windows that do not overlap (patches) are replicated too, because of a fault of XLA: `_faults.PATCHES_SHARDED_TWICE`.

    In a depthwise convolution, the groups of features are a factor of both operands and the result, `n..g,...g->n..g`. So are
    the groups of the batch in the gradient of a grouped convolution. For groups of more than one input feature, XLA's
    partitioner gathers all operands, even if only the batch is sharded, so nothing may be sharded.
    """
    numbers = params["dimension_numbers"]
    left, right = operands[0].shape, operands[1].shape
    factors = _Factors()
    dims_left: list[int | None] = [None] * len(left)
    dims_right: list[int | None] = [None] * len(right)
    result: list[int | None] = [None] * len(results[0].shape)
    (left_batch, left_feature, *positions), (right_out, right_in, *windows), (out_batch, out_feature, *out_positions) = (
        numbers.lhs_spec,
        numbers.rhs_spec,
        numbers.out_spec,
    )
    feature_groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    if batch_groups > 1:
        dims_left[left_batch] = dims_right[right_out] = result[out_feature] = factors.new(batch_groups)
        dims_left[left_feature] = dims_right[right_in] = factors.new(left[left_feature])
    elif feature_groups > 1:
        if right[right_in] == 1:
            dims_left[left_batch] = result[out_batch] = factors.new(left[left_batch])
            dims_left[left_feature] = dims_right[right_out] = result[out_feature] = factors.new(feature_groups)
    else:
        dims_left[left_batch] = result[out_batch] = factors.new(left[left_batch])
        dims_left[left_feature] = dims_right[right_in] = factors.new(left[left_feature])
        dims_right[right_out] = result[out_feature] = factors.new(right[right_out])
        for position, window, out, padding in zip(positions, windows, out_positions, params["padding"], strict=True):
            if right[window] == 1 and not any(padding) and left[position] == results[0].shape[out]:
                dims_left[position] = result[out] = factors.new(left[position])
            elif results[0].shape[out] == 1 and not any(padding) and left[position] == right[window]:
                dims_left[position] = dims_right[window] = factors.new(left[position])
    return Rule(tuple(factors.sizes), (tuple(dims_left), tuple(dims_right)), (tuple(result),))
