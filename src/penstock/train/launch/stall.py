"""Watch the steps of all ranks, and find the rank for which the others wait.

Each rank counts its steps and batches in a file (`penstock._heartbeat`). The launcher looks at it, and notes by its own clock
when a count has changed. Two limits hold:

- From two steps of every rank on: no rank may be silent for longer than the limit that the user gave.
- Before that, ranks import, restore and compile, each at its own pace. So all of them together may be silent for ten times as
  long, and for half an hour at least. A feed hands over its first batch before the step compiles, hence two.

A rank that waits inside of a collective is silent too, so silence does not tell who is at fault. The counts do: the others
cannot get ahead of the rank that they wait for by more than what is in flight, and cannot fall behind it. So the rank with the
fewest steps is at fault, or all that have as few.
"""

from __future__ import annotations

import mmap
import os
import textwrap
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock import _heartbeat

_FIRST = 1800.0  # seconds of silence before two steps, at least
_TIMES = 10.0  # the limit before two steps, as a multiple of the limit
_STACKS_SECONDS = 5.0  # to wait for the stacks


@dataclass
class _Rank:
    words: memoryview
    stacks: Path
    seen: tuple[int, ...] = (0, 0)
    changed: float = 0.0


class Progress:
    """The steps of the ranks of one attempt, with their counts and stacks in a folder. Times and the limit are in seconds."""

    def __init__(self, folder: Path, count: int, limit: float, now: float):
        self._limit, self._looked = limit, now
        self._began: float | None = None  # when every rank had made two steps
        self._ranks = []
        for rank in range(count):
            path = folder / str(rank)
            path.write_bytes(bytes(_heartbeat.SIZE))
            with path.open("r+b") as file:
                words = memoryview(mmap.mmap(file.fileno(), _heartbeat.SIZE)).cast("q")
            self._ranks.append(_Rank(words, path.with_name(path.name + _heartbeat.STACKS), changed=now))

    def environment(self, rank: int) -> dict[str, str]:
        """Return the environment variables of a rank, by which it finds its file."""
        return {_heartbeat.FILE: str(self._ranks[rank].stacks).removesuffix(_heartbeat.STACKS)}

    def stalled(self, running: Collection[int], now: float, excused: bool) -> bool:
        """Look at the counts, and return whether a running rank has been silent for too long.

        If excused, the time since the last look does not count, because the ranks may have waited for the launcher.
        """
        gap, self._looked = now - self._looked, now
        excused = excused or gap > 5.0  # the launcher itself was stopped, or the machine slept
        for rank in self._ranks:
            counts = self._counts(rank)
            if counts != rank.seen:
                rank.seen, rank.changed = counts, now
            elif excused:
                rank.changed += gap
        watched = [self._ranks[each] for each in running]
        if not watched:
            return False
        if self._began is not None and excused:
            self._began += gap
        if self._began is None and all(max(rank.seen) >= 2 for rank in watched):
            self._began = now  # the first ones have waited for the last one until now
        if self._began is not None:
            return max(now - max(rank.changed, self._began) for rank in watched) > self._limit
        return min(now - rank.changed for rank in watched) > max(_FIRST, _TIMES * self._limit)

    def behind(self, running: Collection[int]) -> list[int]:
        """Return the running ranks with the fewest steps, and among those with as many steps the fewest batches."""
        fewest = min(self._ranks[rank].seen for rank in running)
        return [rank for rank in running if self._ranks[rank].seen == fewest]

    def report(self, running: Mapping[int, int], now: float) -> str:
        """Return the steps of all ranks, and the stacks of those that are behind; `running` has the process id of each rank."""
        behind = self.behind(running)
        silent = max(now - self._ranks[rank].changed for rank in running)
        names = ", ".join(map(str, behind))
        if len(behind) < len(running):
            who = f"rank {names} has made the fewest steps, and the others wait for it"
        elif len(running) == 1:
            who = f"only rank {names} is running"
        else:
            who = "all ranks have made as many steps, so their stacks have to tell which is at fault"
        lines = [f"no step for {silent:.0f} s: {who}"]
        lines += [
            f"  rank {rank}: {self._describe(rank)}, "
            + (f"silent for {now - each.changed:.0f} s" if rank in running else "ended")
            for rank, each in enumerate(self._ranks)
        ]
        stacks = self._stacks({rank: running[rank] for rank in behind})
        lines += [f"stacks of rank {rank} (process {running[rank]}):\n{textwrap.indent(stacks[rank], '  ')}" for rank in behind]
        return "\n".join(lines)

    def _describe(self, number: int) -> str:
        rank = self._ranks[number]
        steps, batches = rank.seen
        if steps:
            return f"step {rank.words[_heartbeat.STEP]} ({steps} made here, {batches} batches)"
        return f"{batches} batches" if batches else "no step yet"

    def _stacks(self, processes: Mapping[int, int]) -> dict[int, str]:
        """Ask ranks, given by their process ids, for their stacks. Return the stacks, or why there are none."""
        # The signal would end a process that has not registered it.
        asked = [rank for rank in processes if self._ranks[rank].words[_heartbeat.REGISTERED]]
        for rank in asked:
            os.kill(processes[rank], _heartbeat.STACKS_SIGNAL)
        deadline, sizes = time.monotonic() + _STACKS_SECONDS, [-1]
        while time.monotonic() < deadline:
            before, sizes = sizes, [self._ranks[rank].stacks.stat().st_size for rank in asked]
            if sizes == before and all(sizes):
                break
            time.sleep(0.1)
        silent = "none: the process did not answer the signal, so it is stopped, or waits in the kernel"
        unknown = "none: this process has not imported penstock, which registers the signal that writes them"
        return {
            rank: (self._ranks[rank].stacks.read_text(errors="replace").rstrip() or silent) if rank in asked else unknown
            for rank in processes
        }

    @staticmethod
    def _counts(rank: _Rank) -> tuple[int, ...]:
        return rank.words[_heartbeat.STEPS], rank.words[_heartbeat.BATCHES]
