"""Make tables of the costs of all layouts of a step on a whole mesh: of a class of nodes, and of two that share arrays.

A *state* is the index of a layout of a class, and the states of all classes are an assignment. The seconds of a step are a sum of
these tables, except where several readers share a reshard (`Shared`). The memory at an operation is such a sum too.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from penstock.shard.graph.decisions import Bundle, Node
from penstock.shard.mesh.resharding import Layout, MeshLinks, union, with_axes
from penstock.shard.search.costs import COLLECTIVE_FORMS, Assignment, CostModel, joint_number, project

States = list[int]
"""The index of the layout of each class of nodes."""


class Reshard(NamedTuple):
    """The reshards of the arrays of a bundle, for each row and column of a pair of classes.

    Attributes:
      seconds: of the collectives of one array [rows, columns].
      form: the first of them, as an index of `COLLECTIVE_FORMS`, -1 for another kind, and -2 if there are none [rows, columns].
      fraction: the part of the array that a device holds of the resharded copy [rows, columns].
      joint: what it shares with other arrays, as a number (`costs.joint_number`) [rows, columns].
    """

    seconds: np.ndarray
    form: np.ndarray
    fraction: np.ndarray
    joint: np.ndarray

    def copied(self, form: int) -> np.ndarray:
        """Return the part of the array that a device holds of a copy that exists only in this form (`LiveRanges.form`)."""
        return np.where(self.form >= -1 if form == 0 else self.form == form, self.fraction, 0.0)


@dataclass
class Pair:
    """Two classes of nodes between which arrays pass. States that cost the same in each of its tables are one row or column.

    Attributes:
      a, b: the classes.
      rows: the row of each state of `a`.
      columns: the column of each state of `b`.
      seconds: the seconds of all reshards that no other reader shares [rows, columns].
      reshards: the reshards of each bundle, by its number.
    """

    a: int
    b: int
    rows: np.ndarray
    columns: np.ndarray
    seconds: np.ndarray
    reshards: dict[int, Reshard]

    @functools.cached_property
    def least_of_rows(self) -> Grouping:
        """Return how to reduce an array of states of `a` to rows."""
        return Grouping.of(self.rows)

    @functools.cached_property
    def least_of_columns(self) -> Grouping:
        """Return how to reduce an array of states of `b` to columns."""
        return Grouping.of(self.columns)


class Grouping(NamedTuple):
    """An order of states in which those of a group are next to each other, and where the groups begin."""

    order: np.ndarray
    begins: np.ndarray

    @staticmethod
    def of(groups: np.ndarray) -> Grouping:
        """Return it for the group of each state; the groups are numbered from 0, and none is empty."""
        order = np.argsort(groups, kind="stable")
        return Grouping(order, np.searchsorted(groups[order], np.arange(groups.max(initial=-1) + 1)))

    def least(self, values: np.ndarray) -> np.ndarray:
        """Return the least value of each group."""
        return np.minimum.reduceat(values[self.order], self.begins)


class Reader(NamedTuple):
    """A bundle that shares reshards.

    Attributes:
      pair: the index of its pair of classes.
      seconds: of the reshards that it shares [rows, columns].
      target: a number of the layout after the reshard, and of what is shared [rows, columns].
    """

    pair: int
    seconds: np.ndarray
    target: np.ndarray


@dataclass(frozen=True)
class Shared:
    """Arrays that several readers reshard: to each new layout once, for the reader for which this takes longest.

    Partial results that are added are such an array, and where they come from are its readers.

    Attributes:
      readers: the bundles, with what they share.
      times: the number of such arrays.
      targets: the number of new layouts.
    """

    readers: tuple[Reader, ...]
    times: int
    targets: int


class Moment(NamedTuple):
    """The arrays that are live at an operation, by what shards them.

    Attributes:
      classes: the bytes of the global arrays that each class of nodes shards [classes].
      copies: (bundle, form) → the bytes of the global arrays that exist if the bundle reshards in this form.
    """

    classes: np.ndarray
    copies: Mapping[tuple[int, int], float]


@dataclass
class KnownTables:
    """Parts of the tables of a mesh, for the tables of another step on the same mesh, in the same order of its axes.

    Attributes:
      numbers: a number of the layouts of a class.
      projections: what `LayoutTables._project` returned.
      reshards: what `LayoutTables._make_reshard` returned.
    """

    numbers: dict[tuple[Layout, ...], int] = field(default_factory=dict)
    projections: dict[tuple, tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=dict)
    reshards: dict[tuple, _Table] = field(default_factory=dict)


@dataclass
class LayoutTables:
    """The costs of all layouts on a mesh.

    Attributes:
      costs: the costs of one assignment.
      known: what is known from other steps.
      layouts: the layouts of each class of nodes. A last class, with one empty layout, stands for the second end of arrays that
        pass from a class to itself.
      shards: the number of shards of each layout, for each class.
      seconds: the compute seconds of all nodes of a class, for each class [layouts].
      stored: the bytes of all stored inputs of a class on one device, for each class [layouts].
      pairs: pairs of classes with arrays that may need collectives.
      pair_of: the index of the pair of each bundle whose arrays may need collectives.
      shared: the arrays that several readers reshard.
    """

    costs: CostModel
    known: KnownTables = field(default_factory=KnownTables)
    layouts: list[tuple[Layout, ...]] = field(init=False)
    shards: list[np.ndarray] = field(init=False)
    seconds: list[np.ndarray] = field(init=False)
    stored: list[np.ndarray] = field(init=False)
    pairs: list[Pair] = field(init=False, default_factory=list)
    pair_of: dict[int, int] = field(init=False, default_factory=dict)
    shared: list[Shared] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        costs, links = self.costs, self.costs.links
        start, found = costs.start(), {}
        self.layouts = []
        for first in costs.first_of:
            node = costs.graph.nodes[first]
            key = (node.sizes, node.fixed, start[first] if first in costs.pinned else None)
            if key not in found:
                found[key] = (start[first],) if first in costs.pinned else find_layouts(node, links)
            self.layouts.append(found[key])
        self.layouts.append(((),))
        numbers = self.known.numbers
        self._alike = [numbers.setdefault(each, len(numbers)) for each in self.layouts]
        masks = {each: np.array(each, dtype=np.int64).reshape(len(each), -1) for each in set(self.layouts)}
        self._masks = [masks[each] for each in self.layouts]
        self._counts = np.array([links.shards(axes) for axes in range(1 << len(links.sizes))], dtype=np.float64)
        self.shards = [np.broadcast_to(self._counts[union(each.T)], len(each)) for each in self._masks]
        classes = list(zip(costs.first_of, costs.members.tolist(), self.layouts[:-1], strict=True))
        self.seconds = [
            members * np.array([costs.node_seconds(node, layout) for layout in layouts], dtype=np.float64)
            for node, members, layouts in classes
        ]
        self.seconds.append(np.zeros(1))
        self.stored = [np.zeros(len(each)) for each in self.layouts]
        for node, size in costs.stored:
            number = costs.class_of[node]
            self.stored[number] += [costs.stored_bytes(node, size, layout) for layout in self.layouts[number]]
        self._add_pairs()

    def with_costs(self, costs: CostModel) -> LayoutTables:
        """Return these tables with costs that differ in when arrays are in memory."""
        other = copy.copy(self)
        other.costs = costs
        return other

    def assignment(self, states: Sequence[int]) -> Assignment:
        """Return the layout of each node."""
        return [self.layouts[number][states[number]] for number in self.costs.class_of]

    def states(self, assignment: Assignment) -> States:
        """Return the state of each class."""
        return [self._index[number][assignment[node]] for number, node in enumerate(self.costs.first_of)] + [0]

    @functools.cached_property
    def _index(self) -> list[dict[Layout, int]]:
        return [{layout: index for index, layout in enumerate(each)} for each in self.layouts]

    def moment(self, time: int) -> Moment:
        """Return the arrays that are live at an operation."""
        live, costs = self.costs.live_ranges, self.costs
        rows = np.flatnonzero((live.start <= time) & (live.end >= time))
        own, copies = rows[live.edge[rows] < 0], rows[live.edge[rows] >= 0]
        classes = np.bincount(costs.folded.of_node[live.node[own]], live.bytes[own], minlength=len(self.layouts))
        found: dict[tuple[int, int], float] = defaultdict(float)
        bundles = costs.bundle_of[live.edge[copies]]
        for bundle, form, size in zip(bundles.tolist(), live.form[copies].tolist(), live.bytes[copies].tolist(), strict=True):
            if bundle in self.pair_of:
                found[bundle, form] += size
        return Moment(classes, dict(found))

    def _add_pairs(self) -> None:
        """Make the tables of pairs of classes, and find which readers share reshards."""
        bundles, found = self.costs.folded.bundles, {}
        between: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, bundle in enumerate(bundles):
            found[number] = each = self._reshard(bundle)
            if each.reshard.seconds.any():
                ends = (bundle.a, bundle.b) if bundle.a != bundle.b else (bundle.a, len(self.layouts) - 1)
                between[min(ends), max(ends)].append(number)
        for (a, b), numbers in between.items():
            pair = self._join(a, b, {number: found[number] for number in numbers})
            self.pair_of.update(dict.fromkeys(numbers, len(self.pairs)))
            self.pairs.append(pair)
        for arrays, times in self.costs.arrays.items():
            counts = Counter(number for number in arrays if number in self.pair_of)
            for number, count in counts.items():
                pair = self.pairs[self.pair_of[number]]
                reshard = pair.reshards[number]
                pair.seconds = pair.seconds + times * reshard.seconds * np.where(reshard.joint < 0, count, len(counts) == 1)
            if len(counts) > 1:
                self._share(tuple(counts), times)

    def _share(self, bundles: tuple[int, ...], times: int) -> None:
        """Give numbers to the layouts into which the readers of an array reshard it."""
        numbers: dict[Layout, int] = {}
        readers = []
        kinds = 1
        for number in bundles:
            bundle, pair = self.costs.folded.bundles[number], self.pairs[self.pair_of[number]]
            layouts = [project(bundle.edge.target, layout) for layout in self.layouts[bundle.b]]
            of_state = np.array([numbers.setdefault(layout, len(numbers)) for layout in layouts])
            reads_rows = bundle.b == pair.a
            groups = pair.least_of_rows if reads_rows else pair.least_of_columns
            target = of_state[groups.order[groups.begins]]
            target = np.broadcast_to(target[:, None] if reads_rows else target[None], pair.seconds.shape)
            seconds = pair.reshards[number].seconds
            if bundle.edge.kind == "result":  # so are all others
                joint = pair.reshards[number].joint
                kinds = len(COLLECTIVE_FORMS) << len(self.costs.links.sizes)
                seconds, target = np.where(joint < 0, 0.0, seconds), kinds * target + joint.clip(0)
            readers.append(Reader(self.pair_of[number], seconds, target))
        self.shared.append(Shared(tuple(readers), times, kinds * len(numbers)))

    def _reshard(self, bundle: Bundle) -> _Table:
        """Return the reshards of a bundle for all layouts of both ends."""
        edge, alike = bundle.edge, (self._alike[bundle.a], self._alike[bundle.b])
        kind = edge.kind if edge.kind in ("operand", "result") else None
        array = edge.source, edge.target, edge.partial, edge.bytes
        key = (*alike, *array, edge.count, edge.all_reduce_count, edge.behind, edge.together, edge.combined, kind)
        if key not in self.known.reshards:
            self.known.reshards[key] = self._make_reshard(bundle)
        return self.known.reshards[key]

    def _make_reshard(self, bundle: Bundle) -> _Table:
        edge, links = bundle.edge, self.costs.links
        whole = edge.kind not in ("operand", "result")  # the copy is sharded as the reader is, not as the array
        _, rows, before = self._project(bundle.a, edge.source, edge.partial, False)
        first_b, columns, after = self._project(bundle.b, edge.target, (), whole)
        sources, partial = before[:, :-1], before[:, -1]
        targets = after[:, : len(edge.target)]
        kinds, first, index = np.unique(links.classify(sources, partial, targets), return_index=True, return_inverse=True)
        seconds, form = np.zeros(len(kinds)), np.full(len(kinds), -2, dtype=np.int8)
        joint = np.zeros(len(kinds), dtype=np.int16)
        for number, at in enumerate(first.tolist()):
            row, column = divmod(at, len(targets))
            ends = tuple(sources[row].tolist()), tuple(targets[column].tolist())
            steps = links.reshard_steps(*ends, int(partial[row]), edge.bytes)
            if steps:
                seconds[number] = self.costs.edge_seconds(edge, steps)
                form[number] = COLLECTIVE_FORMS.index(steps[0].kind) if steps[0].kind in COLLECTIVE_FORMS else -1
                joint[number] = joint_number(edge, steps)
        shape = (len(sources), len(targets))
        if edge.kind == "result":
            held = np.broadcast_to(1 / self._counts[union(sources.T)], len(sources))[:, None]
        elif whole:
            held = 1 / self.shards[bundle.b][first_b]
        else:
            held = np.broadcast_to(1 / self._counts[union(targets.T)], len(targets))
        index = index.reshape(shape)
        reshard = Reshard(seconds[index], form[index], np.broadcast_to(held, shape), joint[index])
        return _Table(reshard, rows, columns)

    def _project(
        self, number: int, dims: Sequence[int | None], partial: Sequence[int], whole: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the different layouts of an array among the states of a class: a state of each, and their index for each state.

        The masks of the layouts [layouts, dimensions + 1] end with the mesh axes over which the array is still to be summed, or
        with all axes of the node if `whole`.
        """
        key = (self._alike[number], tuple(dims), tuple(partial), whole)
        if key not in self.known.projections:
            masks = self._masks[number]
            nothing = np.zeros(len(masks), dtype=np.int64)
            columns = [nothing if dim is None else masks[:, dim] for dim in dims]
            last = union(masks.T) if whole else union([masks[:, dim] for dim in partial])
            layouts = np.stack([*columns, last + nothing], axis=1)
            first, index = _number_rows(layouts)
            self.known.projections[key] = first, index, layouts[first]
        return self.known.projections[key]

    def _join(self, a: int, b: int, tables: Mapping[int, _Table]) -> Pair:
        """Return the tables of several bundles between two classes, with common rows and columns."""
        bundles = self.costs.folded.bundles
        number, (reshard, rows, columns) = next(iter(tables.items()))
        if len(tables) == 1 and bundles[number].a == a and bundles[number].b == b:
            return Pair(a, b, rows, columns, np.zeros(reshard.seconds.shape), {number: reshard})
        turned, of_rows, of_columns = {}, [], []
        for number, (reshard, rows, columns) in tables.items():
            if bundles[number].a == bundles[number].b:  # the states of one class, in a single column
                diagonal = Reshard(*(each[rows, columns][:, None] for each in reshard))
                rows, columns, reshard = np.arange(len(rows)), np.zeros(1, dtype=np.int64), diagonal
            elif bundles[number].a != a:
                rows, columns, reshard = columns, rows, Reshard(*(each.T for each in reshard))
            of_rows.append(rows)
            of_columns.append(columns)
            turned[number] = reshard
        first_row, rows = _number_rows(np.stack(of_rows, axis=1))
        first_column, columns = _number_rows(np.stack(of_columns, axis=1))
        reshards = {
            number: Reshard(*(each[np.ix_(own[first_row], its[first_column])] for each in reshard))
            for (number, reshard), own, its in zip(turned.items(), of_rows, of_columns, strict=True)
        }
        return Pair(a, b, rows, columns, np.zeros((len(first_row), len(first_column))), reshards)


