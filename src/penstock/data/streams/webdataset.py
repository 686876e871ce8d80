"""Read tar files whose members are grouped by their names as records for `ps.stream`: `webdataset`.

The format is WebDataset (https://github.com/webdataset/webdataset): members "dir/17.jpg" and "dir/17.cls" that follow each other
are the record with the key "dir/17", and the fields "jpg" and "cls".
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np

from penstock.data.files import Paths, list_files
from penstock.data.streams.records import CUT, FileRecords, Raw, damaged, open_file

_PICKLES = ("pyd", "pkl", "pickle", "pth", "pt")
_BLOCK = 512  # bytes, of the tar format
_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "json": json.loads,
    "txt": bytes.decode,
    "cls": int,
    "npy": lambda data: np.lib.format.read_array(io.BytesIO(data), allow_pickle=False),  # `np.load` also opens other formats
}


def webdataset(paths: Paths) -> WebDataset:
    """Open the tar files of a WebDataset as records for `ps.stream`. Files compressed by gzip are recognised by their content.

    A record is a dict with the field `__key__` and one field for each member. Members that end in "json", "txt", "cls" and "npy"
    are decoded; others stay bytes, such as images, for `transform=ps.per_record(decode)`.

    Args:
      paths: one path or URL, or several; each a file, a glob pattern, or a range of names such as "shard-{000..127}.tar". Or the
        result of `ps.remote`.

    Returns:
      Records for `ps.stream`.

    Raises:
      FileNotFoundError: there is no file at a path or pattern.
      ValueError: there are no paths, or a range of names is empty.
      OSError: a store cannot be read, see `ps.remote`.

    Examples:
      >>> import io, tarfile, tempfile
      >>> path = tempfile.mkdtemp() + "/shard-0.tar"
      >>> with tarfile.open(path, "w") as tar:
      ...     for name, data in {"a.txt": b"to be", "a.cls": b"3"}.items():
      ...         member = tarfile.TarInfo(name)
      ...         member.size = len(data)
      ...         tar.addfile(member, io.BytesIO(data))
      >>> decode = ps.per_record(lambda record: {"length": len(record["txt"]), "label": record["cls"]})
      >>> next(iter(ps.stream(ps.webdataset(path), 1, transform=decode)))
      {'label': array([3]), 'length': array([5])}
    """
    return WebDataset(list_files(paths))


class WebDataset(FileRecords):
    """The records of tar files. The position in a file is [byte of the next record's header, number of records]."""

    form = "WebDataset"

    def records(self, path: str, name: str, position: Any) -> Iterator[tuple[Raw, Any]]:
        """Yield the groups of members, each as a dict from extension to bytes."""
        start, number = position or (0, 0)
        fields: dict[str, Any] = {}
        with damaged(name) as known, open_file(path, name) as file:
            for member, data, offset in _members(file, start, name, known):
                key, extension = _split(member)
                if key is None and member:
                    continue
                if fields and key != fields["__key__"]:
                    number += 1
                    yield Raw(fields, f"{name}, record {fields['__key__']!r}"), [offset, number]
                    fields = {}
                if not member:
                    continue
                if extension in fields:
                    raise ValueError(f"{name} has two members {member!r} in one record: names need to differ")
                fields = {**(fields or {"__key__": key}), extension: data}

    def decode(self, raw: Raw) -> Any:
        """Decode the members of a record whose extension is known. Raise ValueError for a damaged member, or a pickle."""
        record = {}
        for extension, data in raw.data.items():
            kind = extension.rpartition(".")[2].lower()
            if kind in _PICKLES:
                why = "is a pickle, which can run any code when it is read: write it as json or npy"
                raise ValueError(f"{raw.place}: member {extension!r} {why}")
            try:
                record[extension] = _DECODERS[kind](data) if kind in _DECODERS and extension != "__key__" else data
            except Exception as error:  # such as MemoryError for the shape in a damaged header
                why = f"{error or type(error).__name__} ({len(data):,} bytes)"
                raise ValueError(f"{raw.place}: member {extension!r} cannot be decoded: {why}") from error
        return record


def _members(file: BinaryIO, start: int, name: str, known: damaged) -> Iterator[tuple[str, bytes, int]]:
    """Yield (name, content, byte of the header) of each regular file, from a byte on, and ("", b"", byte) at the end.

    Several archives may follow each other in one file, as after `cat` or `tar -A`. The end of each is yielded.
    """
    at: int | None = start
    while at is not None:
        file.seek(at)
        try:
            archive = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115 - the caller closes the file
            while (member := archive.next()) is not None:
                # tarfile would keep all members, in an attribute that its types leave out.
                archive.members = []  # type: ignore[attr-defined]
                at = member.offset
                known.place = f"after byte {at:,}"
                if member.isreg():
                    yield member.name, _content(archive, member), at
                elif (member.islnk() or member.issym()) and _split(member.name)[0] is not None:
                    raise ValueError(
                        f"{name}: member {member.name!r} is a link to {member.linkname!r}, and not a file: write the archive "
                        "anew with tar --dereference --hard-dereference"
                    )
        except tarfile.TarError as error:
            raise ValueError(f"{name} is damaged after byte {at:,}: {error}. {CUT}") from error
        end = archive.offset
        file.seek(end)
        marker = file.read(_BLOCK)
        if marker != bytes(_BLOCK):  # tarfile takes a wrong header, and the end of the file, for the end of the archive
            found = "another header" if marker else "nothing"
            raise ValueError(f"{name} is damaged after byte {at:,}: where the end-of-archive marker belongs is {found}. {CUT}")
        yield "", b"", end
        at = _following_archive(file)


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    content = archive.extractfile(member)
    data = b"" if content is None else content.read()
    if len(data) != member.size:
        raise tarfile.ReadError(f"{member.name!r} has {len(data):,} of its {member.size:,} bytes")
    return data


def _following_archive(file: BinaryIO) -> int | None:
    """Skip blocks of zeros, and return the byte of the block after them; None at the end of the file."""
    while block := file.read(_BLOCK):
        if block.strip(b"\0"):
            return file.tell() - len(block)
    return None


def _split(name: str) -> tuple[str | None, str]:
    """Split the name of a member into key and extension, at the first dot of its last part; None for hidden files."""
    folder, slash, last = name.rpartition("/")
    stem, dot, extension = last.partition(".")
    return (folder + slash + stem, extension) if stem and dot else (None, "")
