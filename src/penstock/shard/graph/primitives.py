"""Sort the primitives of JAX by what XLA's fusion passes do with them."""

from __future__ import annotations

from penstock.shard.trace.flat_program import Op

ALIASES = frozenset(
    [
        *("reshape", "squeeze", "expand_dims", "transpose", "copy", "copy_p", "stop_gradient", "optimization_barrier"),
        *("sharding_constraint", "reshard", "name"),
    ]
)
"""Primitives whose results are the memory of their operands, perhaps read in another order."""
CONTRACTIONS = ("dot_general", "ragged_dot_general", "conv_general_dilated")
EXPENSIVE = frozenset(
    [
        *("exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "sin", "cos", "tan", "erf", "erfc", "erf_inv", "sqrt"),
        *("rsqrt", "cbrt", "pow", "div", "rem", "atan2", "lgamma", "digamma", "sinh", "cosh", "asin", "acos", "atan", "asinh"),
        *("acosh", "atanh"),
    ]
)
"""Elementwise primitives that XLA does not compute twice on CPU and GPU (`InstructionFusion::IsExpensive`)."""
MOVES = frozenset(
    ["broadcast_in_dim", "iota", "slice", "pad", "rev", "split", "unstack", "tile", "dynamic_slice", "bitcast_convert_type"]
)
"""Primitives that move or create elements, which fuse like elementwise ones."""
LOOKUPS = frozenset(["gather", "scatter", "scatter-add", "scatter_add", "dynamic_slice", "dynamic_update_slice"])
"""Primitives that read and write only the elements that they take or put."""
REDUCTIONS = frozenset(
    [
        *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin"),
        *("concatenate", "stack"),
    ]
)
"""Primitives whose results are stored, while their operands may be computed on the way into them."""
IN_PLACE = frozenset(["dynamic_update_slice", "scatter", "scatter-add", "scatter_add"])
"""Primitives that write into the memory of their first operand, if nothing needs it later."""


def is_product(op: Op) -> bool:
    """Return whether an operation multiplies matrices."""
    return op.primitive in CONTRACTIONS and not is_outer_product(op)


def is_outer_product(op: Op) -> bool:
    """Return whether a product sums over nothing, so that XLA makes it a multiplication (`AlgebraicSimplifier::HandleDot`)."""
    if op.primitive != "dot_general":
        return False
    kept = {factor for result in op.rule.results for factor in result}
    summed = {factor for operand in op.rule.operands for factor in operand if factor is not None} - kept
    return all(op.rule.sizes[factor] == 1 for factor in summed)


def is_one_hot(op: Op) -> bool:
    """Return whether a scatter puts one element into each row, as the gradient of a cross-entropy does.

    The TPU compiler makes it a comparison of indices, which it fuses.
    """
    if op.primitive not in ("scatter-add", "scatter_add"):
        return False
    table, indices = op.rule.operands[:2]
    return sum(factor is None or factor not in indices for factor in table) == 1
