"""The sharding rules: for each JAX primitive, a function that returns which of its dimensions may be sharded.

A rule is an operation as a generalised einsum. The form and the word *factor* are Shardy's (`sdy.op_sharding_rule`). A *factor*
is an index that labels dimensions of operands and results. If a factor is sharded over a mesh axis, every operand dimension with
this factor must be sharded over that axis. So is every result dimension with it. A factor that no result has is reduced: the
result is *partial*, and an all-reduce or a reduce-scatter completes it. Example: "bij,bjk->bik" has the factors b, j, i, k, the
operands ((b, i, j), (b, j, k)) and the results ((b, i, k),).

A rule describes what XLA's partitioner does, not what would be possible. Where the partitioner gathers the operands of an
operation although it is independent along a dimension, that dimension has no factor and must be replicated.
`tests/shard/trace/rules/partitioner.json` is a table of what compilers do, with which a test compares the rules.

To add a primitive, write a function with `@rule_for("primitive")`. The docstring of each function gives its rule as an einsum, in
which `.` is a dimension that must be replicated, and `..` are several of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock._jaxlib_faults import GATHERED_TRANSFORM

Dims = tuple[int | None, ...]


@dataclass(frozen=True)
class Rule:
    """The factors of an operation, and the dimensions that they label.

    Attributes:
      sizes: for each factor, a number that must be divisible by the number of shards. It is the size of the dimension. Where a
        reshape splits or merges dimensions, it is the size of the major part.
      operands: for each operand, the factor of each dimension; None for a dimension that must be replicated.
      results: the same for each result.
      identity: whether each result element is computed from operand elements at the same position (elementwise operations,
        transposes, added or removed unit dimensions), so that all operands and results may share one layout.
      gathered: pairs of a compiler ("tpu", "gpu" or "cpu") and the factors along which it gathers the operands.
      one_by_one: whether a TPU applies the updates of a scatter one after another, in a loop.
    """

    sizes: tuple[int, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    identity: bool = False
    gathered: tuple[tuple[str, tuple[int, ...]], ...] = ()
    one_by_one: bool = False

    def reduced(self, factor: int) -> bool:
        """Return whether sharding this factor makes the results partial."""
        return not any(factor in dims for dims in self.results)

    def on(self, compiler: str) -> Rule:
        """Return the rule for a compiler: without the factors along which it gathers the operands."""
        gone = {factor for name, factors in self.gathered if name == compiler for factor in factors}
        kept = [factor for factor in range(len(self.sizes)) if factor not in gone]
        if len(kept) == len(self.sizes):
            return self
        number: dict[int | None, int] = {factor: index for index, factor in enumerate(kept)}
        operands, results = (tuple(tuple(map(number.get, dims)) for dims in each) for each in (self.operands, self.results))
        return Rule(tuple(self.sizes[factor] for factor in kept), operands, results)


RuleFunction = Callable[[Mapping[str, Any], Sequence[Any], Sequence[Any]], Rule]

RULES: dict[str, RuleFunction] = {}
"""The rule functions by primitive. A rule function takes the parameters, the operand avals and the result avals."""


def rule_for(*primitives: str) -> Callable[[RuleFunction], RuleFunction]:
    """Return a decorator that registers a function as the rule of some primitives."""

    def register(function: RuleFunction) -> RuleFunction:
        RULES.update(dict.fromkeys(primitives, function))
        return function

    return register


def find_rule(primitive: str, params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return the rule of an equation, with one entry for each operand and each result.

    A primitive without a registered rule counts as elementwise if all shapes agree (scalar operands aside). Otherwise it is
    replicated. If such an operation keeps all shapes but is not elementwise, the program is still correct, because the compiler
    inserts the collectives that it needs; only the predicted cost is wrong.

    >>> import jax
    >>> x, w = jax.ShapeDtypeStruct((8, 4), "float32"), jax.ShapeDtypeStruct((4, 6), "float32")
    >>> rule = find_rule("dot_general", {"dimension_numbers": (((1,), (0,)), ((), ()))}, [x, w], [x])
    >>> rule.operands, rule.results, rule.reduced(0)
    (((1, 0), (0, 2)), ((1, 2),), True)
    """
    return RULES.get(primitive, elementwise)(params, operands, results)


