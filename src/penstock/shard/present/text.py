"""Write a plan as text on one screen: at most 40 lines of 130 columns.

The text has the mesh and the use of each axis, time and memory beside the baselines, collectives, and leaves. A leaf of repeated
layers has one row for all of them (`LeafGroup`), which also has its optimizer state.
"""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock._bytes import format_bytes
from penstock.data.tree import describe_array
from penstock.shard.apply.sharding_constraints import Spec
from penstock.shard.compiler import describe_excess_of_cpu
from penstock.shard.mesh.shapes import describe_mesh
from penstock.shard.present.parallelism import describe_axis, parameters_of
from penstock.shard.record import LeafLayout, PlanRecord, local_bytes
from penstock.shard.search.costs import GAP, Cost
from penstock.shard.trace.rewriting import AS_WRITTEN
from penstock.shard.wording import format_seconds, format_share, format_spec

_LINES, _COLUMNS = 40, 130
_COLLECTIVES = 6
_SLOWER = 0.001  # a plan that is slower by less than this fraction counts as the fastest
_LEAST = 0.005  # the least share of the bytes of all arguments for which leaves get a line


def plan_text(plan: PlanRecord) -> str:
    """Return a plan as text: mesh axes, time and memory beside the baselines, collectives, and the largest leaves."""
    mesh = describe_mesh(plan.mesh_shape)
    lines = [
        f"{plan.device_count} × {plan.hardware}, mesh {mesh}, limit {format_bytes(plan.limit)} a device",
        *_wrapped(f"{name} ({size}): {', '.join(describe_axis(plan, name))}" for name, size in plan.mesh_shape.items()),
        "",
        *_costs(plan),
        *_wrapped(filter(None, (about_proof(plan), *plan.cost.unknown, *plan.remarks))),
        "",
        "memory a device: " + ", ".join(f"{format_bytes(size)} {name}" for name, size in memory_parts(plan.cost) if size),
        *textwrap.wrap(about_check(plan), _COLUMNS, subsequent_indent="  ", break_on_hyphens=False),
        *_collectives(plan.cost),
        "",
    ]
    lines += _leaves(group_layers(plan), _LINES - len(lines))
    return "\n".join(line if len(line) <= _COLUMNS else f"{line[: _COLUMNS - 1]}…" for line in map(str.rstrip, lines))


def plan_line(plan: PlanRecord) -> str:
    """Return a plan as one line: devices, mesh, memory and time, and whether it is unchecked.

    The memory is the compiler's if the plan was compiled, else the predicted one.
    """
    needed = plan.cost.memory.total if plan.checked is None else plan.checked.memory
    memory = f"{format_bytes(needed)} of {format_bytes(plan.limit)} a device"
    mesh = describe_mesh(plan.mesh_shape)
    end = ", unchecked" if plan.unchecked else ""
    return f"{plan.device_count} × {plan.hardware}, mesh {mesh}, {memory}, {format_seconds(plan.cost.seconds)} a step{end}"


def memory_parts(cost: Cost) -> list[tuple[str, int]]:
    """Return the parts of the peak memory, each as a name and bytes."""
    memory = cost.memory
    kinds = ("parameters", "optimizer", "batch", "other", "constants", "activations")
    return [("other arguments" if kind == "other" else kind, getattr(memory, kind)) for kind in kinds]


def about_check(plan: PlanRecord) -> str:
    """Return the compiler's figure for the memory in words; "unchecked" if the plan needs one and has none; else ""."""
    if (measured := plan.checked) is not None:
        took, share = format_seconds(measured.seconds_to_compile), format_share(measured.memory, plan.limit)
        excess = describe_excess_of_cpu(plan.hardware, measured.compiled_for)
        return f"compiled by {measured.compiled_for} in {took}: {format_bytes(measured.memory)}, {share} of the limit{excess}"
    if plan.unchecked:
        total = plan.cost.memory.total
        predicted = format_share(total, plan.limit)
        padded = f" ({format_share(plan.padded, plan.limit)} if a TPU pads arrays of short rows)" if plan.padded > total else ""
        return f"unchecked: the memory is predicted, {predicted} of the limit{padded}, and no compiler has confirmed it"
    return ""


