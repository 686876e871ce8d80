"""Floating-point operations of an equation, counted as XLA's cost analysis counts them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_FREE = frozenset(
    [
        "convert_element_type",
        "broadcast_in_dim",
        "reshape",
        "transpose",
        "squeeze",
        "expand_dims",
        "copy",
        "copy_p",
        "iota",
        "concatenate",
        "slice",
        "dynamic_slice",
        "dynamic_update_slice",
        "pad",
        "gather",
        "rev",
        "split",
        "select_n",
        "stop_gradient",
        "optimization_barrier",
        "sharding_constraint",
        "bitcast_convert_type",
        "exp",
        "exp2",
        "log",
        "log1p",
        "expm1",
        "tanh",
        "logistic",
        "sin",
        "cos",
        "tan",
        "erf",
        "erf_inv",
        "erfc",
        "sqrt",
        "rsqrt",
        "cbrt",
        "pow",
        "atan2",
        "sort",
        "top_k",
        "argsort",
        "random_bits",
        "random_wrap",
        "random_unwrap",
        "random_split",
        "random_fold_in",
        "random_seed",
        "threefry2x32",
        "device_put",
    ]
)
"""Primitives that move elements, or whose elements XLA counts as transcendentals and not as FLOPs."""


def of_equation(equation: Any) -> float:
    """FLOPs of one run on one device that computes all of it.

    A product of matrices takes 2 · M · N · K; a convolution 2 · (elements of the result) · (taps) · (input features of a group);
    a reduction one for each element that it reads; everything else one for each element that it writes, if that is a number.
    """
    name, params = equation.primitive.name, equation.params
    operands = [each.aval for each in equation.invars]
    results = [each.aval for each in equation.outvars]
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2.0 * math.prod(results[0].shape) * math.prod(operands[0].shape[dim] for dim in contracted)
    if name == "ragged_dot_general":
        return _ragged(params, operands, results)
    if name == "conv_general_dilated":
        return _convolution(params, operands, results)
    if name == "shard_map":
        inner = params["jaxpr"]
        devices = math.prod(params["mesh"].shape.values())
        return devices * sum(of_equation(each) for each in getattr(inner, "jaxpr", inner).eqns)
    if name in _FREE:
        return 0.0
    if name.startswith(("reduce_", "arg", "scatter")):
        return float(math.prod(operands[-1 if name.startswith("scatter") else 0].shape))
    return float(sum(math.prod(each.shape) for each in results if _counts(each)))


def _counts(aval: Any) -> bool:
    try:
        return np.dtype(aval.dtype).kind not in "b"
    except (TypeError, AttributeError):
        return False


def _ragged(params: Any, operands: Any, results: Any) -> float:
    """Each row meets the weights of one group."""
    (contracted, _), _ = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    rows = math.prod(operands[0].shape)
    ragged = set(params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions)
    if ragged & set(contracted):
        return 2.0 * rows * math.prod(results[0].shape[2:])
    return 2.0 * math.prod(results[0].shape) * math.prod(operands[0].shape[dim] for dim in contracted)


def _convolution(params: Any, operands: Any, results: Any) -> float:
    numbers = params["dimension_numbers"]
    kernel, out = operands[1].shape, results[0].shape
    features = kernel[numbers.rhs_spec[1]]
    taps = 1.0
    for out_dim, in_dim, kernel_dim, stride, padding, inner, outer in zip(
        numbers.out_spec[2:],
        numbers.lhs_spec[2:],
        numbers.rhs_spec[2:],
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        strict=True,
    ):
        taps *= _valid(out[out_dim], operands[0].shape[in_dim], kernel[kernel_dim], stride, padding[0], inner, outer)
    positions = math.prod(out[dim] for dim in numbers.out_spec[:2])
    return 2.0 * positions * features * taps / params["batch_group_count"]


def _valid(out: int, size: int, window: int, stride: int, low: int, inner: int, outer: int) -> int:
    """How many pairs of output position and tap fall on an element that is there, and not on padding or dilation."""
    positions = np.arange(out)[:, None] * stride + np.arange(window)[None, :] * outer - low
    return int(((positions >= 0) & (positions <= (size - 1) * inner) & (positions % inner == 0)).sum())
