"""Run one round of live pairs: start a fresh process for each variant, let them take turns, and end them.

One thread asks and ends the processes, so that at most one of them works at any moment of a turn. (While they start, each has a
thread that waits for it, and nothing is timed.)

- Blocks in slices (`slices.py`) begin together; still at most one process works at any moment.
- A variant works only between a request for a block and its answer, and then until it is *settled*. Settled processes no longer
  use the processor. Loaders, for example, first fill their buffers. The next block begins after that.
- All others wait in a blocking read. Whether they are idle is not assumed: their use of the processor is added up while they
  wait. A variant that uses it cannot live beside others (`CannotLiveError`).
- `close` kills all processes of the round and waits for them, also after Ctrl-C.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from penstock.run_command import nvidia_gpu
from penstock_bench import activity, slices
from penstock_bench.live_process import EndedError, LiveProcess
from penstock_bench.model import Workload
from penstock_bench.outcome import Block
from penstock_bench.reference_kernel import reference_seconds
from penstock_bench.turns import orders

Seat = tuple[str, bool]  # the variant's name, and whether it is the control's second process

# A variant is settled when its processes use less than this share of a core.
_IDLE = 0.05
_LOOK = 0.005  # seconds between two looks
_LONGEST_SETTLING = 2.0  # seconds
# A tenth of the memory stays free for the page cache, which all variants share.
_FREE = 0.1


# As PyTorch, XLA, NumPy and the system's "OOM killer" say it.
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemory|RESOURCE_EXHAUSTED|MemoryError|ended by signal 9", re.IGNORECASE)


class CannotLiveError(Exception):
    """An error that says why the variants of a workload cannot live side by side."""


@dataclass
class _Seated:
    """A live process, and what it uses while others have their turns."""

    process: LiveProcess
    session: activity.Session
    waited: float = 0.0  # seconds
    used: float = 0.0  # seconds of the processor while it waited
    rests: tuple[float, float] | None = None  # since when, and its seconds of the processor then


@dataclass
class LiveRound:
    """The live processes of one round of a workload.

    Attributes:
      blocks: what was measured, in order.
      failed: the variants that failed, with the reason and what they wrote.
      starting, turning: the seconds that were spent on each.
      turns: the number of complete turns.
      slice_seconds: the length of the slices of a turn's blocks; None where they run one after the other.
    """

    module: str
    workload: Workload
    seats: Sequence[Seat]
    size: str
    cache: Path
    number: int
    seed: int
    clock: Callable[[], float]
    say: Callable[[str], None] = lambda text: None
    blocks: list[Block] = field(default_factory=list)
    failed: dict[str, tuple[str, str]] = field(default_factory=dict)
    starting: float = 0.0
    turning: float = 0.0
    turns: int = 0
    slice_seconds: float | None = field(init=False)

    def __post_init__(self) -> None:
        self._seated: dict[Seat, _Seated] = {}
        seed = f"{self.seed}/{self.workload.name}/{self.number // 2}"
        self._orders = orders(self.seats, seed, backwards=self.number % 2 == 1)  # also if a round has a single turn
        self._reference: float | None = None
        self._block_seconds = 0.0 if self.size == "quick" else self.workload.block_seconds
        self.slice_seconds = self.workload.slice_seconds if slices.possible() else None

    def __enter__(self) -> LiveRound:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start(self) -> None:
        """Start a process for each variant, and wait until all are warm.

        Raises:
          CannotLiveError: they do not fit into memory together.
        """
        begin = time.perf_counter()
        self._start()
        self._check_room()
        self.starting += time.perf_counter() - begin

    def turn(self) -> None:
        """Let each variant run a block of each metric: all variants the first metric, then all the second one.

        The blocks of a metric run one after the other, or at the same time in slices.

        Raises:
          CannotLiveError: a variant does not stop to use the processor when its block has ended, or they do not fit into memory.
        """
        begin, order = time.perf_counter(), next(self._orders)
        for metric in self.workload.metrics:
            present = [seat for seat in order if seat in self._seated]
            if self.slice_seconds is not None:
                self._blocks_in_slices(present, metric.name)
                continue
            for position, seat in enumerate(present):
                if seat in self._seated:
                    self._block(seat, metric.name, position)
        if not self.turns:
            self._check_room()
        self.turns += 1
        self.turning += time.perf_counter() - begin

    def finish(self) -> dict[Seat, Mapping[str, Any]]:
        """Let each variant verify its results, and return them.

        Raises:
          CannotLiveError: a variant used the processor while it waited.
        """
        self._check_idleness()
        results: dict[Seat, Mapping[str, Any]] = {}
        for seat, seated in list(self._seated.items()):
            try:
                results[seat] = seated.process.finish()
            except EndedError as ended:
                self._drop(seat, ended)
        return {seat: result for seat, result in results.items() if seat[0] not in self.failed}

    def close(self) -> None:
        """End all processes."""
        for seated in self._seated.values():
            seated.process.close()
        self._seated.clear()

    def _start(self) -> None:
        """Start processes, as many at a time as there are cores and as fit into memory: what they compile is not timed.

        Their order is another one in each round, as a process may be slower permanently if it was started beside another.

        Raises:
          CannotLiveError: they do not fit into memory together.
        """
        self.say(
            f"round {self.number + 1}, {self.workload.name}: starting {', '.join(dict.fromkeys(name for name, _ in self.seats))}"
        )
        at_once = activity.cores()
        waiting = next(islice(orders(self.seats, f"{self.seed}/{self.workload.name}/starts"), self.number, None))
        with ThreadPoolExecutor(at_once) as pool:
            while waiting:
                count = self._that_fit(min(at_once, len(waiting)))
                group, waiting = waiting[:count], waiting[count:]
                begun = [seat for seat in group if self._begin(seat)]
                try:
                    endings = list(pool.map(self._until_ready, begun))
                except BaseException:  # Ctrl-C: the pool's threads wait until the processes are warm, or gone
                    self.close()
                    raise
                for seat, ended in zip(begun, endings, strict=True):
                    if ended is not None:
                        self._drop(seat, ended)

    def _begin(self, seat: Seat) -> bool:
        """Start the process of a variant; tell whether it could be started."""
        try:
            variant = self.workload.variant(seat[0])
            sliced, variables = self.slice_seconds is not None, _share_of_gpu(len(self.seats))
            process = LiveProcess(self.module, self.workload, variant, self.size, self.cache, variables, sliced)
        except EndedError as ended:
            self._drop(seat, ended)
            return False
        self._seated[seat] = _Seated(process, activity.Session(process.session))
        return True

    def _until_ready(self, seat: Seat) -> EndedError | None:
        try:
            self._seated[seat].process.wait_until_ready()
        except EndedError as ended:
            return ended
        return None

    def _drop(self, seat: Seat, ended: EndedError) -> None:
        """Note a failure, and end the variant's processes.

        Raises:
          CannotLiveError: there was not enough memory beside the others.
        """
        if len(self._seated) > 1 and _OUT_OF_MEMORY.search(f"{ended.reason}\n{ended.output}"):
            raise CannotLiveError(f"{seat[0]} did not get enough memory beside {len(self._seated) - 1} other processes")
        self.failed.setdefault(seat[0], (ended.reason, ended.output))
        for mine in [one for one in self._seated if one[0] == seat[0]]:
            self._seated.pop(mine).process.close()

    def _that_fit(self, count: int) -> int:
        """Return how many more processes may start at once, of `count`, if each needs as much as the largest one so far.

        In the first round, the first one starts alone, so that its memory is known before others could exhaust the machine's.

        Raises:
          CannotLiveError: there is no room for another one.
        """
        if not self._seated:
            return 1 if self.number == 0 else count
        room = _room()
        if room is None:
            return count
        largest = max(seated.session.memory() + seated.session.shrunk() for seated in self._seated.values())
        if room < largest:
            raise CannotLiveError(
                f"{len(self.seats)} processes of up to {largest / 2**30:.1f} GiB do not fit into memory together "
                f"({room / 2**30:.1f} GiB were left beside {len(self._seated)} of them, without a tenth for the page cache)"
            )
        return max(1, min(count, room // max(largest, 1)))

    def _check_room(self) -> None:
        """Check that each process can have as much memory as it once had. Run whole blocks if not all can at the same time.

        Whole blocks run one at a time, but a process that is stopped in the middle of a step holds the step's memory.

        Raises:
          CannotLiveError: one of them cannot.
        """
        room = _room()
        wanted = [seated.session.shrunk() for seated in self._seated.values()]
        if room is not None and room < max(wanted, default=0):
            raise CannotLiveError(
                f"{len(self.seats)} processes fit into memory together only while they wait: one needs "
                f"{max(wanted) / 2**30:.1f} GiB more for a block, and {room / 2**30:.1f} GiB were left, without a tenth for the "
                "page cache"
            )
        if room is not None and room < sum(wanted):
            self.slice_seconds = None

    def _block(self, seat: Seat, metric: str, position: int) -> None:
        """Let a variant run a block alone."""
        seated = self._seated[seat]
        self.say(f"round {self.number + 1}, turn {self.turns + 1}, {self.workload.name}: {seat[0]}{' (A/A control)' * seat[1]}")
        before_it = self._reference if self._reference is not None else reference_seconds()
        used, busy, started = seated.session.look(), activity.Busy(), self.clock()
        self._wakes(seated, used.cpu)
        try:
            value = seated.process.block(metric, self._block_seconds)
        except EndedError as ended:
            self._drop(seat, ended)
            return
        others = busy.by_others(seated.session.look().since(used).cpu)  # `look`: the block may have started or ended processes
        self._settle(seat, seated)
        total = seated.session.look().since(used)
        self._reference = reference_seconds()
        reference = (before_it + self._reference) / 2
        self._note(seat, metric, position, value, started, total, others, reference)

    def _blocks_in_slices(self, order: Sequence[Seat], metric: str) -> None:
        """Let all variants run a block at the same time, in slices."""
        self.say(f"round {self.number + 1}, turn {self.turns + 1}, {self.workload.name}: {metric} of all variants, in slices")
        used = {seat: self._seated[seat].session.look() for seat in order}
        for seat in order:
            self._wakes(self._seated[seat], used[seat].cpu)
        busy, started = activity.Busy(), self.clock()
        values: dict[Seat, tuple[float, activity.Activity]] = {}

        def answered(seat: Seat, value: float) -> None:
            self._settle(seat, self._seated[seat])
            values[seat] = value, self._seated[seat].session.look().since(used[seat])

        def ended(seat: Seat, error: EndedError) -> None:
            self._drop(seat, error)
            for gone in processes.keys() - self._seated.keys():  # the control has two
                del processes[gone]

        processes = {seat: self._seated[seat].process for seat in order}
        assert self.slice_seconds is not None
        slices.work_in_slices(order, processes, metric, self._block_seconds, self.slice_seconds, answered, ended)
        others = busy.by_others(sum(total.cpu for _, total in values.values()))
        for position, seat in enumerate(order):
            if seat in values and seat in self._seated:
                self._note(seat, metric, position, values[seat][0], started, values[seat][1], others, None)

    def _note(
        self,
        seat: Seat,
        metric: str,
        position: int,
        value: float,
        started: float,
        total: activity.Activity,
        others: float | None,
        reference: float | None,
    ) -> None:
        process, known = self._seated[seat].process, activity.known()
        self.blocks.append(
            Block(
                *seat,
                self.number,
                self.turns,
                position,
                metric,
                value,
                started,
                process.worked,
                total.cpu if known else None,
                total.faults if known else None,
                total.switches if known else None,
                others,
                reference,
                process.slices,
            )
        )

    def _wakes(self, seated: _Seated, cpu: float) -> None:
        """Add up what a variant has used since it was settled."""
        if seated.rests is not None:
            since, used = seated.rests
            seated.waited += time.perf_counter() - since
            seated.used += max(0.0, cpu - used)  # less, if a process has ended

    def _settle(self, seat: Seat, seated: _Seated) -> None:
        """Wait until a variant's processes have stopped to use the processor."""
        begin, cpu = time.perf_counter(), seated.session.cpu()
        while True:
            time.sleep(_LOOK)
            now = seated.session.cpu()
            if now - cpu <= _IDLE * _LOOK:
                break
            cpu = now
            if time.perf_counter() - begin > _LONGEST_SETTLING:
                raise CannotLiveError(
                    f"{seat[0]} still used the processor {_LONGEST_SETTLING:g} s after its block; a variant must be idle "
                    "while it waits"
                )
        seated.rests = (time.perf_counter(), now)

    def _check_idleness(self) -> None:
        for (name, _), seated in self._seated.items():
            if seated.waited > 0 and seated.used > _IDLE * seated.waited:
                raise CannotLiveError(f"{name} used {seated.used / seated.waited:.0%} of a core while others had their turns")


def _room() -> int | None:
    """Return the bytes of memory that more processes may take; None where the system does not say."""
    available, total = activity.available_memory(), activity.total_memory()
    return None if available is None or total is None else max(0, available - int(_FREE * total))


def _share_of_gpu(processes: int) -> dict[str, str]:
    """Return variables by which JAX takes its share of a GPU's memory, of which it else takes three quarters when it starts."""
    return {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.75 / processes:.3f}"} if nvidia_gpu() else {}