def elementwise(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return the rule `ij,ij,…->ij`: all operands and results share one layout, except for scalar operands."""
    shapes = {tuple(aval.shape) for aval in (*operands, *results) if aval.shape} or {()}
    if len(shapes) != 1 or any(tuple(aval.shape) not in shapes for aval in results) or not results:
        return replicated(params, operands, results)
    (shape,) = shapes
    dims = tuple(range(len(shape)))
    return Rule(shape, tuple(dims if aval.shape else () for aval in operands), (dims,) * len(results), identity=True)


def replicated(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `..,..->..`: nothing may be sharded, and every device computes the whole operation."""
    return Rule((), tuple((None,) * len(aval.shape) for aval in operands), tuple((None,) * len(aval.shape) for aval in results))


def batched(
    params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any], *, replicated_dims: Sequence[int]
) -> Rule:
    """Return the rule of an operation that is independent along all dimensions except some.

    In einsum form `ij.,ij.->ij.`, where `.` is a dimension in `replicated_dims`. All operands (scalars aside) and results have
    the same rank. A dimension that is not in `replicated_dims` has the same size in all of them.
    """
    rank = len(results[0].shape)
    kept = [dim for dim in range(rank) if dim not in replicated_dims]
    factor = {dim: number for number, dim in enumerate(kept)}
    dims = tuple(factor.get(dim) for dim in range(rank))
    sizes = tuple(results[0].shape[dim] for dim in kept)
    return Rule(sizes, tuple(dims if aval.shape else () for aval in operands), (dims,) * len(results))


def leading_dims(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any], *, count: int) -> Rule:
    """Return the rule of an operation that is independent along its first `count` dimensions: `ij.,ij..->ij.`.

    All operands (scalars aside) and results share these dimensions. Their other dimensions are replicated.
    """
    sizes = tuple(results[0].shape[:count])
    if any(tuple(aval.shape[:count]) != sizes for aval in (*operands, *results) if aval.shape):
        return replicated(params, operands, results)

    def dims(aval: Any) -> Dims:
        return (*range(count), *(None,) * (len(aval.shape) - count)) if aval.shape else ()

    return Rule(sizes, tuple(map(dims, operands)), tuple(map(dims, results)))


