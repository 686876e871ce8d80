"""Keep copies of remote files in a folder that is bounded in bytes and shared by processes.

The folder has four parts, and everything in it may be deleted while no process uses it:

- `files/` has complete files only. A file comes here by one rename, after all its bytes were written and flushed to the disk.
- `partial/` has files that are being downloaded, each locked by its downloader. One that can be locked is a leftover of a process
  that ended. It is removed or overwritten, and never read.
- `users/` has one file for each process, locked as long as the process lives. It lists the files that the process uses.
- `lock` is held for each change of the other three. It contains the bytes in `files/` and `partial/`, or more: a download that
  a crash interrupted stays counted until the next scan of the folder.

A process that is killed leaves no lock. So at each moment, every file in `files/` is complete, and is removed only while no live
process uses it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from penstock._bytes import format_bytes
from penstock._cache_folder import user_cache
from penstock._file_lock import NO_LOCKS, file_lock

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ENAMETOOLONG)
_LONGEST_LIST = 1 << 22  # bytes; the list of a process has a line for each begin and end of a use
_SAME_USE = 60.0  # seconds; the time of the last use need not be finer
_HELD_TOO_LONG = 60.0  # seconds; the longest work under the lock is one scan of the cache


class Cache:
    """The cache in one folder, which is created, as one process uses it."""

    def __init__(self, folder: str):
        self.folder = os.path.abspath(os.path.expanduser(folder))
        self._files, self._partial, self._users = (os.path.join(self.folder, name) for name in ("files", "partial", "users"))
        self._lock = Path(self.folder, "lock")
        self._used: Counter[str] = Counter()
        self._user: int | None = None  # the open file of this process in users/
        self._user_lock: Any = None
        self._process = os.getpid()
        self._scanned = False
        self._thread = threading.RLock()
        with self._explaining():
            for path in (self._files, self._partial, self._users):
                os.makedirs(path, exist_ok=True)
            with self._locked():
                pass

    def open(self, name: str, size: int) -> BinaryIO | None:
        """Open a complete file for reading; None if it is not there. An open file can be read to its end in any case."""
        path = os.path.join(self._files, name)
        try:
            file = open(path, "rb")  # noqa: SIM115 - the caller closes it
        except FileNotFoundError:
            return None
        state = os.fstat(file.fileno())
        if state.st_size != size:
            file.close()
            return None
        if time.time() - state.st_mtime > _SAME_USE:
            os.utime(file.fileno())
        return file

    def fetch(self, name: str, size: int, limit: int, fill: Callable[[BinaryIO], None], patience: float, shown: str) -> str:
        """Return the path of a file, which this process uses from now on. Download it if it is not there.

        If several processes or threads need the same file, one downloads it, and the others wait.

        Args:
          name: in the cache. Another version of a file needs another name.
          size: its bytes.
          limit: bytes that the cache may have with it.
          fill: writes the content to an empty file, or raises.
          patience: seconds without a new byte after which a download by another process is not waited for.
          shown: the name of the file in errors.

        Raises:
          OSError: the file does not fit the cache or its disk, or `fill` raised it.
          TimeoutError: another process downloads the file, and does not get on.
        """
        pause, seen, since = 0.002, 0.0, time.monotonic()
        while True:
            with self._explaining(shown, size):
                if path := self._take(name, size):
                    return path
                lock = self._claim(name, size, limit, shown)
            if lock is not None:
                try:
                    return self._download(name, size, fill, shown)
                finally:
                    lock.release()
            if (written := self._last_write(name)) != seen:
                seen, since = written, time.monotonic()
            if time.monotonic() - since > patience:
                raise TimeoutError(
                    f"another process downloads {shown} into {self._partial!r}, and got no byte for {patience:.0f} s: is it "
                    "stopped? End it, and run again"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def release(self, name: str) -> None:
        """End one use of a file. When this process has ended all of them, the file may be removed."""
        with self._thread:
            if os.getpid() != self._process:
                return  # a copy of the object after a fork: the other process counts the uses
            self._used[name] -= 1
            if self._used[name] <= 0:
                del self._used[name]
                if self._user is not None:
                    with contextlib.suppress(OSError):
                        os.write(self._user, f"-{name}\n".encode())

    def _take(self, name: str, size: int) -> str | None:
        path = os.path.join(self._files, name)
        with self._locked():
            if not os.path.exists(path):
                return None
            if os.path.getsize(path) != size:  # damaged from outside
                self._count(-os.path.getsize(path))
                os.remove(path)
                return None
            os.utime(path)
            self._use(name)
        return path

    def _claim(self, name: str, size: int, limit: int, shown: str) -> Any:
        """Make room for a file and return its lock; None if another thread or process has downloaded it, or does."""
        path = os.path.join(self._partial, name)
        with self._locked():
            if os.path.exists(os.path.join(self._files, name)):
                return None  # another one has just finished it
            if (lock := _locked(path)) is None:
                return None
            try:
                os.truncate(path, 0)
                self._make_room(name, size, limit, shown)
                _allocate(path, size)
                self._count(size)
            except BaseException:
                os.remove(path)
                lock.release()
                raise
        return lock

    def _download(self, name: str, size: int, fill: Callable[[BinaryIO], None], shown: str) -> str:
        source, target = os.path.join(self._partial, name), os.path.join(self._files, name)
        try:
            with self._explaining(shown, size):
                with open(source, "r+b") as part:
                    fill(part)
                    part.flush()
                    if (written := part.tell()) != size:  # the size of the file says nothing: its space was reserved
                        raise OSError(f"{shown} came with {written:,} bytes, and not with the {size:,} that the store lists")
                    os.fsync(part.fileno())
                with self._locked():
                    os.replace(source, target)
                    self._use(name)
        except BaseException:
            with contextlib.suppress(OSError), self._locked():
                os.remove(source)
                self._count(-size)
            raise
        return target

    def _last_write(self, name: str) -> float:
        try:
            return os.stat(os.path.join(self._partial, name)).st_mtime
        except FileNotFoundError:
            return -1.0

    def _use(self, name: str) -> None:
        """List a file as used by this process. The lock of the cache is held."""
        if self._user is None:
            path = os.path.join(self._users, f"{os.getpid()}-{uuid.uuid4().hex[:8]}")
            self._user_lock = _locked(path)
            self._user = os.open(path, os.O_WRONLY | os.O_APPEND)
        if os.fstat(self._user).st_size > _LONGEST_LIST:
            os.ftruncate(self._user, 0)
            os.write(self._user, "".join(f"+{used}\n" for used in self._used).encode())
        if not self._used[name]:
            os.write(self._user, f"+{name}\n".encode())
        self._used[name] += 1

    def _make_room(self, name: str, size: int, limit: int, shown: str) -> None:
        """Remove the least recently used files until another one fits. The lock of the cache is held.

        Raises:
          OSError: it does not fit, even without all files that no process uses.
        """
        counted = self._counted()
        if self._scanned and counted is not None and counted + size <= limit and self._free() > size:
            return
        files, partial = self._scan(name)
        total = partial + sum(bytes_ for _, bytes_, _ in files)
        in_use = self._in_use()
        unused = sorted(entry for entry in files if entry[2] not in in_use)
        for _, bytes_, unused_name in unused:
            if total + size <= limit and self._free() > size:
                break
            os.remove(os.path.join(self._files, unused_name))
            total -= bytes_
        self._scanned = True
        self._lock.write_text(str(total))
        if total + size > limit:
            raise OSError(
                errno.ENOSPC,
                f"{shown} ({format_bytes(size)}) does not fit the cache {self.folder!r}: of the {format_bytes(limit)} of "
                f"cache_bytes, {format_bytes(total)} are files in use by this or another process. Raise cache_bytes",
            )

    def _scan(self, name: str) -> tuple[list[tuple[float, int, str]], int]:
        """Return (last use, bytes, name) of each file, and the bytes of all other downloads. Remove the leftovers of crashes."""
        partial = 0
        for entry in os.scandir(self._partial):
            if entry.name == name or _remove_unlocked(entry.path):
                continue
            with contextlib.suppress(FileNotFoundError):
                partial += entry.stat().st_size
        files = []
        for entry in os.scandir(self._files):
            with contextlib.suppress(FileNotFoundError):
                state = entry.stat()
                files.append((state.st_mtime, state.st_size, entry.name))
        return files, partial

    def _in_use(self) -> set[str]:
        """Return the names of the files that a live process uses."""
        names = set(self._used)
        for entry in os.scandir(self._users):
            if _remove_unlocked(entry.path):
                continue
            with contextlib.suppress(FileNotFoundError), open(entry.path) as lines:
                used = {line[1:].rstrip("\n"): line[0] == "+" for line in lines}  # the last line of a name counts
                names |= {name for name, is_used in used.items() if is_used}
        return names

    def _free(self) -> int:
        return shutil.disk_usage(self.folder).free

    def _counted(self) -> int | None:
        text = self._lock.read_bytes()
        return int(text) if text.isdigit() else None

    def _count(self, change: int) -> None:
        counted = self._counted()
        if counted is not None:
            self._lock.write_text(str(max(0, counted + change)))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the cache.

        Raises:
          TimeoutError: another process holds it for too long, for example because it was stopped.
        """
        with self._thread:
            if (lock := _locked(self._lock, _HELD_TOO_LONG)) is None:
                raise TimeoutError(
                    f"another process has held the lock {str(self._lock)!r} for {_HELD_TOO_LONG:.0f} s: is it stopped? End it, "
                    "or give another cache folder with cache= or PENSTOCK_CACHE"
                )
            try:
                yield
            finally:
                lock.release()

    @contextlib.contextmanager
    def _explaining(self, shown: str = "remote files", size: int = 0) -> Iterator[None]:
        """Name the folder and the remedy in an error of the operating system about writing to it."""
        try:
            yield
        except OSError as error:
            if error.errno is None or error.strerror != os.strerror(error.errno):
                raise  # its message names the remedy
            if error.errno == errno.EFBIG:
                raise OSError(
                    error.errno,
                    f"{shown} ({format_bytes(size)}) is larger than the files that the filesystem or this process may write to "
                    f"the cache {self.folder!r}. Raise the limit (ulimit -f), or give a folder on another filesystem with cache= "
                    "or PENSTOCK_CACHE",
                ) from error
            if error.errno in _NO_SPACE:
                raise OSError(
                    error.errno,
                    f"no space for {shown} ({format_bytes(size)}) in the cache {self.folder!r}: {error.strerror}. Its disk "
                    f"has {format_bytes(self._free())} free. Nothing half-written is kept. Free space, or give a folder on "
                    "another disk with cache= or PENSTOCK_CACHE",
                ) from error
            if error.errno in _REFUSED and error.filename is not None:
                raise type(error)(
                    error.errno,
                    f"cannot use {self.folder!r} as the cache for {shown}: {error.strerror} ({error.filename!r}). Give a folder "
                    "that can be written to with cache= or PENSTOCK_CACHE",
                ) from error
            raise


