"""The index of packed documents on disk: one file that is complete or absent, and is checked when it is opened.

An index and a description of what it was made of go in; the index comes out again, as memory-mapped arrays. The file has a fixed
prefix (a magic number, the size and the CRC-32 of the header), a header in JSON, and the arrays, each at a multiple of 64 bytes.
Several processes may write the same file at once: each writes to a name of its own and renames that, so one of them remains.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from penstock._atomic_write import replacing
from penstock.data.packs.index import PackIndex

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
      index: the arrays.
      made_of: what the index depends on, for JSON.

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
        with replacing(Path(path), durable=True) as partial, partial.open("wb") as file:
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
    """Map the arrays of an index into memory, after a check of all bytes. Return them, and what the index was made of.

    Raises:
      FileNotFoundError: there is no file.
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
    """Raise ValueError if the arrays are not those of an index, each within the file and after the one before."""
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
