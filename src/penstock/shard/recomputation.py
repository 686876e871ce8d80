"""Choose which values of the forward pass are computed again in the backward pass, so that a step fits its memory limit.

Each value that both passes need is either kept in memory or computed again, from values that are kept or computed again. Given
the layouts of a plan, a mixed integer program takes the choice that adds the least seconds to the step, of those that keep no
more than a given number of bytes. Without that limit, it would be the minimum cut of PyTorch's AOTAutograd (2022).
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import scipy.optimize
from scipy.sparse import coo_array

from penstock._jax import ClosedJaxpr
from penstock.shard.mesh.resharding import union
from penstock.shard.search.solver import MeshPlan, PreparedMesh, Solve, search_meshes
from penstock.shard.trace.calls import find_call, open_jaxpr
from penstock.shard.trace.flat_program import ALIASES, RANDOM_NUMBERS, REDUCTIONS, Path
from penstock.shard.trace.lines import Line, Lines, ScanLoop, is_literal, is_scan
from penstock.shard.trace.recompute import Recomputation, backward_paths
from penstock.shard.trace.source_lines import describe_source
from penstock.shard.trace.step import TracedStep
from penstock.shard.wording import format_share, format_type

Value = tuple[int, int]
"""A value: (-1, its number among the lines of a scope), or (index of the line of a scan, its number in the body)."""

Prepare = Callable[[TracedStep], list[PreparedMesh]]
"""Builds the search problem of a step on the meshes."""
NO_BACKWARD_PASS = (
    "remat is for steps that compute gradients, and no backward pass was found in this step: call jax.grad inside of it"
)
_MOST_NAMED = 3
"""The most values that a sentence names."""
_SEGMENTS = 12
"""The number of sizes of segments that are compared, each half of the one before."""
_TIE = 1e-3
"""The weight of the time where the bytes are the cost."""
_NEARLY_BEST = 0.01
"""The integer program ends when its solution adds at most so much more time than the best, as a fraction."""


@dataclass(frozen=True)
class Unit:
    """An equation of the forward pass that may be evaluated again.

    Attributes:
      line: the equation.
      operands: the values that it reads, without those that are in memory anyway.
      results: its results.
      seconds: the time that it takes in a step, with the collectives of its operands and results.
      possible: whether it can be evaluated again.
    """

    line: Line
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    seconds: float
    possible: bool


def find_scopes(closed: ClosedJaxpr, plan: MeshPlan) -> list[Scope]:
    """Return the scopes of a step that have a backward pass: the step, or bodies of its loops over parts of the batch."""
    backward = backward_paths(closed.jaxpr)
    paths = {path[: max((n for n, part in enumerate(path, 1) if isinstance(part, str)), default=0)] for path in backward}
    bodies = sorted(path for path in paths if not path or path[-1] == "body")
    return [Scope(closed, path, backward, plan) for path in bodies if _find_body(closed, path) is not None]


class Scope:
    """A scope, with the cost of keeping each value of its forward pass and of computing it again, under a plan.

    Attributes:
      path: the path of the scope.
      cut: the index of the first line of the backward pass.
      units: the equations of the forward pass, with those in the bodies of its scans.
      bytes: value → the bytes of a device that it takes from the forward to the backward pass.
      kept: the values that the compiler keeps now, from the forward to the backward pass.
      wanted: the values of the forward pass that the backward pass reads → whether they can be computed again for it.
      gaps: value → the operations between its last reader in the forward pass and the first reader in the backward pass of what
        it is needed for, as a range. Its memory is saved in these operations if it is not kept.
      boundaries: values that are kept in any case, so that no more than a segment has to be computed again at once.
    """

    def __init__(self, closed: ClosedJaxpr, path: Path, backward: Set[Path], plan: MeshPlan):
        self.path = path
        self.bandwidth = plan.prepared.costs.hardware.memory_bandwidth
        self._costs, self._assignment = plan.prepared.costs, plan.candidate.assignment
        self._program, self._graph = plan.prepared.model.program, plan.prepared.model.graph
        self._lines = Lines.of(_find_body(closed, path), path)
        self._loops = {index: ScanLoop(line) for index, line in enumerate(self._lines.lines) if is_scan(line)}
        self._flat = dict(self._name_values())
        prefixes = [[line.path[:length] for length in range(1, len(line.path) + 1)] for line in self._lines.lines]
        self.cut = next(index for index, each in enumerate(prefixes) if not backward.isdisjoint(each))
        self.units = list(self._find_units())
        self._read_at: dict[Value, int] = {}
        self.wanted = self._find_wanted()
        values = {*self.wanted, *(value for unit in self.units for value in (*unit.operands, *unit.results))}
        self.bytes = {value: self._bytes_of(value) for value in sorted(values)}
        self.kept = {value for value in self.bytes if self._holders(value)}
        self.gaps = self._find_gaps()
        self.boundaries = self._find_boundaries()

    def place(self, unit: Unit, value: Value) -> tuple[Path, int]:
        """Return the place of a result of an equation."""
        return unit.line.path, unit.line.results.index(value[1])

    @property
    def kept_bytes(self) -> float:
        """Return the bytes of a device that the compiler keeps now, from the forward to the backward pass."""
        return sum(self.bytes[value] for value in self.kept)

    def stored(self) -> set[int]:
        """Return the values of the flat program that hold what is kept now."""
        return {each for value in self.kept for each in self._holders(value)}

    @property
    def backward(self) -> Path:
        """Return the path of the first equation of the backward pass."""
        return self._lines.lines[self.cut].path

    def describe(self, recomputation: Recomputation) -> str:
        """Return in words the values that take the most memory if they are not computed again, and the share that all take."""
        again = set(recomputation.values)
        sizes: dict[str, float] = defaultdict(float)
        for unit in self.units:
            for value in unit.results:
                if value in self.kept and self.place(unit, value) in again:
                    op = self._program.ops[self._ops_of(unit.line.path)[-1]]
                    line = describe_source(op.sources)
                    name = format_type(self._program.values[self._flat[value]])
                    sizes[f"{name} made at {line}" if line else name] += self.bytes[value]
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:_MOST_NAMED]
        share = format_share(sum(sizes.values()), self.kept_bytes)
        return f"{'; '.join(largest)}: {share} of the activations that are kept for it otherwise"

    # Values in the flat program

    def _name_values(self) -> Iterator[tuple[Value, int]]:
        """Yield each value with its index in the flat program. The first carries of an iteration have none."""
        for where, lines in ((-1, self._lines), *((index, loop.body) for index, loop in self._loops.items())):
            for line in lines.lines:
                for number, index in zip(line.results, self._program.results.get(line.path, ()), strict=False):
                    yield (where, number), index

    @functools.cached_property
    def _buffers(self) -> dict[int, list[tuple[float, int, int]]]:
        """Return, for each value of the flat program that is stored, its bytes on a device, and from when until when."""
        live = self._costs.live_ranges
        each, _ = self._costs.local_bytes(self._assignment)
        found = defaultdict(list)
        for row in np.flatnonzero(live.edge < 0):
            found[int(live.value[row])].append((float(each[row]), int(live.start[row]), int(live.end[row])))
        return found

    def _local(self, value: int) -> float:
        """Return the bytes of a value that one device has."""
        shards = self._costs.links.shards(union(self._assignment[self._graph.group[value]]))
        return self._program.values[value].bytes / shards

    def _stacks(self, value: Value) -> list[int]:
        """Return the values of the flat program that are stacks of a value in the body of a scan."""
        if value[0] < 0:
            return []
        loop = self._loops[value[0]]
        numbers = [number for number in range(loop.carries, len(loop.line.results)) if loop.body.outputs[number] == value[1]]
        return [self._flat[-1, loop.line.results[number]] for number in numbers]

    def _bytes_of(self, value: Value) -> float:
        """Return the bytes that a value takes from the forward to the backward pass."""
        if value[0] < 0:
            return self._local(self._flat[value]) if value in self._flat else 0.0
        loop = self._loops[value[0]]
        if value in self._flat:
            return loop.length * self._local(self._flat[value])
        carry = loop.body.inputs.index(value[1]) - loop.consts
        return loop.length * self._local(self._flat[-1, loop.line.results[carry]])

    def _holders(self, value: Value) -> list[int]:
        """Return the values of the flat program that hold a value from the forward to the backward pass: itself, or stacks."""
        stored = self._stacks(value) if value[0] >= 0 else [self._flat[value]] if value in self._flat else []
        at = self._time(self.cut)
        return [each for each in stored if any(start < at <= end for _, start, end in self._buffers.get(each, ()))]

    def _time(self, index: int) -> int:
        """Return the index of the first operation of a line and the lines after it."""
        return next(
            (times[0] for line in self._lines.lines[index:] if (times := self._ops_of(line.path))), len(self._program.ops)
        )

    # Lines

    def _find_units(self) -> Iterator[Unit]:
        """Yield the equations of the forward pass, and after each scan those in its body."""
        free = {*self._lines.inputs, *self._lines.constants}
        names: dict[int, Value] = {}
        for index, line in enumerate(self._lines.lines[: self.cut]):
            loop = self._loops.get(index)
            # A stack is kept if the value in the body is.
            stacked = loop.body.outputs if loop is not None else []
            stacks = {number: at for at, number in enumerate(line.results) if loop is not None and at >= loop.carries}
            names |= {
                n: (index, stacked[stacks[n]]) if n in stacks and not is_literal(stacked[stacks[n]]) else (-1, n)
                for n in line.results
            }
            yield self._unit(line, names, -1, [number for number in line.results if number not in stacks])
            if loop is None:
                continue
            inside = {number: (index, number) for each in loop.body.lines for number in each.results}
            for at, number in enumerate(loop.body.inputs):
                atom = line.operands[at]
                if loop.consts <= at < loop.first_slice:
                    inside[number] = (index, number)
                elif not is_literal(atom) and atom not in free:
                    inside[number] = names[atom]
            for each in loop.body.lines:
                yield self._unit(each, inside, index, each.results)

    def _unit(self, line: Line, names: Mapping[int, Value], where: int, results: Sequence[int]) -> Unit:
        """Return an equation, given the names of all values that are not in memory anyway."""
        operands = dict.fromkeys(names[atom] for atom in line.operands if not is_literal(atom) and atom in names)
        random = any(self._program.ops[time].primitive in RANDOM_NUMBERS for time in self._ops_of(line.path))
        possible = not (line.equation.effects or random or (where < 0 and is_scan(line)))
        return Unit(line, tuple(operands), tuple((where, number) for number in results), self._seconds(line), possible)

    def _find_wanted(self) -> dict[Value, bool]:
        maker = {number: index for index, line in enumerate(self._lines.lines[: self.cut]) for number in line.results}
        found: dict[Value, bool] = {}
        for index, line in enumerate(self._lines.lines[self.cut :], self.cut):
            for at, atom in enumerate(line.operands):
                if is_literal(atom) or atom not in maker:
                    continue
                value, possible = (-1, atom), maker[atom] not in self._loops
                if not possible:
                    forward, number = self._loops[maker[atom]], self._lines.lines[maker[atom]].results.index(atom)
                    inner = forward.body.outputs[number]
                    if number >= forward.carries and not is_literal(inner):
                        value, loop = (maker[atom], inner), self._loops.get(index)
                        possible = loop is not None and at >= loop.first_slice and loop.length == forward.length
                # In a loop that reads a stack of values, the stack is still whole.
                self._read_at.setdefault(value, self._time(index + (value[0] >= 0)))
                found[value] = found.get(value, True) and possible
        returned = {(-1, atom) for atom in self._lines.outputs if not is_literal(atom)}
        return {value: possible and value not in returned for value, possible in found.items()}

    def _find_gaps(self) -> dict[Value, tuple[int, int]]:
        read_at = dict(self._read_at)
        last_reader: dict[int, int] = {}
        for unit in reversed(self.units):
            end = max((read_at.get(value, 0) for value in unit.results), default=0)
            for value in unit.operands:
                if value not in self.wanted:
                    read_at[value] = max(read_at.get(value, 0), end)
        for index, line in enumerate(self._lines.lines[: self.cut]):
            last_reader.update((atom, index) for atom in (*line.results, *line.operands) if not is_literal(atom))
        starts = {
            value: self._time(value[0] if value[0] >= 0 else min(last_reader.get(value[1], -1) + 1, self.cut))
            for value in self.bytes
        }
        return {value: (start, max(start, read_at.get(value, start))) for value, start in starts.items()}

    def room(self, excess: float) -> tuple[np.ndarray, np.ndarray]:
        """Return where values are kept, and the bytes that may be.

        Args:
          excess: the bytes of a device by which its memory exceeds the limit.

        Returns:
          For each value of `bytes`, whether its gap has a part of the program, as [values, parts], and for each part, the bytes
          of values that may be kept in it.
        """
        live, _ = self._costs.memory_over_time(self._assignment)
        allowed = live.max(initial=0.0) - excess - live
        for value in self.kept:
            start, end = self.gaps[value]
            allowed[start:end] += self.bytes[value]
        gaps = np.array(list(self.gaps.values())).reshape(-1, 2)
        places = np.unique(gaps[gaps < len(live)])
        inside = (gaps[:, :1] <= places) & (places < gaps[:, 1:])
        return inside, np.minimum.reduceat(allowed, places) if len(places) else np.zeros(0)

    def _find_boundaries(self) -> set[Value]:
        """Return the values of the forward pass that are kept between segments, each of which is computed again by itself.

        Segments are chosen so that what is kept between them and the largest segment take the fewest bytes together (Chen et al.
        2016). Values that no row of the batch reaches, such as masks and casts of weights, are not counted.
        """
        arguments = {self._graph.group[value] for value in self._program.inputs}
        forward = self._lines.lines[: self.cut]
        last: dict[int, int] = {}
        for index, line in enumerate(forward):
            last.update((atom, index) for atom in line.operands if not is_literal(atom))
        made: list[tuple[int, int, float]] = []  # value, line that makes it, bytes
        for index, line in enumerate(forward):
            for number in line.results:
                flat = self._flat.get((-1, number))
                if flat is not None and self._graph.group[flat] not in arguments:
                    made.append((number, index, self._local(flat)))
        crossing, inside = np.zeros(self.cut + 2), np.zeros(self.cut + 2)
        for number, index, size in made:
            inside[index + 1] += size if self._flat[-1, number] in self._buffers else 0.0
            if last.get(number, index) > index:
                crossing[index + 1] += size
                crossing[last[number] + 1] -= size
        crossing, inside = np.cumsum(crossing), np.cumsum(inside)
        places = [at for at in range(1, self.cut) if crossing[at] <= min(crossing[at - 1], crossing[at + 1])]
        cuts = _cut_segments([0, *places, self.cut], crossing, inside)
        return {(-1, number) for number, index, _ in made if any(index < at <= last.get(number, index) for at in cuts)}

    # Time

    def _ops_of(self, path: Path) -> list[int]:
        """Return the operations of an equation, in order."""
        return self._ops_in.get(path, [])

    @functools.cached_property
    def _ops_in(self) -> dict[Path, list[int]]:
        found = defaultdict(list)
        for time, op in enumerate(self._program.ops):
            for length in range(len(self.path) + 1, len(op.path) + 1):
                found[op.path[:length]].append(time)
        return found

    @functools.cached_property
    def _edges(self) -> dict[int, list[Any]]:
        found = defaultdict(list)
        for edge in self._graph.edges:
            if edge.kind in ("operand", "result"):
                found[edge.b if edge.kind == "operand" else edge.a].append(edge)
        return found

    @functools.cached_property
    def _node_of(self) -> dict[int, int]:
        return {self._graph.nodes[node].label: node for node in self._graph.op}

    def _seconds(self, line: Line) -> float:
        """Return the seconds that the operations of an equation take in a step."""
        total, costs = 0.0, self._costs
        for time in self._ops_of(line.path):
            op, node = self._program.ops[time], self._node_of.get(time)
            if node is not None and op.primitive not in REDUCTIONS:
                total += costs.node_seconds(node, self._assignment[node])
                each = ((edge, costs.reshard_steps(edge, self._assignment)) for edge in self._edges[node])
                total += sum(costs.edge_seconds(edge, steps) for edge, steps in each if steps)
            elif op.primitive not in ALIASES:
                size = sum(self._local(value) for value in op.results if value in self._buffers)
                total += op.count * size / costs.hardware.memory_bandwidth
        return total


def _find_body(closed: ClosedJaxpr, path: Path) -> Any:
    """Return the jaxpr at a path: a step, or the body of a scan. Return None for the body of another loop."""
    found: Any = closed
    for part in path:
        if isinstance(part, int):
            equation = open_jaxpr(found).eqns[part]
            call = find_call(equation)
            found = call.jaxpr if call is not None else equation.params.get("jaxpr")
    return found


def _cut_segments(places: Sequence[int], crossing: np.ndarray, inside: np.ndarray) -> list[int]:
    """Return the places between segments for which the bytes that cross them and the bytes of the largest segment are fewest.

    Args:
      places: where the forward pass may be cut, with its start and its end.
      crossing: the bytes that cross each place.
      inside: the bytes that are made before each place.
    """
    best: tuple[float, list[int]] = (float(inside[places[-1]]), [])
    for halvings in range(1, _SEGMENTS):
        most = float(inside[places[-1]]) / 2**halvings
        least, before = {places[0]: 0.0}, {}
        for number, end in enumerate(places[1:], 1):
            starts = [at for at in places[:number] if at in least and inside[end] - inside[at] <= most]
            if starts:
                start = min(starts, key=least.__getitem__)
                least[end], before[end] = least[start] + (crossing[end] if end != places[-1] else 0.0), start
        if places[-1] not in least:
            break
        cuts, at = [], before[places[-1]]
        while at != places[0]:
            cuts.append(at)
            at = before[at]
        best = min(best, (least[places[-1]] + most, cuts))
    return best[1]


def choose_recomputation(scope: Scope, excess: float, share: float) -> Recomputation:
    """Return which values to compute again so that a step keeps its limit, or exceeds it by the fewest bytes.

    The variables are, for each value, whether it is kept, and for each equation, whether it is evaluated again. The parts of the
    program in which values are kept become constraints one by one: each time, the one in which the last solution is most over.

    Args:
      excess: the bytes of a device by which its memory exceeds the limit now.
      share: the part of the bytes that may be kept beside the boundaries.
    """
    values, units = list(scope.bytes), scope.units
    keep = {value: index for index, value in enumerate(values)}
    again = {value: len(values) + index for index, unit in enumerate(units) for value in unit.results}
    unit_of = {value: unit for unit in units for value in unit.results}
    size = np.array([scope.bytes[value] for value in values])
    beyond = len(values) + len(units)  # the variable of the bytes beyond the limit, as a part of all
    lower, upper = np.zeros(beyond + 1), np.ones(beyond + 1)
    # A kept value is written and read again.
    cost = np.concatenate([2 * size / scope.bandwidth, [unit.seconds for unit in units], [0.0]])
    rows: list[tuple[dict[int, float], float]] = []  # coefficients, and the least value
    for index, unit in enumerate(units, len(values)):
        upper[index] = unit.possible
        rows += [({keep[each]: 1.0, index: -1.0} | ({again[each]: 1.0} if each in again else {}), 0.0) for each in unit.operands]
    for value, possible in scope.wanted.items():
        rows.append(({keep[value]: 1.0} | ({again[value]: 1.0} if possible and value in again else {}), 1.0))
        # A value that the compiler computes again for each reader takes no memory, and its sources do.
        if value not in scope.kept and possible and value in again and unit_of[value].possible:
            upper[keep[value]] = 0
    for value in scope.boundaries & keep.keys():
        lower[keep[value]] = upper[keep[value]] = 1
    inside, allowed = scope.room(excess)
    fixed = (size * lower[: len(values)]) @ inside
    allowed = np.where(allowed > fixed, fixed + share * (allowed - fixed), allowed)
    kept = np.array([value in scope.kept for value in values])
    total = float(size.sum()) or 1.0
    upper[beyond] = 0.0
    constrained: set[int] = set()
    while True:
        excesses = (size * kept) @ inside - allowed
        worst = int(np.argmax(excesses)) if len(excesses) else -1
        if constrained and (worst in constrained or excesses[worst] <= 0):
            break
        constrained.add(worst)
        if worst >= 0:
            columns = np.flatnonzero(inside[:, worst] * size)
            terms = {int(each): -size[each] / total for each in columns} | {beyond: 1.0}
            rows.append((terms, -float(allowed[worst]) / total))
        solved = _solve(cost, lower, upper, rows)
        if solved is None:  # exceed the limit by as little as possible
            upper[beyond] = np.inf
            cost = np.append(_TIE * cost[:-1] / (cost.sum() or 1.0), 1.0)
            solved = _solve(cost, lower, upper, rows)
            assert solved is not None  # all may be kept
        taken, kept = solved, solved[: len(values)]
    chosen = {value for value in again if taken[again[value]] and not taken[keep[value]]}
    needed = _needed(units, chosen, chosen & scope.kept)
    return Recomputation(
        scope.path, scope.backward, tuple(scope.place(unit, value) for unit in units for value in unit.results if value in needed)
    )


def _solve(
    cost: np.ndarray, lower: np.ndarray, upper: np.ndarray, rows: Sequence[tuple[dict[int, float], float]]
) -> np.ndarray | None:
    """Return which variables are 1 in the nearly cheapest solution of an integer program; None if there is none.

    The last variable is no integer.

    Args:
      rows: the coefficients of each constraint, and the least value of its sum.
    """
    columns = [(row, column, factor) for row, (terms, _) in enumerate(rows) for column, factor in terms.items()]
    at, column, factor = zip(*columns, strict=True)
    solved = scipy.optimize.milp(
        cost / (cost.max() or 1.0),
        integrality=np.append(np.ones(len(cost) - 1), 0),
        bounds=scipy.optimize.Bounds(lower, upper),
        constraints=scipy.optimize.LinearConstraint(
            coo_array((factor, (at, column)), shape=(len(rows), len(cost))).tocsr(), [least for _, least in rows], np.inf
        ),
        options={"mip_rel_gap": _NEARLY_BEST},
    )
    return None if solved.x is None else solved.x > 0.5


def _needed(units: list[Unit], chosen: set[Value], dropped: set[Value]) -> set[Value]:
    """Return the values of a choice that have to be computed again because some values are no longer kept.

    These are what the dropped values are computed from, and what the compiler would compute from them.
    """
    unit_of = {value: unit for unit in units for value in unit.results}
    found: set[Value] = set()

    def add(values: set[Value]) -> None:
        queue = list(values - found)
        while queue:
            value = queue.pop()
            if value not in found:
                found.add(value)
                queue += [operand for operand in unit_of[value].operands if operand in chosen]

    add(dropped)
    for unit in units:
        if any(operand in found for operand in unit.operands):
            add({value for value in unit.results if value in chosen})
    return found


# Search for plans of steps that compute values again

_SHARES = (1.0, 0.7, 0.4, 0.0)
"""Parts of the bytes that may be kept, as far as the limit allows by the first layouts, until a plan fits."""


@dataclass(frozen=True)
class Choice:
    """Values to compute again, with the search for layouts.

    Attributes:
      recomputed: these values.
      prepared: the meshes to search.
      without: the layouts by which it was chosen, in the step that computes nothing again.
      dropped: what is not kept, in words.
    """

    recomputed: tuple[Recomputation, ...]
    prepared: list[PreparedMesh]
    without: MeshPlan
    dropped: str


def fit_rank(plan: MeshPlan, limit: float) -> tuple[bool, float]:
    """Return a key by which plans are in order: those that fit by their time, then the others by their memory."""
    fits = plan.candidate.memory <= limit
    return not fits, plan.candidate.seconds if fits else plan.candidate.memory


class RecomputationSearch:
    """The search for plans that may compute values again in the backward pass.

    Args:
      traced: the step.
      prepared: the meshes.
      prepare: builds the search problem of a step on these meshes.

    Raises:
      ValueError: no backward pass of the step was found.
    """

    def __init__(self, traced: TracedStep, prepared: Sequence[PreparedMesh], prepare: Prepare):
        if not backward_paths(traced.closed.jaxpr):
            raise ValueError(NO_BACKWARD_PASS)
        self._traced, self._prepared, self._prepare = traced, prepared, prepare
        self._closed = traced.rewritten(traced.rewriting)
        self._choices: dict[tuple[Recomputation, ...], Choice] = {}

    def search(self, limit: float, solve: Solve = search_meshes) -> MeshPlan:
        """Return the fastest plan within a limit that is found, of the step or of a step that computes values again.

        If none fits, return one of least memory.

        Args:
          solve: searches meshes.
        """
        found: list[MeshPlan] = []
        for choice in self._choose(limit, solve):
            found.append(solve(choice.prepared, limit, math.inf))
            if found[-1].candidate.memory <= limit:
                break
        for each in self._prepared:
            each.search.begin()
        to_beat = found[-1].candidate.seconds if found and found[-1].candidate.memory <= limit else math.inf
        if math.isfinite(to_beat) and all(math.isinf(each.search.fastest(limit)) for each in self._prepared):
            return found[-1]  # no baseline of the step itself fits, and the search for other layouts takes as long again
        return min((solve(self._prepared, limit, to_beat), *found), key=lambda plan: fit_rank(plan, limit))

    @functools.cached_property
    def _relaxed(self) -> list[PreparedMesh]:
        return [_without_kept(self._closed, each) for each in self._prepared]

    def _choose(self, limit: float, solve: Solve) -> Iterator[Choice]:
        """Yield choices of what to compute again, so that a limit may be kept. Each keeps fewer bytes than the one before.

        The layouts by which they are chosen are the fastest if what is kept for the backward pass takes no memory. Their time is
        the time of a step that computes nothing again.
        """
        found = solve(self._relaxed, limit, math.inf)
        if found.candidate.memory > limit:
            return
        original = next(each for each in self._prepared if each.mesh_shape == found.prepared.mesh_shape)
        plan = original.plan(original.search.evaluate_assignment(found.candidate.assignment))
        excess = plan.candidate.memory - limit
        scopes = find_scopes(self._closed, plan) if excess > 0 else []
        if not scopes:
            return
        scope = max(scopes, key=lambda each: each.kept_bytes)
        for each in dict.fromkeys(choose_recomputation(scope, excess, share) for share in _SHARES):
            recomputed = (each,)
            if recomputed not in self._choices:
                step = self._traced.rewrite(replace(self._traced.rewriting, recomputed=recomputed))
                self._choices[recomputed] = Choice(recomputed, self._prepare(step), plan, scope.describe(each))
            yield self._choices[recomputed]

    def describe(self, found: MeshPlan) -> tuple[str, ...]:
        """Return a sentence about what a plan computes again; none if it keeps all values."""
        choice = self._choices.get(found.prepared.model.rewriting.recomputed)
        if choice is None:
            return ()
        slower = found.candidate.seconds / choice.without.candidate.seconds - 1
        effect = f"{format_share(slower, 1)} slower than without a limit" if slower > 0 else "faster for it"
        return (f"computed again in the backward pass: {choice.dropped}; the step is {effect}",)


def _without_kept(closed: ClosedJaxpr, prepared: PreparedMesh) -> PreparedMesh:
    """Return a mesh to search on which the values that are kept for the backward pass take no memory."""
    plan = prepared.plan(prepared.search.evaluate_assignment(prepared.costs.start()))
    dropped = {value for scope in find_scopes(closed, plan) for value in scope.stored()}
    live = prepared.costs.live_ranges
    rows = ~np.isin(live.value, list(dropped)) | (live.edge >= 0)
    columns = {each.name: getattr(live, each.name)[rows] for each in fields(live) if each.name != "steps"}
    search = prepared.search.with_live_ranges(replace(live, **columns))
    return replace(prepared, costs=search.orders[0], search=search)
