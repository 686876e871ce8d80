"""Warn about a step that computes gradients and does not use them, and about a batch that does not divide over the devices."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from penstock.shard.graph.roles import first_shardable_dim
from penstock.shard.search.solver import PreparedMesh
from penstock.shard.trace.flat_program import FlatProgram, Op, Path, find_dependents, reachable
from penstock.shard.trace.recompute import backward_paths
from penstock.shard.trace.step import TracedStep


def describe_lost_gradients(traced: TracedStep) -> str | None:
    """Return a sentence about a step that computes gradients and does not train; None if it uses them.

    It uses them if its state depends on them, or an array among its other results. A scalar result, such as the norm of the
    gradients, counts only in a step without state: an evaluation, of a gradient penalty for example. A step that
    computes new parameters and drops them does not train these, even if it returns the optimizer's state.
    """
    backward = backward_paths(traced.closed.jaxpr, ())
    program = traced.program
    gradients = {result for op in program.ops if _is_in(op, backward) for result in op.results}
    if not gradients:
        return None
    reached = find_dependents(program, gradients)
    dependent = [index for index, value in enumerate(program.outputs) if value in reached]
    if not any(not traced.state or index in traced.state or traced.outputs[index].shape for index in dependent):
        return (
            f"the step computes gradients, and {'only scalars' if dependent else 'no results'} that it returns depend on them, "
            "so it does not train: return the new parameters and optimizer state, or take the gradients out"
        )
    replaced = {traced.state[index] for index in dependent if index in traced.state}
    lost = sorted(_inputs_with_dropped_values(program, reached, backward) - replaced)
    if not lost:
        return None
    more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    return (
        f"the step computes a new value of {traced.inputs[lost[0]].path!r}{more} from gradients, and does not return it, so "
        "it does not train: return the new parameters. A Flax NNX object has to be changed itself, and not a copy that nnx.clone "
        "makes"
    )


def _inputs_with_dropped_values(program: FlatProgram, reached: set[int], backward: set[Path]) -> set[int]:
    """Return the inputs from which elementwise operations compute a value that nothing reads, such as a new parameter.

    Args:
      reached: the values that depend on gradients. The dropped value is one of them.
      backward: the paths of the backward pass, whose values are gradients and no parameters.
    """
    read = {operand for op in program.ops for operand in op.operands} | set(program.outputs)
    read |= {value for pair in program.same_sharding for value in (pair.outer, pair.inner)}
    sources: dict[int, list[int]] = {}
    dropped = []
    for op in program.ops:
        if op.rule.identity and not _is_in(op, backward):
            for result in op.results:
                shape = program.values[result].shape
                same = [value for value in op.operands if value is not None and program.values[value].shape == shape]
                sources.setdefault(result, []).extend(same)
                if shape and result in reached and result not in read:
                    dropped.append(result)
    found = reachable(sources, dropped)
    return {index for index, value in enumerate(program.inputs) if value in found}


def _is_in(op: Op, paths: set[Path]) -> bool:
    """Return whether an operation is at one of some paths, or inside of an operation there."""
    return any(op.path[:length] in paths for length in range(1, len(op.path) + 1))


def describe_uneven_batch(prepared: Sequence[PreparedMesh], traced: TracedStep) -> str | None:
    """Return a sentence about a batch that does not divide over all devices, with the nearest sizes that do; None if it divides.

    The batch has the number of rows that most of its leaves have.
    """
    devices, graph = math.prod(prepared[0].mesh_shape.values()), prepared[0].costs.graph
    found: list[tuple[int, int, int]] = []  # the number of rows of each leaf of the batch, the leaf, and the dimension
    for index, role in enumerate(prepared[0].roles):
        node = prepared[0].model.inputs[index]
        if role == "batch" and traced.inputs[index].shape and graph.nodes[node].fixed is None:
            dim = first_shardable_dim(graph, node)
            found.append((traced.inputs[index].shape[dim], index, dim))
    if not found:
        return None
    sizes = Counter(rows for rows, _, _ in found)
    rows, index, dim = max(found, key=lambda leaf: sizes[leaf[0]])  # others may be tables that all rows share
    if rows % devices == 0:
        return None
    leaf, node = traced.inputs[index], prepared[0].model.inputs[index]
    used = max(each.costs.links.shards(each.costs.pinned[node][dim]) for each in prepared)
    nearest = nearest_sizes(rows, devices)
    count = f"the batch of {rows} rows" if rows > 1 else "the batch of one row"
    idle = f"shard it over only {used} of them, and the others" if used > 1 else "cannot shard it, and all devices"
    return (
        f"{count} ({leaf.path!r}, dimension {dim}) does not divide over {devices} devices: data parallelism and FSDP "
        f"{idle} compute the same. "
        f"The nearest {'size that divides is' if len(nearest) == 1 else 'sizes that divide are'} {' and '.join(nearest)}"
    )


def nearest_sizes(rows: int, devices: int) -> list[str]:
    """Return the nearest sizes of a batch that divide over the devices: below, unless it is 0, and above.

    >>> nearest_sizes(30, 8), nearest_sizes(5, 8)
    (['24', '32'], ['8'])
    """
    below = rows - rows % devices
    return [str(size) for size in (below, below + devices) if size]
