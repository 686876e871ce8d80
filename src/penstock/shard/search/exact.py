"""Find the fastest states within a memory limit by integer programming, with a lower bound that proves how good they are.

A state of a class is a column, which is 1 if the class is in it; so is a row and a column of a pair of classes that both are in
(the local polytope; M. Wainwright and M. Jordan, Foundations and Trends in Machine Learning 1, 2008). The memory at an operation
is linear in them. The program has rows only for operations at which a solution had too much memory, and columns only for states
that may be in a better plan: reduced costs exclude the others. In turn, message passing on all states bounds the seconds from
below at the prices of memory that the linear program found, and the linear program on some states finds better states and
prices. HiGHS solves it (Q. Huangfu and J. Hall, Mathematical Programming Computation 10, 2018).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import highspy
import numpy as np
from scipy.sparse import csr_array

from penstock.shard.search.costs import GAP
from penstock.shard.search.layout_tables import Grouping, LayoutTables, Moment, States
from penstock.shard.search.message_passing import Messages

_SMALLEST = 0.02
"""If no plan fits, the search ends when none can be smaller than the smallest by more than this fraction."""
_EXCESS_GAP = 0.05
"""An integer program for the least memory ends when no plan can exceed the limit by less than this fraction less."""
_STALLED = 1e-4
"""A round that does not improve the bound by this part, nor the plan, has stalled."""
_STALLS = 3
"""The search also ends after so many rounds that stalled while the linear program got no more states."""
_SWEEPS, _CHECKED = 120, 10
"""The most sweeps of message passing in a round, and after how many the bound is looked at."""
LEAST_ROUNDS, ROUNDS = 2, 12
"""The least rounds, unless the plan is proved before, and the most."""
WORK = 5e9
"""Table entries that the searches of all meshes may read. They take about ten seconds."""
_WORK_OF_COLUMN = {False: 15_000, True: 60_000}
"""Table entries that could be read while HiGHS solves a linear or an integer program, for each of its columns: about the
medians of 30 programs of Keras Hub and the zoo, which differ tenfold. No time counts where rows are added to a linear program."""
_NEW_STATES, _MOST_NEW_STATES = 3, 1000
"""The most states of a class, and of all classes, that become columns in a round."""
_MOST_ROWS = 8
"""The most operations that get a row at a time."""
_FEW_STATES = 1000
"""All states that may be in a better plan are columns of one integer program if they are no more than this."""
_NEARLY_RELAXED = GAP / 10
"""The linear program needs no more states if its value exceeds the bound by less than this part. Message passing makes way for it
when `_CHECKED` sweeps raise the bound by less."""
_UNUSED = 1e-9
"""A reader needs its share of a reshard if its pair has less slack than this part of the reshard."""
_PRESENT = 1e-7
"""States whose columns have a larger value are in a solution of the linear program."""
_NEAR_STATES, _MOST_NEAR_STATES = 300, 3000
"""States besides those in the solution of the linear program that are columns of the integer program: at first, and at most."""
_NODES = 200
"""Nodes of the tree of branch and bound of an integer program. With 5,000, one of 11,249 columns took 97 s. With
200 it takes 13 s, and its bound is 0.05 % lower."""
_OPTIONS: dict[str, bool | int | str] = {
    "output_flag": False,
    "parallel": "off",
    "presolve": "off",
    "simplex_dual_edge_weight_strategy": 1,
}
"""Options of HiGHS. Linear programs take 0.5 to 0.8 times as long without presolve, and 0.7 times with the weights of Devex."""
_WITHIN = 2e-6
"""Solutions of HiGHS may exceed a row by 1e-6 of the limit, so that rows are stricter than the limit by this part of it. A plan
that is nearer to the limit is a solution all the same, at the price `_OUTSIDE`."""
_OUTSIDE = 10.0
"""The price of a limit's bytes, as a multiple of the seconds of the fastest plan."""


class Evaluated(Protocol):
    """The predicted cost of an assignment: its seconds, and the peak memory of a device in bytes."""

    @property
    def seconds(self) -> float: ...

    @property
    def memory(self) -> float: ...


class Bound(NamedTuple):
    """The bounds that are proved for all layouts on a mesh.

    Attributes:
      seconds: every layout within the limit takes at least so long. It is infinite if there is none.
      memory: every layout needs at least so many bytes of a device; 0 if nothing is known.
    """

    seconds: float = 0.0
    memory: float = 0.0


