"""Write and read the checkpoints of a run: arrays, a record and a manifest in one folder for each.

The folder of a checkpoint, `step-N`, has the arrays in `state/`, written by Orbax. `record.json` has the position in the data and
all else that is JSON, and `plan.json` the plan, if there is one. MANIFEST.json is written last, and only a folder that passes its
manifest is a checkpoint. `later.json`, which is not in the manifest, has the part of the record that was known only after the
save.

*Correctness.* `save` takes a snapshot on the calling thread, and one thread of the `Checkpoints`, alive from one `save` to the
next, writes it. No other thread writes to the folder of a checkpoint: `save` and `wait` first join the thread before. In several
processes, each process calls `save` for the same steps in the same order. Orbax synchronizes them before and after they write.
Process 0 then writes the manifest, and sends its outcome to the others, so that `wait` ends in each process with the same
result. A process that is killed leaves a folder without a manifest, which the next save at that step replaces, and the next
complete checkpoint removes.

*Retention* is ours, because Orbax's CheckpointManager (0.12.8) has its own mark of completeness. It removes an old checkpoint
before the manifest of the new one is written, counts folders that have none, and cannot add a metric after a save.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import logging
import math
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from penstock._atomic_write import replace
from penstock.errors import CheckpointError, FirstProcessError
from penstock.train import manifest
from penstock.train.agreement import decide
from penstock.train.schedule import Goal
from penstock.train.state import Leaf, check_same_leaves, describe_leaves, empty, restored, storable, storable_like

_VERSION = 1
_ARRAYS, _RECORD, _PLAN, _LATER = "state", "record.json", "plan.json", "later.json"
_NAME = re.compile(r"step-(0|[1-9]\d*)")
_LOGGER = logging.getLogger("penstock.train")
_saves = itertools.count()


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was complete and undamaged when it was looked for."""

    path: Path  # its folder
    step: int  # number of steps that its state has had
    record: Mapping[str, Any]  # all that was saved beside the arrays, as JSON
    leaves: Mapping[str, Leaf]


