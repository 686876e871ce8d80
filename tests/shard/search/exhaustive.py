"""The best of all assignments, found without the search, to hold the search against.

In: a `Problem`, small enough. Out: the cost of every assignment, or the cheapest one. All mesh axes are decided at once: a
state of a class of nodes is its layout on the whole mesh. A few classes are enumerated. More are eliminated one after another
(bucket elimination; R. Dechter, Artificial Intelligence 113, 1999), with tables of any number of classes, so that an array
that several operations read in one layout is counted once, as in `Problem.seconds`. Under a memory limit, the prices of memory
come from cutting planes (J. Kelley, 1960), and all assignments that the prices do not exclude are looked at.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from penstock.shard.graph.decisions import Node
from penstock.shard.mesh.resharding import Layout, MeshLinks, union
from penstock.shard.search.costs import Assignment, CostModel, project

_LARGEST_TABLE = 1 << 23
_CHUNK = 1 << 14
_CUTS = 40

Scope = tuple[int, ...]
Factor = tuple[Scope, np.ndarray]
"""Costs [states of each class in the scope]."""


class TooLarge(Exception):
    """More states than this method can look at."""


def all_layouts(node: Node, links: MeshLinks) -> list[Layout]:
    """Return every layout that a node may have: each mesh axis shards one dimension that it divides, or none."""
    if node.fixed is not None and all(entry is not None for entry in node.fixed):
        return [tuple(links.bits(entry) for entry in node.fixed)]
    found: dict[Layout, None] = {}
    for dims in itertools.product(range(-1, len(node.sizes)), repeat=len(links.sizes)):
        layout = tuple(sum(1 << axis for axis, at in enumerate(dims) if at == dim) for dim in range(len(node.sizes)))
        if all(
            (not mask if entry is None else mask == links.bits(entry))
            if size == 1 or entry is not None
            else size % links.shards(mask) == 0
            for mask, size, entry in zip(layout, node.sizes, node.fixed or (None,) * len(layout), strict=True)
        ):
            found[layout] = None
    return list(found)


@dataclass(frozen=True)
class Costs:
    """The costs of N assignments.

    Attributes:
      seconds, memory: [N], as `Problem` computes them one by one.
      at: memory at each time at which an array begins to live [N, times].
    """

    seconds: np.ndarray
    memory: np.ndarray
    at: np.ndarray


class Exhaustive:
    """All assignments of a problem, as states [classes], with tables of their costs.

    Attributes:
      layouts: the layouts of each class of nodes.
      states: how many there are of each class.
      count: how many assignments there are.
    """

    def __init__(self, costs: CostModel):
        self.model = costs
        nodes, links = costs.graph.nodes, costs.links
        self._class = [int(number) for number in costs.folded.of_node]
        self.layouts = [all_layouts(nodes[first], links) for first in costs.folded.first]
        self.states = [len(each) for each in self.layouts]
        self.count = math.prod(self.states)
        self._seconds = self._node_factors()
        self._add_edges()
        self._add_memory()
        self._found_prices: dict[float, np.ndarray] = {}

    def assignment(self, state: Sequence[int]) -> Assignment:
        """Return the layouts of all nodes, given the state of each class."""
        return [self.layouts[number][state[number]] for number in self._class]

    def state(self, assignment: Assignment) -> np.ndarray:
        """Return the state of each class of an assignment."""
        return np.array(
            [layouts.index(assignment[first]) for layouts, first in zip(self.layouts, self.model.folded.first, strict=True)]
        )

    def enumerate(self, most: int) -> Iterator[np.ndarray]:
        """Yield all states [N, classes], in chunks.

        Raises:
          TooLarge: there are more than `most`.
        """
        if self.count > most:
            raise TooLarge(f"{self.count} assignments")
        for begin in range(0, self.count, _CHUNK):
            numbers = np.arange(begin, min(begin + _CHUNK, self.count))
            yield np.stack(np.unravel_index(numbers, self.states), axis=1) if self.states else np.zeros((1, 0), int)

    def costs(self, states: np.ndarray) -> Costs:
        """Return the costs of states [N, classes]."""

        def total(factors: list[Factor]) -> np.ndarray:
            return sum((_look_up(each, states) for each in factors), np.zeros(len(states)))

        stored, at = total(self._stored), np.zeros((len(states), self._alive.shape[1]))
        for factor, alive in zip(self._rows, self._alive, strict=True):
            at[:, alive] += _look_up(factor, states)[:, None]
        at += stored[:, None]
        return Costs(total(self._seconds), np.maximum(stored, at.max(axis=1, initial=0)), at)

    def cheapest(self, prices: np.ndarray | None = None) -> Elimination:
        """Find the assignment of least seconds, or of seconds and the bytes at each time at a price [times].

        Raises:
          TooLarge: a table has too many entries.
        """
        factors = list(self._seconds)
        if prices is not None:
            weights = self._alive @ prices
            factors += [(scope, weight * table) for weight, (scope, table) in zip(weights, self._rows, strict=True) if weight]
            factors += [(scope, prices.sum() * table) for scope, table in self._stored]
        return Elimination(self.states, factors)

    def fastest(self, limit: float, known: np.ndarray, most: int) -> float:
        """Return the least seconds of all assignments within a memory limit.

        Args:
          limit: bytes of a device.
          known: states [N, classes], one of which is within the limit; the more are near the best, the less is the work.
          most: assignments that may be looked at.

        Raises:
          TooLarge: the prices of memory leave more assignments than that.
        """
        least = self.cheapest()
        if self.costs(least.best[None]).memory[0] <= limit:
            return least.least
        costs = self.costs(known)
        quickest = float(costs.seconds[costs.memory <= limit].min())
        better = self.within(quickest * (1 - 1e-9), limit, known, most)
        return min(quickest, float(self.costs(better).seconds.min(initial=np.inf)))

    def bound(self, limit: float, known: np.ndarray) -> float:
        """Return seconds that every assignment within a memory limit takes at least."""
        prices = self._prices(limit, known)
        return max(self.cheapest().least, self.cheapest(prices).least - float(prices.sum()) * limit)

    def within(self, seconds: float, limit: float, known: np.ndarray, most: int) -> np.ndarray:
        """Return the states [N, classes] of all assignments that take at most so many seconds and so much memory.

        Raises:
          TooLarge: there are more than `most` to be looked at.
        """
        prices = self._prices(limit, known) if np.isfinite(limit) else np.zeros(self._alive.shape[1])
        states = self.cheapest(prices).within(seconds + (prices.sum() * limit if prices.any() else 0.0), most)
        kept = []
        for begin in range(0, len(states), _CHUNK):
            costs = self.costs(states[begin : begin + _CHUNK])
            kept.append(states[begin : begin + _CHUNK][(costs.memory <= limit) & (costs.seconds <= seconds)])
        return np.concatenate([states[:0], *kept])

    def _prices(self, limit: float, known: np.ndarray) -> np.ndarray:
        """Find prices of a byte at each time, in seconds, at which the cheapest assignment bounds those within the limit best."""
        if limit not in self._found_prices:
            self._found_prices[limit] = self._search_prices(limit, known)
        return self._found_prices[limit]

    def _search_prices(self, limit: float, known: np.ndarray) -> np.ndarray:
        cuts = self.costs(np.concatenate([known, self.cheapest().best[None]]))
        prices, scale = np.zeros(self._alive.shape[1]), max(float(cuts.seconds.max()), 1e-30)
        for _ in range(_CUTS if len(prices) else 0):
            excess = (cuts.at - limit) / max(limit, 1.0)
            solved = linprog(
                np.concatenate([[-1.0], np.zeros(len(prices))]),
                A_ub=np.concatenate([np.ones((len(excess), 1)), -excess], axis=1),
                b_ub=cuts.seconds / scale,
                bounds=[(None, 1e4), *[(0, 1e4)] * len(prices)],
            )
            prices = np.maximum(solved.x[1:], 0) * scale / max(limit, 1.0)
            found = self.cheapest(prices)
            if found.least - prices.sum() * limit >= -solved.fun * scale * (1 - 1e-6) - 1e-30:
                break
            cuts = _join(cuts, self.costs(found.best[None]))
        return prices

    def _shards(self, number: int) -> np.ndarray:
        return np.array([self.model.links.shards(union(layout)) for layout in self.layouts[number]], dtype=float)

    def _node_factors(self) -> list[Factor]:
        seconds, members = [], np.bincount(self._class, minlength=len(self.states))
        for number, (layouts, first) in enumerate(zip(self.layouts, self.model.folded.first, strict=True)):
            each = [self.model.node_seconds(int(first), layout) for layout in layouts]
            seconds.append(((number,), members[number] * np.array(each)))
        return seconds

    def _add_edges(self) -> None:
        """Make tables of the collectives of each array, or of results that are added; what is done twice is counted once."""
        arrays: dict[tuple, list[int]] = {}
        self._tables = []
        for number, edge in enumerate(self.model.graph.edges):
            reader = edge.b if edge.kind in ("operand", "shared_reshard") else None
            array = edge.value if edge.summed_as is None else edge.summed_as
            arrays.setdefault((array, edge.count, edge.kind == "result", reader), []).append(number)
            self._tables.append(self._edge_tables(number))
        for numbers in arrays.values():
            scope = tuple(sorted({end for number in numbers for end in self._ends(number)}))
            shape = tuple(self.states[each] for each in scope)
            if math.prod(shape) > _LARGEST_TABLE:
                raise TooLarge(f"{math.prod(shape)} entries")
            totals, earlier = np.zeros(shape), []
            for number in numbers:
                seconds, _, moves, target = (table.reshape(_grid(table, axes, scope)) for table, axes in self._spread(number))
                again = np.zeros(shape, bool)
                for other_moves, other_target in earlier:
                    again |= (moves != "") & (other_moves == moves) & (other_target == target)
                totals += np.where(again, 0.0, np.broadcast_to(seconds, shape))
                earlier.append((moves, target))
            self._seconds.append((scope, totals))

    def _ends(self, number: int) -> tuple[int, int]:
        edge = self.model.graph.edges[number]
        return self._class[edge.a], self._class[edge.b]

    def _edge_tables(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return seconds, the first collective or "", what others share or "" [states, states], and a number of each target."""
        edge, links = self.model.graph.edges[number], self.model.links
        sources, targets = (self.layouts[end] for end in self._ends(number))
        seconds = np.zeros((len(sources), len(targets)))
        first, moves = np.full(seconds.shape, "", "U16"), np.full(seconds.shape, "", "U24")
        for (row, source), (column, target) in itertools.product(enumerate(sources), enumerate(targets)):
            partial = union(tuple(source[dim] for dim in edge.partial))
            steps = links.reshard_steps(project(edge.source, source), project(edge.target, target), partial, edge.bytes)
            kinds = [step.kind for step in steps]
            if kinds:
                first[row, column] = kinds[0]
                only = kinds not in (["all-reduce"], ["reduce-scatter"])
                summed = str(number) if only else f"{kinds[0]} {steps[0].axes}"
                moves[row, column] = summed if edge.kind == "result" else "all"
            seconds[row, column] = self.model.edge_seconds(edge, steps)
        return seconds, first, moves, np.array([_number(project(edge.target, target)) for target in targets])

    def _spread(self, number: int) -> Iterator[tuple[np.ndarray, Scope]]:
        a, b = self._ends(number)
        for table in self._tables[number][:3]:
            yield (np.diagonal(table), (a,)) if a == b else (table, (a, b)) if a < b else (table.T, (b, a))
        yield self._tables[number][3], (b,)

    def _add_memory(self) -> None:
        live, links = self.model.live_ranges, self.model.links
        times = np.unique(live.start)
        self._alive = (live.start[:, None] <= times) & (live.end[:, None] >= times)
        self._stored = [((self._class[node],), size / self._shards(self._class[node])) for node, size in self.model.stored]
        self._rows: list[Factor] = []
        for node, size, number, form in zip(live.node, live.bytes, live.edge, live.form, strict=True):
            kept = self._class[node]
            if number < 0:
                self._rows.append(((kept,), size / self._shards(kept)))
                continue
            edge, (a, b) = self.model.graph.edges[number], self._ends(number)
            dims = {"operand": edge.target, "result": edge.source}.get(edge.kind)
            shards = np.array(
                [links.shards(union(layout if dims is None else project(dims, layout))) for layout in self.layouts[kept]]
            )
            first = self._tables[number][1]
            exists = first == ("", "reduce-scatter", "all-reduce")[form] if form else first != ""
            table = exists * size / (shards[:, None] if kept == a and a != b else shards[None, :])
            self._rows.append(((a,), np.diagonal(table)) if a == b else ((a, b), table) if a < b else ((b, a), table.T))


