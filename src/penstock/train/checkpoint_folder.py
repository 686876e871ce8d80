"""The folder of one checkpoint: what is in it, and whether that is complete.

It has the arrays (`state/`, by Orbax), `record.json` (the position in the data and all else that is JSON), `plan.json` if there
is a plan, and MANIFEST.json, which is written last. Only a folder that passes its manifest is a checkpoint. `later.json`, which
is not in the manifest, has what of the record was known after the save only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock._atomic_write import replace
from penstock.train import manifest
from penstock.train.agreement import decide
from penstock.train.schedule import Goal
from penstock.train.state import Leaf

VERSION = 1
ARRAYS = "state"  # the folder of the arrays
_RECORD, _PLAN, _LATER = "record.json", "plan.json", "later.json"
_LOGGER = logging.getLogger("penstock.train")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was complete and undamaged when it was looked for.

    Attributes:
      path: its folder.
      step: the number of steps that its state has had.
      record: what was saved beside the arrays.
      leaves: the description of each array.
    """

    path: Path
    step: int
    record: Mapping[str, Any]
    leaves: Mapping[str, Leaf]


def problem(path: Path) -> str | None:
    """Say what is wrong with the folder of a checkpoint; None if nothing is."""
    if not path.is_dir():
        return "there is no such folder"
    if problem := manifest.damage(path):
        return problem
    try:
        _load(path, {})
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its record cannot be read ({summary(error)})"
    return None


def amend(path: Path, record: Mapping[str, Any], goal: str | None) -> None:
    """Write what of the record was known after the save only.

    Raises:
      OSError: it cannot be written.
    """
    later = {"record": dict(record), "goal": goal}
    replace(path / _LATER, json.dumps(later | {"sha256": manifest.digest(later)}), durable=True)


def _later(path: Path) -> dict[str, Any]:
    """Return what was amended: {"record": …, "goal": …}; empty if nothing was."""
    try:
        later = dict(json.loads((path / _LATER).read_text(encoding="utf-8")))
        if later.pop("sha256") == manifest.digest(later):
            return later
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    _LOGGER.warning("%s is damaged, and not used: what it has is computed again", path / _LATER)
    return {}


def _saved(path: Path, later: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was saved beside the arrays, with what was amended later."""
    saved = json.loads((path / _RECORD).read_text(encoding="utf-8"))
    return saved | later | {"record": saved["record"] | later.get("record", {})}


def load_together(path: Path) -> Checkpoint:
    """Read a checkpoint in all processes. Process 0 says what was amended: the file may be too new for the others to see."""
    return _load(path, decide(lambda: _later(path)))


def _load(path: Path, later: Mapping[str, Any]) -> Checkpoint:
    saved = _saved(path, later)
    if saved["version"] != VERSION:
        raise ValueError(f"its version is {saved['version']}, and this penstock reads version {VERSION}")
    leaves = {name: Leaf(tuple(shape), dtype) for name, (shape, dtype) in saved["leaves"].items()}
    return Checkpoint(path, saved["step"], saved["record"], leaves)


def begin(folder: Path, record: str, plan: str | None) -> None:
    """Make the folder of a checkpoint, in place of an unfinished or damaged one."""
    remove(folder)
    folder.parent.mkdir(exist_ok=True)  # but not the run folder, which may have been removed
    folder.mkdir()
    replace(folder / _RECORD, record)
    if plan is not None:
        replace(folder / _PLAN, plan)


def finish(folder: Path) -> None:
    """Write the manifest."""
    if not (folder / _RECORD).is_file():  # Orbax makes the folders above its own again
        raise FileNotFoundError(f"{folder} was removed while it was written")
    manifest.write_manifest(folder)


def metric(path: Path, goal: Goal) -> float | None:
    """Return the value that a checkpoint has for a goal; None if it has none, or one for another goal."""
    try:
        saved = _saved(path, _later(path))
        value = saved["record"].get("metric")
        return float(value) if saved["goal"] == str(goal) and value is not None else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def remove(folder: Path) -> None:
    """Remove a checkpoint. Its manifest goes first: one that is half removed is an unfinished one."""
    for path in (folder / manifest.NAME, folder):
        with contextlib.suppress(IsADirectoryError, NotADirectoryError, PermissionError):  # of what is not as it was written
            path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def summary(error: BaseException) -> str:
    """Return the first line of an error."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:400]}" if lines else type(error).__name__
