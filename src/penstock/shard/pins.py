"""Layouts and roles that the user prescribes, by the paths of leaves."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from penstock.shard.meshes import describe
from penstock.shard.trace import Leaf

Fixed = tuple[tuple[str, ...] | None, ...]
ROLES = ("parameters", "optimizer", "batch", "other")


def matching(pattern: str, leaves: Sequence[Leaf], what: str) -> list[int]:
    """The places of the leaves that a pattern names.

    A pattern is as in a shell: `*` stands for anything, also for several parts of a path. It is held against the whole path
    ("state/params/embed") and against that without the name of the argument ("params/embed").

    Raises:
      ValueError: it matches nothing; the message has the nearest paths.
    """
    found = [
        place
        for place, leaf in enumerate(leaves)
        if fnmatch.fnmatchcase(leaf.path, pattern) or fnmatch.fnmatchcase(leaf.path.partition("/")[2], pattern)
    ]
    if not found:
        paths = [leaf.path for leaf in leaves]
        short = {leaf.path.partition("/")[2]: leaf.path for leaf in leaves}
        near = difflib.get_close_matches(pattern, [*paths, *short], n=3, cutoff=0.3) or paths[:3]
        raise ValueError(f"{what}: the pattern {pattern!r} matches no leaf; the nearest are {', '.join(map(repr, near))}")
    return found


def pinned(constraints: Mapping[str, Any] | None, leaves: Sequence[Leaf], mesh: Mapping[str, int]) -> dict[int, Fixed]:
    """Of each leaf that is pinned, by place: of each dimension the mesh axes.

    Of several patterns that match a leaf, the last counts.

    Raises:
      TypeError, ValueError: a pattern that matches nothing, or a layout that does not fit its leaf or the mesh.
    """
    fixed: dict[int, Fixed] = {}
    for pattern, spec in (constraints or {}).items():
        spec = getattr(spec, "spec", spec)
        if not isinstance(spec, PartitionSpec):
            raise TypeError(f"constraints[{pattern!r}] is {spec!r}; a layout is a jax.sharding.PartitionSpec")
        for place in matching(pattern, leaves, "constraints"):
            fixed[place] = _layout(spec, leaves[place], mesh, pattern)
    return fixed


def _layout(spec: PartitionSpec, leaf: Leaf, mesh: Mapping[str, int], pattern: str) -> Fixed:
    where = f"constraints[{pattern!r}] = {spec} for {leaf.path!r}, shape {list(leaf.shape)}, on mesh {describe(mesh)}"
    if len(spec) > len(leaf.shape):
        raise ValueError(f"{where}: the layout has {len(spec)} dimensions and the leaf {len(leaf.shape)}")
    fixed: list[tuple[str, ...] | None] = []
    for dim, size in enumerate(leaf.shape):
        entry = spec[dim] if dim < len(spec) else None
        if entry is PartitionSpec.UNCONSTRAINED:
            fixed.append(None)
            continue
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        unknown = [axis for axis in axes if axis not in mesh]
        if unknown:
            raise ValueError(f"{where}: the mesh has no axis {unknown[0]!r}; its axes are {', '.join(mesh)}")
        shards = math.prod(mesh[axis] for axis in axes)
        if size % shards:
            raise ValueError(
                f"{where}: dimension {dim} of size {size} does not divide into {shards}; {_instead(leaf, axes, mesh, dim)}"
            )
        fixed.append(axes)
    used = [axis for entry in fixed if entry for axis in entry]
    if len(set(used)) < len(used):
        raise ValueError(f"{where}: a mesh axis stands in two dimensions")
    return tuple(fixed)


def _instead(leaf: Leaf, axes: tuple[str, ...], mesh: Mapping[str, int], dim: int) -> str:
    """The nearest layout that would work."""
    for count in range(len(axes) - 1, 0, -1):
        if leaf.shape[dim] % math.prod(mesh[axis] for axis in axes[:count]) == 0:
            entries: list[Any] = [None] * dim + [axes[:count] if count > 1 else axes[0]]
            return f"{_spec(entries)} would"
    shards = math.prod(mesh[axis] for axis in axes)
    for other, size in enumerate(leaf.shape):
        if size % shards == 0:
            return f"{_spec([None] * other + [axes if len(axes) > 1 else axes[0]])} would"
    return "no dimension of it does: leave it whole with P()"


def _spec(entries: Sequence[Any]) -> str:
    return f"P({', '.join(map(repr, entries))})"


def roles_given(roles: Mapping[str, str] | None, leaves: Sequence[Leaf]) -> dict[int, str]:
    """Of each leaf whose role the user names, by place, that role.

    Raises:
      ValueError: a pattern that matches nothing, or a role that is none of `ROLES`.
    """
    given: dict[int, str] = {}
    for pattern, role in (roles or {}).items():
        if role not in ROLES:
            raise ValueError(f"roles[{pattern!r}] = {role!r}; a role is one of {', '.join(ROLES)}")
        given.update(dict.fromkeys(matching(pattern, leaves, "roles"), role))
    return given