class Elimination:
    """The least sum of factors, and the states that come near it.

    Attributes:
      least: the sum.
      best: the state of each class [classes].
    """

    def __init__(self, states: Sequence[int], factors: Sequence[Factor]):
        self._states, tables, self.least = states, list(factors), 0.0
        self._trail: list[tuple[int, Scope, np.ndarray]] = []
        open_ = set(range(len(states)))
        while open_:
            around = {each: {other for scope, _ in tables if each in scope for other in scope} - {each} for each in open_}
            variable = min(open_, key=lambda each: (math.prod(states[other] for other in around[each]), each))
            scope = (*sorted(around[variable]), variable)
            if math.prod(states[each] for each in scope) > _LARGEST_TABLE:
                raise TooLarge(f"a table of {len(scope)} classes")
            total = np.zeros([states[each] for each in scope])
            for other, table in tables:
                if variable in other:
                    order = sorted(range(len(other)), key=lambda at, other=other: scope.index(other[at]))
                    axes = tuple(other[at] for at in order)
                    total += np.transpose(table, order).reshape(_grid(table, axes, scope, order))
            tables = [(other, table) for other, table in tables if variable not in other]
            least = total.min(axis=-1)
            self._trail.append((variable, scope[:-1], total - least[..., None]))
            if scope[:-1]:
                tables.append((scope[:-1], least))
            else:
                self.least += float(least)
            open_.remove(variable)
        self.best = self.within(self.least, 1 << 62, only_best=True)[0]

    def within(self, threshold: float, most: int, only_best: bool = False) -> np.ndarray:
        """Return all states [N, classes] whose sum is at most a threshold.

        Raises:
          TooLarge: there are more than `most`.
        """
        found = np.zeros((1, len(self._states)), np.int8)  # a layout of three axes in three dimensions is one of 64
        left = np.array([threshold - self.least])
        if threshold < self.least:
            return found[:0]
        for variable, scope, excess in reversed(self._trail):
            more = excess[tuple(found[:, each] for each in scope)] if scope else excess[None].repeat(len(found), axis=0)
            if only_best:
                rows, states = np.arange(len(found)), more.argmin(axis=1)
            else:
                rows, states = np.nonzero(more <= left[:, None])
            if len(rows) > most:
                raise TooLarge(f"{len(rows)} assignments")
            left = left[rows] - more[rows, states]
            found = found[rows]
            found[:, variable] = states
        return found


def _number(layout: Layout) -> int:
    """Return a number that layouts of the same rank share only if they are equal; a mesh has at most three axes."""
    return sum(mask << 3 * at for at, mask in enumerate(layout))


def _grid(table: np.ndarray, axes: Scope, scope: Scope, order: Sequence[int] | None = None) -> list[int]:
    """Return the shape in which a table of some classes, in the order of the scope, is added to one of the whole scope."""
    sizes = dict(zip(axes, table.shape if order is None else [table.shape[at] for at in order], strict=True))
    return [sizes.get(each, 1) for each in scope]


def _look_up(factor: Factor, states: np.ndarray) -> np.ndarray:
    return factor[1][tuple(states[:, each] for each in factor[0])]


def _join(one: Costs, other: Costs) -> Costs:
    return Costs(*(np.concatenate([getattr(one, name), getattr(other, name)]) for name in ("seconds", "memory", "at")))
