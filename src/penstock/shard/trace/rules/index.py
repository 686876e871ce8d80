"""Sharding rules of gathers, scatters, and slices at positions that are known only at run time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.shard.trace.rules.rule import Rule, rule_for


@rule_for("gather")
def gather(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `vd,bt.->btd`: table [V, D], indices [B, T, 1] → rows [B, T, D], partial over v.

    Dimensions of the indices (B, T) and dimensions that are taken in full (D) are independent. If the table is sharded along V,
    the dimension of the lookup, each device takes the rows that it has and leaves zeros for the others.
    """
    numbers = params["dimension_numbers"]
    table, indices, result = (tuple(aval.shape) for aval in (operands[0], operands[1], results[0]))
    sizes: list[int] = []
    table_dims: list[int | None] = [None] * len(table)
    index_dims: list[int | None] = [None] * len(indices)
    result_dims: list[int | None] = [None] * len(result)

    batch = [dim for dim in range(len(result)) if dim not in numbers.offset_dims]
    for at, dim in zip(range(len(indices) - 1), batch, strict=True):
        index_dims[at] = result_dims[dim] = len(sizes)
        sizes.append(indices[at])
    for table_dim, index_dim in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        table_dims[table_dim] = index_dims[index_dim]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    taken = params["slice_sizes"]
    for table_dim, dim in zip([dim for dim in range(len(table)) if dim not in gone], numbers.offset_dims, strict=True):
        if taken[table_dim] == table[table_dim]:
            table_dims[table_dim] = result_dims[dim] = len(sizes)
            sizes.append(table[table_dim])
    looked_up = [dim for dim in numbers.start_index_map if taken[dim] < table[dim]]
    if all(taken[dim] == 1 for dim in looked_up):
        for dim in looked_up:
            table_dims[dim] = len(sizes)
            sizes.append(table[dim])
    return Rule(tuple(sizes), (tuple(table_dims), tuple(index_dims)), (tuple(result_dims),))


@rule_for("scatter-add", "scatter-mul", "scatter-min", "scatter-max")
def scatter(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `vd,bt.,btd->vd`: table [V, D], indices [B, T, 1], updates [B, T, D] → table, partial over b and t.

    It adds rows to a table, as the gradient of a lookup does. If the table is sharded along V, each device reads all updates
    and applies those of its own rows.
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
    sizes: list[int] = []
    table_dims: list[int | None] = [None] * len(table)
    index_dims: list[int | None] = [None] * len(indices)
    update_dims: list[int | None] = [None] * len(updates)

    def factor(size: int) -> int:
        sizes.append(size)
        return len(sizes) - 1

    rows = [dim for dim in range(len(updates)) if dim not in numbers.update_window_dims]
    batching = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    for at, dim in zip(range(len(indices) - 1), rows, strict=True):
        if at in batching:
            index_dims[at] = update_dims[dim] = table_dims[batching[at]] = factor(indices[at])
        elif partial:
            index_dims[at] = update_dims[dim] = factor(indices[at])
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    put = [1] * len(table)
    for table_dim, dim in zip([dim for dim in range(len(table)) if dim not in gone], numbers.update_window_dims, strict=True):
        put[table_dim] = updates[dim]
        if updates[dim] == table[table_dim]:
            table_dims[table_dim] = update_dims[dim] = factor(table[table_dim])
    looked_up = [dim for dim in numbers.scatter_dims_to_operand_dims if put[dim] < table[dim]]
    if all(put[dim] == 1 for dim in looked_up):
        for dim in looked_up:
            table_dims[dim] = factor(table[dim])
    return Rule(tuple(sizes), (tuple(table_dims), tuple(index_dims), tuple(update_dims)), (tuple(table_dims),))


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
