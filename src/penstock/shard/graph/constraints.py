"""Layouts and roles that the user prescribes, by the paths of leaves."""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from penstock.shard.mesh.shapes import describe_mesh
from penstock.shard.trace.step import Leaf

FixedLayout = tuple[tuple[str, ...] | None, ...]
ROLES = ("parameters", "optimizer", "batch", "other")


def matching(pattern: str, leaves: Sequence[Leaf], what: str) -> list[int]:
    """The places of the leaves that a pattern names.

    A pattern is as in a shell: `*` stands for anything, also for several parts of a path. It is held against the whole path
    ("state/params/embed") and against that without the name of the argument ("params/embed"). What is the path of a leaf, letter
    by letter, names that leaf, whatever signs it has ("w[0]").

    Raises:
      ValueError: it matches nothing; the message has the nearest paths.
    """
    names = [(leaf.path, leaf.path.partition("/")[2]) for leaf in leaves]
    found = [index for index, each in enumerate(names) if pattern in each] or [
        index for index, each in enumerate(names) if any(fnmatch.fnmatchcase(name, pattern) for name in each)
    ]
    if not found:
        paths = [leaf.path for leaf in leaves]
        short = {leaf.path.partition("/")[2]: leaf.path for leaf in leaves}
        near = difflib.get_close_matches(pattern, [*paths, *short], n=3, cutoff=0.3) or paths[:3]
        raise ValueError(f"{what}: the pattern {pattern!r} matches no leaf; the nearest are {', '.join(map(repr, near))}")
    return found


def match_constraints(constraints: Mapping[str, Any] | None, leaves: Sequence[Leaf]) -> dict[int, tuple[str, PartitionSpec]]:
    """Of each leaf that is pinned, by place: the last pattern that matches it, and the layout.

    Raises:
      TypeError, ValueError: it is no mapping of patterns to layouts, or a pattern matches nothing.
    """
    last: dict[int, tuple[str, PartitionSpec]] = {}
    for pattern, spec in _by_pattern(constraints, "constraints", '{"params/embed": P("model", None)}'):
        spec = getattr(spec, "spec", spec)
        if not isinstance(spec, PartitionSpec):
            raise TypeError(f"constraints[{pattern!r}] is {spec!r}; a layout is a jax.sharding.PartitionSpec")
        last.update(dict.fromkeys(matching(pattern, leaves, "constraints"), (pattern, spec)))
    return last


def axes_in_constraints(constraints: Mapping[str, Any] | None, leaves: Sequence[Leaf]) -> set[str]:
    """The mesh axes that the layouts name which count."""
    return {axis for _, spec in match_constraints(constraints, leaves).values() for entry in spec for axis in _axes(entry)}


def fixed_layouts(
    constraints: Mapping[str, Any] | None, leaves: Sequence[Leaf], mesh: Mapping[str, int]
) -> dict[int, FixedLayout]:
    """Of each leaf that is pinned, by place: of each dimension the mesh axes.

    Of several patterns that match a leaf, the last counts.

    Raises:
      TypeError, ValueError: a pattern that matches nothing, or a layout that does not fit its leaf or the mesh.
    """
    last = match_constraints(constraints, leaves)
    return {index: _layout(spec, leaves[index], mesh, pattern) for index, (pattern, spec) in last.items()}


def _by_pattern(given: Any, what: str, example: str) -> Iterable[tuple[str, Any]]:
    """What is said of each pattern, of a mapping or of None."""
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        raise TypeError(f"{what}={given!r} is no dict by path patterns, such as {example}")
    for pattern in given:
        if not isinstance(pattern, str):
            raise TypeError(f"{what} has the key {pattern!r}; a pattern of paths is a string, as in {example}")
    return given.items()