def about_proof(plan: PlanRecord) -> str:
    """Return what the search proved of all layouts, in words; "" if no search found the plan."""
    proof, gap = plan.proof, plan.gap
    if proof is None:
        return ""
    if gap is None:
        least = math.floor(proof.memory)
        return f"proved: by this estimate, every layout needs at least {format_bytes(least)}" if least > plan.limit else ""
    slower = plan.cost.seconds / proof.fastest - 1 if proof.fastest else 0.0
    tie = f"; this plan, a near-tie or a baseline, is {slower:.1%} slower than that" if slower >= _SLOWER else ""
    if gap > GAP:
        return f"not proved: by this estimate, a layout that fits may be up to {gap:.1%} faster than the fastest found{tie}"
    faster = f"more than {gap:.1%} faster" if gap >= _SLOWER else "faster"
    layout = "layout" if plan.rewriting == AS_WRITTEN else "layout of the changed step"
    return f"proved: by this estimate, no {layout} that fits is {faster} than the fastest found{tie}"


def is_over(plan: PlanRecord, cost: Cost) -> bool:
    """Return whether the cost of the plan or a baseline is over the limit; not if the compiler has shown that the plan fits."""
    fits = cost is plan.cost and plan.checked is not None and plan.checked.memory <= plan.limit
    return cost.memory.total > plan.limit and not fits


def _wrapped(sentences: Iterable[str]) -> list[str]:
    """Wrap sentences into indented lines."""
    wrap = textwrap.TextWrapper(_COLUMNS, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False).wrap
    return [line for sentence in sentences for line in wrap(sentence)]


def _costs(plan: PlanRecord) -> list[str]:
    """Return the table of costs: the plan, and the baselines."""
    rows = [("this plan", plan.cost), *plan.baselines.items()]
    heads = ("time", "× plan", "compute", "collectives", "sent", "memory", "of limit", "arguments")
    table = [("a step of one device, predicted", *heads)]
    table += [
        (
            name,
            format_seconds(cost.seconds),
            f"{cost.seconds / plan.cost.seconds:.2f}" if plan.cost.seconds else "–",
            format_seconds(cost.compute),
            format_seconds(cost.communication),
            format_bytes(cost.bytes_on_wire),
            format_bytes(cost.memory.total),
            format_share(cost.memory.total, plan.limit),
            format_bytes(cost.memory.arguments),
        )
        for name, cost in rows
    ]
    over = ["", *("  over the limit" if is_over(plan, cost) else "" for _, cost in rows)]
    return [row + end for row, end in zip(_aligned(table, ">"), over, strict=True)]


def _collectives(cost: Cost) -> list[str]:
    """Return the table of collectives."""
    if not cost.collectives:
        return ["no collectives"]
    shown, rest = cost.collectives[:_COLLECTIVES], cost.collectives[_COLLECTIVES:]
    rows = [(f"{each.kind} over {' and '.join(each.axes)}", each.count, each.bytes_on_wire, each.seconds) for each in shown]
    if rest:
        count, sent, seconds = (sum(getattr(each, name) for each in rest) for name in ("count", "bytes_on_wire", "seconds"))
        rows.append(("others", count, sent, seconds))
    table = [("collectives, the slowest first", "count", "sent", "time")]
    table += [(name, f"{count:.0f}", format_bytes(sent), format_seconds(seconds)) for name, count, sent, seconds in rows]
    return _aligned(table, ">")


def _leaves(rows: Sequence[LeafGroup], room: int) -> list[str]:
    """Return the table of leaves: the batch and large groups, as many as there is room for, and the sum of the rest."""
    total = sum(row.bytes for row in rows)
    shown = [row for row in rows if row.leaf.role == "batch" or row.bytes >= _LEAST * total][: room - 2]
    table = [("leaves, the largest first", "", "shape", "a device", "stored", "used", "optimizer"), *map(_leaf, shown)]
    columns = list(zip(*table, strict=True))
    spare = _COLUMNS - sum(max(map(len, column)) + 2 for column in columns[1:]) - 2
    columns[0] = (table[0][0], *(_shortened(path, max(spare, 20)) for path in columns[0][1:]))
    lines = _aligned(list(zip(*(column for column in columns if any(column[1:])), strict=True)), "<")
    if rest := [row for row in rows if row not in shown]:
        count, size = sum(len(row.leaves) for row in rest), sum(row.bytes for row in rest)
        lines.append(f"  and {count} more, {format_bytes(size)} together")
    return lines


