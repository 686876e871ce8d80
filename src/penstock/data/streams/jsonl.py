"""Read files with one JSON value on each line as records for `ps.stream`: `jsonl`."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

from penstock.data.files import Paths, list_files
from penstock.data.streams.records import FileRecords, Raw, damaged, open_file


def jsonl(paths: Paths) -> JsonLines:
    """Open files of JSON lines as records for `ps.stream`. Files compressed by gzip are recognised by their content.

    Args:
      paths: one path or URL, or several; each a file, a glob pattern, or a range of names such as "part-{00..63}.jsonl.gz". Or
        the result of `ps.remote`.

    Returns:
      Records for `ps.stream`: the values of the lines. Empty lines are left out.

    Raises:
      FileNotFoundError: there is no file at a path or pattern.
      ValueError: there are no paths, or a range of names is empty.
      OSError: a store cannot be read, see `ps.remote`.

    Examples:
      >>> import pathlib, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "x.jsonl"
      >>> _ = path.write_text('{"x": 1}\\n{"x": 2}\\n')
      >>> [batch["x"].tolist() for batch in ps.stream(ps.jsonl(path), batch_size=2, epochs=1)]
      [[1, 2]]
    """
    return JsonLines(list_files(paths))


class JsonLines(FileRecords):
    """The records of files of JSON lines. The position in a file is [byte after the line, number of the line]."""

    form = "JSON lines"

    def records(self, path: str, name: str, position: Any) -> Iterator[tuple[Raw, Any]]:
        """Yield the lines that are not empty, undecoded."""
        offset, number = position or (0, 0)
        with damaged(name) as known, open_file(path, name) as file:
            file.seek(offset)
            known.place = f"after line {number} (byte {offset:,})"
            for line in file:
                if number == 0:
                    # `open_file` returns files with a buffer, which BinaryIO does not say.
                    _check_first_line(line, name, is_only=not file.peek(1))  # type: ignore[attr-defined]
                offset += len(line)
                number += 1
                known.place = f"after line {number} (byte {offset:,})"
                if not line.isspace():
                    yield Raw(line, f"{name}, line {number}"), [offset, number]

    def decode(self, raw: Raw) -> Any:
        """Parse a line. Raise ValueError, which names file and line, if it is not JSON."""
        try:
            return json.loads(raw.data)
        except ValueError as error:
            line = raw.data[:60].decode(errors="replace").rstrip("\n")
            hint = "" if raw.data.endswith(b"\n") else ". The file ends in this line: was it cut short?"
            if raw.place.endswith(", line 1") and not hint:
                hint = f". If the file is one JSON value over many lines: {_ONE_VALUE}"
            raise ValueError(f"{raw.place} is not JSON ({error}): {line!r}{hint}") from error


_ONE_VALUE = "ps.jsonl needs a complete value on each line, as `jq -c '.[]' file` writes them"


def _check_first_line(line: bytes, name: str, is_only: bool) -> None:
    """Raise ValueError for a file that is not JSON lines in UTF-8, but looks like it."""
    if line[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) or b"\0" in line[:4]:
        raise ValueError(f"{name} is not UTF-8, but UTF-16 or UTF-32: convert it, with `iconv -f UTF-16 -t UTF-8 file`")
    if is_only and re.match(rb"\s*\[\s*\{", line):
        raise ValueError(f"{name} is one JSON array in one line, and so a single record: {_ONE_VALUE}")
