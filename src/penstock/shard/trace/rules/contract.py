"""Rules of matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.shard.trace.rules.rule import Rule, replicated, rule_for


class _Factors:
    """Numbers factors as they are named."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def new(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1


@rule_for("dot_general")
def dot_general(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Batch dimensions, free dimensions, and contracted ones, over which the result is partial."""
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
    """Rows in groups, each group with weights of its own: `rows[M, K], weights[G, K, N], sizes[G] -> [M, N]`.

    As JAX writes it where there is no kernel for it: a product over K and G of rows that are masked. Where weights are sharded
    along G (experts) each device does the rows of its own groups, so that the result is partial; beside it the sizes are
    exchanged, few bytes. With `lhs_ragged_dimensions` contracted (the gradient of the weights) the result has the groups in
    front, and rows are summed over. Sizes stay whole.
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
    """Batch, output features and input features, over which the result is partial. Positions and windows stay whole.

    Positions are free where the window is one element, and summed over where it is the whole image, as in the gradient of that.
    Windows that do not overlap (patches) would be free too, but for a fault of XLA: `_faults.PATCHES_SHARDED_TWICE`.

    Groups of features (depthwise: as many as there are features) are a factor of both operands and the result; so are groups of
    the batch, which the gradient of a grouped convolution has. Of groups with more than one input feature XLA's partitioner
    gathers all operands, even for the batch.
    """
    numbers = params["dimension_numbers"]
    left, right = operands[0].shape, operands[1].shape
    factors = _Factors()
    dims_left: list[int | None] = [None] * len(left)
    dims_right: list[int | None] = [None] * len(right)
    result: list[int | None] = [None] * len(results[0].shape)
    (left_batch, left_feature, *places), (right_out, right_in, *windows), (out_batch, out_feature, *out_places) = (
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
        for place, window, out, padding in zip(places, windows, out_places, params["padding"], strict=True):
            if right[window] == 1 and not any(padding) and left[place] == results[0].shape[out]:
                dims_left[place] = result[out] = factors.new(left[place])
            elif results[0].shape[out] == 1 and not any(padding) and left[place] == right[window]:
                dims_left[place] = dims_right[window] = factors.new(left[place])
    return Rule(tuple(factors.sizes), (tuple(dims_left), tuple(dims_right)), (tuple(result),))