def _leaf(row: LeafGroup) -> tuple[str, ...]:
    """Return the cells of one group of leaves."""
    leaf = row.leaf
    return (
        row.path,
        f"×{len(row.leaves)}" if len(row.leaves) > 1 else "",
        describe_array(leaf),
        format_bytes(row.bytes),
        format_spec(leaf.stored),
        format_spec(row.used) if row.used is not None else "",
        "same" if row.moments == (leaf.stored,) else " or ".join(map(format_spec, row.moments)),
    )


def _aligned(table: Sequence[Sequence[str]], align: str) -> list[str]:
    """Return the rows of a table with aligned columns. All rows but the header are indented."""
    rows = [[("  " if number else "") + row[0], *row[1:]] for number, row in enumerate(table)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligns = ["<"] + [align] * (len(widths) - 1)
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, aligns, widths, strict=True) if width) for row in rows
    ]


def _shortened(path: str, most: int) -> str:
    """Leave out the middle of a path that has too many characters: its argument and its leaf matter most."""
    if len(path) <= most:
        return path
    head = most // 3
    return f"{path[:head]}…{path[len(path) - (most - head - 1) :]}"


# Leaves in groups, as the text and the page show them.


@dataclass(frozen=True)
class LeafGroup:
    """Leaves that differ only in the numbers in their paths: the same leaf of all layers.

    Attributes:
      path: their common path, with a star where they differ: "state/params/layers/*/w".
      moments: the layouts of their optimizer leaves, which have the same shape and the same end of the path.
      bytes: bytes on one device, for all leaves and their optimizer leaves.
    """

    path: str
    leaves: tuple[LeafLayout, ...]
    moments: tuple[Spec, ...]
    bytes: float

    @property
    def leaf(self) -> LeafLayout:
        """Return the first leaf, which stands for all."""
        return self.leaves[0]

    @property
    def used(self) -> Spec | None:
        """Return the layout at the first use of a leaf that is not of the batch; None if it is the stored one."""
        return None if self.leaf.used == self.leaf.stored or self.leaf.role == "batch" else self.leaf.used


def group_layers(plan: PlanRecord) -> list[LeafGroup]:
    """Return all leaves of the arguments in groups, those with the most bytes on a device first."""
    owner = parameters_of(plan.inputs)
    moments: dict[str, list[LeafLayout]] = defaultdict(list)
    for leaf in plan.inputs:
        if leaf.path in owner:
            moments[owner[leaf.path].path].append(leaf)
    found: dict[tuple, list[LeafLayout]] = defaultdict(list)
    for leaf in plan.inputs:
        if leaf.path not in owner:
            of_moments = tuple(dict.fromkeys(each.stored for each in moments[leaf.path]))
            layout = (leaf.shape, leaf.dtype, leaf.role, leaf.stored, leaf.used, of_moments)
            found[_without_numbers(leaf.path), layout].append(leaf)
    rows = []
    for (_, layout), leaves in found.items():
        all_of_them = [*leaves, *(each for leaf in leaves for each in moments[leaf.path])]
        size = sum(local_bytes(leaf, plan.mesh_shape, plan.platform) for leaf in all_of_them)
        rows.append(LeafGroup(_starred([leaf.path for leaf in leaves]), tuple(leaves), layout[-1], size))
    return sorted(rows, key=lambda row: -row.bytes)


def _without_numbers(path: str) -> str:
    """Return a path without the numbers at the ends of its parts."""
    return "/".join("#" if part.isdigit() else part.rstrip("0123456789") for part in path.split("/"))


def _starred(paths: Sequence[str]) -> str:
    """Return the common path of leaves, with a star where they differ."""
    parts = zip(*(path.split("/") for path in paths), strict=True)
    return "/".join(part[0] if len(set(part)) == 1 else part[0].rstrip("0123456789") + "*" for part in parts)
