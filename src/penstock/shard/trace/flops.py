"""Count the floating-point operations of an equation of a jaxpr, by the formulas of XLA's cost analysis.

Operations whose cost no formula gives are named, so that a plan can report them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from penstock._jaxlib_faults import DENSE_DEPTHWISE_GRADIENT

_FREE = frozenset(
    {
        *("broadcast_in_dim", "reshape", "transpose", "squeeze", "copy", "copy_p", "iota", "concatenate", "stack", "tile"),
        *("split", "unstack", "slice", "dynamic_slice", "dynamic_update_slice", "pad", "gather", "rev", "bitcast_convert_type"),
        *("stop_gradient", "optimization_barrier", "sharding_constraint", "device_put", "sort", "top_k"),
        *("exp", "exp2", "log", "log1p", "expm1", "tanh", "sin", "cos", "tan", "erf", "sqrt", "rsqrt", "cbrt", "pow", "atan2"),
        *("random_wrap", "random_unwrap", "random_split", "random_fold_in", "random_seed"),
    }
)
"""Primitives that count no FLOPs: they move elements, or XLA counts their elements as transcendentals."""

_THREEFRY = 115
"""Operations of threefry-2x32 for two words (Salmon et al., SC 2011): 20 rounds of 5, and 5 injections of the key of 3. XLA
counts up to 201: on CPUs it also computes the distances of rotations."""

_FLOPS_PER_ELEMENT = {"logistic": 3, "erf_inv": 37, "erfc": 60, "threefry2x32": _THREEFRY / 2}
"""Primitives that XLA expands into this many operations per element."""

_AT_MOST_ONE_PER_ELEMENT = frozenset(
    {
        *("add", "add_any", "sub", "mul", "div", "rem", "max", "min", "neg", "sign", "abs", "floor", "ceil", "round", "square"),
        *("and", "or", "xor", "not", "shift_left", "shift_right_logical", "shift_right_arithmetic", "population_count", "clz"),
        *("eq", "ne", "lt", "le", "gt", "ge", "eq_to", "le_to", "lt_to", "select_n", "clamp", "is_finite", "nextafter", "mulhi"),
        *("complex", "real", "imag", "conj", "convert_element_type", "reduce_precision", "stochastic_round", "reciprocal"),
        *("sinh", "cosh", "asin", "acos", "atan", "asinh", "acosh", "atanh", "log2", "one_minus_square"),
        *("name", "reshard", "pvary", "layout_constraint", "with_memory_space_constraint", "broadcast_to", "expand_dims"),
        *("zeros_like", "empty", "empty2", "roll", "bitcast", "to_edtype", "from_edtype"),
        *("rng_bit_generator", "rng_uniform", "random_clone"),
        *("approx_top_k", "axis_index", "platform_index", "dimension_size", "tie"),
    }
)
"""Primitives that compute at most one operation per element that they write."""

_FLOPS_PER_BUTTERFLY = 8.0
"""A Fourier transform of N elements counts 8 · N · log2 N FLOPs; along several dimensions, XLA multiplies their logarithms
(`HloCostAnalysis::HandleFft`)."""

_FLOPS_PER_COMPARISON = 9
"""Operations of `argmax` and `argmin` to compare two numbers and their indices, and to select."""

_MOST_FLOPS_PER_SCANNED_ELEMENT = 17
"""FLOPs per element of a long cumulative sum: XLA cuts the dimension into blocks of 16, and adds the blocks up."""


def count_flops(equation: Any) -> float:
    """Return the FLOPs of one run of an equation on one device that computes all of it.

    - A matrix product: 2 · M · N · K.
    - A convolution: 2 · (elements of the result) · (taps) · (input features of a group).
    - A Fourier transform of N elements: 8 · N · log2 N.
    - A random number of threefry: 115.
    - A reduction: one per element that it reads, less one per element that it writes.
    - All others, and primitives of unknown cost (see `find_unknown_costs`): one per element that they write.

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(jax.numpy.matmul)(*[jax.ShapeDtypeStruct((8, 8), "float32")] * 2)
    >>> count_flops(jaxpr.eqns[0])
    1024.0
    """
    flops = _flops_by_formula(equation)
    return float(sum(math.prod(variable.aval.shape) for variable in equation.outvars)) if flops is None else flops


def find_unknown_costs(equation: Any) -> tuple[str, ...]:
    """Return the names of the primitives in an equation whose FLOPs or bytes sent are unknown."""
    name = equation.primitive.name
    if name == "shard_map":
        return tuple(unknown for inner in _shard_map_body(equation) for unknown in find_unknown_costs(inner))
    return () if name in _AT_MOST_ONE_PER_ELEMENT or _flops_by_formula(equation) is not None else (name,)


def _shard_map_body(equation: Any) -> Any:
    """Return the equations of a `shard_map`, whose body is an open or a closed jaxpr, depending on the version of JAX."""
    body = equation.params["jaxpr"]
    return getattr(body, "jaxpr", body).eqns


def _flops_by_formula(equation: Any) -> float | None:
    """Return the FLOPs of an equation, or None if there is no formula for its primitive."""
    name, params = equation.primitive.name, equation.params
    operands = [atom.aval for atom in equation.invars]
    results = [variable.aval for variable in equation.outvars]
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2.0 * math.prod(results[0].shape) * math.prod(operands[0].shape[dim] for dim in contracted)
    if name == "ragged_dot_general":
        return _ragged_dot_flops(params, operands, results)
    if name == "conv_general_dilated":
        return _convolution_flops(params, operands, results)
    if name == "shard_map":
        return math.prod(params["mesh"].shape.values()) * sum(map(count_flops, _shard_map_body(equation)))
    if name == "fft":
        return _FLOPS_PER_BUTTERFLY * math.prod(operands[0].shape) * math.prod(map(math.log2, params["fft_lengths"]))
    if name == "random_bits":
        # JAX makes each number of both words of a threefry, so that any device can make it. TPUs have an instruction for "rbg".
        return float(math.prod(results[0].shape) * _THREEFRY) if str(operands[0].dtype) == "key<fry>" else 0.0
    if name in _FREE or (name == "convert_element_type" and operands[0].dtype == results[0].dtype):
        return 0.0
    written = sum(math.prod(result.shape) for result in results)
    if name.startswith("scatter"):
        return float(math.prod(operands[2].shape))
    if name.startswith("reduce_window"):
        return float(written * (math.prod(params["window_dimensions"]) - 1))
    if name == "select_and_scatter_add":
        return float(math.prod(operands[0].shape) * math.prod(params["window_dimensions"]))
    if name.startswith("cum"):
        return float(written * min(operands[0].shape[params["axis"]] - 1, _MOST_FLOPS_PER_SCANNED_ELEMENT))
    if name in ("argmax", "argmin"):
        return float(_FLOPS_PER_COMPARISON * (math.prod(operands[0].shape) - written))
    if name in ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor"):
        return float(math.prod(operands[0].shape) - written)
    if name == "integer_pow":
        return float(written * _power_operations(params["y"]))
    return float(written * _FLOPS_PER_ELEMENT[name]) if name in _FLOPS_PER_ELEMENT else None


def _power_operations(power: int) -> int:
    """Return the multiplications of an integer power by squaring, plus one division if it is negative."""
    bits = bin(abs(power))[2:]
    return max(0, len(bits) - 1 + bits.count("1") - 1) + (power < 0)


def _ragged_dot_flops(params: Any, operands: Any, results: Any) -> float:
    """Return the FLOPs of a ragged product, in which each row is multiplied by the weights of one group.

    A compiler without a kernel for it multiplies each row by the weights of all groups (`graph/step_model.py`).
    """
    (contracted, _), _ = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    rows = math.prod(operands[0].shape)
    ragged = set(params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions)
    if ragged & set(contracted):
        return 2.0 * rows * math.prod(results[0].shape[2:])
    return 2.0 * math.prod(results[0].shape) * math.prod(operands[0].shape[dim] for dim in contracted)


def _convolution_flops(params: Any, operands: Any, results: Any) -> float:
    """Return the FLOPs of a convolution, without the taps that fall on padding."""
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
        taps *= _count_taps(out[out_dim], operands[0].shape[in_dim], kernel[kernel_dim], stride, padding[0], inner, outer)
    batch_and_features = math.prod(out[dim] for dim in numbers.out_spec[:2])
    # `_jaxlib_faults.DENSE_DEPTHWISE_GRADIENT`: the gradient of a depthwise kernel is computed as a dense convolution. TPUs have
    # an instruction for it, but it takes as long: a group of one feature uses only one column of the matrix unit.
    groups = params["batch_group_count"]
    dense_groups = groups if DENSE_DEPTHWISE_GRADIENT.present and groups == out[numbers.out_spec[1]] else 1
    return 2.0 * batch_and_features * features * taps * dense_groups


def _count_taps(out: int, size: int, window: int, stride: int, low: int, inner: int, outer: int) -> int:
    """Return the number of pairs (output position, tap) along a dimension that read an element and not padding or a gap.

    `out`, `size` and `window` are the sizes of output, input and window; `low` is the padding before the input. `inner` and
    `outer` are the dilations of input and window.
    """
    positions = np.arange(out)[:, None] * stride + np.arange(window)[None, :] * outer - low
    return int(((positions >= 0) & (positions <= (size - 1) * inner) & (positions % inner == 0)).sum())
