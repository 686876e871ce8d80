"""Read the layouts and roles that the user prescribes for leaves, by patterns of paths.

An error names the pattern, the leaf and the nearest layout that would fit.
"""

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
"""For each dimension, the mesh axes that the user prescribes; None where it is unconstrained."""
ROLES = ("parameters", "optimizer", "batch", "other")


def matching(pattern: str, leaves: Sequence[Leaf], what: str) -> list[int]:
    """Return the indices of the leaves that a pattern matches.

    A pattern is as in a shell: `*` matches any text, also across several parts of a path. It is compared with the full path
    ("state/params/embed") and with the path without the name of the argument ("params/embed"). A pattern that equals a path
    matches this leaf only, even if it has special characters ("w[0]").

    Args:
      what: the name of the option, for the message.

    Raises:
      ValueError: the pattern matches no leaf; the message has the nearest paths.
    """
    names = [(leaf.path, leaf.path.partition("/")[2]) for leaf in leaves]
    matches = [index for index, paths in enumerate(names) if pattern in paths] or [
        index for index, paths in enumerate(names) if any(fnmatch.fnmatchcase(path, pattern) for path in paths)
    ]
    if not matches:
        paths = [leaf.path for leaf in leaves]
        short = {leaf.path.partition("/")[2]: leaf.path for leaf in leaves}
        near = difflib.get_close_matches(pattern, [*paths, *short], n=3, cutoff=0.3) or paths[:3]
        raise ValueError(f"{what}: the pattern {pattern!r} matches no leaf; the nearest are {', '.join(map(repr, near))}")
    return matches


def match_constraints(constraints: Mapping[str, Any] | None, leaves: Sequence[Leaf]) -> dict[int, tuple[str, PartitionSpec]]:
    """Return the constraints: index of each constrained leaf → the last pattern that matches it, and the layout.

    Args:
      constraints: layouts by pattern: each a `PartitionSpec`, or a sharding that has one.

    Raises:
      TypeError: `constraints` is not a mapping, a pattern is not a string, or a layout is not a `PartitionSpec`.
      ValueError: a pattern matches no leaf.
    """
    last: dict[int, tuple[str, PartitionSpec]] = {}
    for pattern, spec in _by_pattern(constraints, "constraints", '{"params/embed": P("model", None)}'):
        spec = getattr(spec, "spec", spec)
        if not isinstance(spec, PartitionSpec):
            raise TypeError(f"constraints[{pattern!r}] is {spec!r}; a layout is a jax.sharding.PartitionSpec")
        last.update(dict.fromkeys(matching(pattern, leaves, "constraints"), (pattern, spec)))
    return last


def axes_in_constraints(constraints: Mapping[str, Any] | None, leaves: Sequence[Leaf]) -> set[str]:
    """Return the mesh axes that the constraints name, without constraints that a later pattern replaces."""
    return {axis for _, spec in match_constraints(constraints, leaves).values() for entry in spec for axis in _axes(entry)}


def fixed_layouts(
    constraints: Mapping[str, Any] | None, leaves: Sequence[Leaf], mesh: Mapping[str, int]
) -> dict[int, FixedLayout]:
    """Return the layout that the user prescribes for each constrained leaf, by the index of the leaf.

    If several patterns match a leaf, the last counts, and only its layout has to fit.

    Raises:
      TypeError: as `match_constraints`.
      ValueError: a pattern matches no leaf, or a layout does not fit its leaf or the mesh. The message suggests one that fits.
    """
    last = match_constraints(constraints, leaves)
    return {index: _fit_layout(spec, leaves[index], mesh, pattern) for index, (pattern, spec) in last.items()}


def given_roles(roles: Mapping[str, str] | None, leaves: Sequence[Leaf]) -> dict[int, str]:
    """Return the roles that the user gives, by the index of the leaf.

    Raises:
      TypeError: `roles` is not a mapping, or a pattern is not a string.
      ValueError: a pattern matches no leaf, or a role is not in `ROLES`.
    """
    given: dict[int, str] = {}
    for pattern, role in _by_pattern(roles, "roles", '{"hidden/*": "batch"}'):
        if role not in ROLES:
            raise ValueError(f"roles[{pattern!r}] = {role!r}; a role is one of {', '.join(ROLES)}")
        given.update(dict.fromkeys(matching(pattern, leaves, "roles"), role))
    return given


def _by_pattern(given: Any, what: str, example: str) -> Iterable[tuple[str, Any]]:
    """Return the items of a mapping by pattern, () for None; raise TypeError if it is no mapping or a key is no string."""
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        raise TypeError(f"{what}={given!r} is not a dict by path patterns, such as {example}")
    for pattern in given:
        if not isinstance(pattern, str):
            raise TypeError(f"{what} has the key {pattern!r}; a pattern of paths is a string, as in {example}")
    return given.items()


def _fit_layout(spec: PartitionSpec, leaf: Leaf, mesh: Mapping[str, int], pattern: str) -> FixedLayout:
    """Return the mesh axes of each dimension of a leaf, after a check that the layout fits the leaf and the mesh."""
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
    """Return the mesh axes in one entry of a `PartitionSpec`."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


def _suggestion(spec: PartitionSpec, leaf: Leaf, mesh: Mapping[str, int]) -> str:
    """Describe the nearest layout that fits.

    Each dimension keeps the subset of its axes that divides it into the most shards. If no subset divides it, all its axes go
    to the first dimension that has no axes and that they divide.
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
    return f"P({', '.join(map(_as_source, entries))}) would do" if entries else "replicate it with P()"


def _as_source(entry: Any) -> str:
    """Return an entry of a `PartitionSpec` as it is written in source code."""
    if entry is PartitionSpec.UNCONSTRAINED:
        return "P.UNCONSTRAINED"
    return repr(entry[0] if entry and len(entry) == 1 else entry)


def _shards(axes: Iterable[str], mesh: Mapping[str, int]) -> int:
    return math.prod(mesh[axis] for axis in axes)