def _allocate(path: str, size: int) -> None:
    """Allocate the space of a file, so that a full disk is noticed before the download. Some filesystems cannot."""
    if size and hasattr(os, "posix_fallocate"):
        try:
            with open(path, "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, size)
            return
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise
    os.truncate(path, size)


def _remove_unlocked(path: str) -> bool:
    """Remove a file that no live process has locked, and return whether it was one."""
    if (lock := _locked(path)) is None:
        return False
    os.remove(path)
    lock.release()
    return True


def _locked(path: str | os.PathLike[str], seconds: float = 0.0) -> Any:
    """Return the lock of a file, which is created if necessary; None if another one holds it for so long.

    Raises:
      OSError: the filesystem has no locks.
    """
    import filelock

    lock = file_lock(path, seconds)
    try:
        lock.acquire()
    except filelock.Timeout:
        return None
    except OSError as error:
        if error.errno in NO_LOCKS:
            raise OSError(
                f"the filesystem of the cache has no locks ({error.strerror}): give a folder on a local disk with cache= or "
                "PENSTOCK_CACHE"
            ) from error
        raise
    return lock


_caches: dict[tuple[int, str], Cache] = {}
_opening = threading.Lock()


def open_cache(folder: str | os.PathLike[str] | None) -> Cache:
    """Return the cache in a folder. A process has one object for each folder.

    Without a folder, it is in `PENSTOCK_CACHE`, or else in "penstock" in the user's cache folder.

    Raises:
      OSError: this user has no home, or the folder cannot be used.
    """
    path = folder if folder is not None else os.environ.get("PENSTOCK_CACHE") or user_cache()
    if path is None:
        raise OSError("this user has no home for the cache of remote files: set PENSTOCK_CACHE, or pass cache=, to a folder")
    path = os.fspath(path)
    key = (os.getpid(), os.path.abspath(os.path.expanduser(path)))
    with _opening:
        if key not in _caches:
            _caches[key] = Cache(path)
        return _caches[key]
