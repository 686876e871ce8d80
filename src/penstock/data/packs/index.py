"""Choose which pieces of which documents each pack holds (`make_index`), and keep this index in a file.

The index is a pure function of the lengths of the documents and the settings, so any process can make it again. Documents are
taken in windows of consecutive ones, so no step sorts or copies all of them. Their order is the order of storage, or a seeded one
that `order.permutation` computes.

The file has a fixed prefix: a magic number, the size of the header and its CRC-32. A header in JSON follows, and the arrays, each
at a multiple of 64 bytes. The file is complete or absent, and is checked when it is opened. Several processes may write the same
file at once: each writes to a name of its own and renames that, so one of them remains.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from penstock._atomic_write import replacing
from penstock.data.array_pickling import from_picklable, to_picklable
from penstock.data.order.permutation import epoch_keys, permute

Method = Literal["best_fit", "concat"]
Long = Literal["split", "error"]


@dataclass(frozen=True)
class PackSettings:
    """All settings that decide which pieces a pack holds; see `pack`."""

    length: int
    method: Method
    window: int
    long: Long
    seed: int | None
    has_eos: bool  # whether each document is followed by an end-of-sequence token

    def as_dict(self) -> dict[str, Any]:
        """Return the settings that have an effect, by name."""
        given = asdict(self)
        return {name: value for name, value in given.items() if name != "window" or self.method == "best_fit"}


@dataclass(frozen=True)
class PackIndex:
    """The pieces of each pack: pack j holds the pieces `starts[j] … starts[j + 1] - 1`.

    Integers are as small as their values allow. With more than 65,535 documents, of up to 65,535 tokens each, a piece takes 8
    bytes (9 with end-of-sequence tokens), and a pack takes 4.
    """

    starts: np.ndarray  # integers [packs + 1]
    documents: np.ndarray  # integers [pieces], the document of each piece
    begins: np.ndarray  # integers [pieces], its first token in the document
    counts: np.ndarray  # integers [pieces], its tokens
    ends: np.ndarray  # bool [pieces], whether the end-of-sequence token of the document follows; [0] without such tokens

    def __getstate__(self) -> dict[str, Any]:
        return {"arrays": to_picklable(tuple(self.__dict__.values()))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(zip(self.__dataclass_fields__, from_picklable(state["arrays"]), strict=True))


def make_index(lengths: np.ndarray, settings: PackSettings) -> PackIndex:
    """Choose the pieces of all packs of documents with these lengths, int64 [N]. Empty documents are left out.

    Raises:
      ValueError: all documents are empty, or one is longer than a pack and `long="error"`.

    Examples:
      >>> settings = PackSettings(8, "best_fit", window=100, long="split", seed=None, has_eos=False)
      >>> index = make_index(np.array([5, 11, 1]), settings)  # 5 and the last 3 of 11, the first 8 of 11, and 1
      >>> index.starts.tolist(), index.documents.tolist(), index.counts.tolist()
      ([0, 2, 3, 4], [0, 1, 1, 2], [5, 3, 8, 1])
    """
    _check_lengths(lengths, settings)
    pieces = _concatenated(lengths, settings) if settings.method == "concat" else _best_fit(lengths, settings)
    number, place, size = smallest(len(lengths)), smallest(int(lengths.max())), smallest(settings.length)
    starts: list[np.ndarray] = []
    columns: list[tuple[np.ndarray, ...]] = []
    done = 0
    for first, documents, begins, counts in pieces:
        starts.append((np.flatnonzero(first) + done).astype(smallest(done + len(first))))
        done += len(first)
        # The end-of-sequence token counts as the last token of its document.
        real = np.minimum(counts, lengths[documents] - begins)
        ends = real < counts if settings.has_eos else np.empty(0, bool)
        columns.append((documents.astype(number), begins.astype(place), real.astype(size), ends))
    starts.append(np.array([done], smallest(done)))
    return PackIndex(np.concatenate(starts), *(np.concatenate(column) for column in zip(*columns, strict=True)))


def smallest(most: int) -> type[np.integer[Any]]:
    """Return the smallest dtype of an index that holds 0 to `most`."""
    return np.uint16 if most < 1 << 16 else np.uint32 if most < 1 << 32 else np.int64


def hash_lengths(lengths: np.ndarray) -> str:
    """Return a hash of the lengths of all documents, in the order of storage."""
    return hashlib.sha256(np.ascontiguousarray(lengths, "<i8").data).hexdigest()


# The pieces of some consecutive packs: whether a piece is the first of its pack, its document, first token and size.
_Pieces = Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]


def _check_lengths(lengths: np.ndarray, settings: PackSettings) -> None:
    if not lengths.any():
        raise ValueError(f"no tokens: all {len(lengths):,} documents are empty")
    too_long = lengths + settings.has_eos > settings.length
    if settings.long == "error" and too_long.any():
        i = int(np.argmax(too_long))
        raise ValueError(
            f"document {i} has {lengths[i]:,} tokens{' and its eos' * settings.has_eos}, more than length={settings.length:,} "
            f"({int(too_long.sum()):,} documents are too long): use long='split' to cut them into pieces, a larger length, or "
            "leave them out"
        )


def _windows(lengths: np.ndarray, settings: PackSettings, window: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the numbers and sizes of the documents, without empty ones, a window of consecutive documents at a time."""
    for start in range(0, len(lengths), window):
        documents = np.arange(start, min(start + window, len(lengths)))
        if settings.seed is not None:
            documents = permute(documents, len(lengths), epoch_keys(settings.seed, 0))
        documents = documents[lengths[documents] > 0]
        yield documents, lengths[documents] + settings.has_eos