class _Row(NamedTuple):
    """An operation at which the memory is limited: part · live bytes + stored bytes ≤ limit + free."""

    time: int
    part: float
    free: float
    moment: Moment


class _Dual:
    """A solution of the dual program, for one objective: messages, and the price of a byte at each row."""

    def __init__(self, tables: LayoutTables):
        self.messages, self.prices = Messages(tables), list[float]()


class ExactSearch:
    """The search on one mesh. A search starts from the plans and the dual solution of earlier ones within other limits.

    Args:
      evaluate: returns the predicted cost of states.

    Attributes:
      work_left: table entries that the last search might still have read (`run`).
    """

    def __init__(self, tables: LayoutTables, evaluate: Callable[[States], Evaluated]):
        self._tables, self._evaluate = tables, evaluate
        self._duals = {True: _Dual(tables), False: _Dual(tables)}  # for seconds, and for the memory
        self._dual = self._duals[True]
        self._found: dict[tuple[int, ...], Evaluated] = {}
        self._active: list[set[int]] = []
        self._rows: list[_Row] = []
        self._shares = [np.full((len(each.readers), each.targets), 1 / len(each.readers)) for each in tables.shared]
        self._layouts: dict[tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray, Grouping]] = {}
        self._least_bytes = 0.0  # proved of every layout
        self._least_seconds = (0.0, 0.0)  # a limit, and what is proved of every layout within it
        self._scale, self.work_left = 1.0, WORK

    @property
    def is_limited(self) -> bool:
        """Return whether a solution had too much memory."""
        return bool(self._rows)

    def run(
        self, starts: Sequence[States], limit: float, to_beat: float = math.inf, work: float = WORK, rounds: int = ROUNDS
    ) -> Bound:
        """Search until a plan within the limit is proved to be nearly the fastest, and return the bound.

        Args:
          starts: states to begin with.
          limit: the bytes of a device.
          to_beat: seconds of a plan on another mesh: if it is proved that none here is faster, the search ends.
          work: table entries that the search may read before it ends; at least two rounds are made. Processes that plan the same
            step have to find the same plan, so that there is no limit of time.
          rounds: the most rounds.
        """
        self._limit, self.work_left = max(1.0, min(limit, 1e18)), work
        self._known: Any = None
        self._relaxed, self._near = (True, math.inf), _NEAR_STATES
        self._support: list[np.ndarray] | None = None
        self._active = [set() for _ in self._tables.layouts]
        for each in starts:
            self._visit(each)
        self._scale = 1 / max(min(each.seconds for each in self._found.values()), 1e-12)
        known = self._least_seconds[1] if self._limit <= self._least_seconds[0] else 0.0
        bound = Bound(math.inf if self._least_bytes > self._limit else known, self._least_bytes)
        with_seconds = math.isfinite(bound.seconds)
        before, stalls, relaxed = (-1.0, -1.0), 0, False
        for number in range(0 if self._is_proved(bound, to_beat) else rounds):
            value = self._raise_bound(with_seconds)
            bound = self._bound(bound, value, with_seconds)
            self._visit(self._dual.messages.decode())
            excess = self._excess(value, with_seconds, to_beat)
            # A smaller plan that does not fit either is worth half of the work.
            least, made = (work / 2, 1) if math.isinf(bound.seconds) else (0.0, LEAST_ROUNDS)
            spent = self.work_left < least and number >= made
            if self._is_proved(bound, to_beat) or number == rounds - 1 or spent:
                break
            closed = self._close(value, excess, with_seconds)
            bound = self._bound(bound, closed, with_seconds)
            if self._is_proved(bound, to_beat):
                break
            reached = (bound.seconds, self._fastest())
            stalled = reached[0] < before[0] * (1 + _STALLED) and reached[1] >= before[1] * (1 - _STALLED)
            stalls = stalls + 1 if stalled and relaxed else 0
            if stalls == _STALLS:
                break
            before = max(before[0], reached[0]), reached[1]
            minimised, with_seconds = with_seconds, math.isfinite(self._fastest())  # if no plan fits, minimise the memory
            relaxed = minimised == with_seconds == self._relaxed[0] and value >= self._relaxed[1] * (1 - _NEARLY_RELAXED)
            if not relaxed:
                self._activate(excess)
                self._relax(with_seconds)
            self._round(with_seconds, excess, relaxed)
        self._least_bytes, self._least_seconds = bound.memory, (self._limit, bound.seconds)
        return bound

    def _visit(self, states: States) -> None:
        """Evaluate states, make them columns, and add a row where they exceed the limit."""
        key = tuple(states)
        if key not in self._found:
            found = self._found[key] = self._evaluate(states)
            if found.memory > self._limit:
                self._add_rows(*self._tables.costs.memory_over_time(self._tables.assignment(states)), most=1)
        for active, state in zip(self._active, states, strict=True):
            active.add(state)

    def _fastest(self) -> float:
        """Return the seconds of the fastest plan within the limit; infinity if there is none."""
        return min((each.seconds for each in self._found.values() if each.memory <= self._limit), default=math.inf)

    def _least(self) -> float:
        """Return the memory of the smallest plan."""
        return min(each.memory for each in self._found.values())

    def _is_proved(self, bound: Bound, to_beat: float) -> bool:
        """Return whether no plan can be much better: faster within the limit, or smaller if none fits."""
        if math.isinf(bound.seconds):
            return self._least() <= bound.memory * (1 + _SMALLEST)
        return min(self._fastest(), to_beat) <= bound.seconds * (1 + GAP)

    def _excess(self, value: float, with_seconds: bool, to_beat: float) -> float:
        """Return by how much the reduced costs of states may exceed the bound `value` in a better plan."""
        if with_seconds:
            return min(self._fastest(), to_beat) * self._scale - value
        return self._least() / self._limit - 1 - value

    def _bound(self, bound: Bound, value: float, with_seconds: bool) -> Bound:
        """Return the bound with what a bound of the objective proves."""
        if with_seconds:
            return Bound(max(bound.seconds, value / self._scale), bound.memory)
        memory = (1 + value) * self._limit * (1 - _WITHIN)
        if memory <= self._limit:
            return bound  # no excess is proved
        return Bound(math.inf, max(bound.memory, memory))

    def _raise_bound(self, with_seconds: bool) -> float:
        """Pass messages at the prices of memory, and return the lower bound."""
        self._dual = self._duals[with_seconds]
        messages, prices = self._dual.messages, self._dual.prices
        prices += [0.0] * (len(self._rows) - len(prices))
        messages.set_costs(*self._priced(with_seconds))
        if self._known is not None and not any(prices):  # with prices, the messages from before give better bounds
            messages.start_from(self._known)
        self._known = None
        room = sum(price * (self._limit + row.free) for price, row in zip(prices, self._rows, strict=True))
        value = -math.inf
        for number in range(_SWEEPS):
            messages.sweep(number % 2 == 0)
            self.work_left -= messages.work
            if (number + 1) % _CHECKED == 0:
                if with_seconds:
                    self._share_out()
                before, value = value, messages.bound() - room
                if value - before < _NEARLY_RELAXED * abs(value) or self.work_left < 0:
                    break
        return value

    def _share_out(self) -> None:
        """Move costs of shared reshards from readers that do not need them to those that do.

        The seconds of a reshard are shared out to its readers. A reader does not need its share of a layout if its pair has
        slack for all states that read the array in this layout. Readers without slack get it.
        """
        for number, shared in enumerate(self._tables.shared):
            shares, price = self._shares[number], self._scale * shared.times
            slack = np.full(shares.shape, np.inf)
            for position, reader in enumerate(shared.readers):
                needed, seconds, targets, groups = self._layouts_of(number, position)
                left = self._dual.messages.slack(reader.pair).ravel()[needed] / (price * seconds)
                slack[position, targets] = groups.least(left).clip(0.0)
            unused, needing = np.minimum(shares, slack), slack < _UNUSED
            count = needing.sum(axis=0)
            change = np.where(count > 0, needing * unused.sum(axis=0) / np.maximum(count, 1) - unused, 0.0)
            self._shares[number] = shares + change
            for reader, changes in zip(shared.readers, change, strict=True):
                if changes.any():
                    self._dual.messages.add(reader.pair, price * changes[reader.target] * reader.seconds)

    def _layouts_of(self, shared: int, position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, Grouping]:
        """Return where the table of a reader has seconds, these, the different layouts there, and how to group by them."""
        if (shared, position) not in self._layouts:
            reader = self._tables.shared[shared].readers[position]
            needed = np.flatnonzero(reader.seconds)
            targets, index = np.unique(reader.target.ravel()[needed], return_inverse=True)
            self._layouts[shared, position] = needed, reader.seconds.ravel()[needed], targets, Grouping.of(index)
        return self._layouts[shared, position]

    def _priced(self, with_seconds: bool) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the costs of each class alone and of each pair, in which live bytes have prices."""
        tables, scale, prices = self._tables, self._scale if with_seconds else 0.0, self._dual.prices
        alone = [scale * each for each in tables.seconds]
        pairs = [scale * each.seconds for each in tables.pairs]
        for shared, shares in zip(tables.shared, self._shares, strict=True):
            for reader, share in zip(shared.readers, shares, strict=True):
                pairs[reader.pair] = pairs[reader.pair] + scale * shared.times * share[reader.target] * reader.seconds
        classes = np.zeros(len(alone))
        copies: dict[tuple[int, int], float] = defaultdict(float)
        for price, row in zip(prices, self._rows, strict=True):
            classes += price * row.part * row.moment.classes
            for key, size in row.moment.copies.items():
                copies[key] += price * row.part * size
        for number in range(len(alone)):
            alone[number] = alone[number] + classes[number] / tables.shards[number] + sum(prices) * tables.stored[number]
        for (bundle, form), price in copies.items():
            at = tables.pair_of[bundle]
            pairs[at] = pairs[at] + price * tables.pairs[at].reshards[bundle].copied(form)
        return alone, pairs

    def _activate(self, excess: float) -> None:
        """Make more states columns: those of the least reduced costs."""
        every = []
        for number, (active, costs) in enumerate(zip(self._active, self._dual.messages.reduced, strict=True)):
            new = [state for state in np.argsort(costs, kind="stable").tolist() if state not in active]
            every += [(costs[state] - costs.min(), number, state) for state in new[:_NEW_STATES]]
        for cost, number, state in sorted(every)[:_MOST_NEW_STATES]:
            if cost <= excess:
                self._active[number].add(state)

    def _close(self, value: float, excess: float, with_seconds: bool) -> float:
        """Return the bound of the integer program of all states that may be in a better plan; `value` if they are too many."""
        if not math.isfinite(excess):
            return value
        kept = [np.flatnonzero(each - each.min() <= excess + 1e-9) for each in self._dual.messages.reduced]
        if sum(map(len, kept)) - len(kept) > _FEW_STATES:
            return value
        solved = self._solve_integer(kept, with_seconds)
        # No better plan has another state. Nothing is paid for memory within the limit.
        return value if solved is None else min(solved - with_seconds * _OUTSIDE * _WITHIN, value + excess)

    def _relax(self, with_seconds: bool) -> None:
        """Solve the linear program of the active states, which gives prices of memory and messages."""
        active = [np.array(sorted(each)) for each in self._active]
        program = _Program(self._tables, active, self._scale if with_seconds else 0.0, self._limit)
        solved = self._solve(program)
        if solved is None:
            return
        self._relaxed = with_seconds, solved.bound
        self._duals[with_seconds].prices, self._known, shares = program.read_duals(solved, self._rows)
        for number, found in shares.items():
            self._shares[number][:, list(found)] = np.stack(list(found.values()), axis=1)
        states, whole = program.read_states(solved.values)
        if whole:
            self._visit(states)
        parts = zip(active, program.parts(solved.values), strict=True)
        self._support = None if whole else [each[part > _PRESENT] for each, part in parts]

    def _round(self, with_seconds: bool, excess: float, relaxed: bool) -> None:
        """Solve an integer program of the states in the solution of the linear program, of the best plan, and near to them.

        If it finds no better plan, and the linear program is `relaxed`, as good as solved, the next one has more states.
        """
        if self._support is None:
            return
        best = min(self._found.items(), key=lambda each: (each[1].memory > self._limit, each[1].seconds))[0]
        every = zip(self._support, best, self._nearest(excess, self._near), strict=True)
        kept = [np.unique([*support.tolist(), state, *near]) for support, state, near in every]
        before = self._fastest(), self._least()
        self._solve_integer(kept, with_seconds)
        if relaxed and (self._fastest(), self._least()) >= before:
            self._near = min(_MOST_NEAR_STATES, self._near * 10)

    def _nearest(self, excess: float, most: int) -> list[list[int]]:
        """Return the states of each class that come nearest to being in a better plan, by their reduced costs."""
        every = [
            (float(cost), number, state)
            for number, costs in enumerate(self._dual.messages.reduced)
            for state, cost in enumerate((costs - costs.min()).tolist())
            if cost <= excess
        ]
        near: list[list[int]] = [[] for _ in self._active]
        for _, number, state in sorted(every)[: len(near) + most]:
            near[number].append(state)
        return near

    def _solve_integer(self, states: list[np.ndarray], with_seconds: bool) -> float | None:
        """Solve an integer program, visit its solution, and return its lower bound; None if it was not solved."""
        program = _Program(self._tables, states, self._scale if with_seconds else 0.0, self._limit, integer=True)
        solved = self._solve(program)
        if solved is None:
            return None
        if solved.values is not None:
            self._visit(program.read_states(solved.values)[0])
        return solved.bound

    def _solve(self, program: _Program) -> _Solved | None:
        """Solve a program, with rows for operations at which its solution exceeds the limit, until more rows change little."""
        before, work = -math.inf, _WORK_OF_COLUMN[program.integer] * program.columns
        while True:
            solved = program.solve(self._rows)
            self.work_left -= work
            work = work if program.integer else 0  # a linear program goes on from its solution
            if solved is None or solved.values is None:
                return solved
            if not self._add_rows(*program.memory(solved.values), exceeded=max(0.0, solved.values[-1])):
                return solved
            changed = solved.bound - before >= _NEARLY_RELAXED * (1 + abs(before))
            # Without them, the plan of an integer program would not fit, nor a linear program prove that none does.
            if not changed and not (program.integer if program.scale else solved.bound < _NEARLY_RELAXED):
                return solved
            before = solved.bound

    def _add_rows(self, live: np.ndarray, stored: float, exceeded: float = 0.0, most: int = _MOST_ROWS) -> bool:
        """Add rows for operations at which a solution exceeds the limit, and return whether there are any.

        Args:
          live: bytes that are live at each operation.
          stored: bytes of stored inputs.
          exceeded: the part of the limit that may be exceeded.
          most: the most rows to add.
        """
        costs = self._tables.costs
        held = np.stack([part * live - free for part, free in costs.held])
        parts = [part for part, _ in costs.held]
        for row in self._rows:
            held[parts.index(row.part), row.time] = -np.inf
        total = stored + held.max(axis=0) + costs.compiler.reserve * len(live)
        limit = self._limit * (1 + exceeded)
        added = False
        for _ in range(most):
            if not len(total) or total.max() <= limit:
                break
            peak = int(total.argmax())
            part, free = costs.held[int(held[:, peak].argmax())]
            free -= costs.compiler.reserve * len(live)
            self._rows.append(_Row(peak, part, free, self._tables.moment(peak)))
            added = True
            below = np.flatnonzero(total <= limit)  # the next row is for another peak
            before, after = below[below < peak], below[below > peak]
            total[before.max(initial=-1) + 1 : after.min(initial=len(total))] = 0.0
        return added


class _Solved(NamedTuple):
    """A solution: the values of all columns, the lower bound of the objective, and the dual values of all rows.

    There are no values if there is no solution. The bound is then infinite.
    """

    values: Any
    bound: float
    duals: np.ndarray = np.zeros(0)


@dataclass
class _Program:
    """The linear program of some states of each class. Its last column is the part by which the limit is exceeded.

    Attributes:
      states: the states of each class.
      scale: the factor on seconds; 0 minimises the memory.
      limit: the bytes of a device.
      integer: whether the columns of states are integers.
      columns: the number of columns.
    """

    tables: LayoutTables
    states: list[np.ndarray]
    scale: float
    limit: float
    integer: bool = False
    _costs: list[np.ndarray] = field(init=False, default_factory=list)
    _entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        tables, count = self.tables, len(self.states)
        self._begins = np.concatenate([[0], np.cumsum([len(each) for each in self.states])])
        self._binary = int(self._begins[-1])
        self._costs = [self.scale * seconds[each] for seconds, each in zip(tables.seconds, self.states, strict=True)]
        classes = np.repeat(np.arange(count), np.diff(self._begins))
        self._entries = [(classes, np.arange(self._binary), np.ones(self._binary))]
        self.columns, self._equal = self._binary, count
        self._pairs = [self._add_pair(number) for number in range(len(tables.pairs))]
        self._readers: list[tuple[int, int, int, float]] = []
        for number in range(len(tables.shared)):
            self._add_shared(number)
        self.columns += 1
        self._memory_rows = 0
        self._highs = highspy.Highs()
        for name, value in _OPTIONS.items():
            self._highs.setOptionValue(name, value)
        self._highs.setOptionValue("mip_max_nodes", _NODES)
        # Relative to the excess, so that a search for a plan that fits does not end at one that nearly does.
        self._highs.setOptionValue("mip_rel_gap", GAP / 10 if self.scale else _EXCESS_GAP)
        self._highs.passModel(self._model())

    def _model(self) -> highspy.HighsLp:
        """Return the program without rows of memory, for HiGHS."""
        rows, free = len(self._readers), highspy.kHighsInf
        row, column, value = (np.concatenate(each) for each in zip(*self._entries, strict=True))
        matrix = csr_array((value, (row, column)), shape=(self._equal + rows, self.columns))
        one = np.zeros(self._equal)
        one[: len(self.states)] = 1.0
        highest = np.full(self.columns, free)
        if self.integer:
            highest[: self._binary] = 1.0
        if self.scale:
            highest[-1] = _WITHIN
        model = highspy.HighsLp()
        model.num_row_, model.num_col_ = matrix.shape
        model.col_cost_ = np.concatenate([*self._costs, [_OUTSIDE if self.scale else 1.0]])
        model.col_lower_, model.col_upper_ = np.zeros(self.columns), highest
        model.row_lower_, model.row_upper_ = np.append(one, np.full(rows, -free)), np.append(one, np.zeros(rows))
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_, model.a_matrix_.index_, model.a_matrix_.value_ = matrix.indptr, matrix.indices, matrix.data
        if self.integer:
            kind = highspy.HighsVarType
            model.integrality_ = [kind.kInteger] * self._binary + [kind.kContinuous] * (self.columns - self._binary)
        return model

    def _add_pair(self, number: int) -> tuple[int, np.ndarray, np.ndarray]:
        """Add the columns of a pair, and return the first of them, with the rows and columns of its tables that they are for."""
        pair = self.tables.pairs[number]
        rows, row_of = np.unique(pair.rows[self.states[pair.a]], return_inverse=True)
        columns, column_of = np.unique(pair.columns[self.states[pair.b]], return_inverse=True)
        first, size = self.columns, len(rows) * len(columns)
        at = first + np.arange(size)
        self._costs.append(self.scale * pair.seconds[np.ix_(rows, columns)].ravel())
        in_rows = self._equal + np.arange(len(rows))
        in_columns = self._equal + len(rows) + np.arange(len(columns))
        ones = np.ones(size)
        self._entries += [
            (np.repeat(in_rows, len(columns)), at, ones),
            (np.tile(in_columns, len(rows)), at, ones),
            (in_rows[row_of], self._begins[pair.a] + np.arange(len(row_of)), -np.ones(len(row_of))),
            (in_columns[column_of], self._begins[pair.b] + np.arange(len(column_of)), -np.ones(len(column_of))),
        ]
        self.columns += size
        self._equal += len(rows) + len(columns)
        return first, rows, columns

    def _add_shared(self, number: int) -> None:
        """Add a column for each layout into which readers reshard an array, of the seconds of the slowest reader."""
        shared = self.tables.shared[number]
        read = []
        for position, reader in enumerate(shared.readers):
            first, rows, columns = self._pairs[reader.pair]
            every = np.ix_(rows, columns)
            seconds, target = reader.seconds[every].ravel(), reader.target[every].ravel()
            needed = np.flatnonzero(seconds)
            read.append((position, first + needed, seconds[needed], target[needed]))
        for target in np.unique(np.concatenate([each[3] for each in read])).tolist():
            parts = [(position, at[goes == target], seconds[goes == target]) for position, at, seconds, goes in read]
            parts = [each for each in parts if len(each[1])]
            slowest = max(float(seconds.max()) for _, _, seconds in parts)
            column, price = self.columns, self.scale * shared.times * slowest
            self._costs.append(np.array([price]))
            self.columns += 1
            for position, at, seconds in parts:
                row = np.full(len(at) + 1, self._equal + len(self._readers))
                self._entries.append((row, np.append(at, column), np.append(seconds / slowest, -1.0)))
                self._readers.append((number, position, target, price))

    def solve(self, rows: Sequence[_Row]) -> _Solved | None:
        """Solve the program within the limit at some operations; None if HiGHS neither finds a solution nor proves that none is.

        After a first solution, the rows that are new are added to it, and a linear program is solved from there.
        """
        for row in rows[self._memory_rows :]:
            columns, values = self._memory_row(row)
            self._highs.addRow(-highspy.kHighsInf, 1 + row.free / self.limit - _WITHIN, len(columns), columns, values)
        self._memory_rows = len(rows)
        self._highs.run()
        status, found = self._highs.getModelStatus(), self._highs.getInfo()
        if self.integer and status == highspy.HighsModelStatus.kInfeasible:
            return _Solved(None, math.inf)
        if found.primal_solution_status != highspy.kSolutionStatusFeasible:
            return None
        solution = self._highs.getSolution()
        values = np.array(solution.col_value)
        if self.integer:
            return _Solved(values, found.mip_dual_bound)
        return _Solved(values, found.objective_function_value, np.array(solution.row_dual))

    def parts(self, values: np.ndarray) -> list[np.ndarray]:
        """Return the values of the states of each class."""
        return np.split(values[: self._binary], self._begins[1:-1])

    def read_states(self, values: np.ndarray) -> tuple[States, bool]:
        """Return the state of each class with the largest value, and whether each value is 0 or 1."""
        parts = self.parts(values)
        states = [int(each[part.argmax()]) for each, part in zip(self.states, parts, strict=True)]
        return states, all(part.max() > 1 - 1e-6 for part in parts)

    def read_duals(self, solved: _Solved, rows: Sequence[_Row]) -> tuple[list[float], list, dict]:
        """Return the price of a byte at each row, the messages of all pairs, and the shares of readers in what they share."""
        equal, readers, memory = np.split(solved.duals, [self._equal, self._equal + len(self._readers)])
        prices = [max(0.0, -float(each)) / self.limit for each in memory] + [0.0] * (len(rows) - len(memory))
        messages, at = [], len(self.states)
        for _, its_rows, its_columns in self._pairs:
            middle, end = at + len(its_rows), at + len(its_rows) + len(its_columns)
            messages.append((its_rows, equal[at:middle], its_columns, equal[middle:end]))
            at = end
        shares: dict[int, dict[int, np.ndarray]] = defaultdict(dict)
        for (number, position, target, price), dual in zip(self._readers, readers, strict=True):
            part = np.zeros(len(self.tables.shared[number].readers))
            found = shares[number].setdefault(target, part)
            found[position] = max(0.0, -float(dual)) / price if price else 0.0
        for found_shares in shares.values():
            for each in found_shares.values():
                each /= max(1.0, each.sum())
        return prices, messages, shares

    def memory(self, values: np.ndarray) -> tuple[np.ndarray, float]:
        """Return the live bytes at each operation, and the stored bytes."""
        tables, parts = self.tables, self.parts(values)
        each = zip(parts, self.states, tables.shards, tables.stored, strict=True)
        sums = np.array([((part / shards[at]).sum(), (part * stored[at]).sum()) for part, at, shards, stored in each])
        copies = np.zeros(len(tables.costs.copy_kinds))
        for number, (bundle, form) in enumerate(tables.costs.copy_kinds):
            if bundle in tables.pair_of:
                first, rows, columns = self._pairs[tables.pair_of[bundle]]
                copied = tables.pairs[tables.pair_of[bundle]].reshards[bundle].copied(form)[np.ix_(rows, columns)].ravel()
                copies[number] = copied @ values[first : first + len(copied)]
        return tables.costs.live_bytes(sums[:-1, 0], copies), float(sums[:, 1].sum())

    def _memory_row(self, row: _Row) -> tuple[np.ndarray, np.ndarray]:
        """Return the columns of a row, and their coefficients over the limit."""
        tables = self.tables
        found = np.zeros(self.columns)
        parts = []
        for number, states in enumerate(self.states):
            live = row.part * row.moment.classes[number] / tables.shards[number][states]
            parts.append(live + tables.stored[number][states])
        found[: self._binary] = np.concatenate(parts)
        for (bundle, form), size in row.moment.copies.items():
            at = tables.pair_of[bundle]
            first, rows, columns = self._pairs[at]
            copied = tables.pairs[at].reshards[bundle].copied(form)[np.ix_(rows, columns)].ravel()
            found[first : first + len(copied)] += row.part * size * copied
        found[-1] = -self.limit
        used = np.flatnonzero(found)
        return used, found[used] / self.limit
