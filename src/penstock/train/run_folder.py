"""The folder of a run: who may use it, and to which run it belongs.

A path, the settings of the run and the fingerprint of its data go in. Another run's folder, or a folder that another process
uses, is refused. `run.json` has what a run must have in common with the one that made the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np

from penstock._arguments import check_path
from penstock._atomic_write import replace
from penstock.train import manifest
from penstock.train.agreement import decide

_RUN, _LOCK = "run.json", "run.lock"
_VERSION = 1
_open_locks: weakref.WeakSet[Any] = weakref.WeakSet()


class OtherRunError(ValueError):
    """The error raised if a folder belongs to something else than this run. Its message says what differs."""


@contextlib.contextmanager
def continuing(path: Path) -> Iterator[None]:
    """Surround what gives batches the position of a checkpoint.

    Args:
      path: the folder of the checkpoint.

    Raises:
      OtherRunError: they are of other data, or have no position.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        raise OtherRunError(
            f"{path} cannot be continued with this feed: {error}. Give the batches that the run had, or name a new folder"
        ) from error


def check_config(config: Any) -> dict[str, Any]:
    """Return settings as JSON has them, so that another process can compare them.

    Raises:
      TypeError: they are not a dict, or one of them is not made of numbers, texts, arrays, paths, dtypes, lists and dicts.
    """
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
      TypeError: it is not a path, or a setting cannot be compared with that of another process.
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
            _unlock(self._lock)

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
        if self.checkpoints.exists() and not self.checkpoints.is_dir():
            raise OtherRunError(
                f"{self.checkpoints} is a file, where a run has the folder of its checkpoints: name another folder"
            )
        saved = self._read()
        if saved is None:
            found = sorted(path.name for path in self.path.iterdir() if path.name not in (_LOCK, _RUN + ".part"))
            if "checkpoints" in found or any(name.startswith("step-") for name in found):
                raise OtherRunError(f"{self.path} has checkpoints, but no {_RUN} that says of which run: name another folder")
        elif saved["config"] != self._config and self._has_trained():
            names = [name for name in {**saved["config"], **self._config} if saved["config"].get(name) != self._config.get(name)]
            listed = "; ".join(f"{name} was {saved['config'].get(name)!r} and is {self._config.get(name)!r}" for name in names)
            raise OtherRunError(
                f"{self.path} belongs to another run: {listed}. Name another folder, or run with the same settings"
            )
        self._lock = _locked(self.path / _LOCK)
        if saved is None or saved["config"] != self._config:
            replace(self.path / _RUN, json.dumps({"version": _VERSION, "config": self._config}, indent=1))

    def _has_trained(self) -> bool:
        """Return whether there is anything to continue from, finished or not."""
        return self.checkpoints.is_dir() and any(self.checkpoints.iterdir())

    def _read(self) -> dict[str, Any] | None:
        try:
            saved = json.loads((self.path / _RUN).read_text(encoding="utf-8"))
            if saved["version"] != _VERSION:
                raise OtherRunError(f"{self.path / _RUN} has version {saved['version']}, and this penstock reads {_VERSION}")
            return {"config": dict(saved["config"])}
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, OtherRunError):
                raise
            raise OtherRunError(f"{self.path / _RUN} is not the file of a run ({error}): name another folder") from error


def _unlock(file: Any) -> None:
    """Give back a lock. To close the file is not enough if a forked child has it open too."""
    try:
        import fcntl
    except ImportError:
        return
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)
    file.close()


def _close_in_child() -> None:
    """Close the locked files in a forked child, such as a worker of torch, which may outlive this process and keep the lock."""
    for file in list(_open_locks):
        with contextlib.suppress(OSError):
            file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def _locked(path: Path) -> Any:
    """Open a file and lock it until it is closed, or the process ends in any way.

    Raises:
      RuntimeError: another process has it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    file = path.open("a+", encoding="utf-8")
    _open_locks.add(file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip()
        file.close()
        raise RuntimeError(
            f"another process{' (' + holder + ')' if holder else ''} is training in {path.parent}: end it, or name another folder"
        ) from None
    except OSError:  # a file system without locks
        return file
    with contextlib.suppress(OSError):
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}")
        file.flush()
    return file