def _best_fit(lengths: np.ndarray, settings: PackSettings) -> _Pieces:
    """Cut long documents, and pack the pieces of each window by best-fit decreasing.

    Packs come in the order of their first document, and documents of a pack in their own order.
    """
    for window, sizes in _windows(lengths, settings, settings.window):
        cuts = -(-sizes // settings.length)
        documents, left = window.repeat(cuts), sizes.repeat(cuts)
        begins = (np.arange(len(documents)) - (np.cumsum(cuts) - cuts).repeat(cuts)) * settings.length
        counts = np.minimum(left - begins, settings.length)
        bins = best_fit_decreasing(counts, settings.length)
        _, earliest = np.unique(bins, return_index=True)
        rank = np.empty(len(earliest), np.int64)
        rank[np.argsort(earliest)] = np.arange(len(earliest))
        packs = rank[bins]
        order = np.argsort(packs, kind="stable")
        yield np.diff(packs[order], prepend=-1) > 0, documents[order], begins[order], counts[order]


def _concatenated(lengths: np.ndarray, settings: PackSettings) -> _Pieces:
    """Put all documents one after the other, and cut that stream at every multiple of the length."""
    done = 0  # tokens of earlier windows
    for documents, sizes in _windows(lengths, settings, 65_536):
        ends = done + np.cumsum(sizes)
        heads = ends - sizes
        stop = int(ends[-1]) if len(ends) else done
        cuts = np.arange(-(-done // settings.length) * settings.length, stop, settings.length)
        places = np.union1d(heads, cuts)  # where a piece starts in the stream
        which = np.searchsorted(heads, places, side="right") - 1
        yield places % settings.length == 0, documents[which], places - heads[which], np.diff(places, append=stop)
        done = stop


def best_fit_decreasing(sizes: np.ndarray, bin_size: int) -> np.ndarray:
    """Return the number of a bin for each piece, int64 [n], from 0 on. Each bin has at least one piece.

    Args:
      sizes: integers [n], each in `1 … bin_size`.
      bin_size: sum of the sizes that a bin can hold.

    Examples:
      >>> best_fit_decreasing(np.array([2, 5, 3, 6]), 8).tolist()  # 6 + 2 and 5 + 3
      [0, 1, 1, 0]
    """
    order = np.argsort(-sizes, kind="stable")
    distinct, counts = np.unique(sizes, return_counts=True)
    chosen: list[int] = []  # the bins of the pieces in `order`
    bins_with: dict[int, list[int]] = {}  # by free space
    free = 0  # bit r is set if `bins_with[r]` has bins
    bins = 0
    for size, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            fitting = free >> size
            if fitting:
                space = size + (fitting & -fitting).bit_length() - 1
                candidates = bins_with.pop(space)
                free ^= 1 << space
            else:
                space = bin_size
                needed = -(-count // (bin_size // size))
                candidates = list(range(bins, bins + needed))
                bins += needed
            each = space // size
            full, rest = divmod(count, each)  # `full` bins take `each` pieces, and one bin takes the rest
            taken = [candidates] if full >= len(candidates) else [candidates[:full], candidates[full : full + 1]]
            for some, pieces in zip(taken, (each, rest), strict=False):
                chosen += sorted(some * pieces)  # neighbours in `order` share a bin
                count -= len(some) * pieces
                free |= _put(bins_with, space - size * pieces, some)
            if len(taken) == 2:
                free |= _put(bins_with, space, candidates[full + 1 :])
    bin_of = np.empty(len(sizes), np.int64)
    bin_of[order] = chosen
    return bin_of


def _put(bins_with: dict[int, list[int]], space: int, bins: list[int]) -> int:
    """Add bins to the class with this free space, and return the bit to set. Full bins are dropped."""
    if not bins or space == 0:
        return 0
    bins_with.setdefault(space, []).extend(bins)
    return 1 << space


_MAGIC = b"\x89penstock-pack\r\n"  # a text transfer or a cut to 7 bits would change it, as for PNG
_VERSION = 1
_PREFIX = struct.Struct("<16sQL")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DTYPES = ("<u2", "<u4", "<i8", "|b1")
_HEADER = {"version": int, "made_of": dict, "arrays": list, "bytes": int}
_MADE_OF = {"settings": dict, "source": str, "documents": int, "tokens": int, "lengths": str, "dtype": str, "sample": list}
_ARRAY = {"name": str, "dtype": str, "shape": int, "offset": int, "crc32": int}


def save_index(path: str, index: PackIndex, made_of: Mapping[str, Any]) -> None:
    """Write an index, so that another process sees the complete file or none.

    Args:
      path: the file. Its folder is made if it does not exist.
      made_of: describes the data and settings that the index depends on, for JSON.

    Raises:
      OSError: the file cannot be written, for example because the disk is full. Nothing is left of it.
    """
    arrays = {field.name: np.ascontiguousarray(getattr(index, field.name)) for field in fields(index)}
    arrays = {name: x.astype(x.dtype.newbyteorder("<"), copy=False) for name, x in arrays.items()}
    places, size = [], 0
    for name, x in arrays.items():
        crc = zlib.crc32(x.view(np.uint8))
        places.append({"name": name, "dtype": x.dtype.str, "shape": len(x), "offset": size, "crc32": crc})
        size += _padded(x.nbytes)
    header = json.dumps({"version": _VERSION, "made_of": made_of, "arrays": places, "bytes": size}).encode()
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with replacing(Path(path), durable=True) as part, part.open("wb") as file:
            file.write(_PREFIX.pack(_MAGIC, len(header), zlib.crc32(header)) + header)
            file.write(bytes(_padded(file.tell()) - file.tell()))
            for x in arrays.values():
                file.write(x.data)
                file.write(bytes(_padded(x.nbytes) - x.nbytes))
    except OSError as error:
        remedy = "make room" if error.errno in _FULL else "make the folder one that can be written to"
        raise type(error)(
            error.errno,
            f"{error.strerror}; the index of ps.pack needs {size + len(header):,} bytes there: {remedy}, or give index= "
            "another path, or None to keep it in memory",
            path,
        ) from error


def open_index(path: str) -> tuple[PackIndex, dict[str, Any]]:
    """Map the arrays of an index into memory, after a check of all bytes. Return them, and `made_of` of `save_index`.

    Raises:
      ValueError: the file is not an index, is damaged, or has another version of the format.
    """
    with open(path, "rb") as file:
        header = _header(path, file.read(_PREFIX.size), file.read)
        start, size = _padded(file.tell()), os.fstat(file.fileno()).st_size
        if size != start + header["bytes"]:
            raise _damaged(path, f"it has {size:,} bytes, and needs {start + header['bytes']:,}")
        _check_padding(path, file, start, header["arrays"], size)
        return PackIndex(**{place["name"]: _map(path, file, start, place) for place in header["arrays"]}), header["made_of"]


def _check_padding(path: str, file: BinaryIO, start: int, places: list[dict[str, Any]], size: int) -> None:
    """Raise ValueError if a byte that belongs to neither the header nor an array is not 0."""
    end = file.tell()  # of the header
    for place in [*places, {"offset": size - start, "shape": 0, "dtype": "u1"}]:
        file.seek(end)
        if any(file.read(start + place["offset"] - end)):
            raise _damaged(path, f"the bytes after byte {end:,} are not 0")
        end = start + place["offset"] + place["shape"] * np.dtype(place["dtype"]).itemsize


def _map(path: str, file: BinaryIO, start: int, place: dict[str, Any]) -> np.ndarray:
    if not place["shape"]:
        return np.empty(0, place["dtype"])  # no empty range can be mapped
    array = np.asarray(np.memmap(file, place["dtype"], "r", start + place["offset"], (place["shape"],)))
    if zlib.crc32(array.view(np.uint8)) != place["crc32"]:
        raise _damaged(path, f"the checksum of array {place['name']!r} is wrong")
    return array


def _header(path: str, prefix: bytes, read: Any) -> dict[str, Any]:
    if not prefix:
        raise ValueError(f"{path!r} is empty (0 bytes): delete it, and the index is made there, or give index= another path")
    if not prefix.startswith(_MAGIC[: len(prefix)]):
        raise ValueError(f"{path!r} is not an index of ps.pack (it begins with {prefix[:16]!r}): give index= another path")
    if len(prefix) < _PREFIX.size:
        raise _damaged(path, "it ends within the first bytes")
    _, size, crc = _PREFIX.unpack(prefix)
    text = read(min(size, 1 << 24))
    if zlib.crc32(text) != crc:
        raise _damaged(path, "the checksum of its header is wrong")
    try:
        header: dict[str, Any] = json.loads(text)
    except ValueError:
        raise _damaged(path, "its header is not JSON") from None
    if isinstance(header, dict) and isinstance(header.get("version"), int) and header["version"] != _VERSION:
        raise ValueError(
            f"{path!r} has version {header['version']} of the format, and this penstock reads {_VERSION}: delete it, and it is "
            "made again, or give index= another path"
        )
    _check_keys(path, "its header", header, _HEADER)
    _check_keys(path, "'made_of'", header["made_of"], _MADE_OF)
    for place in header["arrays"]:
        _check_keys(path, "an array", place, _ARRAY)
    _check_places(path, header["arrays"], header["bytes"])
    return header


def _check_keys(path: str, what: str, given: Any, kinds: Mapping[str, type]) -> None:
    """Raise ValueError if a part of the header lacks a value, or has one of another type."""
    if not isinstance(given, dict):
        raise _damaged(path, f"{what} is not a JSON object")
    for name, kind in kinds.items():
        if type(given.get(name)) is not kind:
            has = f"{name!r} as {given[name]!r}" if name in given else f"no {name!r}"
            raise _damaged(path, f"{what} has {has}")


def _check_places(path: str, places: list[dict[str, Any]], size: int) -> None:
    """Raise ValueError if arrays of an index are missing, or not each within the file and after the one before."""
    names, end = [field.name for field in fields(PackIndex)], 0
    if [place["name"] for place in places] != names:
        raise _damaged(path, f"it has the arrays {[place['name'] for place in places]}, and needs {names}")
    for place in places:
        if place["dtype"] not in _DTYPES or place["shape"] < 0 or place["offset"] != end:
            raise _damaged(path, f"array {place['name']!r} is {place['dtype']}[{place['shape']}] at byte {place['offset']}")
        end += _padded(place["shape"] * np.dtype(place["dtype"]).itemsize)
    if end != size:
        raise _damaged(path, f"its arrays have {end:,} bytes, and its header says {size:,}")


def _damaged(path: str, why: str) -> ValueError:
    return ValueError(f"{path!r} is a damaged index of ps.pack: {why}. Delete it, and it is made again")


def _padded(size: int) -> int:
    return -(-size // 64) * 64
