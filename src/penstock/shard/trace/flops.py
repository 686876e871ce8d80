"""Floating-point operations of an equation, counted as XLA's cost analysis counts them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from penstock._faults import DENSE_DEPTHWISE_GRADIENT

_FREE = frozenset(
    {
        *("broadcast_in_dim", "reshape", "transpose", "squeeze", "copy", "copy_p", "iota", "concatenate", "stack", "tile"),
        *("split", "slice", "dynamic_slice", "dynamic_update_slice", "pad", "gather", "rev", "bitcast_convert_type"),
        *("stop_gradient", "optimization_barrier", "sharding_constraint", "device_put", "sort", "top_k"),
        *("exp", "exp2", "log", "log1p", "expm1", "tanh", "sin", "cos", "tan", "erf", "sqrt", "rsqrt", "cbrt", "pow", "atan2"),
        *("random_bits", "random_wrap", "random_unwrap", "random_split", "random_fold_in", "random_seed", "threefry2x32"),
    }
)
"""Primitives that move elements, or whose elements XLA counts as transcendentals and not as FLOPs."""

_EACH = {"logistic": 3, "erf_inv": 37}
"""Those that are written out as so many operations for each element."""

_AT_MOST_ONE = frozenset(
    {
        *("add", "add_any", "sub", "mul", "div", "rem", "max", "min", "neg", "sign", "abs", "floor", "ceil", "round", "square"),
        *("and", "or", "xor", "not", "shift_left", "shift_right_logical", "shift_right_arithmetic", "population_count", "clz"),
        *("eq", "ne", "lt", "le", "gt", "ge", "eq_to", "le_to", "lt_to", "select_n", "clamp", "is_finite", "nextafter", "mulhi"),
        *("complex", "real", "imag", "conj", "convert_element_type", "reduce_precision", "stochastic_round", "reciprocal"),
        *("sinh", "cosh", "asin", "acos", "atan", "asinh", "acosh", "atanh", "log2", "one_minus_square"),
        *("name", "reshard", "pvary", "layout_constraint", "with_memory_space_constraint", "broadcast_to", "expand_dims"),
        *(
            "zeros_like",
            "empty",
            "empty2",
            "unstack",
            "roll",
            "bitcast",
            "to_edtype",
            "from_edtype",
            "rng_bit_generator",
            "rng_uniform",
            "random_clone",
        ),
        *("approx_top_k", "axis_index", "platform_index", "dimension_size", "optimization_barrier", "tie"),
    }
)
"""Primitives known to compute no more than one operation for each element that they write."""

_SEARCH = 9
"""Operations that compare two numbers and their places, and choose."""

_BLOCK = 17
"""FLOPs for each element of a scan along a dimension: XLA cuts long ones into blocks of 16, and adds those up."""


def of_equation(equation: Any) -> float:
    """FLOPs of one run on one device that computes all of it.

    A product of matrices takes 2 · M · N · K; a convolution 2 · (elements of the result) · (taps) · (input features of a group);
    a reduction one for each element that it reads, less those that it writes; everything else one for each that it writes,
    which `unknown_in` says where nothing is known of it.
    """
    counted = _counted(equation)
    return float(sum(math.prod(each.aval.shape) for each in equation.outvars)) if counted is None else counted


def unknown_in(equation: Any) -> tuple[str, ...]:
    """Return the names of the primitives in an equation whose FLOPs, or what they send, are unknown."""
    name = equation.primitive.name
    if name == "shard_map":
        return tuple(found for each in _inside(equation) for found in unknown_in(each))
    return () if name in _AT_MOST_ONE or _counted(equation) is not None else (name,)


def _inside(equation: Any) -> Any:
    """Return the equations of a `shard_map`: JAX gives its program as an open jaxpr, and in other versions as a closed one."""
    inner = equation.params["jaxpr"]
    return getattr(inner, "jaxpr", inner).eqns


def _counted(equation: Any) -> float | None:
    """FLOPs of a primitive that there is a formula for; None of another."""
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
        return math.prod(params["mesh"].shape.values()) * sum(map(of_equation, _inside(equation)))
    if name in _FREE or (name == "convert_element_type" and operands[0].dtype == results[0].dtype):
        return 0.0
    written = sum(math.prod(each.shape) for each in results)
    if name.startswith("scatter"):
        return float(math.prod(operands[2].shape))
    if name.startswith("reduce_window"):
        return float(written * (math.prod(params["window_dimensions"]) - 1))
    if name == "select_and_scatter_add":
        return float(math.prod(operands[0].shape) * math.prod(params["window_dimensions"]))
    if name.startswith("cum"):
        return float(written * min(operands[0].shape[params["axis"]] - 1, _BLOCK))
    if name in ("argmax", "argmin"):
        return float(_SEARCH * (math.prod(operands[0].shape) - written))
    if name in ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor"):
        return float(math.prod(operands[0].shape) - written)
    if name == "integer_pow":
        return float(written * _multiplications(params["y"]))
    return float(written * _EACH[name]) if name in _EACH else None


def _multiplications(power: int) -> int:
    """By squaring; one division for a negative power."""
    bits = bin(abs(power))[2:]
    return max(0, len(bits) - 1 + bits.count("1") - 1) + (power < 0)


def _ragged(params: Any, operands: Any, results: Any) -> float:
    """Each row meets the weights of one group. Where there is no kernel for it, JAX multiplies with those of all groups."""
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
    # `_faults.DENSE_DEPTHWISE_GRADIENT`. TPUs have an instruction for that gradient, but are as far from their peak in it: a
    # group of one feature has one column of the matrix unit to itself.
    groups = params["batch_group_count"]
    pairs = groups if DENSE_DEPTHWISE_GRADIENT.present and groups == out[numbers.out_spec[1]] else 1
    return 2.0 * positions * features * taps * pairs


def _valid(out: int, size: int, window: int, stride: int, low: int, inner: int, outer: int) -> int:
    """How many pairs of output position and tap fall on an element that is there, and not on padding or dilation."""
    positions = np.arange(out)[:, None] * stride + np.arange(window)[None, :] * outer - low
    return int(((positions >= 0) & (positions <= (size - 1) * inner) & (positions % inner == 0)).sum())
