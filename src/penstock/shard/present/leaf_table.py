"""Group the leaves of a plan for a table.

In: a `PlanRecord`. Out: one group for the same leaf of all layers, where each parameter comes with its optimizer state. Also the
number of layers, which is read from the parameters: from the loops that take slices of them, and from their paths.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.shard.apply.sharding_constraints import Spec
from penstock.shard.record import LeafLayout, PlanRecord, local_bytes


@dataclass(frozen=True)
class LeafGroup:
    """Leaves that differ only in the numbers in their paths: the same leaf of all layers.

    Attributes:
      path: their common path, with a star where they differ: "state/params/layers/*/w".
      leaves: the leaves.
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


def group_layers(plan: PlanRecord) -> list[LeafGroup]:
    """Return all leaves of the arguments in groups, those with the most bytes on a device first.

    Args:
      plan: the plan.
    """
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


def parameters_of(leaves: Iterable[LeafLayout]) -> dict[str, LeafLayout]:
    """Return the parameter that each optimizer leaf belongs to, by the path of the optimizer leaf.

    It is the parameter of the same shape whose path has the longest common end. A leaf without such a parameter is left out.

    Args:
      leaves: parameters and optimizer leaves.
    """
    named: dict[tuple[str, tuple[int, ...]], list[LeafLayout]] = defaultdict(list)
    leaves = list(leaves)
    for leaf in leaves:
        if leaf.role == "parameters":
            named[leaf.path.rpartition("/")[2], leaf.shape].append(leaf)
    found = {}
    for leaf in leaves:
        candidates = named.get((leaf.path.rpartition("/")[2], leaf.shape), ())
        if leaf.role == "optimizer" and candidates:
            found[leaf.path] = max(candidates, key=lambda each: _common_end(each.path, leaf.path))
    return found


def count_layers(plan: PlanRecord) -> tuple[int, str] | None:
    """Return the number of repeated layers of a model, and the word for one of them: (32, "layer").

    Layers are the slices that loops take of stacked parameters, or they are numbered in the paths of the parameters. Numbered
    layers have leaves of the same names and shapes. Both have at least one matrix.

    Args:
      plan: the plan.

    Returns:
      None if there are no such layers, if they are not all equal, or if there are several kinds of them. In these cases, a count
      "a layer" would be ambiguous.
    """
    stacked = [leaf for leaf in plan.inputs if leaf.role == "parameters" and leaf.slices > 1 and _is_stack_of_matrices(leaf)]
    numbered = _numbered_layers([leaf for leaf in plan.inputs if leaf.role == "parameters" and leaf.slices == 1])
    counts = {leaf.slices for leaf in stacked}
    if not stacked and len(numbered) == 1:
        ((family, members),) = numbered.items()
        equal = len({tuple(sorted(leaves)) for leaves in members.values()}) == 1
        return (len(members), _layer_name(family)) if equal else None
    if len(counts) == 1 and not numbered:
        return counts.pop(), _layer_name("/".join(_common_start([leaf.path for leaf in stacked])))
    return None


def _is_stack_of_matrices(leaf: LeafLayout) -> bool:
    """Return whether the slices that loops take of a leaf have two dimensions or more; loops take them along the first."""
    sizes = itertools.accumulate(leaf.shape, operator.mul)
    return sum(size > leaf.slices for size in sizes) > 1


def _numbered_layers(leaves: Iterable[LeafLayout]) -> dict[str, dict[str, list[tuple[str, tuple[int, ...]]]]]:
    """Return the leaves, as names and shapes, of each number of each kind of layers that paths number, if it has matrices."""
    parts: dict[str, dict[str, list[tuple[str, tuple[int, ...]]]]] = defaultdict(lambda: defaultdict(list))
    for leaf in leaves:
        split = _outermost_number(leaf.path)
        if split:
            family, number, rest = split
            parts[family][number].append((rest, leaf.shape))
    return {
        family: members
        for family, members in parts.items()
        if len(members) > 1 and any(len(shape) > 1 for leaves in members.values() for _, shape in leaves)
    }


def _layer_name(path: str) -> str:
    """Return the word for one of the layers at a path.

    >>> _layer_name("state/params/blocks/"), _layer_name("state/params/encoder")
    ('block', 'layer')
    """
    name = path.strip("/").rpartition("/")[2].rstrip("_-").removesuffix("s")
    return name if name in ("block", "stage", "cell") else "layer"


def _common_start(paths: Sequence[str]) -> list[str]:
    """Return the parts that all paths begin with, without their last."""
    parts = zip(*(path.split("/")[:-1] for path in paths), strict=False)
    return [part[0] for part in itertools.takewhile(lambda part: len(set(part)) == 1, parts)]


def _outermost_number(path: str) -> tuple[str, str, str] | None:
    """Split a path at its first number: what is before it, the number, and the rest.

    >>> _outermost_number("params/layers/3/mlp/w")
    ('params/layers/', '3', 'mlp/w')
    """
    match = re.match(r"((?:[^/]*/)*?[^/]*?)(\d+)(?:/(.*))?$", path)
    return (match[1], match[2], match[3] or "") if match else None


def _without_numbers(path: str) -> str:
    """Return a path without the numbers at the ends of its parts."""
    return "/".join("#" if part.isdigit() else part.rstrip("0123456789") for part in path.split("/"))


def _starred(paths: Sequence[str]) -> str:
    """Return the common path of leaves, with a star where they differ."""
    parts = zip(*(path.split("/") for path in paths), strict=True)
    return "/".join(part[0] if len(set(part)) == 1 else part[0].rstrip("0123456789") + "*" for part in parts)


def _common_end(one: str, other: str) -> int:
    """Return how many parts at the end of two paths are equal."""
    pairs = zip(reversed(one.split("/")), reversed(other.split("/")), strict=False)
    return next((count for count, (a, b) in enumerate(pairs) if a != b), min(one.count("/"), other.count("/")))
