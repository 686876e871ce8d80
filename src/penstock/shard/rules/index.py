"""Rules of gathers, scatters and slices at positions that only the run knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.shard.rules.rule import Rule, rule_for


@rule_for("gather")
def gather(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Rows looked up in a table: `table[V, D], indices[B, T, 1] -> [B, T, D]`.

    Dimensions of the indices and of whole slices are independent. Where the table is sharded along the dimension that is
    looked up in (V), each device finds what it has and leaves zeros for the rest: the result is partial.
    """
    numbers = params["dimension_numbers"]
    table, indices, result = (tuple(each.shape) for each in (operands[0], operands[1], results[0]))
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
    for table_dim, dim in zip([dim for dim in range(len(table)) if dim not in gone], numbers.offset_dims, strict=True):
        if params["slice_sizes"][table_dim] == table[table_dim]:
            table_dims[table_dim] = result_dims[dim] = len(sizes)
            sizes.append(table[table_dim])
    looked_up = [dim for dim in numbers.collapsed_slice_dims if dim in numbers.start_index_map]
    if len(looked_up) == len(numbers.start_index_map):
        for dim in looked_up:
            table_dims[dim] = len(sizes)
            sizes.append(table[dim])
    return Rule(tuple(sizes), (tuple(table_dims), tuple(index_dims)), (tuple(result_dims),))


@rule_for(
    "scatter",
    "scatter-add",
    "scatter-mul",
    "scatter-min",
    "scatter-max",
    "scatter_add",
    "scatter_mul",
    "scatter_min",
    "scatter_max",
)
def scatter(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Rows added to a table, the gradient of a lookup: `table[V, D], indices[B, T, 1], updates[B, T, D] -> table[V, D]`.

    Where the table is sharded along V each device takes the updates of its own rows, and needs to see all of them. Where the
    updates are sharded along B or T the sums are partial; that is so for additions alone.
    """
    numbers = params["dimension_numbers"]
    table, indices, updates = (tuple(each.shape) for each in operands[:3])
    adds = params.get("update_jaxpr") is not None and _adds(params)
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
        elif adds:
            index_dims[at] = update_dims[dim] = factor(indices[at])
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    for table_dim, dim in zip([dim for dim in range(len(table)) if dim not in gone], numbers.update_window_dims, strict=True):
        if updates[dim] == table[table_dim]:
            table_dims[table_dim] = update_dims[dim] = factor(table[table_dim])
    looked_up = [dim for dim in numbers.inserted_window_dims if dim in numbers.scatter_dims_to_operand_dims]
    if len(looked_up) == len(numbers.scatter_dims_to_operand_dims):
        for dim in looked_up:
            table_dims[dim] = factor(table[dim])
    return Rule(tuple(sizes), (tuple(table_dims), tuple(index_dims), tuple(update_dims)), (tuple(table_dims),))


def _adds(params: Mapping[str, Any]) -> bool:
    jaxpr = params["update_jaxpr"]
    return [equation.primitive.name for equation in jaxpr.eqns] in (["add"], ["add_any"])


@rule_for("dynamic_slice")
def dynamic_slice(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """What is taken whole keeps its layout."""
    return _windows(operands[0].shape, results[0].shape, others=operands[1:], result=results[0])


@rule_for("dynamic_update_slice")
def dynamic_update_slice(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    array, update = operands[0].shape, operands[1].shape
    dims = tuple(dim if array[dim] == update[dim] else None for dim in range(len(array)))
    return Rule(tuple(array), (dims, dims, *((),) * (len(operands) - 2)), (dims,))


def _windows(before: tuple[int, ...], after: tuple[int, ...], others: Sequence[Any], result: Any) -> Rule:
    dims = tuple(dim if before[dim] == after[dim] else None for dim in range(len(before)))
    return Rule(tuple(before), (dims, *((),) * len(others)), (dims,))
