"""Refuse a run folder that belongs to another run, or that another process uses.

`run.json` has the settings that a run must have in common with the one that made the folder. `run.lock` is locked by the process
that trains, and names it.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np

from penstock._arguments import check_path
from penstock._atomic_write import replace
from penstock._file_lock import NO_LOCKS, file_lock
from penstock.errors import OtherRunError
from penstock.train import manifest
from penstock.train.agreement import decide

_RUN, _LOCK = "run.json", "run.lock"
_VERSION = 1


@contextlib.contextmanager
def continuing(path: Path) -> Iterator[None]:
    """Inside of the `with`, turn errors of a feed that is moved to the position of a checkpoint into an OtherRunError."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise OtherRunError(
            f"{path} cannot be continued with this feed: {error}. Give the batches that the run had, or name a new folder"
        ) from error


def check_config(config: Any) -> dict[str, Any]:
    """Return settings as JSON, so that another process can compare them; raise TypeError if one cannot be compared."""
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise TypeError(f"config={config!r} is not a dict of settings")
    return {str(name): _as_json(value, f"config[{name!r}]") for name, value in config.items()}


def _as_json(value: Any, name: str) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)  # NaN is not equal to itself
    if isinstance(value, Mapping):
        return {str(key): _as_json(inner, f"{name}[{key!r}]") for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(inner, f"{name}[{number}]") for number, inner in enumerate(value)]
    if isinstance(value, (np.generic, np.ndarray, jax.Array)):
        return _as_json(np.asarray(value).tolist(), name)
    if isinstance(value, (os.PathLike, np.dtype, type)):
        return str(value)
    raise TypeError(
        f"{name} is a {type(value).__name__}, whose text may differ from process to process, so that no restart could compare "
        "it: give numbers, texts, and lists and dicts of them"
    )


class RunFolder:
    """A run folder that this process, or set of processes, has for itself. Use it in a `with`.

    Args:
      path: the folder. It is made if necessary. All processes have to see it.
      config: settings of the run, as JSON, which must stay the same.

    Raises:
      TypeError: it is not a path, or a setting cannot be compared with another process's.
      ValueError: it is the address of a bucket, empty, or in the folder of a checkpoint.
      OtherRunError: the folder holds something else, or another run.
      RuntimeError: another process is training in it.
      OSError: it cannot be made.
    """

    def __init__(self, path: str | os.PathLike[str], config: Mapping[str, Any] | None):
        self.path = check_path("checkpoint", path).absolute()
        for folder in (self.path, *self.path.parents):
            if (folder / manifest.NAME).is_file():
                raise ValueError(
                    f"checkpoint={str(self.path)!r} is in the folder of a checkpoint, {folder.name}: name the run folder; to "
                    "start from that checkpoint, name it with restore= and a new run folder with checkpoint="
                )
        self._config = check_config(config)
        self._lock: Any = None

    def __enter__(self) -> RunFolder:
        decide(self._open)
        if not (self.path / _RUN).is_file():
            raise OSError(
                f"process {jax.process_index()} does not see {self.path / _RUN}, which process 0 has written: all processes need "
                "the run folder on a file system that they share"
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._lock is not None:
            self._lock.release()

    @property
    def checkpoints(self) -> Path:
        """Return the folder of its checkpoints."""
        return self.path / "checkpoints"

    def _open(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                error.errno, f"checkpoint={str(self.path)!r}: no folder to write to ({error.strerror}); name another one"
            ) from error
        if os.path.lexists(self.checkpoints) and not self.checkpoints.is_dir():
            kind = "a link to nowhere" if self.checkpoints.is_symlink() else "a file"
            raise OtherRunError(
                f"{self.checkpoints} is {kind}, where a run has the folder of its checkpoints: name another folder"
            )
        saved = self._read()
        if saved is None:
            if any(path.name == "checkpoints" or path.name.startswith("step-") for path in self.path.iterdir()):
                raise OtherRunError(f"{self.path} has checkpoints, but no {_RUN} that says of which run: name another folder")
        elif saved != self._config and self._has_trained():
            names = [name for name in {**saved, **self._config} if saved.get(name) != self._config.get(name)]
            listed = "; ".join(f"{name} was {saved.get(name)!r} and is {self._config.get(name)!r}" for name in names)
            raise OtherRunError(
                f"{self.path} belongs to another run: {listed}. Name another folder, or run with the same settings"
            )
        self._lock = _locked(self.path / _LOCK)
        if saved != self._config:
            replace(self.path / _RUN, json.dumps({"version": _VERSION, "config": self._config}, indent=1))

    def _has_trained(self) -> bool:
        """Return whether there is anything to continue from, finished or not."""
        return self.checkpoints.is_dir() and any(self.checkpoints.iterdir())

    def _read(self) -> dict[str, Any] | None:
        """Return the settings of the run that made the folder; None for a new one."""
        try:
            saved = json.loads((self.path / _RUN).read_text(encoding="utf-8"))
            if saved["version"] != _VERSION:
                raise OtherRunError(f"{self.path / _RUN} has version {saved['version']}, and this penstock reads {_VERSION}")
            return dict(saved["config"])
        except FileNotFoundError:
            return None
        except OtherRunError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise OtherRunError(f"{self.path / _RUN} is not the file of a run ({error}): name another folder") from error


def _locked(path: Path) -> Any:
    """Lock a file until `release()`, or until this process ends in any way. A file system without locks is used without one."""
    import filelock

    lock = file_lock(path)
    try:
        lock.acquire()
        with contextlib.suppress(OSError):
            path.write_text(f"process {os.getpid()} on {platform.node()}", encoding="utf-8")
    except filelock.Timeout:
        holder = ""
        with contextlib.suppress(OSError):
            holder = path.read_text(encoding="utf-8").strip()
        raise RuntimeError(
            f"another process{f' ({holder})' if holder else ''} is training in {path.parent}: end it, or name another folder"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return lock
