"""The leaves of a plan as a reader wants them: alike ones together, and parameters with what the optimizer keeps of them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.shard.apply.sharding_constraints import Spec
from penstock.shard.record import LeafLayout, PlanRecord, local_bytes


@dataclass(frozen=True)
class LeafGroup:
    """Leaves that differ in nothing but numbers in their paths, which are those of the layers.

    Attributes:
      path: "state/params/layers/*/w", with a star where they differ.
      leaves: all of them.
      moments: the layouts of what the optimizer keeps of each of them: leaves of the same shape and of a path with the same end.
      bytes: of a device, for all of them and their moments.
    """

    path: str
    leaves: tuple[LeafLayout, ...]
    moments: tuple[Spec, ...]
    bytes: float

    @property
    def leaf(self) -> LeafLayout:
        """The first of them."""
        return self.leaves[0]


def group_layers(plan: PlanRecord) -> list[LeafGroup]:
    """All leaves of the arguments, those that take most of a device first."""
    owner = parameters_of(plan.inputs)
    moments: dict[str, list[LeafLayout]] = defaultdict(list)
    for leaf in plan.inputs:
        if leaf.path in owner:
            moments[owner[leaf.path].path].append(leaf)
    found: dict[tuple, list[LeafLayout]] = defaultdict(list)
    for leaf in plan.inputs:
        if leaf.path not in owner:
            kept = tuple(dict.fromkeys(each.stored for each in moments[leaf.path]))
            layout = (leaf.shape, leaf.dtype, leaf.role, leaf.stored, leaf.used, kept)
            found[_without_numbers(leaf.path), layout].append(leaf)
    rows = []
    for (_, layout), leaves in found.items():
        all_of_them = [*leaves, *(each for leaf in leaves for each in moments[leaf.path])]
        size = sum(local_bytes(leaf, plan.mesh_shape) for leaf in all_of_them)
        rows.append(LeafGroup(_starred([leaf.path for leaf in leaves]), tuple(leaves), layout[-1], size))
    return sorted(rows, key=lambda row: -row.bytes)


def parameters_of(leaves: Iterable[LeafLayout]) -> dict[str, LeafLayout]:
    """Of each leaf of the optimizer, by path, the parameter that it belongs to, if one has its shape and the end of its path."""
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
    """How many alike parts the parameters have, numbered in their paths, and what they are called: (32, "layer").

    Alike are parts whose leaves have the same names and shapes, one matrix at least. None if there are no such parts, or
    several kinds of them, of which a count of operations could not say which it is about, or others among them.
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
    """What stands before the first number that a part of a path ends in, the number, and the rest."""
    match = re.match(r"((?:[^/]*/)*?[^/]*?)(\d+)(?:/(.*))?$", path)
    return (match[1], match[2], match[3] or "") if match else None


def _without_numbers(path: str) -> str:
    return "/".join("#" if part.isdigit() else part.rstrip("0123456789") for part in path.split("/"))


def _starred(paths: Sequence[str]) -> str:
    parts = zip(*(path.split("/") for path in paths), strict=True)
    return "/".join(part[0] if len(set(part)) == 1 else part[0].rstrip("0123456789") + "*" for part in parts)


def _common_end(one: str, other: str) -> int:
    pairs = zip(reversed(one.split("/")), reversed(other.split("/")), strict=False)
    return next((count for count, (a, b) in enumerate(pairs) if a != b), min(one.count("/"), other.count("/")))
