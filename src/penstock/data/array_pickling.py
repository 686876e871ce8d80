"""Pickle the arrays of a source small: without a copy for a file, and once for memory that several views share.

- An array in a file (memmap, h5py) is replaced by the path of the file. The other process opens it.
- Views that have more elements than their memory has, such as overlapping windows, are replaced by that memory, once for all
  views. Each view adds its shape, strides and offset.
- Any other array stays as it is. Pickle protocol 5 passes its bytes on without a copy.

The version of a file (its number and size) is sent with its path. So a process reads the file whose array was pickled, and no
other.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np


def to_picklable(arrays: Any) -> Any:
    """Replace the arrays of a pytree by values from which other processes can make them again.

    Args:
      arrays: a pytree of arrays of NumPy (also memmaps and views), h5py or zarr.

    Returns:
      The same pytree with other leaves, for `pickle.dumps(..., protocol=5)`.

    Raises:
      ValueError: an h5py file is open for writing, so no other process can read it.
      OSError: a file was replaced or removed since it was opened.
    """
    leaves, treedef = jax.tree_util.tree_flatten(arrays)
    bases = [_base(x) if isinstance(x, np.ndarray) else None for x in leaves]
    return jax.tree_util.tree_unflatten(treedef, _with_shared_memory(list(map(_in_file, leaves, bases)), bases))


def from_picklable(arrays: Any) -> Any:
    """Make the arrays again. Arrays in memory may be read-only.

    Raises:
      OSError: a file has changed since the arrays were pickled.
    """
    return jax.tree.map(lambda x: x.open() if isinstance(x, (_Dataset, _View)) else x, arrays)


class FileVersion(NamedTuple):
    """The path of a file, and its version.

    The time of the last change is no part of it. Processes that map one file see all changes of it, and may write to it. The
    cache of remote files sets the time of a file that is used.
    """

    path: str
    number: int  # the inode, which belongs to no other file while an array of this one is open
    size: int  # bytes

    @classmethod
    def of_array(cls, path: str, is_open: bool) -> FileVersion:
        """Return the file that an array of this process lies in.

        Args:
          path: by which it was opened.
          is_open: whether the array has a descriptor of its file, as memory maps have.

        Raises:
          OSError: another file is at this path now, or none.
        """
        try:
            now = os.stat(path)
        except FileNotFoundError as error:
            message = "worker processes cannot open this file any more: keep it until the run ends"
            raise FileNotFoundError(error.errno, message, path) from None
        if is_open and not _has_open(now):
            raise OSError(_changed(path))
        return cls(path, now.st_ino, now.st_size)

    def check(self) -> str:
        """Return the path. Raise OSError if the file has changed."""
        now = os.stat(self.path)
        if (self.number, self.size) != (now.st_ino, now.st_size):
            raise OSError(_changed(self.path))
        return self.path


def _has_open(now: os.stat_result) -> bool:
    """Tell whether this process has a descriptor of a file, or cannot list its descriptors."""
    try:
        descriptors = os.listdir("/dev/fd")
    except OSError:
        return True
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # the descriptor of the listing is closed by now
            if os.path.samestat(os.fstat(int(descriptor)), now):
                return True
    return False


def _changed(path: str) -> str:
    return (
        f"{path!r} has changed since its array was opened, so a worker process would read other data: open the array again, and "
        "make a new Loader. Write changed data under another name"
    )


class _Dataset:
    """The file of an h5py dataset, and its name in there."""

    def __init__(self, file: FileVersion, name: str):
        self.file, self.name = file, name

    def open(self) -> Any:
        import h5py

        return h5py.File(self.file.check(), "r")[self.name]


class _Mapped:
    """A range of bytes in a file."""

    def __init__(self, file: FileVersion, offset: int, size: int):
        self.file, self.offset, self.size = file, offset, size

    def open(self) -> np.ndarray:
        """Map the bytes into memory, read-only."""
        return np.memmap(self.file.check(), np.uint8, "r", self.offset, (self.size,))


class _View:
    """An array by the offset of its first element in memory, in bytes. The memory is uint8 [n], or lies in a file."""

    def __init__(self, memory: np.ndarray | _Mapped, x: np.ndarray, offset: int):
        self.memory, self.offset = memory, offset
        self.dtype, self.shape, self.strides = x.dtype, x.shape, x.strides

    def open(self) -> np.ndarray:
        memory = self.memory.open() if isinstance(self.memory, _Mapped) else self.memory
        return np.ndarray(self.shape, self.dtype, memory, self.offset, self.strides)


def _in_file(x: Any, base: np.ndarray | None) -> Any:
    """Replace an array in a file by its path; return any other array as it is."""
    if type(x).__module__.partition(".")[0] == "h5py":
        if x.file.mode != "r":
            raise ValueError(
                f"{x.file.filename!r} is open for writing (mode {x.file.mode!r}), so no other process can read it: close it, "
                "and open it again with h5py.File(path, 'r')"
            )
        return _Dataset(FileVersion.of_array(x.file.filename, x.file.driver == "sec2"), x.name)
    # Values written to a copy-on-write map (mode "c") are in the memory of this process, and not in the file.
    if isinstance(base, np.memmap) and base.filename is not None and base.mode != "c" and x.size:
        low, high = _extent(x)
        # `base` is the map itself, and not a slice of it, so its offset is where its first byte lies in the file.
        start = base.offset + low - base.ctypes.data
        file = FileVersion.of_array(os.fspath(base.filename), is_open=True)
        return _View(_Mapped(file, start, high - low), x, x.ctypes.data - low)
    return np.asarray(x) if isinstance(x, np.memmap) else x


def _with_shared_memory(leaves: list[Any], bases: Sequence[np.ndarray | None]) -> list[Any]:
    """Replace the views of one base by the base where that is smaller than all of them. Make other arrays contiguous."""
    groups: dict[int, list[int]] = {}
    for i, (x, base) in enumerate(zip(leaves, bases, strict=True)):
        if isinstance(x, np.ndarray) and not x.dtype.hasobject:  # whose memory holds pointers
            groups.setdefault(id(base), []).append(i)
    for group in groups.values():
        base = bases[group[0]]
        assert base is not None  # as x is an ndarray
        memory = _bytes(base) if sum(leaves[i].nbytes for i in group) > base.nbytes else None
        for i in group:
            x = leaves[i]
            if memory is not None:
                leaves[i] = _View(memory, x, x.ctypes.data - memory.ctypes.data)
            elif not (x.flags.c_contiguous or x.flags.f_contiguous):
                leaves[i] = np.ascontiguousarray(x)  # pickle would put the bytes of another array into each message
    return leaves


def _base(x: np.ndarray) -> np.ndarray:
    """Return the array that owns the memory of a view, or the map of a memmap; `x` itself if that is unknown."""
    base = x
    owner: Any = x.base
    while owner is not None:
        if isinstance(owner, np.ndarray):
            base = owner
        elif not type(owner).__module__.startswith("numpy."):  # NumPy wraps the base of an `as_strided` view
            break
        owner = getattr(owner, "base", None)
    (low, high), (first, last) = _extent(x), _extent(base)
    return base if first <= low and high <= last else x


def _extent(x: np.ndarray) -> tuple[int, int]:
    """Return the addresses of the first byte of an array and after its last."""
    start = x.ctypes.data
    if x.size == 0:
        return start, start
    reach = [(n - 1) * stride for n, stride in zip(x.shape, x.strides, strict=True)]
    return start + sum(r for r in reach if r < 0), start + sum(r for r in reach if r > 0) + x.itemsize


def _bytes(base: np.ndarray) -> np.ndarray | None:
    """View the memory of an array without gaps as uint8 [n]; None if it has gaps."""
    ordered = np.asarray(base).transpose(sorted(range(base.ndim), key=lambda axis: -base.strides[axis]))
    return ordered.reshape(-1).view(np.uint8) if ordered.flags.c_contiguous else None