class _Table(NamedTuple):
    """The reshards of a bundle, with the row of each state of its first end, and the column of each state of its second."""

    reshard: Reshard
    rows: np.ndarray
    columns: np.ndarray


def find_layouts(node: Node, links: MeshLinks) -> tuple[Layout, ...]:
    """Return all layouts of a node: each mesh axis shards one dimension that it divides, or none.

    Dimensions that the user fixes have the given axes and no others.
    """
    fixed = node.fixed or (None,) * len(node.sizes)
    if all(entry is not None for entry in fixed) and node.fixed is not None:
        return (tuple(links.bits(entry or ()) for entry in fixed),)
    layouts: list[Layout] = [(0,) * len(node.sizes)]
    for axis, name in enumerate(links.names):
        given = [dim for dim, entry in enumerate(fixed) if entry and name in entry]
        following: list[Layout] = []
        for layout in layouts:
            if given:
                following.append(with_axes(layout, given[0], 1 << axis))
                continue
            following.append(layout)
            for dim, size in enumerate(node.sizes):
                if fixed[dim] is None and size > 1 and size % (links.sizes[axis] * links.shards(layout[dim])) == 0:
                    following.append(with_axes(layout, dim, 1 << axis))
        layouts = following
    return tuple(layouts)


def _number_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where each different row of a matrix is first, and the number of each row among the different ones."""
    if not math.prod(rows.shape):
        return np.zeros(1, dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
    _, first, index = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    return first, index.ravel()
