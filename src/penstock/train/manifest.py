"""Write and check the manifest of a folder: the size and SHA-256 checksum of each file in it.

MANIFEST.json is written last. A folder without one is unfinished, so only a folder whose files are all written can pass.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from penstock._atomic_write import replace

NAME = "MANIFEST.json"
_VERSION = 1
_THREADS = 4  # hashlib releases the interpreter lock


def write_manifest(folder: Path) -> None:
    """Write the manifest of all files that are in a folder now, atomically."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and path.name != NAME)
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256} for name, sha256 in _hashed(folder, names)}
    manifest = {"version": _VERSION, "files": files, "sha256": digest(files)}
    replace(folder / NAME, json.dumps(manifest, indent=1), durable=True)


def damage(folder: Path) -> str | None:
    """Describe the first damage of a folder: no manifest, a missing file, or a size or checksum that differs; None if intact.

    Files that are not in the manifest do not matter.
    """
    try:
        manifest = json.loads((folder / NAME).read_bytes())
        files: dict[str, Any] = manifest["files"]
        if manifest["version"] != _VERSION:
            return f"{NAME} has version {manifest['version']}, and this penstock reads version {_VERSION}"
        if manifest["sha256"] != digest(files):
            return f"{NAME} was changed after it was written"
    except FileNotFoundError:
        return f"it is unfinished: there is no {NAME}, which is written last"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{NAME} cannot be read ({type(error).__name__}: {error})"
    for name, wanted in files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            return f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name} cannot be read ({error.strerror})"
        if size != wanted["bytes"]:
            return f"{name} has {size:,} bytes and had {wanted['bytes']:,} when it was written"
    try:
        found = dict(_hashed(folder, list(files)))
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    for name, wanted in files.items():
        if found[name] != wanted["sha256"]:
            return f"the content of {name} has changed since it was written (its SHA-256 checksum differs)"
    return None


def is_finished(folder: Path) -> bool:
    """Return whether a folder is more than a save that was broken off. It may be damaged, or out of reach, all the same."""
    try:
        (folder / NAME).lstat()
    except FileNotFoundError:
        return not folder.is_dir()  # a link whose target is away may be the folder of a finished one
    except OSError:
        pass  # the folder cannot be read
    return True


def _hashed(folder: Path, names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and SHA-256 checksum of each file, in order."""
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        yield from zip(names, threads.map(_sha256, [folder / name for name in names]), strict=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(content: dict[str, Any]) -> str:
    """Return the SHA-256 checksum of JSON, such as the list of files."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
