"""Sharding rules of primitives that rearrange or create elements and compute nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.shard.trace.rules.rule import Rule, batched, elementwise, leading_dims, replicated, rule_for


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
    changed = [dim for dim in range(len(after)) if before[dim] != after[dim] or _is_padded(params, dim)]
    return batched(params, operands, results, replicated_dims=changed)


def _is_padded(params: Mapping[str, Any], dim: int) -> bool:
    return "padding_config" in params and any(params["padding_config"][dim])


@rule_for("rev")
def rev(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `i.->i.`: reversed dimensions are replicated."""
    return batched(params, operands, results, replicated_dims=params["dimensions"])


@rule_for("optimization_barrier")
def optimization_barrier(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `ij,kl->ij,kl`: each result is the operand of the same index."""
    sizes: list[int] = []
    dims: list[tuple[int, ...]] = []
    for aval in results:
        dims.append(tuple(range(len(sizes), len(sizes) + len(aval.shape))))
        sizes.extend(aval.shape)
    return Rule(tuple(sizes), tuple(dims), tuple(dims))


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
