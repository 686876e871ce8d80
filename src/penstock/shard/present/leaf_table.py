"""Group the leaves of a plan for a table.

In: a `PlanRecord`. Out: one group for the same leaf of all layers, where each parameter comes with its optimizer state. Also the
number of layers, which is read from the paths of the parameters.
"""

from __future__ import annotations

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

    Layers are numbered in the paths of the parameters. They have leaves of the same names and shapes, with at least one matrix.

    Args:
      plan: the plan.

    Returns:
      None if there are no such layers, if they are not all equal, or if there are several kinds of them. In these cases, a count
      "a layer" would be ambiguous.
    """
    parts: dict[str, dict[str, list[tuple[str, tuple[int, ...]]]]] = defaultdict(lambda: defaultdict(list))
    for leaf in plan.inputs:
        split = _outermost_number(leaf.path) if leaf.role == "parameters" else None
        if split:
            family, number, rest = split
            parts[family][number].append((rest, leaf.shape))
    repeated = {
        family: len(members)
        for family, members in parts.items()
        if len(members) > 1 and any(len(shape) > 1 for leaves in members.values() for _, shape in leaves)
    }
    if len(repeated) != 1:
        return None
    ((family, count),) = repeated.items()
    if len({tuple(sorted(leaves)) for leaves in parts[family].values()}) > 1:
        return None
    name = family.strip("/").rpartition("/")[2].rstrip("_-").removesuffix("s")
    return count, name if name in ("block", "stage", "cell") else "layer"


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