class Checkpoints:
    """The checkpoints in a folder, of which the last and the best are kept.

    Args:
      folder: holds them. All processes have to see it.
      keep: number of newest checkpoints that are kept.
      goal: the metric of the best checkpoint, and its direction; None if no best one is kept.

    Attributes:
      complete: the step of the newest complete checkpoint that this object wrote or found; None if there is none.
    """

    def __init__(self, folder: Path, *, keep: int = 3, goal: Goal | None = None):
        self.folder = folder
        self.complete: int | None = None
        self._keep, self._goal = keep, goal
        self._goal_text = None if goal is None else str(goal)
        self._files = ArrayFiles()
        self._thread: threading.Thread | None = None
        self._started: int | None = None  # the step of the last save
        self._error: BaseException | None = None  # of the last save
        self._refused: BaseException | None = None  # the error of the check of a save

    def save(
        self,
        step: int,
        arrays: Mapping[str, Any],
        record: Mapping[str, Any],
        *,
        plan: str | None = None,
        late: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """Start to copy arrays, and let a thread write them with a record. First wait until the save before is written.

        Args:
          step: the number of steps that the state has had.
          arrays: the arrays by name. They may be donated right after the call.
          record: all else, as JSON. If a best checkpoint is kept, `record["metric"]` is the value of the metric, or None.
          plan: the plan as JSON.
          late: returns additions to the record. The thread calls it in all processes before it writes. If it raises, nothing is
            written, and `wait` and `check` raise that error.

        Raises:
          CheckpointError: the save before failed.
        """
        self.wait()
        stored = {name: storable(array) for name, array in arrays.items() if array.size}  # Orbax refuses empty arrays and folders
        described = {name: [list(leaf.shape), leaf.dtype] for name, leaf in describe_leaves(arrays).items()}
        saved = {"version": _VERSION, "step": step, "leaves": described, "record": dict(record), "goal": self._goal_text}
        arguments = (step, snapshot(stored), saved, plan, next(_saves), late)
        self._started = step
        self._thread = threading.Thread(target=self._write, args=arguments, name="penstock-checkpoint", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise CheckpointError if a save has failed meanwhile. It does not wait."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait until the save that was started is complete; raise CheckpointError if it failed, or what its `late` raised."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        refused, error, self._refused, self._error = self._refused, self._error, None, None
        if refused is not None:
            raise refused
        if error is not None:
            left = "there is none before it" if self.complete is None else f"the checkpoint of step {self.complete:,} is intact"
            place = f"step {self._started:,} could not be saved to {self._path(self._started)}"
            raise CheckpointError(f"{place}: {self._reason(error)}; {left}") from error

    def amend(self, step: int, record: Mapping[str, Any]) -> None:
        """Replace parts of the record of the checkpoint of a step. `record` has the changes, as JSON; see `save`.

        Raises:
          CheckpointError: the save failed, or the change cannot be written.
        """
        self.wait()
        folder, later = self._path(step), {"record": dict(record), "goal": self._goal_text}
        text = json.dumps(later | {"sha256": manifest.digest(later)})
        try:
            decide(lambda: replace(folder / _LATER, text, durable=True))
        except (OSError, FirstProcessError) as error:
            raise CheckpointError(
                f"the results of step {step:,} could not be added to {folder}: {self._reason(error)}; the checkpoint is intact"
            ) from error

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint that passes its manifest; None if no save has ended. Newer ones are reported as damaged.

        Raises:
          CheckpointError: there are finished checkpoints, and none can be used. A run that began anew would remove them.
        """
        found = self._first_intact(lambda: sorted(self._folders(), reverse=True), or_raise=True)
        if found is not None:
            self.complete = found.step
        return found

    def best(self) -> Checkpoint | None:
        """Return the checkpoint with the best metric that passes its manifest; None if there is none."""
        return self._first_intact(self._by_metric, or_raise=False)

    def _first_intact(self, steps: Callable[[], Iterable[int]], or_raise: bool) -> Checkpoint | None:
        """Return the first checkpoint that passes its manifest, and report the ones before it. Process 0 looks for it.

        If none passes, and the save of one had ended, raise CheckpointError with `or_raise`.
        """

        def find() -> tuple[int | None, list[str]]:
            problems: dict[int, str] = {}
            found = None
            for step in steps():
                if (problem := _problem(self._path(step))) is None:
                    found = step
                    break
                problems[step] = problem
            finished = set(self.steps()) if or_raise and found is None else set()
            if unusable := [f"  step-{step}: {problem}" for step, problem in problems.items() if step in finished]:
                return None, unusable
            instead = "there is no other one" if found is None else f"continuing from step {found:,}"
            for step, problem in problems.items():
                _LOGGER.warning("checkpoint %s is passed over: %s; %s", self._path(step), problem, instead)
            return found, []

        step, unusable = decide(find)
        if unusable:
            raise CheckpointError(
                f"no checkpoint in {self.folder} can be used:\n" + "\n".join(unusable) + "\nMake one readable again, for example "
                f"by mounting its storage. To begin anew, name another run folder, or remove {self.folder}"
            )
        return None if step is None else _load_together(self._path(step))

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints whose save has ended, in order. They may be damaged."""
        return sorted(step for step in self._folders() if manifest.is_finished(self._path(step)))

    def close(self) -> None:
        """Wait for the save that was started, log its error if there is one, and end the threads.

        The caller may be on its way out with an error of its own, which has to arrive.
        """
        try:
            self.wait()
        except Exception as error:
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
        folder = self._path(step)
        try:
            saved["record"] |= late()
        except BaseException as error:
            self._refused = error
            return
        try:
            decide(lambda: _begin(folder, json.dumps(saved), plan), f"begin/{number}")
            if arrays:
                self._files.write(folder / _ARRAYS, arrays)
            decide(lambda: _finish(folder), f"end/{number}")
            self.complete = step
            if jax.process_index() == 0:
                self._remove_old(step)
        except BaseException as error:
            self._error = error
            if jax.process_index() == 0:
                _remove(folder)  # it may be what has filled the disk

    def _remove_old(self, newest: int) -> None:
        """Remove the checkpoints that are neither among the last nor the best, and unfinished ones before the newest."""
        last = [step for step in self.steps() if step <= newest][-self._keep :]
        kept = {*last, *self._by_metric()[:1]}
        for step in self._folders():
            if step <= newest and step not in kept:
                _remove(self._path(step))

    def _by_metric(self) -> list[int]:
        """Return the steps of the finished checkpoints that have the metric, the best first; of equal ones, the newest first."""
        if self._goal is None:
            return []
        sign = 1 if self._goal.direction == "min" else -1
        values = {step: _metric(self._path(step), self._goal_text) for step in self.steps()}
        return sorted((step for step in reversed(values) if not math.isnan(values[step])), key=lambda step: sign * values[step])

    def _path(self, step: int | None) -> Path:
        return self.folder / f"step-{step}"

    def _folders(self) -> list[int]:
        """Return the steps of all folders of checkpoints, finished or not."""
        try:
            return [int(match[1]) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        except FileNotFoundError:
            return []

    def _reason(self, error: BaseException) -> str:
        """Return why a write failed. TensorStore reports a full disk or quota in the text of the error only."""
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        if not full and not re.search("No space left on device|Disk quota exceeded", str(error)):
            return _summary(error)
        free = shutil.disk_usage(self.folder).free if self.folder.exists() else 0
        return f"no space left on the disk ({free / 1e6:,.0f} MB are free): free some, or keep fewer checkpoints"


def read(path: Path) -> Checkpoint:
    """Return the checkpoint in a folder; raise CheckpointError if it is not complete, or damaged."""
    problem = decide(lambda: _problem(path))
    if problem is not None:
        raise CheckpointError(f"checkpoint {path} cannot be used: {problem}")
    return _load_together(path)


def restore(checkpoint: Checkpoint, like: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Read the arrays of a checkpoint, with the shapes, dtypes and shardings of abstract arrays.

    Raises:
      OtherStateError: the checkpoint has other arrays.
      CheckpointError: an array cannot be read.
    """
    check_same_leaves(checkpoint.leaves, describe_leaves(like), f"checkpoint {checkpoint.path}")
    wanted = {name: storable_like(x) for name, x in like.items() if x.size}
    with contextlib.closing(ArrayFiles()) as files:
        try:
            arrays = files.read(checkpoint.path / _ARRAYS, wanted) if wanted else {}
        except Exception as error:
            raise CheckpointError(f"checkpoint {checkpoint.path} cannot be read: {_summary(error)}") from error
    return {name: restored(arrays[name], x) if x.size else empty(x) for name, x in like.items()}


def _begin(folder: Path, record: str, plan: str | None) -> None:
    """Make the folder of a checkpoint, in place of an unfinished or damaged one."""
    _remove(folder)
    folder.parent.mkdir(exist_ok=True)  # but not the run folder, which may have been removed
    folder.mkdir()
    replace(folder / _RECORD, record)
    if plan is not None:
        replace(folder / _PLAN, plan)


def _finish(folder: Path) -> None:
    if not (folder / _RECORD).is_file():  # Orbax makes the folders above its own again
        raise FileNotFoundError(f"{folder} was removed while it was written")
    manifest.write_manifest(folder)


def _remove(folder: Path) -> None:
    """Remove a checkpoint, its manifest first: one that is half removed is an unfinished one."""
    for path in (folder / manifest.NAME, folder):
        with contextlib.suppress(IsADirectoryError, NotADirectoryError, PermissionError):  # a file may be in a folder's place
            path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _problem(path: Path) -> str | None:
    """Say what is wrong with the folder of a checkpoint; None if nothing is."""
    if not path.is_dir():
        return "there is no such folder"
    if problem := manifest.damage(path):
        return problem
    try:
        _load(path, {})
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its record cannot be read ({_summary(error)})"
    return None


def _load_together(path: Path) -> Checkpoint:
    """Read a checkpoint in all processes. Process 0 reads the amendments: the file may be too new for the others to see."""
    return _load(path, decide(lambda: _later(path)))


def _load(path: Path, later: Mapping[str, Any]) -> Checkpoint:
    saved = _read_record(path, later)
    if saved["version"] != _VERSION:
        raise ValueError(f"its version is {saved['version']}, and this penstock reads version {_VERSION}")
    leaves = {name: Leaf(tuple(shape), dtype) for name, (shape, dtype) in saved["leaves"].items()}
    return Checkpoint(path, saved["step"], saved["record"], leaves)


def _read_record(path: Path, later: Mapping[str, Any]) -> dict[str, Any]:
    """Return record.json with the amendments."""
    saved = json.loads((path / _RECORD).read_text(encoding="utf-8"))
    return saved | later | {"record": saved["record"] | later.get("record", {})}


def _later(path: Path) -> dict[str, Any]:
    """Return the amendments: {"record": …, "goal": …}; empty if there are none."""
    try:
        later = dict(json.loads((path / _LATER).read_text(encoding="utf-8")))
        if later.pop("sha256") == manifest.digest(later):
            return later
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    _LOGGER.warning("%s is damaged, and not used: its content is computed again", path / _LATER)
    return {}


def _metric(path: Path, goal: str | None) -> float:
    """Return the value that a checkpoint has for a goal; NaN if it has none, or one for another goal."""
    try:
        saved = _read_record(path, _later(path))
        return float(saved["record"]["metric"]) if saved["goal"] == goal else math.nan
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return math.nan


def _summary(error: BaseException) -> str:
    """Return the first line of an error."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:400]}" if lines else type(error).__name__


def require_orbax() -> Any:
    """Import Orbax, or raise an ImportError that says how to install it."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError('checkpoints need Orbax: pip install "penstock[train]"') from error
    return orbax.checkpoint


class ArrayFiles:
    """A writer and reader of folders of named arrays, with the threads of Orbax that it needs.

    All processes write, each its own shards. Arrays are read with any other sharding. Errors are of Orbax and TensorStore.
    """

    def __init__(self) -> None:
        self._orbax = require_orbax()
        # With its processes named, Orbax synchronizes them by the coordination service. Otherwise it uses a collective, which
        # must not run on another thread than the steps: each process could start them in another order. Orbax's API V1 runs such
        # collectives in each save, whatever its options are (0.12.8).
        meeting = self._orbax.options.MultiprocessingOptions(
            primary_host=0, active_processes=set(range(jax.process_count())) if jax.process_count() > 1 else None
        )
        self._checkpointer = self._orbax.AsyncCheckpointer(
            self._orbax.PyTreeCheckpointHandler(multiprocessing_options=meeting), multiprocessing_options=meeting
        )
        logging.getLogger("absl").addFilter(_drop_errors_of_threads)

    def write(self, folder: Path, arrays: Mapping[str, Any]) -> None:
        """Write arrays to a new folder. It appears under its name when it is complete. All processes call this."""
        self._checkpointer.save(folder.absolute(), args=self._orbax.args.PyTreeSave(dict(arrays)))
        self._checkpointer.wait_until_finished()

    def read(self, folder: Path, like: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Read arrays of the given shapes and dtypes, onto the given shardings. All processes call this."""
        target = dict(like)
        arguments = self._orbax.checkpoint_utils.construct_restore_args(target)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Orbax, about shardings in files, which are not used
            return self._checkpointer.restore(
                folder.absolute(), args=self._orbax.args.PyTreeRestore(item=target, restore_args=arguments)
            )

    def close(self) -> None:
        """End the threads."""
        self._checkpointer.close()


def snapshot(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Copy arrays, so that the next step may reuse their memory. The copy is started, and not waited for.

    On an accelerator the copy is in pinned memory of the host, so that it takes no memory of the device.
    """
    groups: dict[frozenset[jax.Device], dict[str, jax.Array]] = {}  # one program needs all its arrays on the same devices
    for name, array in arrays.items():
        groups.setdefault(frozenset(array.sharding.device_set), {})[name] = array
    copies: dict[str, jax.Array] = {}
    for devices, group in groups.items():
        if next(iter(devices)).platform == "cpu":
            copies |= _copy_program(tuple((name, x.sharding) for name, x in group.items()))(group)
        else:
            copies |= jax.device_put(group, {name: x.sharding.with_memory_kind("pinned_host") for name, x in group.items()})
    return copies


@functools.lru_cache(maxsize=4)
def _copy_program(shardings: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(lambda arrays: jax.tree.map(jnp.copy, arrays), out_shardings=dict(shardings))


def _drop_errors_of_threads(record: logging.LogRecord) -> bool:
    """Return whether to keep a message of Orbax: not of an error in one of its threads, which is raised too."""
    return "_SignalingThread.run() raised" not in str(record.msg)
