"""The checkpoints of a run: arrays and a record go in, verified checkpoints come out, the newest first.

`checkpoint_folder` says what the folder of each, `step-N`, has, and when it is complete.

*Correctness.* `save` takes a snapshot on the calling thread, and one thread of this object, alive from one `save` to the
next, writes it. Nobody else writes to the folder of a checkpoint: `save` and `wait` first join the thread before. In several
processes, each process calls `save` for the same steps in the same order. Orbax lets them meet before and after they write;
process 0 then writes the manifest, and sends its outcome to the others, so that `wait` ends in each process with the same
result. A process that is killed leaves a folder without a manifest, which the next save at that step replaces, and the next
complete checkpoint removes.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import math
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from penstock.errors import FirstProcessError
from penstock.train import checkpoint_folder, manifest
from penstock.train.agreement import decide
from penstock.train.array_files import ArrayFiles, snapshot
from penstock.train.checkpoint_folder import Checkpoint
from penstock.train.schedule import Goal
from penstock.train.state import check_same_leaves, describe_leaves, empty, restored, storable, storable_like

_LOGGER = logging.getLogger("penstock.train")
_NAME = re.compile(r"step-(\d+)")
_saves = itertools.count()


class CheckpointError(RuntimeError):
    """The error raised if a checkpoint could not be written or read. Its message says why, and which one is intact."""


class Checkpoints:
    """The checkpoints in a folder, of which the last and the best are kept.

    Args:
      folder: holds them. All processes have to see it.
      keep: number of newest checkpoints that are kept.
      goal: what the best checkpoint is the best in; None if none is kept.
    """

    def __init__(self, folder: Path, *, keep: int = 3, goal: Goal | None = None):
        self.folder = folder
        self._keep, self._goal = keep, goal
        self._files = ArrayFiles()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._refused: BaseException | None = None  # the error of the check of a save
        self._started: int | None = None  # the step of the last save, while its thread has not ended well
        self._complete: int | None = None  # the newest checkpoint that this object knows to be complete

    @property
    def complete(self) -> int | None:
        """Return the step of the newest complete checkpoint that this object wrote or found; None if there is none."""
        return self._complete

    def save(
        self,
        step: int,
        arrays: Mapping[str, Any],
        record: Mapping[str, Any],
        *,
        plan: str | None = None,
        late: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """Save arrays and a record. It returns when the copy of the arrays is started; a thread writes them.

        If the save before is still being written, this waits for it first.

        Args:
          step: the number of steps that the state has had.
          arrays: the arrays by name. They may be donated right after the call.
          record: all else, as JSON. If a best checkpoint is kept, `record["metric"]` is the value of the metric, or None.
          plan: the plan as JSON.
          late: is called on the thread that writes, in all processes, before it writes, and returns what is added to the record.
            If it raises, nothing is written, and `wait` and `check` raise that error.

        Raises:
          CheckpointError: the save before failed.
        """
        self.wait()
        stored = {name: storable(array) for name, array in arrays.items() if array.size}  # Orbax refuses empty arrays and folders
        described = {name: [list(leaf.shape), leaf.dtype] for name, leaf in describe_leaves(arrays).items()}
        saved = {"version": checkpoint_folder.VERSION, "step": step, "leaves": described}
        saved |= {"record": dict(record), "goal": self._goal_text()}
        copies = snapshot(stored)
        self._started = step
        self._thread = threading.Thread(
            target=self._write, args=(step, copies, saved, plan, next(_saves), late), name="penstock-checkpoint", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raise the error of a save that failed meanwhile. It does not wait.

        Raises:
          CheckpointError: a save failed.
        """
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait until the save that was started is complete.

        Raises:
          CheckpointError: it failed.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        if (refused := self._refused) is not None:
            self._refused = None
            raise refused
        if (error := self._error) is not None:
            self._error = None
            raise CheckpointError(self._failed(error)) from error

    def amend(self, step: int, record: Mapping[str, Any]) -> None:
        """Replace parts of the record of a checkpoint that was saved before all of it was known.

        Args:
          step: the step of the checkpoint.
          record: what changes, as JSON; `record["metric"]` as that of `save`.

        Raises:
          CheckpointError: the save failed, or the change cannot be written.
        """
        self.wait()
        folder = self.folder / f"step-{step}"
        try:
            decide(lambda: checkpoint_folder.amend(folder, record, self._goal_text()))
        except (OSError, FirstProcessError) as error:
            raise CheckpointError(
                f"the results of step {step:,} could not be added to {folder}: {self._reason(error)}; the checkpoint is intact"
            ) from error

    def _goal_text(self) -> str | None:
        return None if self._goal is None else str(self._goal)

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint that passes its manifest. Each newer one is reported with what is wrong with it.

        Returns:
          The checkpoint; None if there is none.
        """
        path = decide(self._latest)
        if path is None:
            return None
        checkpoint = checkpoint_folder.load_together(Path(path))
        self._complete = checkpoint.step
        return checkpoint

    def _latest(self) -> str | None:
        """Return the folder of the newest checkpoint that passes its manifest, and report those that are passed over."""
        passed_over: list[str] = []
        for step, path in sorted(self._folders().items(), reverse=True):
            problem = checkpoint_folder.problem(path)
            if problem is None:
                for line in passed_over:
                    _LOGGER.warning("%s; continuing from step %s", line, f"{step:,}")
                return str(path)
            passed_over.append(f"checkpoint {path} is passed over: {problem}")
        for line in passed_over:
            _LOGGER.warning("%s; there is no older one", line)
        return None

    def best(self) -> Checkpoint | None:
        """Return the checkpoint with the best metric that passes its manifest; None if there is none."""
        path = decide(self._best)
        return None if path is None else checkpoint_folder.load_together(Path(path))

    def _best(self) -> str | None:
        for path in self._by_metric():
            problem = checkpoint_folder.problem(path)
            if problem is None:
                return str(path)
            _LOGGER.warning("checkpoint %s is passed over: %s", path, problem)
        return None

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints that have a manifest, in order."""
        return sorted(step for step, path in self._folders().items() if manifest.is_finished(path))

    def close(self) -> None:
        """Wait for the save that was started, and end the threads. An error of it is logged."""
        try:
            self.wait()
        except CheckpointError as error:
            _LOGGER.error("%s", error)
        finally:
            self._files.close()

    def _write(
        self,
        step: int,
        arrays: dict[str, jax.Array],
        saved: dict[str, Any],
        plan: str | None,
        number: int,
        late: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Write a checkpoint, on the thread of this object."""
        folder = self.folder / f"step-{step}"
        try:
            saved["record"] |= late()
        except BaseException as error:
            self._refused = error
            return
        try:
            decide(lambda: checkpoint_folder.begin(folder, json.dumps(saved), plan), f"begin/{number}")
            if arrays:
                self._files.write(folder / checkpoint_folder.ARRAYS, arrays)
            decide(lambda: checkpoint_folder.finish(folder), f"end/{number}")
            self._complete = step
            if jax.process_index() == 0:
                self._remove_old(step)
        except BaseException as error:
            self._error = error
            if jax.process_index() == 0:
                checkpoint_folder.remove(folder)  # it may be what has filled the disk

    def _remove_old(self, newest: int) -> None:
        """Remove the checkpoints that are neither among the last nor the best, and unfinished ones before the newest."""
        folders = self._folders()
        finished = sorted((step for step, path in folders.items() if manifest.is_finished(path)), reverse=True)
        kept = {step for step in finished if step > newest} | set([step for step in finished if step <= newest][: self._keep])
        best = next(iter(self._by_metric()), None)
        for step, path in folders.items():
            if step <= newest and step not in kept and path != best:
                checkpoint_folder.remove(path)

    def _by_metric(self) -> list[Path]:
        """Return the finished folders that have a value for the goal, the best first; of equal ones, the newest."""
        if self._goal is None:
            return []
        better, values = self._goal.better, {}
        for _, path in sorted(self._folders().items(), reverse=True):
            value = checkpoint_folder.metric(path, self._goal) if manifest.is_finished(path) else None
            if value is not None and not math.isnan(value):
                values[path] = value
        ordered: list[Path] = []
        for path, value in values.items():
            before = next((i for i, other in enumerate(ordered) if better(value, values[other])), len(ordered))
            ordered.insert(before, path)
        return ordered

    def _folders(self) -> dict[int, Path]:
        """Return all folders of checkpoints, finished or not, by step."""
        try:
            paths = list(self.folder.iterdir())
        except FileNotFoundError:
            return {}
        return {int(match[1]): path for path in paths if (match := _NAME.fullmatch(path.name))}

    def _failed(self, error: BaseException) -> str:
        left = "there is none before it" if self._complete is None else f"the checkpoint of step {self._complete:,} is intact"
        place = f"{self.folder / f'step-{self._started}'}"
        return f"step {self._started:,} could not be saved to {place}: {self._reason(error)}; {left}"

    def _reason(self, error: BaseException) -> str:
        if not _is_disk_full(error):
            return checkpoint_folder.summary(error)
        free = shutil.disk_usage(self.folder).free if self.folder.exists() else 0
        return f"no space left on the disk ({free / 1e6:,.0f} MB are free): free some, or keep fewer checkpoints"


def restore(checkpoint: Checkpoint, like: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Read the arrays of a checkpoint.

    Args:
      checkpoint: a checkpoint that was found.
      like: for each name an abstract array: the shape and dtype that it must have, and the sharding that it gets.

    Raises:
      OtherStateError: the checkpoint has other arrays.
      CheckpointError: an array cannot be read.
    """
    check_same_leaves(checkpoint.leaves, describe_leaves(like), f"checkpoint {checkpoint.path}")
    wanted = {name: storable_like(x) for name, x in like.items() if x.size}
    with contextlib.closing(ArrayFiles()) as files:
        try:
            arrays = files.read(checkpoint.path / checkpoint_folder.ARRAYS, wanted) if wanted else {}
        except Exception as error:
            raise CheckpointError(f"checkpoint {checkpoint.path} cannot be read: {checkpoint_folder.summary(error)}") from error
    return {name: restored(arrays[name], x) if x.size else empty(x) for name, x in like.items()}


def read(path: Path) -> Checkpoint:
    """Return the checkpoint in a folder.

    Raises:
      CheckpointError: it is not complete, or damaged.
    """
    problem = decide(lambda: checkpoint_folder.problem(path))
    if problem is not None:
        raise CheckpointError(f"checkpoint {path} cannot be used: {problem}")
    return checkpoint_folder.load_together(path)


def _is_disk_full(error: BaseException) -> bool:
    """Return whether a disk or a quota was full. TensorStore says it in words only."""
    codes = (errno.ENOSPC, errno.EDQUOT)
    text = str(error)
    return getattr(error, "errno", None) in codes or "No space left on device" in text or "Disk quota exceeded" in text
