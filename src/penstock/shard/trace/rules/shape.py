"""Rules of the primitives that move elements and compute nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.shard.trace.rules.rule import Rule, batched, elementwise, leading, replicated, rule_for


@rule_for("broadcast_in_dim")
def broadcast_in_dim(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Dimensions that are kept keep their layout; the new ones may be sharded for nothing, as each device makes its part."""
    operand, result = operands[0].shape, results[0].shape
    placed = params["broadcast_dimensions"]
    dims = tuple(at if operand[dim] == result[at] else None for dim, at in enumerate(placed))
    kept = [at for dim, at in enumerate(placed) if dims[dim] is not None]
    identity = all(size == 1 for at, size in enumerate(result) if at not in kept) and bool(operand)
    rest = ((),) * (len(operands) - 1)
    return Rule(tuple(result), (dims, *rest), (tuple(range(len(result))),), identity=identity)


@rule_for("iota", "rng_uniform")
def born(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Each device makes its own part."""
    shape = tuple(results[0].shape)
    return Rule(shape, tuple((None,) * len(each.shape) for each in operands), (tuple(range(len(shape))),))


@rule_for("transpose")
def transpose(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    return Rule(tuple(operands[0].shape), (tuple(range(len(operands[0].shape))),), (tuple(params["permutation"]),), identity=True)


@rule_for("reshape")
def reshape(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Of dimensions that are merged or split, the major part keeps its layout: [B, T, D] ↔ [B·T, D] may be sharded along B.

    Both shapes are cut into the shortest runs of equal numbers of elements. In a run the first dimensions larger than one share a
    factor, as far as the smaller of them goes.
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
    """Dimensions that are left over at the end have size one."""
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
    shape, gone = operands[0].shape, {dim % len(operands[0].shape) for dim in params["dimensions"]}
    kept = tuple(dim for dim in range(len(shape)) if dim not in gone)
    return Rule(tuple(shape), (tuple(None if dim in gone else dim for dim in range(len(shape))),), (kept,), identity=True)


@rule_for("concatenate")
def concatenate(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    return batched(params, operands, results, replicated_dims=[params["dimension"]])


@rule_for("split")
def split(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    return batched(params, operands, results, replicated_dims=[params["axis"]])


@rule_for("pad", "slice")
def resized(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Dimensions that keep their size keep their layout; it is compared with the array's, as a pad may also cut."""
    before, after = operands[0].shape, results[0].shape
    changed = [dim for dim in range(len(after)) if before[dim] != after[dim] or _moves(params, dim)]
    return batched(params, operands, results, replicated_dims=changed)


def _moves(params: Mapping[str, Any], dim: int) -> bool:
    return "padding_config" in params and any(params["padding_config"][dim])


@rule_for("rev")
def rev(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    return batched(params, operands, results, replicated_dims=params["dimensions"])


@rule_for("optimization_barrier")
def each_for_itself(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Result i is operand i."""
    sizes: list[int] = []
    dims: list[tuple[int, ...]] = []
    for each in results:
        dims.append(tuple(range(len(sizes), len(sizes) + len(each.shape))))
        sizes.extend(each.shape)
    return Rule(tuple(sizes), tuple(dims), tuple(dims))


@rule_for("bitcast_convert_type")
def bitcast(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """A wider or narrower type has one dimension less or more at the end."""
    ranks = {len(operands[0].shape), len(results[0].shape)}
    return elementwise(params, operands, results) if len(ranks) == 1 else leading(params, operands, results, count=min(ranks))


@rule_for("stack")
def stack(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Along the new dimension the operands lie one after the other."""
    kept = tuple(range(len(operands[0].shape)))
    axis = params["axis"]
    return Rule(tuple(operands[0].shape), (kept,) * len(operands), ((*kept[:axis], None, *kept[axis:]),))


@rule_for("tile")
def tile(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    return batched(params, operands, results, replicated_dims=[dim for dim, times in enumerate(params["reps"]) if times > 1])