def independent_dims(operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return the rule of a `shard_map`: each dimension has its own factor, as each layout is prescribed separately."""
    factors = _Factors()
    operand_dims, result_dims = factors.label(operands), factors.label(results)
    return Rule(tuple(factors.sizes), operand_dims, result_dims)


def _gathered(rule: Rule, *compilers: str) -> Rule:
    """Return a rule with compilers that gather the operands along all factors, as for the call of a library."""
    every = tuple(range(len(rule.sizes)))
    return replace(rule, gathered=tuple((compiler, every) for compiler in compilers))


class _Factors:
    """The factors of a rule that is being built, numbered in order."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def new(self, size: int) -> int:
        """Add a factor and return its number."""
        self.sizes.append(size)
        return len(self.sizes) - 1

    def label(self, avals: Sequence[Any]) -> tuple[Dims, ...]:
        """Add a factor for each dimension of some arrays, and return these factors."""
        return tuple(tuple(map(self.new, aval.shape)) for aval in avals)


# Elementwise operations with several operands, which broadcast dimensions of size one


@rule_for(
    *("add", "add_any", "sub", "mul", "div", "rem", "max", "min", "pow", "atan2", "nextafter", "complex", "select_n", "clamp"),
    *("and", "or", "xor", "shift_left", "shift_right_logical", "shift_right_arithmetic", "eq", "ne", "lt", "le", "gt", "ge"),
)
def broadcasting(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `ij,ij->ij`. A scalar operand has no factors, and a broadcast dimension, of size one, is replicated: `ij,.j->ij`."""
    shape = tuple(results[0].shape)
    dims = tuple(range(len(shape)))
    operand_dims: list[Dims] = []
    for aval in operands:
        if aval.shape and (
            len(aval.shape) != len(shape) or any(own not in (1, size) for own, size in zip(aval.shape, shape, strict=True))
        ):
            return replicated(params, operands, results)
        operand_dims.append(tuple(dim if aval.shape[dim] == shape[dim] else None for dim in dims) if aval.shape else ())
    return Rule(shape, tuple(operand_dims), (dims,), identity=True)


# Matrix products and convolutions


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
    `mk,mn,.->gkn`, partial over m. Group sizes are replicated. For TPUs and GPUs, the partitioner gathers along m and g.
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
    gathered = (group, *(factor for dim in ragged if (factor := dims_left[dim]) is not None))
    operand_dims = (tuple(dims_left), tuple(dims_right), (None,) * len(operands[2].shape))
    return Rule(tuple(factors.sizes), operand_dims, (tuple(result),), gathered=(("tpu", gathered), ("gpu", gathered)))


@rule_for("conv_general_dilated")
def conv_general_dilated(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `n..c,..co->n..o`: batch, input features (over which the result is partial) and output features.

    Positions and windows are replicated, with two exceptions:

    - the window is one element, `nhwc,..co->nhwo`: positions are independent;
    - the window is the whole image, as in the gradient of the case above, `nhwc,hwco->n..o`: the result is partial over h and w.

    Windows that do not overlap (patches) are replicated too, because of a fault of XLA: `_jaxlib_faults.PATCHES_SHARDED_TWICE`.

    In a depthwise convolution, the groups of features are a factor of both operands and the result, `n..g,...g->n..g`. So are
    the groups of the batch in the gradient of a grouped convolution. For groups of more than one input feature, only the batch
    may be sharded, and only on TPUs.
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
        dims_left[left_batch] = result[out_batch] = factors.new(left[left_batch])
        if right[right_in] == 1:
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
    dims = (tuple(dims_left), tuple(dims_right)), (tuple(result),)
    rule = Rule(tuple(factors.sizes), *dims)
    return _gathered(rule, "gpu", "cpu") if feature_groups > 1 and right[right_in] > 1 else rule


# Gathers, scatters, and slices at positions that are known only at run time


@rule_for("gather")
def gather(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `vd,bt.->btd`: table [V, D], indices [B, T, 1] → rows [B, T, D], partial over v.

    Dimensions of the indices (B, T) and dimensions that are taken in full (D) are independent. If the table is sharded along V,
    the dimension of the lookup, each device takes the rows that it has and leaves zeros for the others.
    """
    numbers = params["dimension_numbers"]
    table, indices, result = (tuple(aval.shape) for aval in (operands[0], operands[1], results[0]))
    factors = _Factors()
    table_dims: list[int | None] = [None] * len(table)
    index_dims: list[int | None] = [None] * len(indices)
    result_dims: list[int | None] = [None] * len(result)
    batch = [dim for dim in range(len(result)) if dim not in numbers.offset_dims]
    for at, dim in zip(range(len(indices) - 1), batch, strict=True):
        index_dims[at] = result_dims[dim] = factors.new(indices[at])
    for table_dim, index_dim in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        table_dims[table_dim] = index_dims[index_dim]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    taken = params["slice_sizes"]
    for table_dim, dim in zip([dim for dim in range(len(table)) if dim not in gone], numbers.offset_dims, strict=True):
        if taken[table_dim] == table[table_dim]:
            table_dims[table_dim] = result_dims[dim] = factors.new(table[table_dim])
    looked_up = [dim for dim in numbers.start_index_map if taken[dim] < table[dim]]
    if all(taken[dim] == 1 for dim in looked_up):
        for dim in looked_up:
            table_dims[dim] = factors.new(table[dim])
    return Rule(tuple(factors.sizes), (tuple(table_dims), tuple(index_dims)), (tuple(result_dims),))


@rule_for("scatter-add", "scatter-mul", "scatter-min", "scatter-max")
def scatter(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `vd,bt.,btd->vd`: table [V, D], indices [B, T, 1], updates [B, T, D] → table, partial over b and t.

    It adds rows to a table, as the gradient of a lookup does. If the table is sharded along V, each device reads all updates
    and applies the updates of its own rows.
    """
    return _scatter(params, operands, partial=True)


@rule_for("scatter", "scatter-sub")
def scatter_without_reduction(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `vd,...,..d->vd`: no all-reduce completes replaced or subtracted rows, so each device reads all updates."""
    return _scatter(params, operands, partial=False)


def _scatter(params: Mapping[str, Any], operands: Sequence[Any], partial: bool) -> Rule:
    """Return the rule of a scatter; `partial` is whether updates may be sharded along their rows."""
    numbers = params["dimension_numbers"]
    table, indices, updates = (tuple(aval.shape) for aval in operands)
    factors = _Factors()
    table_dims: list[int | None] = [None] * len(table)
    index_dims: list[int | None] = [None] * len(indices)
    update_dims: list[int | None] = [None] * len(updates)
    rows = [dim for dim in range(len(updates)) if dim not in numbers.update_window_dims]
    batching = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    for at, dim in zip(range(len(indices) - 1), rows, strict=True):
        if at in batching:
            index_dims[at] = update_dims[dim] = table_dims[batching[at]] = factors.new(indices[at])
        elif partial:
            index_dims[at] = update_dims[dim] = factors.new(indices[at])
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    put = [1] * len(table)
    for table_dim, dim in zip([dim for dim in range(len(table)) if dim not in gone], numbers.update_window_dims, strict=True):
        put[table_dim] = updates[dim]
        if updates[dim] == table[table_dim]:
            table_dims[table_dim] = update_dims[dim] = factors.new(table[table_dim])
    looked_up = [dim for dim in numbers.scatter_dims_to_operand_dims if put[dim] < table[dim]]
    if all(put[dim] == 1 for dim in looked_up):
        for dim in looked_up:
            table_dims[dim] = factors.new(table[dim])
    # The gradient of `w[i]` for a scalar i under `jax.vmap`, in which the indices are positions of windows.
    one_by_one = not set(numbers.scatter_dims_to_operand_dims) <= set(numbers.inserted_window_dims)
    dims = tuple(table_dims), tuple(index_dims), tuple(update_dims)
    return Rule(tuple(factors.sizes), dims, (tuple(table_dims),), one_by_one=one_by_one)


@rule_for("dynamic_slice")
def dynamic_slice(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `i.->i.`: dimensions that are taken in full are independent, the others are replicated."""
    array, taken = operands[0].shape, results[0].shape
    dims = tuple(dim if array[dim] == taken[dim] else None for dim in range(len(array)))
    return Rule(tuple(array), (dims, *((),) * (len(operands) - 1)), (dims,))


@rule_for("dynamic_update_slice")
def dynamic_update_slice(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `ijk,i..->ij.`: the update [I, 1, L] of an array [I, J, K].

    Dimensions that are replaced in full (i) are independent. Where the update has one element (j), the array may be sharded,
    and the device that has this position writes it. Other dimensions are replicated.
    """
    array, update = operands[0].shape, operands[1].shape
    put = tuple(dim if array[dim] == update[dim] else None for dim in range(len(array)))
    dims = tuple(dim if update[dim] in (1, array[dim]) else None for dim in range(len(array)))
    return Rule(tuple(array), (dims, put, *((),) * (len(operands) - 2)), (dims,))


# Linear algebra on batches of matrices [..., M, N], and Fourier transforms


@rule_for(
    *("cholesky", "qr", "eig", "schur", "hessenberg", "tridiagonal", "householder_product", "ormqr"),
    *("triangular_solve", "tridiagonal_solve"),
)
def matrix_batches(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `b..->b..`: the matrices of a batch are independent, and each is replicated."""
    return leading_dims(params, operands, results, count=max(len(aval.shape) for aval in operands) - 2)


@rule_for("lu", "eigh", "svd")
def matrix_batches_of_calls(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `b..->b..`, except on TPUs, where these are calls whose batch the compiler gathers."""
    return _gathered(matrix_batches(params, operands, results), "tpu")


@rule_for("symmetric_product")
def symmetric_product(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `b..->b..`, except on GPUs, where it is a call of cuBLAS whose batch the compiler gathers."""
    return _gathered(matrix_batches(params, operands, results), "gpu")


@rule_for("cholesky_update")
def cholesky_update(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `..,.->..`: the operation takes a single matrix, which is replicated."""
    return replicated(params, operands, results)


@rule_for("lu_pivots_to_permutation")
def lu_pivots_to_permutation(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `b.->b.`: the vectors of pivots of a batch are independent."""
    return leading_dims(params, operands, results, count=len(operands[0].shape) - 1)


@rule_for("fft")
def fft(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `b..->b..`: the transforms of a batch are independent, and each is replicated."""
    batch = 0 if GATHERED_TRANSFORM.present else len(operands[0].shape) - len(params["fft_lengths"])
    return leading_dims(params, operands, results, count=batch)


# Random numbers: keys are replicated, and each device draws its own shard of the numbers. This holds for JAX's default generator
# with `jax_threefry_partitionable`, where the bits are a function of key and position.


@rule_for("random_bits")
def random_bits(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `k->kij`: keys [K] → bits [K, I, J]. The dimensions of the keys are shared, the others are new."""
    keys, bits = tuple(operands[0].shape), tuple(results[0].shape)
    return Rule(bits, (tuple(range(len(keys))),), (tuple(range(len(bits))),))


@rule_for("random_wrap", "random_unwrap", "random_split", "random_fold_in", "random_clone")
def key_operation(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `k->k.`: keys are independent. New dimensions, such as the keys of a split, hold few bytes and are replicated."""
    return leading_dims(params, operands, results, count=min(len(aval.shape) for aval in (*operands, *results)))


@rule_for("random_seed")
def random_seed(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return the rule without factors: every device creates all keys."""
    return replicated(params, operands, results)


@rule_for("random_gamma")
def random_gamma(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `i.,i.->i.`: numbers are drawn one by one in row-major order, so that only the major dimension is independent."""
    shape = tuple(results[0].shape)
    major = next((dim for dim, size in enumerate(shape) if size > 1), 0)
    dims = tuple(0 if dim == major else None for dim in range(len(shape)))
    return Rule(shape[major : major + 1], tuple(dims if aval.shape else () for aval in operands), (dims,))


@rule_for("rng_bit_generator")
def rng_bit_generator(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `.->.,..`: a generator with a state, which the compiler replicates with all its numbers."""
    return replicated(params, operands, results)


# Reductions, cumulative operations, windows and sorting


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
    """Return `i.->i.,i.`: the dimension that is searched is replicated."""
    dims = [params.get("axis", -1) % len(operands[0].shape)]  # JAX 0.10 searches the last one
    return _gathered(batched(params, operands, results, replicated_dims=dims), "gpu", "cpu")


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


# Primitives that rearrange or create elements and compute nothing


@rule_for("broadcast_in_dim")
def broadcast_in_dim(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `i->ij`: the old dimensions are independent. New ones may be sharded at no cost: each device creates its shard."""
    operand, result = operands[0].shape, results[0].shape
    targets = params["broadcast_dimensions"]
    dims = tuple(target if operand[dim] == result[target] else None for dim, target in enumerate(targets))
    kept = [target for dim, target in enumerate(targets) if dims[dim] is not None]
    identity = all(size == 1 for dim, size in enumerate(result) if dim not in kept) and bool(operand)
    rest = ((),) * (len(operands) - 1)
    return Rule(tuple(result), (dims, *rest), (tuple(range(len(result))),), identity=identity)


@rule_for("iota", "rng_uniform")
def create(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `->ij`: each device creates its own shard."""
    shape = tuple(results[0].shape)
    return Rule(shape, tuple((None,) * len(aval.shape) for aval in operands), (tuple(range(len(shape))),))


@rule_for("transpose")
def transpose(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `ij->ji`."""
    return Rule(tuple(operands[0].shape), (tuple(range(len(operands[0].shape))),), (tuple(params["permutation"]),), identity=True)


@rule_for("reshape")
def reshape(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `b.d->bd` for [B, T, D] → [B·T, D]: the major part of merged or split dimensions is independent.

    Both shapes are cut into the shortest runs of dimensions with equal numbers of elements. In each run, the first dimensions
    larger than one share a factor, whose size is the smaller of the two.
    """
    before, after = tuple(operands[0].shape), tuple(results[0].shape)
    if params.get("dimensions") is not None or 0 in before:
        return replicated(params, operands, results)
    sizes: list[int] = []
    ins: list[int | None] = [None] * len(before)
    outs: list[int | None] = [None] * len(after)
    for run_in, run_out in _runs(before, after):
        large_in = [dim for dim in run_in if before[dim] > 1]
        large_out = [dim for dim in run_out if after[dim] > 1]
        if not large_in:
            continue
        first, second = before[large_in[0]], after[large_out[0]]
        if max(first, second) % min(first, second):
            continue
        ins[large_in[0]] = outs[large_out[0]] = len(sizes)
        sizes.append(min(first, second))
    squeezed = [size for size in before if size > 1] == [size for size in after if size > 1]
    return Rule(tuple(sizes), (tuple(ins),) + ((),) * (len(operands) - 1), (tuple(outs),), identity=squeezed)


def _runs(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[range, range]]:
    """Return pairs of the shortest runs of dimensions that have equal numbers of elements.

    Dimensions at the end that are in no run have size one.
    """
    runs, i, j = [], 0, 0
    while i < len(before) and j < len(after):
        first_in, first_out = i, j
        size_in, size_out = before[i], after[j]
        i, j = i + 1, j + 1
        while size_in != size_out:
            if size_in < size_out:
                size_in, i = size_in * before[i], i + 1
            else:
                size_out, j = size_out * after[j], j + 1
        runs.append((range(first_in, i), range(first_out, j)))
    return runs


@rule_for("squeeze")
def squeeze(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `i.j->ij`, where `.` is a unit dimension that is removed."""
    shape, removed = operands[0].shape, {dim % len(operands[0].shape) for dim in params["dimensions"]}
    kept = tuple(dim for dim in range(len(shape)) if dim not in removed)
    return Rule(tuple(shape), (tuple(None if dim in removed else dim for dim in range(len(shape))),), (kept,), identity=True)


@rule_for("concatenate")
def concatenate(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `i.,i.->i.`: the dimension along which arrays are joined is replicated."""
    return batched(params, operands, results, replicated_dims=[params["dimension"]])


@rule_for("split")
def split(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `i.->i.,i.`: the dimension that is split is replicated."""
    return batched(params, operands, results, replicated_dims=[params["axis"]])


@rule_for("pad", "slice")
def pad_or_slice(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `i.->i.`: dimensions that are padded or sliced are replicated.

    A dimension may keep its size although it is padded, as padding may be negative on one side.
    """
    before, after = operands[0].shape, results[0].shape
    padding = params.get("padding_config", ((),) * len(after))
    changed = [dim for dim in range(len(after)) if before[dim] != after[dim] or any(padding[dim])]
    return batched(params, operands, results, replicated_dims=changed)


@rule_for("rev")
def rev(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `i.->i.`: reversed dimensions are replicated."""
    return batched(params, operands, results, replicated_dims=params["dimensions"])


@rule_for("optimization_barrier")
def optimization_barrier(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `ij,kl->ij,kl`: each result is the operand of the same index."""
    factors = _Factors()
    dims = factors.label(results)
    return Rule(tuple(factors.sizes), dims, dims)


@rule_for("bitcast_convert_type")
def bitcast(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `ij->ij`; or `ij.->ij` and `ij->ij.` where a wider or narrower type removes or adds a dimension at the end."""
    ranks = {len(operands[0].shape), len(results[0].shape)}
    return (
        elementwise(params, operands, results) if len(ranks) == 1 else leading_dims(params, operands, results, count=min(ranks))
    )


@rule_for("stack")
def stack(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `ij,ij->i.j`: the new dimension is replicated."""
    kept = tuple(range(len(operands[0].shape)))
    axis = params["axis"]
    return Rule(tuple(operands[0].shape), (kept,) * len(operands), ((*kept[:axis], None, *kept[axis:]),))


@rule_for("unstack")
def unstack(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `i.j->ij,ij`: the dimension that is taken apart is replicated."""
    kept = tuple(range(len(results[0].shape)))
    axis = params["axis"] % (len(kept) + 1)
    return Rule(tuple(results[0].shape), ((*kept[:axis], None, *kept[axis:]),), (kept,) * len(results))


@rule_for("tile")
def tile(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `i.->i.`: dimensions that are repeated are replicated."""
    return batched(params, operands, results, replicated_dims=[dim for dim, times in enumerate(params["reps"]) if times > 1])