def _layout(spec: PartitionSpec, leaf: Leaf, mesh: Mapping[str, int], pattern: str) -> FixedLayout:
    where = f"constraints[{pattern!r}] = {spec} for {leaf.path!r}, shape {list(leaf.shape)}, on mesh {describe_mesh(mesh)}"
    unknown = [axis for entry in spec for axis in _axes(entry) if axis not in mesh]
    if unknown:
        raise ValueError(f"{where}: the mesh has no axis {unknown[0]!r}; its axes are {', '.join(mesh)}")
    if len(spec) > len(leaf.shape):
        raise ValueError(
            f"{where}: the layout has {len(spec)} dimensions and the leaf {len(leaf.shape)}; {_suggestion(spec, leaf, mesh)}"
        )
    fixed: list[tuple[str, ...] | None] = []
    for dim, size in enumerate(leaf.shape):
        entry = spec[dim] if dim < len(spec) else None
        if entry is PartitionSpec.UNCONSTRAINED:
            fixed.append(None)
            continue
        axes = _axes(entry)
        shards = _shards(axes, mesh)
        if size % shards:
            raise ValueError(
                f"{where}: dimension {dim} of size {size} does not divide into {shards}; {_suggestion(spec, leaf, mesh)}"
            )
        fixed.append(axes)
    used = [axis for entry in fixed if entry for axis in entry]
    if len(set(used)) < len(used):
        raise ValueError(f"{where}: a mesh axis stands in it twice; {_suggestion(spec, leaf, mesh)}")
    return tuple(fixed)


def _axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one dimension of a layout."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


def _suggestion(spec: PartitionSpec, leaf: Leaf, mesh: Mapping[str, int]) -> str:
    """The nearest layout that would do.

    Each dimension keeps those of its axes that divide it furthest. Where none does, all of them go to the first dimension that
    has none and that they divide.
    """
    entries: list[Any] = [None] * len(leaf.shape)
    unplaced = []
    used: set[str] = set()
    for dim, entry in enumerate(spec):
        if entry is PartitionSpec.UNCONSTRAINED and dim < len(entries):
            entries[dim] = entry
        named = tuple(axis for axis in dict.fromkeys(_axes(entry)) if axis not in used)
        subsets = (subset for count in range(len(named), 0, -1) for subset in itertools.combinations(named, count))
        fitting = [subset for subset in subsets if dim < len(entries) and leaf.shape[dim] % _shards(subset, mesh) == 0]
        if fitting:
            entries[dim] = max(fitting, key=lambda subset: _shards(subset, mesh))
            used.update(entries[dim])
        elif named:
            unplaced.append(named)
    for named in unplaced:
        free = (dim for dim, size in enumerate(leaf.shape) if entries[dim] is None and size % _shards(named, mesh) == 0)
        to = next(free, None)
        if to is not None and not used.intersection(named):
            entries[to] = named
            used.update(named)
    while entries and entries[-1] is None:
        entries.pop()
    return f"P({', '.join(map(_as_source, entries))}) would do" if entries else "leave it whole with P()"


def _as_source(entry: Any) -> str:
    """One dimension of a layout as it stands in a program."""
    if entry is PartitionSpec.UNCONSTRAINED:
        return "P.UNCONSTRAINED"
    return repr(entry[0] if entry and len(entry) == 1 else entry)


def _shards(axes: Iterable[str], mesh: Mapping[str, int]) -> int:
    return math.prod(mesh[axis] for axis in axes)


def given_roles(roles: Mapping[str, str] | None, leaves: Sequence[Leaf]) -> dict[int, str]:
    """Of each leaf whose role the user names, by place, that role.

    Raises:
      TypeError, ValueError: it is no mapping, a pattern matches nothing, or a role is none of `ROLES`.
    """
    given: dict[int, str] = {}
    for pattern, role in _by_pattern(roles, "roles", '{"hidden/*": "batch"}'):
        if role not in ROLES:
            raise ValueError(f"roles[{pattern!r}] = {role!r}; a role is one of {', '.join(ROLES)}")
        given.update(dict.fromkeys(matching(pattern, leaves, "roles"), role))
    return given
